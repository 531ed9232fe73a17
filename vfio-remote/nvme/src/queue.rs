//! Ring mechanics of submission and completion queues (NVMe 1.4, 4.1).

use crate::bits::{CQE_BYTES, Cqe, SQE_BYTES, low};
use crate::controller::Permit;
use crate::ids::CqId;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A queue index that the driver has written and that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadIndex(pub u32);

/// A submission queue, seen from the controller.
#[derive(Debug)]
pub struct SubmissionQueue {
    address: u64,
    entries: u32,
    head: u32,
    tail: u32,
    /// Identifier of its completion queue.
    pub cq: CqId,
    /// Commands taken whose completions the driver does not have yet.
    in_flight: u32,
    /// The delete command that waits for them, and for entries on their way.
    pub deleting: Option<Permit>,
    /// Entries on their way from remote memory: nothing else is taken meanwhile.
    pub fetching: bool,
    /// The tail that the driver was last told to ring for (shadow doorbells), if any.
    pub event: Option<u32>,
    /// The driver wrote a bad tail, and it has been reported.
    pub bad_tail: bool,
}

impl SubmissionQueue {
    /// An empty queue of `entries` at `address`.
    pub fn new(address: u64, entries: u32, cq: CqId) -> Self {
        Self {
            address,
            entries,
            head: 0,
            tail: 0,
            cq,
            in_flight: 0,
            deleting: None,
            fetching: false,
            event: None,
            bad_tail: false,
        }
    }

    /// Whether nothing of it is under way.
    pub fn is_drained(&self) -> bool {
        self.in_flight == 0 && !self.fetching
    }

    /// How many commands may be taken: as many as fit into the ring are in flight at most.
    pub fn free(&self) -> u32 {
        self.entries.saturating_sub(self.in_flight)
    }

    /// A command of it is in flight.
    pub fn began(&mut self) {
        self.in_flight += 1;
    }

    /// The driver has the completion of a command, or it is held as an event request.
    pub fn ended(&mut self) {
        debug_assert!(self.in_flight > 0, "a command that has not begun has ended");
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Takes the driver's tail over.
    pub fn set_tail(&mut self, tail: u32) -> Result<(), BadIndex> {
        if tail >= self.entries {
            return Err(BadIndex(tail));
        }
        self.tail = tail;
        Ok(())
    }

    /// Last tail seen.
    pub fn tail(&self) -> u32 {
        self.tail
    }

    /// The tail before that: the driver, told to ring when it passes it, does not.
    pub fn behind(&self) -> u32 {
        (self.tail + self.entries - 1) % self.entries
    }

    /// Entries from `index` to the tail.
    pub fn distance(&self, index: u32) -> u32 {
        (self.tail + self.entries - index % self.entries) % self.entries
    }

    /// Entries in it.
    pub fn pending(&self) -> u32 {
        self.distance(self.head)
    }

    /// Entries of the ring.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Head.
    pub fn head(&self) -> u16 {
        low(self.head)
    }

    /// Address of the entry at the head.
    pub fn head_address(&self) -> u64 {
        self.address.wrapping_add(u64::from(self.head) * SQE_BYTES)
    }

    /// Entries from the head on that lie in one piece, at most `limit`.
    pub fn run(&self, limit: u32) -> u32 {
        self.pending().min(self.entries - self.head).min(limit)
    }

    /// One entry was taken.
    pub fn advance(&mut self) {
        self.head = (self.head + 1) % self.entries;
    }
}

/// Whether an interrupt is due for entries that were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// An interrupt is due.
    Now,
    /// The driver has not looked at what the last one told of: when it does, it sees the new ones,
    /// too.
    Later,
    /// The driver has seen them all.
    Never,
}

/// A completion queue, seen from the controller.
#[derive(Debug)]
pub struct CompletionQueue {
    address: u64,
    entries: u32,
    tail: u32,
    head: u32,
    phase: bool,
    /// Where it interrupts, if it does.
    pub vector: Option<u16>,
    /// Completions that found it full.
    pub backlog: VecDeque<Cqe>,
    /// Submission queues that use it.
    pub users: u32,
    /// Entries were added since the last interrupt.
    pub posted: bool,
    /// The last interrupt: when, and the tail then.
    pub raised: Option<(Instant, u32)>,
    /// Entries on their way to remote memory, which must not be overtaken.
    posting: u32,
    /// The driver wrote a bad head, and it has been reported.
    pub bad_head: bool,
}

impl CompletionQueue {
    /// An empty queue of `entries` at `address`.
    pub fn new(address: u64, entries: u32, vector: Option<u16>) -> Self {
        Self {
            address,
            entries,
            tail: 0,
            head: 0,
            phase: true,
            vector,
            backlog: VecDeque::new(),
            users: 0,
            posted: false,
            raised: None,
            posting: 0,
            bad_head: false,
        }
    }

    /// Whether entries are on their way to remote memory.
    pub fn is_posting(&self) -> bool {
        self.posting > 0
    }

    /// An entry is on its way; whoever it reaches is interrupted then.
    pub fn posts(&mut self) {
        self.posted = false;
        self.posting += 1;
    }

    /// An entry has arrived.
    pub fn arrived(&mut self) {
        debug_assert!(
            self.posting > 0,
            "an entry that was not on its way has arrived"
        );
        self.posting = self.posting.saturating_sub(1);
    }

    /// Whether it is full, as far as the driver's head is known.
    pub fn is_full(&self) -> bool {
        (self.tail + 1) % self.entries == self.head
    }

    /// Whether the driver has entries to look at, as far as its head is known.
    pub fn has_entries(&self) -> bool {
        self.tail != self.head
    }

    /// What the driver, whose head is `head`, is still to be told of.
    pub fn due(&self, head: u32, patience: Duration) -> Due {
        let Some((when, raised)) = self.raised else {
            return Due::Now;
        };
        if head >= self.entries {
            return Due::Now;
        }
        let ahead = |index: u32| (index + self.entries - head) % self.entries;
        if head == self.tail {
            Due::Never
        } else if (1..=ahead(self.tail)).contains(&ahead(raised)) && when.elapsed() < patience {
            Due::Later
        } else {
            Due::Now
        }
    }

    /// An interrupt tells of all entries that there are now.
    pub fn raise(&mut self) {
        self.posted = false;
        self.raised = Some((Instant::now(), self.tail));
    }

    /// Takes the driver's head over: one between the last one and the tail.
    pub fn set_head(&mut self, head: u32) -> Result<(), BadIndex> {
        let used = |from: u32| (self.tail + self.entries - from) % self.entries;
        if head >= self.entries || used(head) > used(self.head) {
            return Err(BadIndex(head));
        }
        self.head = head;
        Ok(())
    }

    /// Last head seen.
    pub fn head(&self) -> u32 {
        self.head
    }

    /// The head before that.
    pub fn behind(&self) -> u32 {
        (self.head + self.entries - 1) % self.entries
    }

    /// Claims the next entry: where it lies, and `cqe` with its phase. It must not be full.
    pub fn claim(&mut self, mut cqe: Cqe) -> (u64, Cqe) {
        debug_assert!(!self.is_full(), "a full completion queue");
        let address = self.address.wrapping_add(u64::from(self.tail) * CQE_BYTES);
        cqe.status = cqe.status & !1 | u16::from(self.phase);
        self.tail += 1;
        if self.tail == self.entries {
            self.tail = 0;
            self.phase = !self.phase;
        }
        self.posted = true;
        (address, cqe)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn phases_change_with_each_round() {
        let mut queue = CompletionQueue::new(0x1000, 3, None);
        let mut phases = Vec::new();
        for _ in 0..7 {
            let (address, cqe) = queue.claim(Cqe::default());
            phases.push((address & 0xff, cqe.status));
            queue
                .set_head(u32::try_from((address & 0xff) / 16 + 1).unwrap() % 3)
                .unwrap();
        }
        assert_eq!(phases[..4], [(0, 1), (16, 1), (32, 1), (0, 0)]);
        assert_eq!(phases[6], (0, 1));
    }

    #[test]
    fn an_interrupt_waits_for_a_driver_that_has_one_to_look_at() {
        let long = Duration::from_secs(3600);
        let mut queue = CompletionQueue::new(0x1000, 4, Some(1));
        queue.claim(Cqe::default());
        assert_eq!(queue.due(0, long), Due::Now);
        queue.raise();
        assert!(!queue.posted);
        queue.claim(Cqe::default());
        assert_eq!(queue.due(0, long), Due::Later);
        // Not for ever.
        assert_eq!(queue.due(0, Duration::ZERO), Due::Now);
        // It has seen what it was told of, and stopped there; or has seen all.
        assert_eq!(queue.due(1, long), Due::Now);
        assert_eq!(queue.due(2, long), Due::Never);
        // Over the end of the ring.
        queue.raise();
        queue.set_head(2).unwrap();
        for _ in 0..2 {
            queue.claim(Cqe::default());
        }
        assert_eq!(queue.due(1, long), Due::Later);
        assert_eq!(queue.due(2, long), Due::Now);
        assert_eq!(queue.due(0, long), Due::Never);
        // An index that is none, or has not been reached, puts nothing off.
        assert_eq!(queue.due(7, long), Due::Now);
    }

    proptest! {
        #[test]
        fn indices_of_a_hostile_driver_leave_the_queues_consistent(
            entries in 2_u32..70,
            steps in prop::collection::vec((any::<bool>(), 0_u32..100), 0..200),
        ) {
            let mut sq = SubmissionQueue::new(0, entries, CqId::ADMIN);
            let mut cq = CompletionQueue::new(0, entries, None);
            let mut used = 0;
            for (submit, index) in steps {
                if submit {
                    prop_assert_eq!(sq.set_tail(index).is_ok(), index < entries);
                    prop_assert!(sq.pending() < entries);
                    let run = sq.run(8);
                    let end = sq.head_address() + u64::from(run) * 64;
                    prop_assert!(run <= 8 && end <= u64::from(entries) * 64);
                    for _ in 0..run {
                        sq.advance();
                        if !cq.is_full() {
                            let (address, _) = cq.claim(Cqe::default());
                            prop_assert!(address < u64::from(entries) * 16);
                            used += 1;
                        }
                    }
                } else {
                    let free = (index + entries - cq.head()) % entries;
                    let valid = index < entries && free <= used;
                    prop_assert_eq!(cq.set_head(index).is_ok(), valid);
                    if valid {
                        used -= free;
                    }
                }
                prop_assert_eq!(cq.has_entries(), used > 0);
            }
        }
    }
}
