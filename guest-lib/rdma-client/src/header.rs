//! The context header as the process sees it.

use farlane_abi::arena::{BACKEND_SLEEPING, HEADER_SEGMENT_BYTES, OFF_BACKEND_STATE, OFF_DEAD};
use farlane_transport::{Link, LinkError, Map, Origin, Segment};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// The first segment of a context, and the link it lies on.
#[derive(Debug)]
pub(crate) struct Header {
    segment: Segment,
    link: Arc<dyn Link>,
    origin: Origin,
}

impl Header {
    /// Allocates the header: must be the first thing done on a link.
    pub(crate) fn new(link: &Arc<dyn Link>) -> Result<Self, LinkError> {
        let bytes = usize::try_from(HEADER_SEGMENT_BYTES)
            .map_err(|_| LinkError::Protocol("a header longer than memory"))?;
        Ok(Self {
            segment: Segment::header(link, bytes)?,
            link: Arc::clone(link),
            origin: Origin::here(),
        })
    }

    pub(crate) fn map(&self) -> &Map {
        &self.segment
    }

    pub(crate) fn link(&self) -> &Arc<dyn Link> {
        &self.link
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
        let state = self.segment.word(OFF_BACKEND_STATE);
        let sleeps = state.load(Ordering::Relaxed) == BACKEND_SLEEPING;
        if sleeps {
            self.link.doorbell();
        }
        sleeps
    }

    /// Sleeps until the backend wakes callers, the device dies, or `timeout`.
    pub(crate) fn wait(&self, timeout: Duration) {
        self.link.wait(timeout);
    }

    /// Whether the link itself has noticed that the device is gone.
    pub(crate) fn link_is_dead(&self) -> bool {
        self.link.is_dead()
    }
}
