//! Asynchronous events of a process, in memory shared with it.

use farlane_abi::arena::{
    ASYNC_ENTRIES, AsyncEvent, OFF_ASYNC_CONSUMED, OFF_ASYNC_PRODUCED, OFF_ASYNC_RING,
};
use farlane_abi::control::EVENT_ASYNC;
use farlane_abi::width::to_usize;
use farlane_sys::sync::lock;
use farlane_zero_copy::SharedMemory;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Delivers events to a process.
pub trait EventSink: Send + Sync {
    /// Event `index` has happened, once. Called from worker threads: must not wait for the
    /// process.
    fn raise(&self, index: u32);
}

/// The asynchronous event ring.
pub(crate) struct AsyncRing {
    memory: SharedMemory,
    produced: Mutex<u32>,
    events: Arc<dyn EventSink>,
}

impl AsyncRing {
    pub fn new(memory: SharedMemory, events: Arc<dyn EventSink>) -> Self {
        Self {
            memory,
            produced: Mutex::new(0),
            events,
        }
    }

    /// Puts an event into the ring; a process that does not take its events loses new ones.
    pub fn push(&self, kind: u32, object: u32) {
        let mut produced = lock(&self.produced);
        let (Ok(consumed), Ok(word)) = (
            self.memory.word(OFF_ASYNC_CONSUMED),
            self.memory.word(OFF_ASYNC_PRODUCED),
        ) else {
            return;
        };
        if produced.wrapping_sub(consumed.load(Ordering::Acquire)) >= ASYNC_ENTRIES {
            log::debug!("Asynchronous event {kind} dropped: the ring is full");
            return;
        }
        let event = AsyncEvent {
            kind: kind.into(),
            object: object.into(),
            ..Default::default()
        };
        let index = to_usize(u64::from(*produced % ASYNC_ENTRIES));
        let at = OFF_ASYNC_RING + index * size_of::<AsyncEvent>();
        if self.memory.write(at, &event).is_ok() {
            *produced = produced.wrapping_add(1);
            word.store(*produced, Ordering::Release);
            self.events.raise(EVENT_ASYNC);
        }
    }
}
