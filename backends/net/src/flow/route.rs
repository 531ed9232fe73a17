//! Where a frame goes next: the flow table decides it once, and it travels with the frame.

use super::shard::Slot;
use crate::pairs::PairId;

/// The flow of a frame that is under way between workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub(super) shard: u16,
    pub(super) slot: Slot,
    /// The sequence number after the frame's segment.
    pub(super) end: Option<u32>,
    /// The worker that has read the frame from its port queue.
    pub(super) from: PairId,
}

impl Ticket {
    /// The flow's entry in the table: equal for all frames of one flow alone.
    #[must_use]
    pub fn flow(&self) -> (u16, Slot) {
        (self.shard, self.slot)
    }
}

#[cfg(test)]
impl Ticket {
    /// A frame of the flow of this shard's first entry, which worker 1 has read.
    pub const fn of_shard(shard: u16) -> Self {
        Self {
            shard,
            slot: Slot::FIRST,
            end: None,
            from: PairId(1),
        }
    }
}

/// Where a frame goes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Into the worker's own receive queue, before any other frame, or away.
    Deliver,
    /// Into the receive queue of a pair, by its worker: this one, too, when the frame may have to
    /// wait for buffers.
    Forward {
        /// The pair.
        to: PairId,
        /// Its flow, if the table tracks it: [`delivered`](super::FlowTable::delivered) follows.
        flow: Option<Ticket>,
    },
    /// To the worker that decides the flow's order: it reads its own port queue until that is
    /// empty, then asks the table again ([`sequenced`](super::FlowTable::sequenced)).
    Sequence {
        /// The sequencer.
        to: PairId,
        /// The flow.
        flow: Ticket,
    },
    /// Kept by the worker while the flow moves: once it has read how far the driver of queue `on`
    /// is, it asks the table again ([`retry`](super::FlowTable::retry)).
    Hold {
        /// The queue that has to drain.
        on: PairId,
        /// The flow.
        flow: Ticket,
    },
}

impl Route {
    /// The flow, if the table tracks it.
    #[must_use]
    pub fn ticket(&self) -> Option<Ticket> {
        match *self {
            Self::Deliver => None,
            Self::Forward { flow, .. } => flow,
            Self::Sequence { flow, .. } | Self::Hold { flow, .. } => Some(flow),
        }
    }
}
