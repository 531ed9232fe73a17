//! What the users of a function and its worker share.

use crate::counters::{Counters, count};
use crate::memory::VideoMemory;
use crate::queue::{Place, Queue};
use crate::registers::{Effect, Registers};
use farlane_abi::gpu::VECTOR_FAULT;
use farlane_pci::emulated::InterruptLines;
use farlane_pci::{DmaSpace, Interrupts};
use farlane_sys::sync::{held, lock};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// What the lock guards.
#[derive(Debug)]
struct State {
    registers: Registers,
    /// The doorbell was written since the worker last woke.
    kicked: bool,
    /// The worker is to end.
    stopping: bool,
    /// It has ended.
    ended: bool,
    /// Up to which [`Shared::epoch`] the worker has acted.
    seen: u64,
}

/// What the worker is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// To end.
    Stop,
    /// To execute the commands of a queue, as long as the epoch is this one.
    Serve(Place, u64),
}

/// Shared by the function's users and its worker.
#[derive(Debug)]
pub struct Shared {
    state: Mutex<State>,
    /// There is something for the worker to look at.
    changed: Condvar,
    /// The worker has acted.
    settled: Condvar,
    /// Counts what makes the worker leave its queue: enabling, disabling, reset, end. Changed under
    /// the lock.
    epoch: AtomicU64,
    /// Video memory.
    pub memory: VideoMemory,
    /// System memory.
    pub dma: Arc<DmaSpace>,
    /// Interrupts.
    pub interrupts: InterruptLines<Counters>,
    /// Counters.
    pub counters: Arc<Counters>,
}

impl Shared {
    /// As after a reset.
    pub fn new(memory: VideoMemory, interrupts: Interrupts, counters: Arc<Counters>) -> Self {
        Self {
            state: Mutex::new(State {
                registers: Registers::new(memory.len()),
                kicked: false,
                stopping: false,
                ended: false,
                seen: 0,
            }),
            changed: Condvar::new(),
            settled: Condvar::new(),
            epoch: AtomicU64::new(0),
            memory,
            dma: DmaSpace::new(),
            interrupts: InterruptLines::new(interrupts, Arc::clone(&counters), |c| &c.interrupts),
            counters,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn wait<'s>(condition: &Condvar, state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        held(condition.wait(state))
    }

    /// Makes the worker leave its queue.
    fn turn(&self, _state: &mut State) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Whether nothing has changed since this epoch.
    pub fn is_current(&self, epoch: u64) -> bool {
        self.epoch.load(Ordering::Relaxed) == epoch
    }

    /// Reads registers.
    pub fn read_registers(&self, offset: u64, data: &mut [u8]) {
        self.state().registers.read(offset, data);
    }

    /// Writes a register.
    pub fn write_register(&self, offset: u64, data: &[u8]) {
        let mut state = self.state();
        match state.registers.write(offset, data) {
            Effect::None => (),
            Effect::Control => self.turn(&mut state),
            Effect::Doorbell => {
                state.kicked = true;
                self.changed.notify_all();
            }
        }
    }

    /// Waits until there is something to do that is not what was ordered before.
    pub fn next_order(&self) -> Order {
        let mut state = self.state();
        loop {
            if let Some(order) = self.look(&mut state) {
                return order;
            }
            state = Self::wait(&self.changed, state);
        }
    }

    /// What there is to do that was not ordered before.
    pub fn order(&self) -> Option<Order> {
        self.look(&mut self.state())
    }

    fn look(&self, state: &mut State) -> Option<Order> {
        if state.stopping {
            return Some(Order::Stop);
        }
        let epoch = self.epoch.load(Ordering::SeqCst);
        if state.seen == epoch {
            return None;
        }
        state.seen = epoch;
        state.kicked = false;
        state.registers.stopped();
        self.settled.notify_all();
        match state.registers.wanted() {
            Some(Some(place)) => return Some(Order::Serve(place, epoch)),
            Some(None) => self.raise_fault(state),
            None => (),
        }
        None
    }

    fn raise_fault(&self, state: &mut State) {
        state.registers.fault();
        count(&self.counters.faults, 1);
        self.interrupts.raise(VECTOR_FAULT);
    }

    /// The queue is in use.
    pub fn ready(&self, epoch: u64) {
        let mut state = self.state();
        if self.is_current(epoch) {
            state.registers.ready();
        }
    }

    /// The queue cannot be.
    pub fn fault(&self, epoch: u64) {
        let mut state = self.state();
        if self.is_current(epoch) {
            self.raise_fault(&mut state);
        }
    }

    /// Sleeps until the queue has work, the epoch has passed, or the time is over.
    pub fn sleep(&self, queue: &Queue<'_>, epoch: u64, limit: Option<Duration>) {
        queue.prepare_sleep();
        let rests =
            |state: &mut State| !queue.has_work() && !state.kicked && self.is_current(epoch);
        let state = self.state();
        let mut state = match limit {
            None => held(self.changed.wait_while(state, rests)),
            Some(limit) => held(self.changed.wait_timeout_while(state, limit, rests)).0,
        };
        state.kicked = false;
        drop(state);
        queue.woke();
        count(&self.counters.wakes, 1);
    }

    /// Resets registers and video memory; waits until the worker has let go of them.
    ///
    /// # Errors
    /// It has ended, or memory cannot be cleared.
    pub fn reset_all(&self) -> std::io::Result<()> {
        let mut state = self.state();
        state.registers = Registers::new(self.memory.len());
        self.turn(&mut state);
        let epoch = self.epoch.load(Ordering::SeqCst);
        while state.seen < epoch {
            if state.ended {
                return Err(std::io::Error::other("The worker has ended"));
            }
            state = Self::wait(&self.settled, state);
        }
        self.interrupts.clear_pending();
        // Under the lock: the worker takes no order meanwhile.
        self.memory.clear()
    }

    /// The worker is to end.
    pub fn stop_worker(&self) {
        let mut state = self.state();
        state.stopping = true;
        self.turn(&mut state);
    }

    /// The worker has ended.
    pub fn worker_ended(&self) {
        self.state().ended = true;
        self.settled.notify_all();
    }
}
