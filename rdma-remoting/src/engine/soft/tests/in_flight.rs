//! Several requests of a connection on their way at once, over a carrier that loses, doubles and
//! reorders what it carries.

mod answers;
mod bounds;
mod net;
mod random;

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
