//! A worker: a thread that gives contexts their turns, and sleeps when there is nothing to do.

use crate::context::Context;
use crate::counters::{self, Counters};
use crate::engine::{Budget, EventSource, Progress, earlier};
use crate::hand::Hand;
use crate::nodes::WorkerNode;
use crate::round::{Look, Pace, Tenants};
use crate::traffic;
use farlane_sys::sync::{held, lock};
use farlane_worker::idle::{self, Idle};
use farlane_worker::wake::{self, Sleep};
use farlane_worker::{policy, thread};
use farlane_zero_copy::topology::Node;
use rustix::event::{EventfdFlags, epoll};
use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The number of the next sweep of any worker: contexts go from one to another, and know which
/// sweep was the last that has looked at them.
static SWEEPS: AtomicU64 = AtomicU64::new(1);

/// What a worker's thread and those who direct it have in common.
struct WorkerState {
    /// The contexts it serves.
    list: Mutex<Vec<Arc<Context>>>,
    /// Which of them has its turn, and how often the list has changed.
    hand: Hand,
    /// The generation that the thread goes by, and who waits for it.
    seen: Mutex<u64>,
    seen_changed: Condvar,
    epoll: OwnedFd,
    /// Whether the thread sleeps, for those who need no doorbell.
    sleep: Arc<Sleep<OwnedFd>>,
    /// What its engine has it look at, and watch while it sleeps.
    sources: Vec<Arc<dyn EventSource>>,
    stop: AtomicBool,
    counters: Arc<Counters>,
}

/// A worker thread, and how it is directed.
pub(crate) struct Worker {
    state: Arc<WorkerState>,
    /// Its node, where it has one.
    node: Option<Node>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Worker {
    pub fn start(
        index: usize,
        on: Option<WorkerNode>,
        sources: Vec<Arc<dyn EventSource>>,
        counters: Arc<Counters>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let state = Arc::new(WorkerState {
            list: Mutex::default(),
            hand: Hand::default(),
            seen: Mutex::new(0),
            seen_changed: Condvar::new(),
            epoll,
            sleep: Arc::new(Sleep::new(wake)),
            sources,
            stop: AtomicBool::new(false),
            counters,
        });
        state.watch(state.sleep.event.as_fd())?;
        for source in &state.sources {
            state.watch(source.fd())?;
        }
        let node = on.as_ref().map(|on| on.node);
        let thread = std::thread::Builder::new()
            .name(format!("worker{index}"))
            .spawn({
                let state = Arc::clone(&state);
                move || {
                    traffic::enter_worker(index);
                    if let Some(on) = on {
                        (on.enter)();
                    }
                    state.run(node);
                }
            })?;
        Ok(Self {
            state,
            node,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Its node, where it has one.
    pub fn node(&self) -> Option<Node> {
        self.node
    }

    /// Number of contexts that it serves.
    pub fn load(&self) -> usize {
        self.state.list().len()
    }

    pub fn enlist(&self, context: &Arc<Context>) {
        context.inbox().tell(Some(Arc::clone(&self.state.sleep)));
        self.state.change(|list| {
            list.push(Arc::clone(context));
            true
        });
    }

    /// Whether it serves a context.
    pub fn serves(&self, context: &Arc<Context>) -> bool {
        self.state.list().iter().any(|c| Arc::ptr_eq(c, context))
    }

    /// Takes these contexts from it. Returns what to [wait](Self::wait_left) for, where it served
    /// one of them.
    pub fn dismiss(&self, contexts: &HashSet<*const Context>) -> Option<u64> {
        self.state.change(|list| {
            let before = list.len();
            list.retain(|context| {
                let is_dismissed = contexts.contains(&Arc::as_ptr(context));
                if is_dismissed {
                    context.inbox().tell(None);
                }
                !is_dismissed
            });
            list.len() != before
        })
    }

    /// Returns when none of these contexts, which the change of that number has taken from it, has
    /// a turn: after the turn of the one that has it now, if it is one of them.
    pub fn wait_left(&self, contexts: &HashSet<*const Context>, generation: u64) {
        let is_one = |held| contexts.iter().any(|context| context.addr() == held);
        if self.state.hand.holds(is_one) {
            self.state.wait_seen(generation);
        }
    }

    /// How often its list has changed.
    #[cfg(test)]
    pub fn generation(&self) -> u64 {
        self.state.hand.generation()
    }

    pub fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.state.watch(fd)
    }

    pub fn unwatch(&self, fd: BorrowedFd<'_>) {
        // Fails only where it was never added.
        if let Err(e) = epoll::delete(&self.state.epoll, fd) {
            log::debug!("A doorbell was not watched: {e}");
        }
    }

    /// Has it look at all of its contexts, whatever it waits for.
    pub fn wake(&self) {
        self.state.sleep.wake();
    }

    pub fn stop(&self) {
        self.state.stop.store(true, Ordering::SeqCst);
        self.state.sleep.wake();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            log::error!("A worker has panicked");
        }
    }
}

/// Its thread ends with it, also where the workers beside it could not start.
impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}

impl WorkerState {
    fn list(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Context>>> {
        lock(&self.list)
    }

    /// Changes the list, and wakes the thread to take note. Returns the new generation.
    fn change(&self, how: impl FnOnce(&mut Vec<Arc<Context>>) -> bool) -> Option<u64> {
        let mut list = self.list();
        if !how(&mut list) {
            return None;
        }
        let generation = self.hand.change();
        drop(list);
        self.sleep.wake();
        Some(generation)
    }

    fn wait_seen(&self, generation: u64) {
        let mut seen = lock(&self.seen);
        while *seen < generation {
            seen = held(self.seen_changed.wait(seen));
        }
    }

    fn saw(&self, generation: u64) {
        *lock(&self.seen) = generation;
        self.seen_changed.notify_all();
    }

    /// Edge-triggered: every write to the eventfd wakes, and nobody has to read it.
    fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        epoll::add(
            &self.epoll,
            fd,
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        Ok(())
    }

    fn run(&self, node: Option<Node>) {
        thread::prepare();
        let mut tenants = Tenants::default();
        let mut generation = 0;
        let mut idle = Idle::new(policy::RINGS);
        let mut sweep = 0;
        let mut rest: Option<Rest> = None;
        while !self.stop.load(Ordering::Relaxed) {
            let current = self.hand.generation();
            if current != generation {
                generation = current;
                let contexts = self.list().clone();
                let key = |context: &Arc<Context>| Arc::as_ptr(context).addr();
                let throughput = |context: &Arc<Context>| Arc::clone(context.throughput());
                tenants.set(
                    &contexts,
                    |one, other| one.is_beside(other),
                    key,
                    throughput,
                );
                self.saw(generation);
                self.awake();
                rest = None;
            }
            let mut progress = self.turn(&mut tenants, generation, (sweep, rest.is_some()), node);
            for source in &self.sources {
                if source.take() {
                    progress.worked = true;
                    tenants.interrupted();
                }
            }
            if progress.worked {
                idle.worked();
                if rest.take().is_some() {
                    self.awake();
                    tenants.interrupted();
                }
                continue;
            }
            match &mut rest {
                Some(rest) => {
                    rest.note(progress.deadline);
                    if progress.cut {
                        // It looks as often as others make it: they have the CPU before.
                        std::thread::yield_now();
                    }
                }
                None => {
                    if let idle::Rest::Sleep(limit) = idle.idle() {
                        // Who posts something from now on wakes it. What was posted before is
                        // found in a sweep.
                        self.sleep.announce();
                        wake::announce(words(&self.list()));
                        self.sources.iter().for_each(|source| source.arm());
                        sweep = SWEEPS.fetch_add(1, Ordering::Relaxed);
                        rest = Some(Rest {
                            looked: false,
                            limit,
                            deadline: None,
                        });
                    }
                }
            }
            if !progress.cut
                && let Some(rest) = rest.take_if(|rest| rest.looked)
            {
                counters::count(&self.counters.sleeps, 1);
                let now = Instant::now();
                idle.waits(now);
                // A change of the list, the end, and every doorbell since the announcement end it.
                self.wait(rest.longest(now));
                idle.woke();
                self.awake();
            }
        }
        drop(tenants);
        self.saw(u64::MAX);
    }

    /// Those that were taken from the list are touched no more, which is why it is locked.
    fn awake(&self) {
        self.sleep.awake();
        wake::awake(words(&self.list()));
    }

    /// A turn of all, as long as the list is the one of that generation.
    fn turn(
        &self,
        tenants: &mut Tenants<Arc<Context>>,
        generation: u64,
        (sweep, is_resting): (u64, bool),
        node: Option<Node>,
    ) -> Progress {
        let (now, idle) = tenants.begin(is_resting);
        let look = Look {
            now,
            node,
            until: None,
            sweep,
            pace: Pace::Bounded,
            idle,
        };
        let poll = |context: &Arc<Context>, look: &Look, budget: &Budget| {
            if self.hand.take(Arc::as_ptr(context), generation) {
                return context.poll(look, budget);
            }
            Progress {
                cut: true,
                ..Progress::default()
            }
        };
        let progress = tenants.turn(&look, Instant::now, poll);
        self.hand.put_down();
        progress
    }

    fn wait(&self, most: Option<Duration>) {
        let timeout = most.and_then(|d| rustix::event::Timespec::try_from(d).ok());
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 16];
        match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => log::error!("A worker cannot wait: {e}"),
        }
    }
}

/// Sleep is announced, and the sweep goes on.
#[derive(Debug)]
struct Rest {
    /// The sweep has begun.
    looked: bool,
    /// How long to wait at most.
    limit: Option<Duration>,
    /// When to come back though nothing new arrives.
    deadline: Option<Instant>,
}

impl Rest {
    fn note(&mut self, deadline: Option<Instant>) {
        self.looked = true;
        self.deadline = earlier(self.deadline, deadline);
    }

    /// How long a wait that begins now may last.
    fn longest(&self, now: Instant) -> Option<Duration> {
        let left = self.deadline.map(|d| d.saturating_duration_since(now));
        earlier(self.limit, left)
    }
}

/// The words that say whether a context's backend must be woken.
fn words(contexts: &[Arc<Context>]) -> impl Iterator<Item = &AtomicU32> {
    contexts.iter().filter_map(|context| context.state_word())
}

#[cfg(test)]
mod tests;
