#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

const PACE: FollowLimits = FollowLimits {
    threshold: 3,
    stay_us: 1_000,
    longest_stay_us: 8_000,
};

fn count(votes: &mut ProcessVotes, home: u16, queue: u16, signal: Signal, now: u64) -> Option<u16> {
    let moved = votes.count(PairId(home), PairId(queue), signal, now, &PACE);
    moved.map(|to| to.0)
}

#[test]
fn two_requests_or_three_acknowledgements_from_elsewhere_move_a_flow() {
    let mut votes = ProcessVotes::default();
    assert_eq!(count(&mut votes, 0, 1, Signal::Data, 1), None);
    assert_eq!(count(&mut votes, 0, 1, Signal::Data, 2), Some(1));
    let mut votes = ProcessVotes::default();
    assert_eq!(count(&mut votes, 0, 1, Signal::Acknowledge, 1), None);
    assert_eq!(count(&mut votes, 0, 1, Signal::Acknowledge, 2), None);
    assert_eq!(count(&mut votes, 0, 1, Signal::Acknowledge, 3), Some(1));
}

#[test]
fn acknowledgements_of_the_soft_interrupt_do_not_outvote_the_process() {
    let mut votes = ProcessVotes::default();
    let mut moved = None;
    for now in 0..40 {
        // Nine of ten come from the receive queue's own CPU.
        let queue = u16::from(now % 10 == 0);
        moved = moved.or(count(&mut votes, 0, queue, Signal::Acknowledge, now));
    }
    assert_eq!(moved, Some(1));
}

#[test]
fn a_stray_acknowledgement_now_and_then_moves_nothing() {
    let mut votes = ProcessVotes::default();
    for now in 0..10_000 {
        let queue = u16::from(now % 100 == 0);
        assert_eq!(count(&mut votes, 0, queue, Signal::Acknowledge, now), None);
    }
}

#[test]
fn data_from_both_does_not_move_a_flow() {
    let mut votes = ProcessVotes::default();
    for now in 0..1_000 {
        let queue = u16::from(now % 2 == 0);
        assert_eq!(count(&mut votes, 0, queue, Signal::Data, now), None);
    }
}

#[test]
fn late_acknowledgements_from_the_old_queue_do_not_move_a_flow_back() {
    let mut votes = ProcessVotes::default();
    for now in 1..=3 {
        count(&mut votes, 0, 1, Signal::Acknowledge, now);
    }
    for now in 4..500 {
        assert_eq!(count(&mut votes, 1, 0, Signal::Acknowledge, now), None);
    }
    // The process has come back: it is followed.
    assert_eq!(count(&mut votes, 1, 0, Signal::Data, 1_500), None);
    assert_eq!(count(&mut votes, 1, 0, Signal::Data, 1_501), Some(0));
}

#[test]
fn two_processes_that_share_a_flow_move_it_ever_more_seldom() {
    let mut votes = ProcessVotes::default();
    let mut home = 0;
    let mut moves = Vec::new();
    for now in (1..100_000).step_by(10) {
        for queue in [0, 1] {
            if let Some(to) = count(&mut votes, home, queue, Signal::Acknowledge, now) {
                home = to;
                moves.push(now);
            }
        }
    }
    // At the longest stay: about a dozen in 100 ms, in place of 100.
    assert!((3..20).contains(&moves.len()), "{moves:?}");
}

proptest! {
    #[test]
    fn a_process_that_stays_is_found_wherever_it_is(
        before in proptest::collection::vec((0..4_u16, 0..4_u16, any::<bool>()), 0..200),
        home in 0..4_u16,
        process in 0..4_u16,
    ) {
        let mut votes = ProcessVotes::default();
        let mut now = 1;
        for (home, queue, data) in before {
            let signal = if data { Signal::Data } else { Signal::Acknowledge };
            now += 7;
            count(&mut votes, home, queue, signal, now);
        }
        let mut home = home;
        for _ in 0..1_000 {
            now += 100;
            if let Some(to) = count(&mut votes, home, process, Signal::Data, now) {
                home = to;
            }
        }
        prop_assert_eq!(home, process);
    }
}
