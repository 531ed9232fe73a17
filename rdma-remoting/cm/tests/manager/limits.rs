//! What peers and programs can have a manager hold.

use crate::wire::{Wire, accept, connect, gid, ports, sent, sent_attributes};
use farlane_rdma_cm::{
    CallError, CommId, Counts, Event, Gid, Limits, Mad, Message, PrivateData, Qpn, TimeExponent,
    attribute,
};
use std::collections::BTreeSet;
use std::time::Duration;

pub const FEW: Limits = Limits {
    connections: 100,
    requests: 40,
    orphans: 30,
    listeners: 3,
    backlog: 16,
    answers: 1024,
};

/// Requests of many queue pairs of a node, as a flood of them comes. After each something happens.
pub fn flood_and(wire: &mut Wire, from: usize, count: u32, mut then: impl FnMut(&mut Wire)) {
    let mut other = Wire::new(4, u64::from(count));
    for qpn in 1..=count {
        let now = wire.now;
        let client = other.managers[from]
            .connect(now, connect(from, 1, qpn, 0))
            .unwrap();
        while let Some(transmit) = other.managers[from].poll_transmit() {
            let at = ports(1, from);
            wire.managers[1]
                .receive(now, at, &transmit.datagram[..])
                .unwrap();
        }
        other.managers[from].destroy(now, client).unwrap();
        while other.managers[from].poll_transmit().is_some() {}
        then(wire);
    }
}

fn flood(wire: &mut Wire, from: usize, count: u32) {
    flood_and(wire, from, count, |_| ());
}

/// A program accepts whatever it is asked for.
fn accept_all(wire: &mut Wire) -> Vec<CommId> {
    let (events, now) = (wire.take(1), wire.now);
    let accept = |event: &Event| {
        let id = event.id();
        wire.managers[1].accept(now, id, &accept(100, 0)).unwrap();
        id
    };
    events.iter().map(accept).collect()
}

#[test]
fn a_flood_of_requests_leaves_room_for_those_of_others() {
    let mut wire = Wire::limited(4, 1, FEW);
    flood(&mut wire, 2, 10_000);
    // Half of the backlog.
    assert_eq!(wire.managers[1].counts().requests, 8);
    flood(&mut wire, 3, 10_000);
    assert_eq!(wire.managers[1].counts().requests, 12);
    let now = wire.now;
    wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    wire.run(Duration::from_millis(1));
    let events = wire.take(1);
    let is_its = |event: &Event| match event {
        Event::ConnectRequest { request, .. } => request.ports.remote == gid(0),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        (events.len(), events.iter().filter(|e| is_its(e)).count()),
        (13, 1)
    );
    // Who claims makes room.
    for event in &events {
        wire.managers[1].claim(event.id()).unwrap();
    }
    assert_eq!(wire.managers[1].counts().requests, 0);
    flood(&mut wire, 2, 100);
    assert_eq!(wire.managers[1].counts().requests, 8);
}

#[test]
fn a_program_has_as_many_connections_as_it_may() {
    let mut wire = Wire::limited(2, 2, FEW);
    let now = wire.now;
    let connect_one = |wire: &mut Wire| wire.managers[0].connect(now, connect(0, 1, 1, 7));
    let ids: Vec<CommId> = (0..100).map(|_| connect_one(&mut wire).unwrap()).collect();
    assert_eq!(connect_one(&mut wire), Err(CallError::Limit(100)));
    wire.managers[0].destroy(now, ids[5]).unwrap();
    connect_one(&mut wire).unwrap();
    wire.managers[0]
        .listen(farlane_rdma_cm::ServiceId(0), None, 1)
        .unwrap();
    let more = wire.managers[0].listen(farlane_rdma_cm::ServiceId(5), None, 1);
    assert_eq!(more, Err(CallError::Limit(3)));
}

#[test]
fn a_peer_whose_requests_are_all_accepted_leaves_room_for_others() {
    let mut wire = Wire::limited(4, 7, FEW);
    let now = wire.now;
    for qpn in 1..=20 {
        wire.managers[1]
            .connect(now, connect(1, 0, qpn, 0))
            .unwrap();
    }
    let mut accepted = Vec::new();
    // The program's own have 20 of 100 places.
    flood_and(&mut wire, 2, 200, |wire| accepted.extend(accept_all(wire)));
    assert_eq!(wire.managers[1].counts().connections, 20 + 40);
    flood_and(&mut wire, 3, 200, |wire| drop(accept_all(wire)));
    assert_eq!(wire.managers[1].counts().connections, 20 + 40 + 20);
    // What has gone makes room, once, when its peer knows.
    for id in accepted.drain(..20) {
        let now = wire.now;
        wire.managers[1].destroy(now, id).unwrap();
    }
    flood_and(&mut wire, 2, 100, |wire| drop(accept_all(wire)));
    assert_eq!(wire.managers[1].counts().connections, 20 + 20 + 20);
    wire.run(Duration::from_secs(40));
    // The others were rejected, and their ids are there still.
    wire.take(1);
    flood_and(&mut wire, 2, 300, |wire| drop(accept_all(wire)));
    assert_eq!(wire.managers[1].counts().connections, 20 + 30 + 20);
}

#[test]
fn what_has_ended_is_forgotten_before_it_is_too_much() {
    let mut wire = Wire::limited(2, 3, FEW);
    for _ in 0..200 {
        let (client, server) = wire.connected(0, 1);
        let now = wire.now;
        wire.managers[0].destroy(now, client).unwrap();
        wire.run(Duration::from_millis(1));
        assert_eq!(wire.take(1), [Event::Disconnected { id: server }]);
        let now = wire.now;
        wire.managers[1].destroy(now, server).unwrap();
        wire.run(Duration::from_millis(1));
        assert!(wire.managers.iter().all(|one| one.counts().orphans <= 30));
    }
    assert_eq!(wire.managers[0].counts().orphans, 30);
    assert!(wire.managers[0].counts().timers <= 30);
    wire.rest();
    for manager in &wire.managers {
        let nothing = Counts {
            listeners: 2,
            ..Counts::default()
        };
        assert_eq!(manager.counts(), nothing);
    }
}

#[test]
fn no_end_is_forgotten_before_its_peer_has_answered() {
    let limits = Limits {
        connections: 400,
        ..FEW
    };
    let mut wire = Wire::limited(3, 11, limits);
    let pairs: Vec<_> = (0..45)
        .map(|number| wire.connected_by(0, 1, [100 + number, 200 + number]))
        .collect();
    let now = wire.now;
    for (client, _) in &pairs {
        wire.managers[0].destroy(now, *client).unwrap();
        assert!(wire.managers[0].is_ending(*client));
    }
    // What was sent first is lost.
    assert_eq!(sent_attributes(&mut wire, 0), [attribute::DREQ; 45]);
    let counts = wire.managers[0].counts();
    assert_eq!((counts.connections, counts.orphans), (0, 45));
    // They take the places of others until then.
    let room = (0..).take_while(|number| {
        let asked = wire.managers[0].connect(now, connect(0, 2, 900, *number));
        asked.is_ok()
    });
    assert_eq!(room.count(), 400 - 45);
    wire.run(Duration::from_secs(10));
    let mut told = wire.take(1);
    told.sort_by_key(|event| event.id());
    let mut servers: Vec<_> = pairs.iter().map(|(_, server)| *server).collect();
    servers.sort();
    let all: Vec<_> = servers
        .into_iter()
        .map(|id| Event::Disconnected { id })
        .collect();
    assert_eq!(told, all);
    let now = wire.now;
    for event in told {
        wire.managers[1].destroy(now, event.id()).unwrap();
    }
    wire.run(Duration::from_secs(10));
    let ended: BTreeSet<_> = std::iter::from_fn(|| wire.managers[0].poll_ended()).collect();
    assert_eq!(ended, pairs.iter().map(|(client, _)| *client).collect());
    assert!(wire.managers[0].counts().orphans <= FEW.orphans);
}

#[test]
fn no_rejection_of_what_was_accepted_is_forgotten_before_it_was_told() {
    let limits = Limits {
        connections: 400,
        ..FEW
    };
    let mut wire = Wire::limited(2, 11, limits);
    let mut servers = Vec::new();
    for number in 0..45 {
        let now = wire.now;
        let request = connect(0, 1, 100 + number, 1);
        let client = wire.managers[0].connect(now, request).unwrap();
        wire.run(Duration::from_millis(1));
        let server = wire.take(1)[0].id();
        let now = wire.now;
        let reply = accept(200 + number, 2);
        wire.managers[1].accept(now, server, &reply).unwrap();
        wire.run(Duration::from_millis(1));
        wire.take(0);
        let nothing = PrivateData::default();
        wire.managers[0].establish(client, nothing).unwrap();
        // This is lost.
        assert_eq!(sent_attributes(&mut wire, 0), [attribute::RTU]);
        servers.push(server);
    }
    let now = wire.now;
    for server in servers {
        wire.managers[1].destroy(now, server).unwrap();
    }
    // So are the first rejections.
    assert_eq!(sent_attributes(&mut wire, 1), [attribute::REJ; 45]);
    wire.run(Duration::from_secs(200));
    let told = wire.take(0);
    let told = told
        .iter()
        .filter(|event| matches!(event, Event::Rejected { .. }));
    assert_eq!(told.count(), 45);
}

#[test]
fn a_peer_that_never_answers_that_connections_end_leaves_room_for_others() {
    let mut wire = Wire::limited(4, 12, FEW);
    let mut end_all = |wire: &mut Wire| {
        for id in accept_all(wire) {
            wire.managers[1].communication_established(id).unwrap();
            let now = wire.now;
            wire.managers[1].destroy(now, id).unwrap();
        }
    };
    flood_and(&mut wire, 2, 200, &mut end_all);
    // Of a quarter of all; what is more is forgotten at last.
    assert_eq!(wire.managers[1].counts().orphans, 13 + FEW.orphans);
    flood_and(&mut wire, 3, 200, &mut end_all);
    assert_eq!(wire.managers[1].counts().orphans, 13 + 6 + FEW.orphans);
}

#[test]
fn an_end_that_its_peer_was_not_told_of_is_told_beside_a_flood() {
    let mut wire = Wire::limited(3, 6, FEW);
    let (client, server) = wire.connected(0, 1);
    let now = wire.now;
    wire.managers[1].destroy(now, server).unwrap();
    assert_eq!(sent_attributes(&mut wire, 1), [attribute::DREQ]);
    // Another peer has more ends than are kept.
    flood_and(&mut wire, 2, 200, |wire| {
        let request = wire.take(1)[0].id();
        let now = wire.now;
        wire.managers[1].destroy(now, request).unwrap();
    });
    assert_eq!(wire.managers[1].counts().orphans, 1 + FEW.orphans);
    wire.run(Duration::from_secs(10));
    assert_eq!(wire.take(0), [Event::Disconnected { id: client }]);
}

#[test]
fn a_backlog_where_none_may_wait_has_room_for_one() {
    let limits = Limits { backlog: 0, ..FEW };
    let mut wire = Wire::limited(2, 8, limits);
    flood(&mut wire, 0, 2);
    assert_eq!(wire.managers[1].counts().requests, 1);
}

#[test]
fn nobody_can_tell_the_next_name_of_a_connection() {
    let mut wire = Wire::new(2, 4);
    let now = wire.now;
    let mut near = 0;
    let mut before = CommId(0);
    for number in 0..1000 {
        let id = wire.managers[0]
            .connect(now, connect(0, 1, 1, number))
            .unwrap();
        near += u32::from(id.0.wrapping_sub(before.0).wrapping_add(0xffff) < 0x1_ffff);
        before = id;
    }
    assert!(near < 10, "{near} names are near the one before");
}

/// A connection that was accepted, of a request that says how long its peer takes to answer.
pub fn accepted_of(wire: &mut Wire, timeout: TimeExponent) -> CommId {
    let now = wire.now;
    wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    let transmit = wire.managers[0].poll_transmit().unwrap();
    let mut mad = Mad::parse(&transmit.datagram[..]).unwrap();
    let Message::Req(req) = &mut mad.message else {
        panic!("{mad:?}");
    };
    req.local_cm_response_timeout = timeout;
    req.local_qpn = Qpn::of(7);
    wire.managers[1]
        .receive(now, ports(1, 0), &mad.write())
        .unwrap();
    let server = wire.take(1)[0].id();
    wire.managers[1]
        .accept(now, server, &accept(200, 8))
        .unwrap();
    server
}

#[test]
fn a_peer_that_takes_long_does_not_hold_what_has_ended() {
    for is_established in [false, true] {
        let mut wire = Wire::new(2, 9);
        let server = accepted_of(&mut wire, TimeExponent::MAX);
        if is_established {
            wire.managers[1].communication_established(server).unwrap();
        }
        let now = wire.now;
        wire.managers[1].destroy(now, server).unwrap();
        assert_eq!(wire.managers[1].counts().orphans, 1);
        // Nobody answers.
        let end = now + Duration::from_secs(150);
        while let Some(at) = wire.managers[1].next_timer()
            && at < end
        {
            wire.managers[1].advance(at);
            sent(&mut wire, 1);
        }
        assert_eq!(wire.managers[1].counts().orphans, 0, "{is_established}");
    }
}

#[test]
fn a_peer_with_several_gids_has_one_share() {
    let mut wire = Wire::limited(4, 1, FEW);
    // Nodes 2 and 3 are of one port.
    let limited = |seed| Wire::limited(2, seed, FEW).managers.remove(1);
    let is_same = |asked: Gid| if asked == gid(3) { gid(2) } else { asked };
    let manager = std::mem::replace(&mut wire.managers[1], limited(2));
    wire.managers[1] = manager.with_homes(Box::new(is_same));
    flood(&mut wire, 2, 100);
    flood(&mut wire, 3, 100);
    assert_eq!(wire.managers[1].counts().requests, 8);
    flood(&mut wire, 0, 100);
    assert_eq!(wire.managers[1].counts().requests, 8 + 4);
}

/// The port of a peer's GID, which its guest sets and clears meanwhile.
#[test]
fn a_share_is_given_back_to_whom_it_was_taken_from() {
    let mut wire = Wire::limited(4, 1, FEW);
    let limited = |seed| Wire::limited(2, seed, FEW).managers.remove(1);
    let manager = std::mem::replace(&mut wire.managers[1], limited(2));
    let is_set = std::cell::Cell::new(false);
    wire.managers[1] = manager.with_homes(Box::new(move |asked: Gid| {
        is_set.set(!is_set.get());
        if asked == gid(3) && is_set.get() {
            gid(2)
        } else {
            asked
        }
    }));
    for _ in 0..4 {
        flood_and(&mut wire, 3, 100, |wire| {
            for event in std::iter::from_fn(|| wire.managers[1].poll_event()).collect::<Vec<_>>() {
                let now = wire.now;
                wire.managers[1].destroy(now, event.id()).unwrap();
            }
            sent(wire, 1);
        });
    }
    assert_eq!(wire.managers[1].counts().requests, 0);
    flood(&mut wire, 0, 100);
    assert_eq!(wire.managers[1].counts().requests, 8);
}
