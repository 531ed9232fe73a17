//! Asynchronous events of a process, in memory shared with it.

use crate::ring::{Place, Producer};
use farlane_abi::arena::{
    ASYNC_ENTRIES, AsyncEvent, OFF_ASYNC_CONSUMED, OFF_ASYNC_PRODUCED, OFF_ASYNC_RING,
};
use farlane_abi::control::EVENT_ASYNC;
use farlane_zero_copy::SharedMemory;
use std::sync::Arc;

/// Delivers events to a process.
pub trait EventSink: Send + Sync {
    /// Event `index` has happened, once. Called from worker threads: must not wait for the
    /// process.
    fn raise(&self, index: u32);
}

/// The asynchronous event ring.
pub(crate) struct AsyncRing {
    ring: Producer,
    events: Arc<dyn EventSink>,
}

impl AsyncRing {
    pub fn new(memory: SharedMemory, events: Arc<dyn EventSink>) -> Self {
        let place = Place {
            produced_at: OFF_ASYNC_PRODUCED,
            consumed_at: OFF_ASYNC_CONSUMED,
            entries_at: OFF_ASYNC_RING,
            entries: ASYNC_ENTRIES,
            stride: size_of::<AsyncEvent>(),
        };
        let ring = Producer::new(memory, place);
        Self { ring, events }
    }

    /// Puts an event into the ring; a process that does not take its events loses new ones.
    pub fn push(&self, kind: u32, object: u32) {
        let event = AsyncEvent {
            kind: kind.into(),
            object: object.into(),
            ..Default::default()
        };
        match self.ring.push(&event) {
            Some(()) => self.events.raise(EVENT_ASYNC),
            None => log::debug!("Asynchronous event {kind} dropped: the ring is full"),
        }
    }
}
