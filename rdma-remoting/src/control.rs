//! The control thread: carries out calls that may take long, those that map and clear memory, in
//! the place of workers that have others to serve.
//!
//! It has one call at a time in hand, of each tenant in turn, however many contexts and calls a
//! tenant has. Of a context one call at most is here; meanwhile nobody else serves the context's
//! ring, so that its calls are answered in order. Its queue pairs have their turns as ever.

use crate::context::Context;
use farlane_sys::sync::{held, lock};
use farlane_worker::idle::{Idle, Rest};
use farlane_worker::policy;
use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Contexts whose next calls wait, by tenant: whose turn it is comes first.
#[derive(Default)]
struct Waiting(VecDeque<VecDeque<Arc<Context>>>);

impl Waiting {
    fn push(&mut self, context: &Arc<Context>) {
        let is_of = |of: &&mut VecDeque<Arc<Context>>| {
            let mut all = of.iter();
            all.next().is_some_and(|one| one.is_beside(context))
        };
        let one = Arc::clone(context);
        match self.0.iter_mut().find(is_of) {
            Some(of) => of.push_back(one),
            None => self.0.push_back([one].into()),
        }
    }

    fn pop(&mut self) -> Option<Arc<Context>> {
        let mut of = self.0.pop_front()?;
        let context = of.pop_front();
        if !of.is_empty() {
            self.0.push_back(of);
        }
        context
    }

    /// Takes those out, and says so to them.
    fn withdraw(&mut self, contexts: &HashSet<*const Context>) {
        for of in &mut self.0 {
            of.retain(|context| {
                let stays = !contexts.contains(&Arc::as_ptr(context));
                if !stays {
                    context.set_call_is_away(false);
                }
                stays
            });
        }
        self.0.retain(|of| !of.is_empty());
    }
}

#[derive(Default)]
struct State {
    is_running: bool,
    /// It waits to be woken.
    is_asleep: bool,
    waiting: Waiting,
    /// Address of the context whose call is carried out; zero for none.
    in_hand: usize,
}

/// The control thread of a server, and how it is directed.
#[derive(Default)]
pub(crate) struct Control {
    state: Mutex<State>,
    /// There is something new, or the end: looked at without the lock.
    any: AtomicBool,
    more: Condvar,
    /// What was in hand is there no more.
    put_down: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Control {
    /// Starts the thread.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        lock(&self.state).is_running = true;
        let control = Arc::clone(self);
        let builder = std::thread::Builder::new().name("control".to_owned());
        let thread = builder.spawn(move || control.run())?;
        *lock(&self.thread) = Some(thread);
        Ok(())
    }

    /// Ends it, after the call in hand.
    pub fn stop(&self) {
        lock(&self.state).is_running = false;
        self.any.store(true, Ordering::Release);
        self.more.notify_all();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            log::error!("The control thread has panicked");
        }
    }

    /// Has it carry out the next call of a context, whose ring the caller does not serve until
    /// then. The call stays where it is, for the next turn, where somebody else is busy with the
    /// list: a worker waits for nobody.
    pub fn hand_over(&self, context: &Arc<Context>) {
        let Ok(mut state) = self.state.try_lock() else {
            return;
        };
        if !state.is_running {
            return;
        }
        context.set_call_is_away(true);
        state.waiting.push(context);
        self.any.store(true, Ordering::Release);
        if std::mem::take(&mut state.is_asleep) {
            drop(state);
            self.more.notify_one();
        }
    }

    /// Takes contexts from it that nobody hands over any more. When it returns, it carries out none
    /// of their calls: where it has one of them in hand, after that.
    pub fn withdraw(&self, contexts: &HashSet<*const Context>) {
        let mut state = lock(&self.state);
        state.waiting.withdraw(contexts);
        let is_one = |held| contexts.iter().any(|context| context.addr() == held);
        while is_one(state.in_hand) {
            state = held(self.put_down.wait(state));
        }
    }

    fn run(&self) {
        let mut idle = Idle::new(policy::RINGS);
        while let Some(context) = self.take(&mut idle) {
            context.answer_away();
            drop(context);
            lock(&self.state).in_hand = 0;
            self.put_down.notify_all();
        }
    }

    /// Takes the next one into its hand; none at the end.
    fn take(&self, idle: &mut Idle) -> Option<Arc<Context>> {
        loop {
            if self.any.load(Ordering::Acquire) {
                let mut state = lock(&self.state);
                if !state.is_running {
                    return None;
                }
                if let Some(context) = state.waiting.pop() {
                    state.in_hand = Arc::as_ptr(&context).addr();
                    idle.worked();
                    return Some(context);
                }
                self.any.store(false, Ordering::Relaxed);
            }
            match idle.idle() {
                Rest::Look => (),
                Rest::Nap(limit) => self.sleep(idle, Some(limit)),
                Rest::Sleep(limit) => self.sleep(idle, limit),
            }
        }
    }

    /// Until there is something new, or for so long at most.
    fn sleep(&self, idle: &mut Idle, limit: Option<Duration>) {
        let mut state = lock(&self.state);
        if self.any.load(Ordering::Acquire) {
            return;
        }
        state.is_asleep = true;
        idle.waits(Instant::now());
        let is_asleep = |state: &mut State| state.is_asleep && state.is_running;
        let mut state = match limit {
            None => held(self.more.wait_while(state, is_asleep)),
            Some(limit) => held(self.more.wait_timeout_while(state, limit, is_asleep)).0,
        };
        state.is_asleep = false;
        drop(state);
        idle.woke();
    }
}

#[cfg(test)]
mod tests;
