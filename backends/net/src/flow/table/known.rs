//! Which flows the table knows: who comes in, who stays, and who is forgotten.

use super::{FlowTable, SHARDS, lock};
use crate::flow::follow::ProcessVotes;
use crate::flow::key::FlowKey;
use crate::flow::order::FlowOrder;
use crate::flow::parse::Signal;
use crate::flow::shard::{NewFlow, Promotion, Shard, Slot};
use crate::pairs::PairId;
use farlane_abi::width::to_u64;
use std::sync::atomic::Ordering;

/// Entries that a [`tick`](FlowTable::tick) looks at.
const TICK_STEPS: usize = 8;

/// Frames in each direction that make a flow established. Of TCP those count that neither open a
/// connection nor end one: what a sender under another's name has the guest say, however often.
const ESTABLISHED: u8 = 2;

/// The same of a flow that was established and had to make room, or for which there was none: where
/// there are more than are kept, they take turns, and what the port is asked for then costs little
/// beside so many frames.
const ESTABLISHED_AGAIN: u8 = 8;

/// Whether a frame counts.
fn counts(signal: Signal) -> bool {
    !matches!(signal, Signal::Open | Signal::Close)
}

/// Groups of flows that are not known, in a part.
const UNKNOWN_GROUPS: usize = 512;

/// Microseconds after which nothing of a frame is under way any more.
const LONG_AGO_US: u64 = 1_000_000;

/// What is kept of a flow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flow {
    pub(super) order: FlowOrder,
    pub(super) votes: ProcessVotes,
    /// Frames that have come and gone, of those that [count](counts), and how many of each make it
    /// established.
    received: u8,
    sent: u8,
    needed: u8,
    /// The queue of the port's rule for the flow, or of the hint for one that waits.
    pub(super) rule: Option<PairId>,
    /// The queue of a rule that the port follows no longer, and since when.
    left: Option<(PairId, u64)>,
}

impl Flow {
    pub(super) fn new(order: FlowOrder) -> Self {
        Self {
            order,
            votes: ProcessVotes::default(),
            received: 0,
            sent: 0,
            needed: ESTABLISHED,
            rule: None,
            left: None,
        }
    }

    /// A frame has come. Returns whether that makes the flow established.
    pub(super) fn has_come(&mut self, signal: Signal) -> bool {
        if !counts(signal) {
            return false;
        }
        self.received = self.received.saturating_add(1);
        self.received == self.needed && self.sent >= self.needed
    }

    /// A frame has gone. Returns whether that makes the flow established.
    pub(super) fn has_gone(&mut self, signal: Signal) -> bool {
        if !counts(signal) {
            return false;
        }
        self.sent = self.sent.saturating_add(1);
        self.sent == self.needed && self.received >= self.needed
    }

    /// It is not established: it can be again.
    fn begins_again(&mut self) {
        self.received = 0;
        self.sent = 0;
        self.needed = ESTABLISHED_AGAIN;
    }

    /// The port follows its rule no longer: frames come from another queue than `left`, from now on
    /// or soon.
    pub(super) fn leaves(&mut self, left: PairId, now_us: u64) {
        self.left = Some((left, now_us));
    }

    /// Whether all frames have come that came by a rule that was taken back: they come from another
    /// queue now, or have done so all the time.
    pub(super) fn has_left(&self, sequencer: PairId, now_us: u64) -> bool {
        self.left.is_none_or(|(left, since_us)| {
            left != sequencer || now_us.saturating_sub(since_us) >= LONG_AGO_US
        })
    }
}

/// How full the table is, and what it has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCounts {
    /// Flows in the table.
    pub flows: u64,
    /// Those of them that are established.
    pub established: u64,
    /// Moves that were begun.
    pub moves: u64,
    /// Flows that were forgotten, to make room or because they were idle.
    pub forgotten: u64,
    /// Flows for which there was no room.
    pub refused: u64,
}

/// A part of the table.
pub(super) struct TablePart {
    pub(super) flows: Shard<Flow>,
    /// When a frame of a flow that is not known last arrived, in microseconds, by some bits of the
    /// flow's hash; zero: never.
    unknown_seen: Box<[u64; UNKNOWN_GROUPS]>,
}

impl TablePart {
    /// An empty one with room for so many flows.
    pub(super) fn new(flows: usize) -> Self {
        Self {
            flows: Shard::new(flows),
            unknown_seen: Box::new([0; UNKNOWN_GROUPS]),
        }
    }

    pub(super) fn unknown_seen_mut(&mut self, within: u32) -> Option<&mut u64> {
        let index = usize::try_from(within >> 16).ok()?;
        self.unknown_seen.get_mut(index % UNKNOWN_GROUPS)
    }
}

impl FlowTable {
    /// Forgets what is idle, a few entries at a time. For every worker, once in a while.
    pub fn tick(&self, now_us: u64) {
        let number = self.next_shard.fetch_add(1, Ordering::Relaxed) % SHARDS;
        let Some(shard) = self.shards.get(number) else {
            return;
        };
        // Whoever has the lock is busy with the shard; there will be another tick.
        let Ok(mut shard) = shard.try_lock() else {
            return;
        };
        shard.flows.expire(
            TICK_STEPS,
            now_us,
            self.settings.idle_us,
            |flow, seen_us| self.spare(flow, seen_us, now_us),
            |key, flow| self.forget(key, flow),
        );
    }

    /// What the table has done, and how full it is.
    pub fn counts(&self) -> FlowCounts {
        let mut counts = FlowCounts {
            moves: self.moves.load(Ordering::Relaxed),
            forgotten: self.forgotten.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            ..FlowCounts::default()
        };
        for shard in &self.shards {
            let shard = lock(shard);
            counts.flows += to_u64(shard.flows.len());
            counts.established += to_u64(shard.flows.protected());
        }
        counts
    }

    /// Makes a flow known, that is to have this home.
    pub(super) fn insert(
        &self,
        part: &mut TablePart,
        key: FlowKey,
        within: u32,
        target: PairId,
        now_us: u64,
    ) -> Option<Slot> {
        let source = self.hash.source(&key).to_le_bytes()[0];
        let seen = part.unknown_seen_mut(within).map_or(0, |seen| *seen);
        let order = if seen == 0 || now_us.saturating_sub(seen) >= LONG_AGO_US {
            FlowOrder::placed(target)
        } else {
            FlowOrder::known(target)
        };
        let slot = part.flows.insert(
            NewFlow {
                key,
                hash: within,
                source,
            },
            Flow::new(order),
            now_us,
            |flow, seen_us| self.spare(flow, seen_us, now_us),
            |key, flow| self.forget(key, flow),
        );
        if slot.is_none() {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        slot
    }

    /// A flow has become established, perhaps in the place of another one.
    pub(super) fn promote(shard: &mut Shard<Flow>, slot: Slot) {
        let other = match shard.promote(slot) {
            Promotion::Done => return,
            Promotion::Instead(other) => other,
            Promotion::Refused => slot,
        };
        if let Some((_, flow)) = shard.peek(other) {
            flow.begins_again();
        }
    }

    /// Whether a flow may be forgotten without reordering it. What a driver has consumed is not
    /// looked at while a queue is idle; a frame that is a second old is done with.
    fn spare(&self, flow: &Flow, seen_us: u64, now_us: u64) -> bool {
        let active = self.active();
        let old = now_us.saturating_sub(seen_us) >= LONG_AGO_US;
        let can_take_back = flow.rule.is_none() || self.hints.has_room();
        can_take_back
            && flow.order.is_idle(|queue| {
                if old {
                    u64::MAX
                } else {
                    self.consumed(queue, active)
                }
            })
    }

    fn forget(&self, key: &FlowKey, flow: &Flow) {
        self.count_forgotten();
        if let Some(rule) = flow.rule {
            self.hints.take_back(*key, rule);
        }
    }

    pub(super) fn count_forgotten(&self) {
        self.forgotten.fetch_add(1, Ordering::Relaxed);
    }
}
