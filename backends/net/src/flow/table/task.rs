//! What a flow table tells workers to do with a frame.

use crate::flow::shard::Slot;

/// Names the flow of a frame that is under way between workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub(super) shard: u16,
    pub(super) slot: Slot,
    /// End of the frame's segment.
    pub(super) end: Option<u32>,
    /// Who has read it.
    pub(super) from: u16,
}

impl Ticket {
    /// What all frames of one flow have in common, and of different flows not.
    #[must_use]
    pub fn flow(&self) -> (u16, Slot) {
        (self.shard, self.slot)
    }
}

/// What a worker is to do with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Put it into the worker's own receive queue, before any other frame, or throw it away.
    Deliver,
    /// Send it to another worker, in order, or do at once what that one would.
    Forward {
        /// The worker.
        to: u16,
        /// What that one is to do.
        task: Task,
    },
    /// Keep it: the flow is moving. After reading anew what the driver has consumed of queue `on`,
    /// [`FlowTable::retry`](super::FlowTable::retry).
    Hold {
        /// The flow.
        ticket: Ticket,
        /// The queue that has to drain.
        on: u16,
    },
}

/// What a worker is to do with a frame that another has sent to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Put it into its own receive queue, then
    /// [`FlowTable::delivered`](super::FlowTable::delivered).
    Deliver(Ticket),
    /// The same, of a flow that the table does not know: nothing to say afterwards.
    Stray,
    /// Read its own port queue until that is empty, then
    /// [`FlowTable::sequenced`](super::FlowTable::sequenced).
    Sequence(Ticket),
    /// Held by itself.
    Held(Ticket),
}
