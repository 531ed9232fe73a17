//! How much a carrier has on its way, and when it has no more of it.

use super::super::super::attributes::State;
use super::*;

/// Bytes that are on their way, and those that are asked for.
fn bytes_under_way(pair: &Pair) -> u64 {
    let net = lock(&pair.net);
    let bytes = |sent: &Sent| match sent.request.opcode.fetches() {
        true => sent.count,
        false => sent.bytes.len() as u64,
    };
    net.requests.iter().map(bytes).sum()
}

/// The last state that the carrier of the sender was told of, and what had completed before.
fn last_told(pair: &Pair) -> (State, usize) {
    let net = lock(&pair.net);
    let own = |(of, ..): &&(QpNumber, State, usize)| *of == pair.a.qp.number();
    let (_, state, completed) = net.entered.iter().rfind(own).unwrap();
    (*state, *completed)
}

#[test]
fn no_more_bytes_are_on_their_way_than_a_carrier_takes() {
    for opcode in [Opcode::Write, Opcode::Read] {
        for most in [1, 100, 600, 5000] {
            let mut pair = Pair::new();
            lock(&pair.net).most_bytes = Some(most);
            copy_from_slice(&pair.a.region, 0, &[1; 4000]).unwrap();
            copy_from_slice(&pair.b.region, 0, &[2; 4000]).unwrap();
            for at in 0..4 {
                pair.post(opcode, 1000 * at, 1000, 1000 * at);
            }
            pair.turn();
            assert_eq!(bytes_under_way(&pair), most.min(4000), "{opcode:?}");
            assert!(!pair.turn().worked, "it waits for an answer");
            // Without a timer, by answers alone.
            let mut turns = 0;
            while pair.a.cq.len() < 4 {
                pair.carry_all();
                assert!(pair.a.qp.is_ready());
                pair.turn();
                assert!(bytes_under_way(&pair) <= most, "{opcode:?} {most}");
                turns += 1;
                assert!(turns <= 8000);
            }
            assert_eq!(pair.completed(), succeed(0..4));
            assert_eq!(pair.a.bytes(0, 4000), pair.b.bytes(0, 4000));
        }
    }
}

#[test]
fn what_has_no_bytes_needs_no_room() {
    let mut pair = Pair::new();
    lock(&pair.net).most_bytes = Some(8);
    pair.post_writes(1);
    pair.post(Opcode::Write, 0, 0, 0);
    pair.post(Opcode::Write, 0, 0, 0);
    pair.turn();
    assert_eq!(pair.under_way(), [0, 1, 2]);
    assert_eq!(pair.settle(), succeed(0..3));
}

#[test]
fn a_carrier_knows_before_what_has_no_answer_completes() {
    let change = |qp_state| {
        move |pair: &mut Pair| {
            let attr = QpAttr {
                qp_state,
                ..QpAttr::default()
            };
            pair.a.qp.modify(QP_STATE, &attr).unwrap();
        }
    };
    /// Somebody else brings it there, as a peer that breaks rules.
    fn fail(pair: &mut Pair) {
        let to = lock(&pair.net).requests[0].from;
        let name = lock(&pair.net).requests[0].to;
        let name = QpName {
            number: to.number,
            ..name
        };
        let target = pair.fabric.find(name).unwrap();
        assert!(target.common.enter_error());
    }
    /// Nothing arrives.
    fn lose(pair: &mut Pair) {
        lock(&pair.net).requests.clear();
        while pair.a.cq.is_empty() {
            pair.turn();
            lock(&pair.net).requests.clear();
            pair.now += Duration::from_millis(100);
        }
    }
    type Ends = Box<dyn Fn(&mut Pair)>;
    let ends: [(Ends, State, usize); 5] = [
        (Box::new(change(QPS_RESET)), State::Reset, 0),
        (Box::new(change(QPS_ERR)), State::Error, 3),
        (Box::new(fail), State::Error, 3),
        (Box::new(lose), State::Error, 3),
        (Box::new(|pair| pair.a.qp.destroy()), State::Reset, 0),
    ];
    for (end, state, flushed) in ends {
        let mut pair = Pair::new();
        pair.post_writes(3);
        pair.turn();
        assert_eq!(last_told(&pair), (State::ReadyToSend, 0));
        end(&mut pair);
        pair.turn();
        assert_eq!(last_told(&pair), (state, 0));
        assert_eq!(pair.completed().len(), flushed);
    }
}
