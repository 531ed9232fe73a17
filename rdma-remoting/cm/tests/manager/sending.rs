//! What a manager sends, and what it does not.

use crate::limits::{FEW, accepted_of, flood_and};
use crate::wire::{Wire, connect, gid, ports, resolve, sent, sent_attributes};
use farlane_rdma_cm::{
    CallError, Event, Limits, Mad, Message, PrivateData, Qpn, RejectReason, TimeExponent, attribute,
};
use std::time::Duration;

#[test]
fn a_peer_that_takes_no_time_has_nothing_sent_without_end() {
    let mut wire = Wire::new(2, 5);
    let server = accepted_of(&mut wire, TimeExponent::of(0));
    let mut sent = 0;
    for _ in 0..1000 {
        while wire.managers[1].poll_transmit().is_some() {
            sent += 1;
        }
        wire.now += Duration::from_millis(1);
        wire.managers[1].advance(wire.now);
    }
    assert!((2..=5).contains(&sent), "{sent} in a second");
    assert_eq!(
        wire.managers[1].establish(server, PrivateData::default()),
        { Err(CallError::WrongState) }
    );
}

#[test]
fn what_nobody_takes_uses_no_retry_up_and_is_there_once() {
    let mut wire = Wire::new(2, 13);
    let now = wire.now;
    wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    for _ in 0..100 {
        let at = wire.managers[0].next_timer().unwrap();
        wire.managers[0].advance(at);
        wire.now = at;
    }
    assert_eq!(sent_attributes(&mut wire, 0), [attribute::REQ]);
    // It goes on as if no time had passed.
    let mut again = 0;
    while let Some(at) = wire.managers[0].next_timer() {
        wire.managers[0].advance(at);
        again += sent(&mut wire, 0).len();
    }
    // And the rejection by which it gives up.
    assert_eq!(again, 15 + 1);
}

#[test]
fn of_what_was_asked_and_given_up_at_once_nothing_is_sent() {
    let mut wire = Wire::new(2, 13);
    let now = wire.now;
    for _ in 0..10_000 {
        let id = wire.managers[0]
            .connect(now, connect(0, 1, 100, 7))
            .unwrap();
        wire.managers[0].destroy(now, id).unwrap();
    }
    assert!(!wire.managers[0].has_transmits());
    // Of what was sent the peer hears.
    let id = wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    assert_eq!(sent_attributes(&mut wire, 0), [attribute::REQ]);
    wire.managers[0].destroy(now, id).unwrap();
    assert_eq!(sent_attributes(&mut wire, 0), [attribute::REJ]);
}

#[test]
fn who_has_little_to_send_does_not_wait_for_who_has_much() {
    let mut wire = Wire::new(4, 14);
    let now = wire.now;
    for number in 0..50 {
        wire.managers[0]
            .connect(now, connect(0, 1, 100 + number, 7))
            .unwrap();
    }
    sent(&mut wire, 0);
    // All are to be sent again, again and again.
    for _ in 0..5 {
        let at = wire.managers[0].next_timer().unwrap();
        wire.managers[0].advance(at);
    }
    wire.managers[0]
        .connect(now, connect(0, 2, 900, 7))
        .unwrap();
    let sent = sent(&mut wire, 0);
    assert_eq!((sent.len(), sent[50].ports.remote), (51, gid(2)));
}

#[test]
fn rejections_of_a_peers_requests_are_of_its_share_of_answers() {
    let limits = Limits { answers: 8, ..FEW };
    let mut wire = Wire::limited(4, 1, limits);
    flood_and(&mut wire, 2, 100, |wire| {
        for event in std::iter::from_fn(|| wire.managers[1].poll_event()).collect::<Vec<_>>() {
            let now = wire.now;
            wire.managers[1].destroy(now, event.id()).unwrap();
        }
    });
    assert_eq!(sent_attributes(&mut wire, 1), [attribute::REJ; 4]);
    assert!(!wire.managers[1].has_transmits());
}

#[test]
fn nothing_is_said_of_a_name_that_its_peer_uses_again() {
    let mut wire = Wire::new(2, 15);
    let server = accepted_of(&mut wire, TimeExponent::of(20));
    let now = wire.now;
    let nothing = PrivateData::default();
    let reason = RejectReason::CONSUMER_DEFINED;
    wire.managers[1]
        .reject(now, server, reason, nothing)
        .unwrap();
    // The peer has heard that, and asks for another one by the same name.
    let req = sent(&mut wire, 1).remove(0);
    let Message::Rep(rep) = Mad::parse(&req.datagram[..]).unwrap().message else {
        panic!("{req:?}");
    };
    let now = wire.now;
    let mut other = Wire::new(2, 15);
    other.managers[0]
        .connect(now, connect(0, 1, 100, 9))
        .unwrap();
    let transmit = other.managers[0].poll_transmit().unwrap();
    let mut mad = Mad::parse(&transmit.datagram[..]).unwrap();
    let Message::Req(req) = &mut mad.message else {
        panic!("{mad:?}");
    };
    (req.local_comm_id, req.local_qpn) = (rep.remote_comm_id, Qpn::of(8));
    wire.managers[1]
        .receive(now, ports(1, 0), &mad.write())
        .unwrap();
    assert!(matches!(
        &wire.managers[1].poll_event(),
        Some(Event::ConnectRequest { .. })
    ));
    while let Some(at) = wire.managers[1].next_timer() {
        wire.managers[1].advance(at);
        assert_eq!(sent_attributes(&mut wire, 1), []);
    }
}

#[test]
fn a_request_that_is_given_up_does_not_come_after_its_rejection() {
    let mut wire = Wire::new(2, 13);
    let now = wire.now;
    let id = wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    // The first one is lost.
    assert_eq!(sent_attributes(&mut wire, 0), [attribute::REQ]);
    let at = wire.managers[0].next_timer().unwrap();
    wire.now = at;
    wire.managers[0].advance(at);
    wire.managers[0].destroy(at, id).unwrap();
    wire.run(Duration::from_millis(1));
    assert_eq!(wire.take(1), [], "a request of nobody");
}

#[test]
fn of_datagrams_asked_for_and_given_up_at_once_nothing_is_sent() {
    let mut wire = Wire::new(2, 13);
    let now = wire.now;
    for _ in 0..10_000 {
        let id = wire.managers[0].resolve(now, &resolve(0, 1, 7)).unwrap();
        wire.managers[0].destroy(now, id).unwrap();
    }
    let answers = sent(&mut wire, 0).len();
    assert_eq!(answers, 0);
}

#[test]
fn who_gives_connections_up_leaves_room_for_answers() {
    let mut wire = Wire::new(2, 13);
    let now = wire.now;
    let ids: Vec<_> = (0..2000)
        .map(|n| {
            wire.managers[0]
                .connect(now, connect(0, 1, 100 + n, 7))
                .unwrap()
        })
        .collect();
    sent(&mut wire, 0);
    for id in ids {
        wire.managers[0].destroy(now, id).unwrap();
    }
    wire.managers[1]
        .connect(now, connect(1, 0, 100, 7))
        .unwrap();
    let req = sent(&mut wire, 1).remove(0);
    wire.managers[0]
        .receive(now, ports(0, 1), &req.datagram[..])
        .unwrap();
    let request = wire.managers[0].poll_event().unwrap().id();
    wire.managers[0].destroy(now, request).unwrap();
    let rejections = sent(&mut wire, 0);
    let is_of_request = |datagram: &[u8]| match Mad::parse(datagram).unwrap().message {
        Message::Rej(rej) => rej.local_comm_id == request,
        _ => false,
    };
    let mut all = rejections.iter();
    assert!(all.any(|one| is_of_request(&one.datagram[..])));
    assert_eq!(rejections.len(), 2001);
}

#[test]
fn all_peers_hear_that_connections_end() {
    let limits = Limits {
        connections: 64,
        requests: 64,
        orphans: 4,
        listeners: 3,
        backlog: 64,
        answers: 4,
    };
    let mut wire = Wire::limited(2, 13, limits);
    let ids: Vec<_> = (0..30)
        .map(|n| wire.connected_by(0, 1, [100 + n, 200 + n]).0)
        .collect();
    let now = wire.now;
    for id in ids {
        wire.managers[0].destroy(now, id).unwrap();
    }
    wire.rest();
    assert_eq!(wire.take(1).len(), 30);
}
