//! What answers count, and what becomes of those that come late, twice or not at all.

use super::*;

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
