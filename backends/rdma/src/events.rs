//! The event queue of a VM.
//!
//! An event goes from the engine's thread straight into a buffer of the guest. Where the guest has
//! posted none, events are counted by context and index, so that what waits is bounded by the
//! number of those, and delivered one by one as buffers come.

use farlane_abi::control::Event;
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_daemon::vring::{VmMemory, Vring};
use farlane_rdma_remoting::EventSink;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vhost_user_backend::{VringState, VringT as _};
use virtio_queue::{QueueOwnedT as _, QueueT as _};
use vm_memory::GuestAddressSpace as _;

/// Context and event index.
type Key = (u32, u32);

/// The event queue of one connection of a VM.
pub struct EventQueue {
    memory: VmMemory,
    /// Locked before the queue's own lock.
    state: Mutex<State>,
}

struct State {
    /// None before the VM is there, and after it has gone.
    vring: Option<Vring>,
    /// Events without a buffer, and how many of each.
    waiting: BTreeMap<Key, u64>,
    /// The last one that was delivered: the next comes after it, so that none starves.
    last: Key,
}

impl std::fmt::Debug for EventQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventQueue").finish_non_exhaustive()
    }
}

/// Raises the events of one context.
#[derive(Debug)]
pub struct ContextEvents {
    queue: Arc<EventQueue>,
    context: u32,
    /// Changed under the queue's lock.
    open: AtomicBool,
}

impl EventSink for ContextEvents {
    fn raise(&self, index: u32) {
        let mut state = self.queue.state();
        if self.open.load(Ordering::Relaxed) {
            self.queue.raise(&mut state, (self.context, index));
        }
    }
}

impl ContextEvents {
    /// No event of this context is delivered when this has returned, not even one that waits.
    pub fn close(&self) {
        let mut state = self.queue.state();
        self.open.store(false, Ordering::Relaxed);
        let mut later = state.waiting.split_off(&(self.context, 0));
        if let Some(next) = self.context.checked_add(1) {
            state.waiting.append(&mut later.split_off(&(next, 0)));
        }
    }
}

impl EventQueue {
    /// An event queue in a VM with this memory.
    #[must_use]
    pub fn new(memory: VmMemory) -> Arc<Self> {
        Arc::new(Self {
            memory,
            state: Mutex::new(State {
                vring: None,
                waiting: BTreeMap::new(),
                last: (0, 0),
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The queue that carries the events, or none any more.
    pub fn set_vring(&self, vring: Option<Vring>) {
        self.state().vring = vring;
    }

    /// Where the events of `context` go.
    #[must_use]
    pub fn context(self: &Arc<Self>, context: u32) -> Arc<ContextEvents> {
        Arc::new(ContextEvents {
            queue: Arc::clone(self),
            context,
            open: AtomicBool::new(true),
        })
    }

    /// Waits for a delivery under way. After the queue was stopped, none begins.
    pub fn settle(&self) {
        drop(self.state());
    }

    fn raise(&self, state: &mut State, key: Key) {
        if state.waiting.is_empty() && self.deliver(state, key, Put::One) {
            return;
        }
        let count = state.waiting.entry(key).or_default();
        *count = count.saturating_add(1);
        self.flush_locked(state);
    }

    /// Delivers what waits, as far as there are buffers: the guest has posted some.
    pub fn flush(&self) {
        self.flush_locked(&mut self.state());
    }

    fn flush_locked(&self, state: &mut State) {
        while let Some(key) = state.next_waiting() {
            if !self.deliver(state, key, Put::Waiting) {
                return;
            }
            state.last = key;
            if let Some(count) = state.waiting.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    state.waiting.remove(&key);
                }
            }
        }
    }

    /// Puts one event into a buffer, if there is one.
    fn deliver(&self, state: &State, key: Key, put: Put) -> bool {
        let Some(vring) = &state.vring else {
            return false;
        };
        let mut queue = vring.get_mut();
        if !queue.is_enabled() || !queue.get_queue().ready() {
            return false;
        }
        let event = Event {
            context: key.0.into(),
            index: key.1.into(),
        };
        self.put(&mut queue, &event)
            // Asks for a kick only where one is needed. True: buffers have come in between.
            || put == Put::Waiting
                && queue.enable_notification().unwrap_or(false)
                && self.put(&mut queue, &event)
    }

    /// Fills the next good buffer. Bad ones are given back empty, no more than the queue holds.
    fn put(&self, queue: &mut VringState<VmMemory>, event: &Event) -> bool {
        let memory = self.memory.memory();
        let mut used = false;
        let mut filled = false;
        for _ in 0..queue.get_queue().size() {
            let next = queue.get_queue_mut().iter(memory.clone());
            let Some(chain) = next.ok().and_then(|mut chains| chains.next()) else {
                break;
            };
            let head = chain.head_index();
            let bytes = event.as_bytes();
            filled = chain.writer(&memory).is_ok_and(|mut writer| {
                writer.available_bytes() >= bytes.len() && writer.write_all(bytes).is_ok()
            });
            let length = if filled { size_of::<Event>() } else { 0 };
            if queue
                .add_used(head, u32::try_from(length).unwrap_or(0))
                .is_err()
            {
                filled = false;
                break;
            }
            used = true;
            if filled {
                break;
            }
        }
        if used && queue.needs_notification().unwrap_or(true) {
            let _ = queue.signal_used_queue();
        }
        filled
    }
}

/// Whether other events wait already.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Put {
    /// No: the fast way. If it fails, the event comes back as one that waits.
    One,
    Waiting,
}

impl State {
    fn next_waiting(&self) -> Option<Key> {
        self.waiting
            .range((Bound::Excluded(self.last), Bound::Unbounded))
            .next()
            .or_else(|| self.waiting.first_key_value())
            .map(|(&key, _)| key)
    }
}
