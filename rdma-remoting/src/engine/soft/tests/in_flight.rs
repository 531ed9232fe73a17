//! Several requests of a connection on their way at once, over a carrier that loses, doubles and
//! reorders what it carries.

mod bounds;
mod net;

use super::super::carrier::{Acknowledgement, Answer, Failed, Payload, Position, Reply, Sequence};
use super::super::common::Life;
use super::super::inbound::Fragment;
use super::super::responder::{Nak, NotReady};
use super::*;
use crate::engine::{Budget, LOOK_COST, OPERATION_COST};
use crate::memory::Part;
use farlane_abi::queue::{
    MAX_MESSAGE_BYTES, WC_STATUS_LOC_PROT_ERR, WC_STATUS_REM_ACCESS_ERR,
    WC_STATUS_RNR_RETRY_EXC_ERR, WC_STATUS_WR_FLUSH_ERR,
};
use farlane_abi::rdma::{
    EVENT_SQ_DRAINED, QP_EN_SQD_ASYNC_NOTIFY, QP_STATE, QPS_ERR, QPS_RESET, QPS_SQD, QPT_UC,
};
use farlane_sys::sync::lock;
use farlane_zero_copy::{RegionError, copy_from_slice};
use net::*;
use proptest::prelude::*;
use std::collections::VecDeque;

fn succeed(numbers: std::ops::Range<u64>) -> Vec<(u64, u8)> {
    numbers.map(|number| (number, WC_STATUS_SUCCESS)).collect()
}

#[test]
fn requests_are_sent_before_those_ahead_of_them_are_answered() {
    let mut pair = Pair::new();
    let count = MESSAGES as u64 + 4;
    for at in 0..count {
        pair.post(Opcode::Write, 8 * at, 8, 8 * at);
    }
    pair.turn();
    assert_eq!(pair.under_way(), (0..MESSAGES as u64).collect::<Vec<_>>());
    assert_eq!(pair.completed(), []);
    assert_eq!(pair.a.sends.len(), 4, "others wait in their queue");
    assert_eq!(pair.settle(), succeed(0..count));
}

#[test]
fn no_more_reads_are_on_their_way_than_the_peer_takes() {
    let mut pair = Pair::new();
    for at in 0..u64::from(READS) + 2 {
        pair.post(Opcode::Read, 8 * at, 8, 8 * at);
    }
    pair.post(Opcode::Write, 800, 8, 800);
    pair.turn();
    assert_eq!(pair.under_way().len(), usize::from(READS));
    assert_eq!(pair.settle(), succeed(0..u64::from(READS) + 3));
}

#[test]
fn a_request_with_a_fence_waits_for_what_is_read_before_it() {
    let mut pair = Pair::new();
    copy_from_slice(&pair.b.region, 64, &7_u64.to_ne_bytes()).unwrap();
    pair.post(Opcode::Read, 0, 8, 64);
    pair.post_as(Opcode::Write, 0, 8, 128, true);
    pair.turn();
    assert_eq!(pair.under_way(), [0]);
    assert_eq!(pair.settle(), succeed(0..2));
    assert_eq!(pair.b.word(128), 7);
}

#[test]
fn a_refusal_lets_those_before_it_complete_and_none_behind_it() {
    let mut pair = Pair::new();
    pair.post(Opcode::Write, 0, 8, 0);
    pair.post(Opcode::Read, 8, 8, 0);
    pair.post(Opcode::Write, 0, 8, BYTES - 1);
    pair.post(Opcode::Write, 0, 8, 0);
    pair.post(Opcode::Read, 0, 8, 0);
    let expected = [
        WC_STATUS_SUCCESS,
        WC_STATUS_SUCCESS,
        WC_STATUS_REM_ACCESS_ERR,
        WC_STATUS_WR_FLUSH_ERR,
        WC_STATUS_WR_FLUSH_ERR,
    ];
    assert_eq!(pair.settle(), (0..).zip(expected).collect::<Vec<_>>());
}

#[test]
fn an_error_of_the_requesters_own_waits_for_those_before_it() {
    for is_long in [false, true] {
        let mut pair = Pair::new();
        pair.post(Opcode::Write, 0, 8, 0);
        // No memory there, or a message that no peer takes.
        let (local, length) = if is_long {
            (0, MAX_MESSAGE_BYTES + 1)
        } else {
            (BYTES, 8)
        };
        pair.post(Opcode::Write, local, length, 0);
        pair.post(Opcode::Write, 0, 8, 0);
        pair.turn();
        assert_eq!((pair.under_way(), pair.completed()), (vec![0], vec![]));
        let done = pair.settle();
        assert_eq!(done[0], (0, WC_STATUS_SUCCESS));
        assert!(
            done[1].0 == 1 && ![WC_STATUS_SUCCESS, WC_STATUS_WR_FLUSH_ERR].contains(&done[1].1)
        );
        assert_eq!(done[2..], [(2, WC_STATUS_WR_FLUSH_ERR)]);
    }
}

#[test]
fn a_receiver_that_is_not_ready_gets_the_message_when_it_is() {
    let mut pair = Pair::new();
    pair.post(Opcode::Write, 0, 8, 0);
    pair.post(Opcode::Send, 0, 600, 0);
    pair.post(Opcode::Write, 0, 8, 8);
    pair.turn();
    pair.carry_all();
    pair.turn();
    assert_eq!(pair.completed(), succeed(0..1));
    pair.b.receive(70, 4096, 600);
    assert_eq!(pair.settle(), succeed(1..3));
    let arrived: Vec<_> = std::iter::from_fn(|| pair.b.cq.poll()).collect();
    assert_eq!(arrived.len(), 1);
    assert_eq!(
        (arrived[0].wr_id.get(), arrived[0].byte_len.get()),
        (70, 600)
    );
}

#[test]
fn a_receiver_that_is_never_ready_fails_the_request_and_flushes_the_rest() {
    let mut pair = Pair::new();
    pair.post(Opcode::Send, 0, 8, 0);
    pair.post(Opcode::Write, 0, 8, 8);
    let expected = [
        (0, WC_STATUS_RNR_RETRY_EXC_ERR),
        (1, WC_STATUS_WR_FLUSH_ERR),
    ];
    assert_eq!(pair.settle(), expected);
}

#[test]
fn where_all_is_lost_the_oldest_request_fails_and_the_rest_are_flushed() {
    let mut pair = Pair::new();
    pair.post_writes(3);
    pair.fates = VecDeque::from(vec![Fate::Lost; 1000]);
    let expected = [
        (0, WC_STATUS_RETRY_EXC_ERR),
        (1, WC_STATUS_WR_FLUSH_ERR),
        (2, WC_STATUS_WR_FLUSH_ERR),
    ];
    assert_eq!(pair.settle(), expected);
}

#[test]
fn a_send_queue_is_drained_when_all_that_was_sent_is_answered() {
    let mut pair = Pair::new();
    pair.post_writes(3);
    pair.turn();
    let attr = QpAttr {
        qp_state: QPS_SQD,
        en_sqd_async_notify: 1,
        ..QpAttr::default()
    };
    pair.a
        .qp
        .modify(QP_STATE | QP_EN_SQD_ASYNC_NOTIFY, &attr)
        .unwrap();
    pair.post(Opcode::Write, 0, 8, 0);
    let is_drained = |pair: &Pair| lock(&pair.a.events).contains(&EVENT_SQ_DRAINED);
    pair.turn();
    assert!(!is_drained(&pair) && pair.a.qp.query().sq_draining == 1);
    assert_eq!(pair.settle(), succeed(0..3));
    assert!(is_drained(&pair) && pair.a.qp.query().sq_draining == 0);
    assert_eq!(pair.a.sends.len(), 1);
}

#[test]
fn what_is_on_its_way_is_flushed_in_order_and_its_answers_are_none() {
    let mut pair = Pair::new();
    pair.post_writes(4);
    pair.turn();
    pair.a
        .qp
        .modify(QP_STATE, &attributes(&pair.b, QPS_ERR))
        .unwrap();
    let flushed = (0..4).map(|number| (number, WC_STATUS_WR_FLUSH_ERR));
    assert_eq!(pair.settle(), flushed.collect::<Vec<_>>());
}

#[test]
fn memory_that_goes_before_an_answer_comes_is_the_readers_error() {
    let mut pair = Pair::new();
    pair.post(Opcode::Read, 0, 8, 0);
    pair.post(Opcode::Write, 0, 8, 0);
    pair.turn();
    pair.a.region.revoke();
    let expected = [(0, WC_STATUS_LOC_PROT_ERR), (1, WC_STATUS_WR_FLUSH_ERR)];
    assert_eq!(pair.settle(), expected);
}

#[test]
fn windows_of_memory_change_when_nothing_is_on_its_way() {
    let mut pair = Pair::new();
    pair.post(Opcode::Write, 0, 8, 0);
    let window = pair
        .a
        .memory
        .insert_window(PdHandle(1), crate::memory::WindowKind::Two);
    // Not bound yet: it ends the queue pair, behind what was sent.
    pair.post(Opcode::LocalInvalidate(window.unwrap()), 0, 0, 0);
    pair.turn();
    assert_eq!(pair.completed(), []);
    let done = pair.settle();
    assert_eq!(done[0], (0, WC_STATUS_SUCCESS));
    assert!(done.len() == 2 && done[1].1 != WC_STATUS_SUCCESS);
}

impl Pair {
    /// An answer comes to the sender.
    fn answer(&self, to: Life, from: Life, acknowledgement: Acknowledgement) {
        let answer = Answer::Acknowledgement(acknowledgement);
        let mut net = lock(&self.net);
        let come = net.come.entry(self.a.qp.number()).or_default();
        come.push_back(Reply { to, from, answer });
    }
}

#[test]
fn an_answer_to_another_life_or_to_what_was_not_sent_is_none() {
    let mut pair = Pair::new();
    let count = MESSAGES as u64;
    pair.post_writes(count + 4);
    pair.turn();
    let to = lock(&pair.net).requests[0].from.life;
    let arrived = |message| Acknowledgement::Arrived(Position::of(Sequence(message)));
    pair.answer(Life::begin(), Life::begin(), arrived(count));
    pair.turn();
    assert_eq!(pair.completed(), []);
    // The responder is known by its first answer.
    let from = Life::begin();
    pair.answer(to, from, arrived(1));
    pair.answer(to, Life::begin(), arrived(count));
    pair.answer(to, from, arrived(count + 2));
    pair.answer(
        to,
        from,
        Acknowledgement::Refused(Sequence(count + 2), Nak::Fatal(9)),
    );
    pair.turn();
    assert_eq!(pair.completed(), succeed(0..1));
}

#[test]
fn answers_of_before_a_reset_complete_nothing_after_it() {
    let mut pair = Pair::new();
    pair.post_writes(3);
    pair.turn();
    while pair.carry_request() {}
    let reset = attributes(&pair.b, QPS_RESET);
    for (side, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
        side.qp.modify(QP_STATE, &reset).unwrap();
        connect_again(&side.qp, to, QPT_RC);
    }
    pair.post_writes(2);
    pair.turn();
    while pair.carry_answer() {}
    pair.turn();
    assert_eq!(pair.completed(), []);
    assert_eq!(pair.settle(), succeed(3..5));
}

#[test]
fn a_sender_that_is_paused_takes_its_answers_when_it_goes_on() {
    let mut pair = Pair::new();
    pair.post_writes(3);
    pair.turn();
    pair.a.qp.pause(true);
    pair.carry_all();
    pair.turn();
    assert_eq!(pair.completed(), []);
    pair.a.qp.pause(false);
    pair.turn();
    assert_eq!(pair.completed(), succeed(0..3));
}

#[test]
fn an_answer_about_bytes_that_a_message_does_not_have_is_none() {
    for offset in [600, 650, u64::MAX] {
        let mut pair = Pair::new();
        (0..2).for_each(|_| _ = pair.post(Opcode::Write, 0, 600, 0));
        pair.turn();
        let (to, from) = (lock(&pair.net).requests[0].from.life, Life::begin());
        lock(&pair.net).requests.clear();
        let message = Sequence(0);
        let at = Position { message, offset };
        pair.answer(to, from, Acknowledgement::Missing(at));
        pair.answer(to, from, Acknowledgement::Arrived(at));
        pair.turn();
        assert!(pair.under_way().is_empty());
        let message = Sequence(1);
        let at = Position {
            message,
            offset: 256,
        };
        pair.answer(to, from, Acknowledgement::Missing(at));
        pair.turn();
        assert_eq!(pair.completed(), succeed(0..1));
        assert_eq!(pair.under_way(), [1]);
    }
}

#[test]
fn where_there_is_nobody_to_send_to_a_request_fails_when_its_retries_are_over() {
    for has_sent in [false, true] {
        let mut pair = Pair::new();
        if has_sent {
            pair.post_writes(1);
            assert_eq!(pair.settle(), succeed(0..1));
        }
        lock(&pair.net).is_down = true;
        // After a change whom it is connected to is looked for anew.
        for state in [QPS_SQD, QPS_RTS] {
            let attr = attributes(&pair.b, state);
            pair.a.qp.modify(QP_STATE, &attr).unwrap();
        }
        let first = pair.posted;
        pair.post_writes(2);
        let expected = [
            (first, WC_STATUS_RETRY_EXC_ERR),
            (first + 1, WC_STATUS_WR_FLUSH_ERR),
        ];
        assert_eq!(pair.settle(), expected);
    }
}

#[test]
fn a_read_of_which_some_has_come_has_all_its_retries_again() {
    let mut pair = Pair::new();
    let pieces = 20;
    let length = u32::try_from(pieces * MTU).unwrap();
    pair.post(Opcode::Read, 8192, length, 0);
    // Of each try the first piece comes back, and that all was carried out.
    for _ in 0..2 * pieces {
        pair.turn();
        while pair.carry_request() {}
        let own = pair.a.qp.number();
        let mut net = lock(&pair.net);
        let mut answers = std::mem::take(&mut net.answers).into_iter();
        let come = net.come.entry(own).or_default();
        come.extend(answers.next().map(|(_, reply)| reply));
        come.extend(answers.next_back().map(|(_, reply)| reply));
        drop(net);
        pair.now += Duration::from_secs(1);
    }
    assert_eq!(pair.completed(), succeed(0..1));
}

#[test]
fn a_read_that_is_sent_again_in_other_pieces_comes_whole() {
    let mut pair = Pair::new();
    let bytes: Vec<u8> = (0..BYTES).map(|i| (i % 253) as u8).collect();
    copy_from_slice(&pair.b.region, 0, &bytes).unwrap();
    pair.post(Opcode::Read, 8192, 600, 0);
    pair.post_writes(1);
    // Of the first piece the answer is lost, and all others are.
    pair.turn();
    assert!(pair.carry_request());
    lock(&pair.net).requests.clear();
    lock(&pair.net).answers.clear();
    pair.now += Duration::from_secs(1);
    pair.turn_within(Budget::UNBOUNDED.within(100, 8));
    assert_eq!(pair.settle(), succeed(0..2));
    assert_eq!(pair.a.bytes(8192, 600), bytes[..600]);
}

#[test]
fn one_that_fails_waits_without_turns_for_those_before_it() {
    let mut pair = Pair::new();
    pair.post(Opcode::Read, 8192, 8, 0);
    pair.post_writes(2);
    pair.turn();
    lock(&pair.net).requests.clear();
    // What is sent again has no memory any more.
    pair.a.region.revoke();
    pair.now += Duration::from_secs(1);
    pair.turn();
    assert_eq!(pair.under_way(), [0]);
    assert!(!pair.turn().worked && !pair.a.qp.is_ready());
}

#[test]
fn answers_cost_looks() {
    let mut pair = Pair::new();
    pair.post_writes(1);
    pair.turn();
    let (to, from) = (lock(&pair.net).requests[0].from.life, Life::begin());
    let nothing = Acknowledgement::Arrived(Position::default());
    (0..100).for_each(|_| pair.answer(to, from, nothing));
    let left = |pair: &Pair| lock(&pair.net).come[&pair.a.qp.number()].len();
    let progress = pair.turn_within(Budget::new(4 * LOOK_COST));
    assert_eq!((left(&pair), progress.used.cost), (96, 4 * LOOK_COST));
    assert!(progress.more);
    // They are taken also for one who may carry out nothing.
    pair.turn_within(Budget::NO_OPERATION);
    assert_eq!(left(&pair), 0);
}

#[test]
fn an_atomic_operation_whose_answer_cannot_go_is_not_carried_out_again() {
    /// Where answers cannot go.
    struct Mute;
    impl Payload for Mute {
        fn write(&mut self, _: &[Part], _: u64, _: u64, _: u64) -> Result<(), Failed> {
            Ok(())
        }
        fn read(&mut self, _: &[Part], _: u64, _: u64) -> Result<(), Failed> {
            Ok(())
        }
        fn operand(&mut self) -> Result<u64, RegionError> {
            Ok(0)
        }
        fn answer(&mut self, _: u64) -> Result<(), RegionError> {
            Err(RegionError::Busy)
        }
    }
    let mut pair = Pair::new();
    copy_from_slice(&pair.b.region, 64, &7_u64.to_ne_bytes()).unwrap();
    pair.post(Opcode::FetchAdd { add: 5 }, 0, 8, 64);
    pair.turn();
    let sent = lock(&pair.net).requests.pop_front().unwrap();
    let fragment = Fragment::new(&sent.request, sent.length, sent.at, sent.count).unwrap();
    let target = pair.fabric.find(sent.to).unwrap();
    target
        .responder()
        .receive(&target.common, &sent.from, &fragment, &mut Mute);
    pair.now += Duration::from_secs(1);
    assert_eq!(pair.settle(), succeed(0..1));
    assert_eq!((pair.a.word(0), pair.b.word(64)), (7, 12));
}

#[test]
fn an_unreliable_sender_that_was_reset_is_heard_again() {
    let mut pair = Pair::of(QPT_UC);
    pair.post_writes(3);
    assert_eq!(pair.settle(), succeed(0..3));
    let reset = attributes(&pair.b, QPS_RESET);
    pair.a.qp.modify(QP_STATE, &reset).unwrap();
    connect_again(&pair.a.qp, &pair.b, QPT_UC);
    pair.b.receive(9, 4096, 600);
    pair.post(Opcode::Send, 0, 600, 0);
    assert_eq!(pair.settle(), succeed(3..4));
    assert_eq!(pair.b.cq.poll().map(|done| done.wr_id.get()), Some(9));
}

#[test]
fn only_one_request_fails_of_itself() {
    let mut pair = Pair::new();
    pair.post_writes(2);
    // All retries are used up.
    for _ in 0..8 {
        pair.turn();
        pair.now += Duration::from_secs(1);
    }
    let sent = lock(&pair.net).requests[0].from.life;
    let refused = Acknowledgement::Refused(Sequence(0), Nak::Fatal(WC_STATUS_REM_ACCESS_ERR));
    pair.answer(sent, Life::begin(), refused);
    lock(&pair.net).requests.clear();
    let expected = [(0, WC_STATUS_REM_ACCESS_ERR), (1, WC_STATUS_WR_FLUSH_ERR)];
    assert_eq!(pair.settle(), expected);
}

#[test]
fn a_refusal_that_overtakes_what_was_read_before_it_counts() {
    let mut pair = Pair::new();
    pair.post(Opcode::Read, 8, 8, 0);
    pair.post(Opcode::Write, 0, 8, BYTES - 1);
    pair.post(Opcode::Write, 0, 8, 0);
    pair.turn();
    while pair.carry_request() {}
    lock(&pair.net).answers.make_contiguous().reverse();
    let expected = [
        (0, WC_STATUS_SUCCESS),
        (1, WC_STATUS_REM_ACCESS_ERR),
        (2, WC_STATUS_WR_FLUSH_ERR),
    ];
    assert_eq!(pair.settle(), expected);
}

/// An operation of a script.
#[derive(Clone, Debug)]
enum Step {
    Write { remote: u16, length: u16 },
    Read { remote: u16, length: u16 },
    Send { length: u16 },
    Add { word: u8, add: u8 },
    Swap { word: u8, compare: u8, swap: u8 },
    Store { word: u8 },
}

fn step() -> impl Strategy<Value = Step> {
    let words = 0..4_u8;
    prop_oneof![
        (0..2000_u16, 0..1000_u16).prop_map(|(remote, length)| Step::Write { remote, length }),
        (0..2000_u16, 0..1000_u16).prop_map(|(remote, length)| Step::Read { remote, length }),
        (0..1000_u16).prop_map(|length| Step::Send { length }),
        (words.clone(), 1..9_u8).prop_map(|(word, add)| Step::Add { word, add }),
        (words.clone(), 0..9_u8, 0..9_u8).prop_map(|(word, compare, swap)| Step::Swap {
            word,
            compare,
            swap
        }),
        words.prop_map(|word| Step::Store { word }),
    ]
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        6 => Just(Fate::Arrives),
        1 => Just(Fate::Lost),
        1 => Just(Fate::Doubled),
        1 => (1..8_u8).prop_map(Fate::Late),
    ]
}

fn budget() -> impl Strategy<Value = Budget> {
    (1..4 * OPERATION_COST, 1..2000_u64, 1..8_u64)
        .prop_map(|(cost, bytes, operations)| Budget::new(cost).within(bytes, operations))
}

/// Local memory of each step, so that none depends on when another has ended; what is received goes
/// into a part of its own, too.
const SLOT: u64 = 1024;
/// Where the words of atomic operations lie at the peer.
const WORDS: u64 = 8192;
const RECEIVED: u64 = 16384;

proptest! {
    #[test]
    fn every_request_is_carried_out_once_and_in_order_whatever_is_lost(
        steps in prop::collection::vec(step(), 1..40),
        fates in prop::collection::vec(fate(), 0..400),
        budgets in prop::collection::vec(budget(), 0..200),
        late_receives: bool,
        most_bytes in prop::option::of(1..3000_u64),
    ) {
        let mut pair = Pair::new();
        lock(&pair.net).most_bytes = most_bytes;
        (pair.fates, pair.budgets) = (fates.into(), budgets.into());
        let first: Vec<u8> = (0..BYTES).map(|i| (i % 253) as u8).collect();
        for side in [&pair.a, &pair.b] {
            copy_from_slice(&side.region, 0, &first).unwrap();
        }
        // What each side has afterwards.
        let (mut ours, mut theirs) = (first.clone(), first);
        let mut sends = Vec::new();
        // What is read may be read again later: who changes it waits for that, by a fence (IBTA
        // 10.8.3.3, table of ordering rules).
        let mut is_read = false;
        for (at, step) in (0_u64..).zip(&steps) {
            let reads = matches!(step, Step::Read { .. });
            let fence = !reads && is_read;
            is_read = reads || (is_read && !fence);
            let local = at * SLOT;
            let (here, u) = (usize::try_from(local).unwrap(), usize::from);
            let place = |word: u8| WORDS + 8 * u64::from(word);
            let word = |memory: &[u8], word: u8| {
                let at = usize::try_from(place(word)).unwrap();
                u64::from_ne_bytes(memory[at..at + 8].try_into().unwrap())
            };
            let set = |memory: &mut [u8], word: u8, value: u64| {
                let at = usize::try_from(place(word)).unwrap();
                memory[at..at + 8].copy_from_slice(&value.to_ne_bytes());
            };
            match *step {
                Step::Write { remote, length } => {
                    pair.post_as(Opcode::Write, local, length.into(), remote.into(), fence);
                    theirs[u(remote)..][..u(length)].copy_from_slice(&ours[here..][..u(length)]);
                }
                Step::Read { remote, length } => {
                    pair.post(Opcode::Read, local, length.into(), remote.into());
                    ours[here..][..u(length)].copy_from_slice(&theirs[u(remote)..][..u(length)]);
                }
                Step::Send { length } => {
                    pair.post_as(Opcode::Send, local, length.into(), 0, fence);
                    let to = RECEIVED + SLOT * sends.len() as u64;
                    let to_here = usize::try_from(to).unwrap();
                    theirs[to_here..][..u(length)].copy_from_slice(&ours[here..][..u(length)]);
                    sends.push((at, to, u32::from(length)));
                }
                Step::Add { word: at, add } => {
                    pair.post_as(Opcode::FetchAdd { add: add.into() }, local, 8, place(at), fence);
                    let old = word(&theirs, at);
                    ours[here..][..8].copy_from_slice(&old.to_ne_bytes());
                    set(&mut theirs, at, old.wrapping_add(add.into()));
                }
                Step::Swap { word: at, compare, swap } => {
                    let (compare, swap) = (compare.into(), swap.into());
                    pair.post_as(Opcode::CompareSwap { compare, swap }, local, 8, place(at), fence);
                    let old = word(&theirs, at);
                    ours[here..][..8].copy_from_slice(&old.to_ne_bytes());
                    if old == compare {
                        set(&mut theirs, at, swap);
                    }
                }
                Step::Store { word: at } => {
                    pair.post_as(Opcode::AtomicWrite, local, 8, place(at), fence);
                    let new = u64::from_ne_bytes(ours[here..][..8].try_into().unwrap());
                    set(&mut theirs, at, new);
                }
            }
        }
        let receive = |pair: &Pair| for &(number, to, length) in &sends {
            pair.b.receive(number, to, length);
        };
        if late_receives {
            // A first turn may meet no receive request; there are retries enough for one.
            pair.turn();
            pair.carry_all();
        }
        receive(&pair);
        prop_assert_eq!(pair.settle(), succeed(0..steps.len() as u64));
        let arrived = std::iter::from_fn(|| pair.b.cq.poll());
        let arrived: Vec<_> = arrived
            .map(|done| (done.wr_id.get(), done.status, done.byte_len.get()))
            .collect();
        let expected = sends.iter().map(|&(number, _, length)| (number, 0, length));
        prop_assert_eq!(arrived, expected.collect::<Vec<_>>());
        let length = usize::try_from(BYTES).unwrap();
        prop_assert!(pair.a.bytes(0, length) == ours, "the sender's memory");
        prop_assert!(pair.b.bytes(0, length) == theirs, "the receiver's memory");
    }

    #[test]
    fn messages_without_answers_arrive_whole_in_order_and_once_or_not_at_all(
        lengths in prop::collection::vec(0..1000_u32, 1..30),
        fates in prop::collection::vec(fate(), 0..120),
    ) {
        let mut pair = Pair::of(QPT_UC);
        let is_lossless = fates.iter().all(|fate| *fate == Fate::Arrives);
        pair.fates = fates.into();
        let count = lengths.len() as u64;
        for (at, &length) in (0_u64..).zip(&lengths) {
            let bytes = vec![u8::try_from(at + 1).unwrap(); usize::try_from(SLOT).unwrap()];
            copy_from_slice(&pair.a.region, SLOT * at, &bytes).unwrap();
            pair.post(Opcode::Send, SLOT * at, length, 0);
            pair.b.receive(at, SLOT * at, 1000);
        }
        prop_assert_eq!(pair.settle(), succeed(0..count));
        let arrived: Vec<_> = std::iter::from_fn(|| pair.b.cq.poll()).collect();
        prop_assert!(!is_lossless || arrived.len() as u64 == count);
        // Each takes the oldest receive request, and is one of those behind the last.
        let mut rest = lengths.iter().zip(1..);
        for (at, done) in (0_u64..).zip(&arrived) {
            prop_assert_eq!((done.wr_id.get(), done.status), (at, WC_STATUS_SUCCESS));
            let length = done.byte_len.get();
            let bytes = pair.b.bytes(SLOT * at, usize::try_from(length).unwrap());
            let is_it = |&(other, filled): &(&u32, u8)| {
                *other == length && bytes.iter().all(|byte| *byte == filled)
            };
            prop_assert!(rest.any(|message| is_it(&message)));
        }
    }

    #[test]
    fn every_request_completes_once_whatever_becomes_of_its_queue_pair(
        steps in prop::collection::vec((0..12_u8, any::<bool>(), any::<bool>()), 1..60),
        fates in prop::collection::vec(fate(), 0..100),
        is_short: bool,
    ) {
        let mut pair = Pair::new();
        pair.fates = fates.into();
        let mut completed = Vec::new();
        for (step, turns, carries) in steps {
            let change = |state| _ = pair.a.qp.modify(QP_STATE, &attributes(&pair.b, state));
            match step {
                0 => pair.a.qp.pause(true),
                1 => pair.a.qp.pause(false),
                2 => pair.b.qp.pause(true),
                3 => pair.b.qp.pause(false),
                4 => change(QPS_SQD),
                5 | 6 => change(QPS_RTS),
                7 if is_short => change(QPS_ERR),
                _ => {
                    let local = 8 * pair.posted;
                    pair.post(Opcode::FetchAdd { add: 1 }, local, 8, WORDS);
                }
            }
            if turns {
                pair.turn();
            }
            if carries {
                pair.carry_all();
            }
            completed.extend(pair.completed());
            pair.now += Duration::from_millis(20);
        }
        for side in [&pair.a, &pair.b] {
            side.qp.pause(false);
        }
        // Not from an error.
        let _ = pair.a.qp.modify(QP_STATE, &attributes(&pair.b, QPS_RTS));
        completed.extend(pair.settle());
        let numbers: Vec<_> = completed.iter().map(|(number, _)| *number).collect();
        prop_assert_eq!(numbers, (0..pair.posted).collect::<Vec<_>>());
        let done = completed.iter().take_while(|(_, status)| *status == 0).count() as u64;
        prop_assert!(completed.iter().skip(usize::try_from(done).unwrap()).all(|one| one.1 != 0));
        // Each has met what those before it have left, and none was carried out twice.
        let word = pair.b.word(WORDS);
        prop_assert!((done..=pair.posted).contains(&word), "{done} of {}: {word}", pair.posted);
        for number in 0..done {
            prop_assert_eq!(pair.a.word(8 * number), number);
        }
    }

    #[test]
    fn answers_that_make_no_sense_harm_nothing_but_the_connection(
        steps in prop::collection::vec((0..3_u8, 0..6_u64, 0..700_u64, 0..40_usize), 1..60),
        turns in prop::collection::vec(any::<bool>(), 60),
        reads: bool,
    ) {
        let mut pair = Pair::new();
        let number = pair.a.qp.number();
        for at in 0..8 {
            let opcode = if reads && at % 3 == 0 { Opcode::Read } else { Opcode::Write };
            pair.post(opcode, SLOT * at, 600, 0);
        }
        pair.turn();
        let (to, from) = {
            let net = lock(&pair.net);
            (net.requests[0].from.life, Life::begin())
        };
        for (&(kind, message, offset, count), turn) in steps.iter().zip(turns) {
            let at = Position { message: Sequence(message), offset };
            let answer = match kind {
                0 => Answer::Acknowledgement(Acknowledgement::Arrived(at)),
                1 => Answer::Acknowledgement(Acknowledgement::Missing(at)),
                2 if offset % 2 == 0 => Answer::Acknowledgement(Acknowledgement::Refused(
                    at.message,
                    Nak::NotReady(NotReady {
                        timer: 1,
                        rings: true,
                    }),
                )),
                _ => Answer::Data(at, vec![0; count]),
            };
            let mut net = lock(&pair.net);
            net.come.entry(number).or_default().push_back(Reply { to, from, answer });
            drop(net);
            if turn {
                pair.turn();
            }
        }
        pair.now += Duration::from_secs(1);
        let mut done = pair.completed();
        done.extend(pair.settle());
        // In order, and nothing succeeds behind what has failed.
        let numbers: Vec<_> = done.iter().map(|(number, _)| *number).collect();
        prop_assert_eq!(numbers, (0..8).collect::<Vec<_>>());
        let failed = done.iter().position(|(_, status)| *status != 0);
        if let Some(failed) = failed {
            prop_assert!(done[failed..].iter().all(|(_, status)| *status != 0));
        }
    }

    #[test]
    fn fragments_of_any_content_end_a_connection_at_most(
        fragments in prop::collection::vec(
            (0..4_u64, 0..600_u64, 0..600_u32, 0..600_u64, 0..5_u8, any::<u16>()),
            1..50,
        ),
    ) {
        let mut pair = Pair::new();
        pair.post(Opcode::Write, 0, 0, 0);
        pair.turn();
        let from = lock(&pair.net).requests.pop_front().unwrap().from;
        (0..4).for_each(|number| pair.b.receive(number, 4096, 300));
        let name = QpName {
            destination: Destination::Gid(RawGid::default()),
            number: pair.b.qp.number(),
        };
        let target = pair.fabric.find(name).unwrap();
        for (message, offset, length, count, kind, remote) in fragments {
            let mut request = SendWqe::default();
            request.opcode = match kind {
                0 => Opcode::Send,
                1 => Opcode::Write,
                2 => Opcode::Read,
                3 => Opcode::FetchAdd { add: 1 },
                _ => Opcode::AtomicWrite,
            };
            (request.rkey, request.remote_address) = (pair.b.key, remote.into());
            let at = Position { message: Sequence(message), offset };
            let Some(fragment) = Fragment::new(&request, length, at, count) else {
                continue;
            };
            let bytes = vec![1; usize::try_from(count).unwrap()];
            let mut payload = Bytes { at, bytes: &bytes, fetched: Vec::new() };
            target.responder().receive(&target.common, &from, &fragment, &mut payload);
        }
        let done: Vec<_> = std::iter::from_fn(|| pair.b.cq.poll()).collect();
        prop_assert!(done.len() <= 4);
        prop_assert!(done.iter().all(|done| done.byte_len.get() <= 300));
    }
}
