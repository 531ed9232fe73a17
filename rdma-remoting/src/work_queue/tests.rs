//! Rings of the user ABI of rxe, as librxe and others fill them.

use super::*;
use crate::request::RecvWqe;
use crate::testing::shared;
use farlane_abi::rxe::{
    CONTROL_BYTES, RING_OFF_CONSUMED, RING_OFF_ENTRIES, RING_OFF_PRODUCED, RingLayout,
};
use farlane_abi::width::to_usize;
use proptest::prelude::*;

/// The process's end of a receive queue.
struct Process {
    ring: SharedMemory,
    layout: RingLayout,
}

fn queue(entries: u32) -> (Process, RxeRecvQueue) {
    let format = RxeRecvFormat { elements: 1 };
    let bytes = u32::try_from(format.entry_bytes()).unwrap();
    let layout = RingLayout::new(entries, bytes, 1 << 14).unwrap();
    let (_, ring) = shared("ring", layout.segment_bytes());
    let (_, control) = shared("control", CONTROL_BYTES);
    let queue = rxe_recv_queue(&ring, &layout, &control, format).unwrap();
    (Process { ring, layout }, queue)
}

impl Process {
    fn word(&self, at: usize) -> u32 {
        self.ring.word(at).unwrap().load(Ordering::SeqCst)
    }

    fn set_produced(&self, index: u32) {
        let word = self.ring.word(RING_OFF_PRODUCED).unwrap();
        word.store(index, Ordering::SeqCst);
    }

    /// Posts as librxe does; false where the ring is full.
    fn post(&self, wr_id: u64) -> bool {
        let mask = self.layout.slots - 1;
        let produced = self.word(RING_OFF_PRODUCED);
        let next = (produced + 1) & mask;
        if next == self.word(RING_OFF_CONSUMED) {
            return false;
        }
        let entry = RxeRecvEntry {
            wr_id: wr_id.into(),
            ..Default::default()
        };
        let at = to_usize((produced * self.layout.stride).into());
        self.ring.write(RING_OFF_ENTRIES + at, &entry).unwrap();
        self.set_produced(next);
        true
    }
}

fn take(queue: &mut RxeRecvQueue) -> Result<Option<u64>, QueueError> {
    let mut request = RecvWqe::default();
    let taken = queue.take(&mut request)?;
    Ok(taken.then_some(request.wr_id))
}

#[test]
fn a_ring_goes_round_and_is_full_with_one_element_free() {
    let (process, mut queue) = queue(3);
    let mut wr_ids = 0..;
    for round in 0..5_u64 {
        let posted: Vec<_> = wr_ids.by_ref().take_while(|id| process.post(*id)).collect();
        // One was drawn in vain.
        assert_eq!(posted.len(), 3, "round {round}");
        for id in posted {
            assert!(WorkSource::<RecvWqe>::is_ready(&queue));
            assert_eq!(take(&mut queue), Ok(Some(id)));
            // Its place is not free before it is retired.
            assert!(!process.post(99));
        }
        assert_eq!(take(&mut queue), Ok(None));
        (0..3).for_each(|_| WorkSource::<RecvWqe>::retire(&mut queue));
        let words = [RING_OFF_PRODUCED, RING_OFF_CONSUMED].map(|at| process.word(at));
        assert!(words[0] == words[1] && words[1] < 4, "{words:?}");
    }
}

#[test]
fn who_posts_to_a_ring_need_not_ring() {
    let (_, queue) = queue(3);
    assert!(!WorkSource::<RecvWqe>::rings(&queue));
}

#[test]
fn what_is_discarded_is_given_back() {
    let (process, mut queue) = queue(3);
    (0..3).for_each(|id| assert!(process.post(id)));
    assert_eq!(take(&mut queue), Ok(Some(0)));
    WorkSource::<RecvWqe>::discard(&mut queue);
    assert_eq!(process.word(RING_OFF_CONSUMED), 3);
    assert_eq!(take(&mut queue), Ok(None));
    assert!(process.post(7));
    assert_eq!(take(&mut queue), Ok(Some(7)));
}

#[test]
fn an_index_behind_what_was_taken_ends_the_queue() {
    let (process, mut queue) = queue(7);
    (0..5).for_each(|id| assert!(process.post(id)));
    for id in 0..4 {
        assert_eq!(take(&mut queue), Ok(Some(id)));
    }
    process.set_produced(3);
    let refused = Err(QueueError::Index {
        produced: 3,
        consumed: 0,
        entries: 8,
    });
    assert_eq!(take(&mut queue), refused);
    assert!(WorkSource::<RecvWqe>::is_ready(&queue));
}

proptest! {
    /// Whatever is written: nothing outside of the ring is read, and no more is taken than lies in
    /// it at once.
    #[test]
    fn any_index_leaves_the_ring_within_its_bounds(
        entries in 0u32..20,
        steps in prop::collection::vec((any::<u32>(), any::<bool>(), any::<bool>()), 1..60),
    ) {
        let (process, mut queue) = queue(entries);
        let slots = process.layout.slots;
        let mut waiting = 0;
        for (index, takes, discards) in steps {
            process.set_produced(index);
            if takes {
                while let Ok(Some(_)) = take(&mut queue) {
                    waiting += 1;
                    prop_assert!(waiting < slots);
                }
            }
            if discards {
                WorkSource::<RecvWqe>::discard(&mut queue);
                waiting = 0;
                prop_assert_eq!(process.word(RING_OFF_CONSUMED), index & (slots - 1));
            }
            let queued = WorkSource::<RecvWqe>::queued(&queue);
            prop_assert!(queued < slots);
        }
    }
}
