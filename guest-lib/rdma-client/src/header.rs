//! The context header as the process sees it.

use farlane_abi::arena::{
    BACKEND_SLEEPING, HEADER_SEGMENT_BYTES, OFF_BACKEND_STATE, OFF_DEAD, OFF_RUNG, OFF_RUNG_SUMMARY,
};
use farlane_abi::width::to_usize;
use farlane_transport::{Map, Origin, Segment, Transport, TransportError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// The first segment of a context, and the transport it lies on.
#[derive(Debug)]
pub(crate) struct Header {
    segment: Segment,
    transport: Arc<dyn Transport>,
    origin: Origin,
}

impl Header {
    /// Allocates the header: must be the first thing done on a transport.
    pub(crate) fn new(transport: &Arc<dyn Transport>) -> Result<Self, TransportError> {
        Ok(Self {
            segment: Segment::header(transport, to_usize(HEADER_SEGMENT_BYTES))?,
            transport: Arc::clone(transport),
            origin: Origin::here(),
        })
    }

    pub(crate) fn map(&self) -> &Map {
        &self.segment
    }

    pub(crate) fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    /// Whether the device is gone, which it also is for a child of the process that opened it.
    /// Two loads of words that nobody writes in normal times.
    #[inline]
    pub(crate) fn is_dead(&self) -> bool {
        !self.is_here() || self.segment.word(OFF_DEAD).load(Ordering::Acquire) != 0
    }

    /// Whether this is the process that opened the device: a child cannot touch its segments.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.origin.is_here()
    }

    /// After work has been published: wakes the backend if it sleeps, and says whether it did.
    #[inline]
    pub(crate) fn wake_backend(&self) -> bool {
        // Pairs with the backend's fence between saying that it sleeps and its last look at the
        // rings: one of the two sees the other (`farlane_abi::arena`).
        fence(Ordering::SeqCst);
        self.wake_if_asleep()
    }

    /// The same, after a full fence.
    fn wake_if_asleep(&self) -> bool {
        let state = self.segment.word(OFF_BACKEND_STATE);
        let sleeps = state.load(Ordering::Relaxed) == BACKEND_SLEEPING;
        if sleeps {
            self.transport.doorbell();
        }
        sleeps
    }

    /// After work has been published on the queue pair of `slot`, with the word `state` at
    /// [`QP_OFF_BACKEND_STATE`](farlane_abi::queue::QP_OFF_BACKEND_STATE): rings it where the
    /// backend does not look at it, and wakes the backend if it sleeps.
    #[inline]
    pub(crate) fn ring(&self, state: &AtomicU32, slot: u32) {
        // Pairs with the backend's fence between saying that it looks no more and its last look.
        fence(Ordering::SeqCst);
        if state.load(Ordering::Relaxed) == BACKEND_SLEEPING {
            self.set_bit(OFF_RUNG, slot);
            self.set_bit(OFF_RUNG_SUMMARY, slot / 32);
            fence(Ordering::SeqCst);
        }
        self.wake_if_asleep();
    }

    fn set_bit(&self, bits: usize, bit: u32) {
        let word = self.segment.word(bits + to_usize(u64::from(bit / 32) * 4));
        word.fetch_or(1 << (bit % 32), Ordering::SeqCst);
    }

    /// Sleeps until the backend wakes callers, the device dies, or `timeout`.
    pub(crate) fn wait(&self, timeout: Duration) {
        self.transport.wait(timeout);
    }

    /// Whether the transport itself has noticed that the device is gone.
    pub(crate) fn transport_is_dead(&self) -> bool {
        self.transport.is_dead()
    }
}
