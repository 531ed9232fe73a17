//! Events that nobody waits for.

use farlane_abi::control::MAX_EVENTS;
use farlane_rdma_remoting::EventSink;

/// Takes events, and sees that they are ones that a context can have.
#[derive(Clone, Copy, Debug)]
pub struct Raised;

impl EventSink for Raised {
    fn raise(&self, index: u32) {
        assert!(index < MAX_EVENTS, "event {index}");
    }
}
