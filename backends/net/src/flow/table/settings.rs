//! What a flow table is made with.

use crate::flow::follow::FollowLimits;
use crate::flow::order::HoldLimits;
use crate::pairs::PairCount;

/// Where flows of which the guest has sent nothing go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Into the queue of the worker that reads them: the port has spread them.
    Arrival,
    /// Into a queue by their hash: the port has fewer queues than the guest.
    Hash,
}

/// What a table is made with.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Queue pairs of the device.
    pub queues: PairCount,
    /// Flows that are known at most.
    pub capacity: usize,
    /// Where unknown flows go.
    pub placement: Placement,
    /// Microseconds after which a flow of which nothing is seen is forgotten.
    pub idle_us: u64,
    /// How fast a flow follows its process.
    pub follow: FollowLimits,
    /// How long it may be held for that.
    pub limits: HoldLimits,
}

impl Settings {
    /// The usual for so many queue pairs: 65,536 flows, forgotten after 30 s.
    #[must_use]
    pub fn usual(queues: PairCount, placement: Placement) -> Self {
        Self {
            queues,
            capacity: 1 << 16,
            placement,
            idle_us: 30_000_000,
            follow: FollowLimits::default(),
            limits: HoldLimits::default(),
        }
    }
}
