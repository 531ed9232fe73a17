//! Listeners, and queue pairs of datagrams.

use crate::wire::{
    SOON, Wire, accept, answer, connect, datagram_service, gid, number, resolve, sent,
    sent_attributes, service,
};
use farlane_rdma_cm::{CallError, Event, Qpn, RejectReason, SidrStatus, attribute};

#[test]
fn a_queue_pair_of_datagrams_is_found_and_told_again() {
    let mut wire = Wire::new(2, 11);
    let now = wire.now;
    let client = wire.managers[0].resolve(now, &resolve(0, 1, 7)).unwrap();
    let request = sent(&mut wire, 0).remove(0);
    wire.put(request.clone());
    wire.run(SOON);
    let events = wire.take(1);
    let [
        Event::ServiceRequest {
            id, request: asked, ..
        },
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!(
        (asked.program_data().len(), number(asked.program_data())),
        (180, 7)
    );
    let now = wire.now;
    wire.managers[1].answer(now, *id, &answer(300, 8)).unwrap();
    assert_eq!(sent_attributes(&mut wire, 1), [attribute::SIDR_REP]);
    wire.put(request);
    wire.run(SOON);
    assert_eq!(wire.take(1), []);
    let events = wire.take(0);
    let [Event::ServiceReply { id, reply }] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!(
        (*id, reply.qpn, reply.q_key),
        (client, Qpn::of(300), 0x1234_5678)
    );
    assert_eq!(number(&reply.private_data.0), 8);
    wire.rest();
    assert_eq!(wire.take(0), []);
}

#[test]
fn nobody_listens_for_what_nobody_has_said() {
    let mut wire = Wire::new(2, 12);
    for listener in [wire.listeners[1], wire.datagram_listeners[1]] {
        wire.managers[1].unlisten(wire.now, listener).unwrap();
        assert_eq!(
            wire.managers[1].unlisten(wire.now, listener),
            Err(CallError::NoSuchId)
        );
    }
    let now = wire.now;
    wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    wire.managers[0].resolve(now, &resolve(0, 1, 8)).unwrap();
    wire.run(SOON);
    let events = wire.take(0);
    let [
        Event::Rejected { reason, .. },
        Event::ServiceReply { reply, .. },
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!(*reason, RejectReason::INVALID_SERVICE_ID);
    assert_eq!(reply.status, SidrStatus::UNSUPPORTED);
}

#[test]
fn a_service_of_connections_has_no_datagrams_and_one_of_datagrams_no_connections() {
    let mut wire = Wire::new(2, 21);
    let now = wire.now;
    let mut asking = connect(0, 1, 100, 7);
    asking.service_id = datagram_service();
    wire.managers[0].connect(now, asking).unwrap();
    let mut resolving = resolve(0, 1, 8);
    resolving.service_id = service();
    wire.managers[0].resolve(now, &resolving).unwrap();
    wire.run(SOON);
    assert_eq!(wire.take(1), []);
    let events = wire.take(0);
    let [
        Event::Rejected { reason, .. },
        Event::ServiceReply { reply, .. },
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!(*reason, RejectReason::INVALID_SERVICE_ID);
    assert_eq!(reply.status, SidrStatus::UNSUPPORTED);
}

#[test]
fn a_listener_has_its_service_at_its_port_for_itself() {
    let mut wire = Wire::new(1, 13);
    let manager = &mut wire.managers[0];
    assert_eq!(
        manager.listen(service(), Some(gid(0)), 1),
        Err(CallError::InUse)
    );
    assert_eq!(manager.listen(service(), None, 1), Err(CallError::InUse));
    manager.unlisten(wire.now, wire.listeners[0]).unwrap();
    let of_port = manager.listen(service(), Some(gid(0)), 1).unwrap();
    manager.listen(service(), Some(gid(1)), 1).unwrap();
    assert_eq!(
        manager.listen(service(), Some(gid(0)), 1),
        Err(CallError::InUse)
    );
    assert_eq!(manager.listen(service(), None, 1), Err(CallError::InUse));
    manager.unlisten(wire.now, of_port).unwrap();
    manager.listen(service(), Some(gid(0)), 1).unwrap();
}

#[test]
fn requests_that_nobody_has_claimed_end_with_who_listens() {
    let mut wire = Wire::new(2, 14);
    let now = wire.now;
    let client = wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    wire.run(SOON);
    let listener = wire.listeners[1];
    wire.managers[1].unlisten(wire.now, listener).unwrap();
    wire.run(SOON);
    let events = wire.take(0);
    assert!(matches!(&events[..], [Event::Rejected { id, .. }] if *id == client));
    assert_eq!(wire.managers[1].counts().requests, 0);
}

#[test]
fn what_was_claimed_and_what_waits_at_others_outlives_who_listens() {
    let mut wire = Wire::new(2, 15);
    let now = wire.now;
    for (qpn, number) in [(100, 7), (101, 8)] {
        let request = connect(0, 1, qpn, number);
        wire.managers[0].connect(now, request).unwrap();
    }
    let resolving = wire.managers[0].resolve(now, &resolve(0, 1, 9)).unwrap();
    wire.run(SOON);
    let events = wire.take(1);
    let ids: Vec<_> = events.iter().map(Event::id).collect();
    let [claimed, waiting, at_other] = ids[..] else {
        panic!("{events:?}");
    };
    wire.managers[1].claim(claimed).unwrap();
    let listener = wire.listeners[1];
    wire.managers[1].unlisten(wire.now, listener).unwrap();
    let counts = wire.managers[1].counts();
    assert_eq!((counts.connections, counts.requests), (2, 1));
    let now = wire.now;
    assert_eq!(
        wire.managers[1].accept(now, waiting, &accept(200, 1)),
        Err(CallError::NoSuchId)
    );
    wire.managers[1]
        .accept(now, claimed, &accept(200, 1))
        .unwrap();
    wire.managers[1]
        .answer(now, at_other, &answer(300, 2))
        .unwrap();
    wire.run(SOON);
    let mut events = wire.take(0);
    let of_datagrams = |event: &Event| matches!(event, Event::ServiceReply { .. });
    events.sort_by_key(|event| (of_datagrams(event), matches!(event, Event::Reply { .. })));
    let [
        Event::Rejected { .. },
        Event::Reply { .. },
        Event::ServiceReply { id, reply },
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!((*id, reply.qpn), (resolving, Qpn::of(300)));
    // Its service is free for another one, who is asked.
    let listener = wire.managers[1].listen(service(), None, 1).unwrap();
    let now = wire.now;
    wire.managers[0]
        .connect(now, connect(0, 1, 102, 10))
        .unwrap();
    wire.run(SOON);
    let events = wire.take(1);
    assert!(matches!(&events[..], [Event::ConnectRequest { listener: at, .. }] if *at == listener));
}
