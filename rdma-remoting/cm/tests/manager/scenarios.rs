//! Connections and requests, one thing after the other.

use crate::wire::{
    SOON, Wire, accept, address, answer, connect, gid, number, ports, resolve, route, sent,
    sent_attributes,
};
use farlane_rdma_cm::{
    About, CallError, CommId, Event, Mad, Message, Ports, PrivateData, QpInit, Qpn, RejectReason,
    Reliable, RetryCount, TimeExponent, Transport, attribute,
};
use std::time::Duration;

/// A datagram reaches a manager from a node.
fn receive(wire: &mut Wire, from: usize, to: usize, mad: &Mad) {
    let now = wire.now;
    let at = ports(to, from);
    wire.managers[to].receive(now, at, &mad.write()).unwrap();
}

#[test]
fn two_queue_pairs_learn_of_each_other_and_part() {
    let mut wire = Wire::new(2, 1);
    let now = wire.now;
    let client = wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    assert!(
        wire.managers[0]
            .qp_init(client)
            .unwrap()
            .remote_read_and_atomic
    );
    let too_early = Err(CallError::WrongState);
    assert_eq!(
        wire.managers[0].qp_ready_to_receive(client).map(|_| ()),
        too_early
    );
    wire.run(SOON);
    let [
        Event::ConnectRequest {
            listener,
            id,
            request,
        },
    ] = &wire.take(1)[..]
    else {
        panic!("no request");
    };
    assert_eq!(*listener, wire.listeners[1]);
    assert_eq!(request.ports, ports(1, 0));
    assert_eq!(request.remote_qpn, Qpn::of(100));
    assert_eq!(
        (request.initiator_depth, request.responder_resources),
        (4, 8)
    );
    assert_eq!(request.route, route());
    assert_eq!(request.ip.unwrap().addresses.source(), address(0));
    assert_eq!(
        (request.program_data().len(), number(request.program_data())),
        (56, 7)
    );
    let server = *id;

    let now = wire.now;
    wire.managers[1]
        .accept(now, server, &accept(200, 8))
        .unwrap();
    wire.run(SOON);
    let [Event::Reply { id, reply }] = &wire.take(0)[..] else {
        panic!("no reply");
    };
    assert_eq!(
        (*id, reply.remote_qpn, reply.srq),
        (client, Qpn::of(200), true)
    );
    // It wanted to begin 8, and the peer takes 5; the peer wanted to begin 16, and it takes 4.
    assert_eq!((reply.initiator_depth, reply.responder_resources), (5, 4));
    assert_eq!(number(&reply.private_data.0), 8);
    wire.managers[0]
        .establish(client, PrivateData([9; 224]))
        .unwrap();
    wire.run(SOON);
    let established = Event::Established {
        id: server,
        private_data: Box::new(PrivateData([9; 224])),
    };
    assert_eq!(wire.take(1), [established]);

    let [of_client, of_server] = [(0, client), (1, server)].map(|(node, id)| {
        let manager = &wire.managers[node];
        let init = QpInit {
            partition_key: 0xffff,
            remote_read_and_atomic: true,
        };
        assert_eq!(manager.qp_init(id), Ok(init));
        let (receive, send) = (
            manager.qp_ready_to_receive(id),
            manager.qp_ready_to_send(id),
        );
        (receive.unwrap(), send.unwrap())
    });
    assert_eq!(of_client.0.ports, ports(0, 1));
    assert_eq!(
        (of_client.0.dest_qpn, of_server.0.dest_qpn),
        (Qpn::of(200), Qpn::of(100))
    );
    assert_eq!(of_client.0.rq_psn, of_server.1.sq_psn);
    assert_eq!(of_server.0.rq_psn, of_client.1.sq_psn);
    assert_ne!(of_client.0.rq_psn, of_server.0.rq_psn);
    assert_eq!(of_client.0.max_dest_rd_atomic, Some(4));
    assert_eq!(of_server.0.max_dest_rd_atomic, Some(5));
    let reliable = Reliable {
        timeout: TimeExponent::of(19),
        retry_count: RetryCount::of(6),
        rnr_retry_count: RetryCount::of(3),
        max_rd_atomic: 5,
    };
    assert_eq!(of_client.1.reliable, Some(reliable));
    let reliable = of_server.1.reliable.unwrap();
    assert_eq!(
        (reliable.rnr_retry_count, reliable.max_rd_atomic),
        (RetryCount::of(7), 4)
    );

    let now = wire.now;
    wire.managers[1].disconnect(now, server).unwrap();
    wire.run(SOON);
    assert_eq!(wire.take(0), [Event::Disconnected { id: client }]);
    let now = wire.now;
    wire.managers[0].disconnect(now, client).unwrap();
    // Once more it is as it was.
    wire.managers[0].disconnect(now, client).unwrap();
    wire.rest();
    assert_eq!(wire.take(0), [Event::TimewaitExit { id: client }]);
    wire.managers[0].disconnect(now, client).unwrap();
    let ends = [
        Event::Disconnected { id: server },
        Event::TimewaitExit { id: server },
    ];
    assert_eq!(wire.take(1), ends);
    for (node, id) in [(0, client), (1, server)] {
        let now = wire.now;
        wire.managers[node].destroy(now, id).unwrap();
        assert_eq!(
            wire.managers[node].destroy(now, id),
            Err(CallError::NoSuchId)
        );
        let counts = wire.managers[node].counts();
        assert_eq!(
            (counts.connections, counts.orphans, counts.timers),
            (0, 0, 0)
        );
    }
}

#[test]
fn a_request_that_is_rejected_stays_rejected_when_it_is_asked_again() {
    let mut wire = Wire::new(2, 2);
    let now = wire.now;
    let client = wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    let request = sent(&mut wire, 0).remove(0);
    wire.put(request.clone());
    wire.run(SOON);
    let server = wire.take(1)[0].id();
    let now = wire.now;
    let reason = RejectReason::CONSUMER_DEFINED;
    let private_data = PrivateData::new(b"no").unwrap();
    wire.managers[1]
        .reject(now, server, reason, private_data)
        .unwrap();
    // It is lost, and the request comes again, also after the program has forgotten it.
    assert_eq!(sent_attributes(&mut wire, 1), [attribute::REJ]);
    wire.managers[1].destroy(now, server).unwrap();
    wire.put(request);
    wire.run(SOON);
    let private_data = Box::new(private_data);
    let rejected = Event::Rejected {
        id: client,
        reason,
        private_data,
    };
    assert_eq!(wire.take(0), [rejected]);
    assert_eq!(wire.take(1), []);
    wire.rest();
    assert_eq!(wire.take(0), []);
    assert_eq!(wire.managers[1].counts().orphans, 0);
}

#[test]
fn who_takes_an_acceptance_back_says_so_until_it_is_heard() {
    let mut wire = Wire::new(2, 18);
    let now = wire.now;
    let client = wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    wire.run(SOON);
    let server = wire.take(1)[0].id();
    let now = wire.now;
    wire.managers[1]
        .accept(now, server, &accept(200, 8))
        .unwrap();
    wire.run(SOON);
    wire.managers[0]
        .establish(client, PrivateData::default())
        .unwrap();
    assert_eq!(sent_attributes(&mut wire, 0), [attribute::RTU]);
    assert!(matches!(&wire.take(0)[..], [Event::Reply { .. }]));
    let (now, reason) = (wire.now, RejectReason::CONSUMER_DEFINED);
    wire.managers[1]
        .reject(now, server, reason, PrivateData::default())
        .unwrap();
    assert_eq!(sent_attributes(&mut wire, 1), [attribute::REJ]);
    wire.rest();
    let events = wire.take(0);
    assert!(matches!(
        &events[..],
        [Event::Rejected { .. }, Event::TimewaitExit { .. }]
    ));
    assert_eq!(wire.take(1), [Event::TimewaitExit { id: server }]);
}

#[test]
fn who_is_not_there_is_unreachable_after_all_retries() {
    let mut wire = Wire::new(1, 3);
    let now = wire.now;
    let client = wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    let resolved = wire.managers[0].resolve(now, &resolve(0, 1, 8)).unwrap();
    wire.rest();
    let [first, second] = [resolved, client].map(|id| Event::Unreachable { id });
    assert_eq!(wire.take(0), [first, second]);
    // Each 16 times, and that the client gives up.
    assert_eq!(wire.sent, 33);
    let waited = wire.now - now;
    assert!(
        waited > Duration::from_secs(68) && waited < Duration::from_secs(120),
        "{waited:?}"
    );
}

#[test]
fn a_program_may_take_its_time() {
    let mut wire = Wire::new(2, 4);
    let now = wire.now;
    let client = wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    // Longer than the retries of a request go on, and than those of a reply.
    wire.run(Duration::from_secs(100));
    let server = wire.take(1)[0].id();
    let now = wire.now;
    wire.managers[1]
        .accept(now, server, &accept(200, 8))
        .unwrap();
    wire.run(Duration::from_secs(100));
    assert!(matches!(&wire.take(0)[..], [Event::Reply { .. }]));
    assert_eq!(wire.take(1), []);
    wire.managers[0]
        .establish(client, PrivateData::default())
        .unwrap();
    wire.run(SOON);
    assert!(matches!(&wire.take(1)[..], [Event::Established { .. }]));
}

#[test]
fn each_end_waits_for_the_others_adapter_to_acknowledge() {
    let mut wire = Wire::new(2, 22);
    let now = wire.now;
    let mut near = connect(0, 1, 100, 7);
    near.route.ack_timeout = TimeExponent::of(12);
    let client = wire.managers[0].connect(now, near).unwrap();
    wire.run(SOON);
    let events = wire.take(1);
    let [Event::ConnectRequest { id, request, .. }] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!(request.route.ack_timeout, TimeExponent::of(15));
    let (now, server) = (wire.now, *id);
    wire.managers[1]
        .accept(now, server, &accept(200, 8))
        .unwrap();
    let reply = sent(&mut wire, 1).remove(0);
    let Message::Rep(rep) = Mad::parse(&reply.datagram[..]).unwrap().message else {
        panic!("no reply");
    };
    assert_eq!(rep.target_ack_delay, TimeExponent::of(15));
    wire.put(reply);
    wire.run(SOON);
    for (node, id) in [(0, client), (1, server)] {
        let send = wire.managers[node].qp_ready_to_send(id).unwrap();
        assert_eq!(send.reliable.unwrap().timeout, TimeExponent::of(15));
    }
}

#[test]
fn who_ends_at_the_same_time_has_ended_once() {
    let mut wire = Wire::new(2, 5);
    let (client, server) = wire.connected(0, 1);
    let now = wire.now;
    wire.managers[0].disconnect(now, client).unwrap();
    wire.managers[1].disconnect(now, server).unwrap();
    wire.rest();
    for (node, id) in [(0, client), (1, server)] {
        let ends = [Event::Disconnected { id }, Event::TimewaitExit { id }];
        assert_eq!(wire.take(node), ends);
    }
}

#[test]
fn two_programs_of_one_port_are_each_others_peers() {
    let mut wire = Wire::new(1, 19);
    let (client, server) = wire.connected(0, 0);
    let receive = |id| wire.managers[0].qp_ready_to_receive(id).unwrap();
    assert_eq!(receive(client).dest_qpn, Qpn::of(200));
    assert_eq!(receive(server).dest_qpn, Qpn::of(100));
    let now = wire.now;
    let asking = wire.managers[0].resolve(now, &resolve(0, 0, 7)).unwrap();
    wire.run(SOON);
    let asked = wire.take(0)[0].id();
    let now = wire.now;
    wire.managers[0]
        .answer(now, asked, &answer(300, 8))
        .unwrap();
    wire.managers[0].disconnect(now, client).unwrap();
    wire.run(SOON);
    let events = wire.take(0);
    assert!(matches!(&events[0], Event::ServiceReply { id, .. } if *id == asking));
    assert_eq!(events[1..], [Event::Disconnected { id: server }]);
    for id in [client, server, asking, asked] {
        let now = wire.now;
        wire.managers[0].destroy(now, id).unwrap();
    }
    wire.rest();
    let counts = wire.managers[0].counts();
    assert_eq!((counts.connections, counts.orphans), (0, 0));
    assert_eq!(wire.take(0), []);
}

#[test]
fn a_connection_may_end_before_its_requester_has_established_it() {
    let mut wire = Wire::new(2, 20);
    let now = wire.now;
    let client = wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    wire.run(SOON);
    let server = wire.take(1)[0].id();
    let now = wire.now;
    wire.managers[1]
        .accept(now, server, &accept(200, 8))
        .unwrap();
    wire.run(SOON);
    assert!(matches!(&wire.take(0)[..], [Event::Reply { .. }]));
    wire.managers[1].communication_established(server).unwrap();
    let now = wire.now;
    wire.managers[1].disconnect(now, server).unwrap();
    wire.run(SOON);
    assert_eq!(wire.take(0), [Event::Disconnected { id: client }]);
    assert_eq!(
        wire.managers[0].establish(client, PrivateData::default()),
        Err(CallError::WrongState)
    );
    let now = wire.now;
    wire.managers[0].disconnect(now, client).unwrap();
    wire.rest();
    assert_eq!(wire.take(0), [Event::TimewaitExit { id: client }]);
}

#[test]
fn what_nobody_uses_any_more_ends_at_both_ends() {
    let mut wire = Wire::new(2, 6);
    let (client, server) = wire.connected(0, 1);
    let now = wire.now;
    wire.managers[0].destroy(now, client).unwrap();
    // The first message that says so is lost.
    assert_eq!(sent_attributes(&mut wire, 0), [attribute::DREQ]);
    wire.run(Duration::from_secs(10));
    assert_eq!(wire.take(1), [Event::Disconnected { id: server }]);
    let now = wire.now;
    wire.managers[1].destroy(now, server).unwrap();
    wire.rest();
    assert_eq!((wire.take(0), wire.take(1)), (vec![], vec![]));
    for node in [0, 1] {
        let counts = wire.managers[node].counts();
        assert_eq!(
            (counts.connections, counts.orphans, counts.timers),
            (0, 0, 0)
        );
    }
}

#[test]
fn a_reply_to_who_has_gone_is_rejected() {
    let mut wire = Wire::new(2, 7);
    let now = wire.now;
    let client = wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    wire.run(SOON);
    let server = wire.take(1)[0].id();
    wire.managers[0].destroy(wire.now, client).unwrap();
    // That it gives up is lost.
    assert_eq!(sent_attributes(&mut wire, 0), [attribute::REJ]);
    let now = wire.now;
    wire.managers[1]
        .accept(now, server, &accept(200, 8))
        .unwrap();
    wire.rest();
    let events = wire.take(1);
    let [
        Event::Rejected { id, reason, .. },
        Event::TimewaitExit { .. },
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!((*id, *reason), (server, RejectReason::INVALID_COMM_ID));
}

#[test]
fn a_queue_pair_that_its_peer_has_connected_anew_was_stale() {
    let mut wire = Wire::new(2, 8);
    let (client, server) = wire.connected(0, 1);
    // The client's machine starts again, and knows nothing.
    let mut again = Wire::new(2, 9);
    std::mem::swap(&mut wire.managers[0], &mut again.managers[0]);
    let now = wire.now;
    let anew = wire.managers[0]
        .connect(now, connect(0, 1, 100, 9))
        .unwrap();
    assert_ne!(anew, client);
    wire.run(SOON);
    let events = wire.take(0);
    let [Event::Rejected { id, reason, .. }] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!((*id, *reason), (anew, RejectReason::STALE_CONNECTION));
    assert_eq!(wire.take(1), [Event::Disconnected { id: server }]);
    let now = wire.now;
    wire.managers[0]
        .connect(now, connect(0, 1, 100, 10))
        .unwrap();
    wire.run(SOON);
    assert!(matches!(&wire.take(1)[..], [Event::ConnectRequest { .. }]));
}

#[test]
fn data_may_come_before_the_word_that_it_may() {
    let mut wire = Wire::new(2, 10);
    let now = wire.now;
    let client = wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    wire.run(SOON);
    let server = wire.take(1)[0].id();
    let now = wire.now;
    wire.managers[1]
        .accept(now, server, &accept(200, 8))
        .unwrap();
    wire.run(SOON);
    wire.managers[0]
        .establish(client, PrivateData([1; 224]))
        .unwrap();
    wire.managers[1].communication_established(server).unwrap();
    wire.run(SOON);
    let private_data = Box::default();
    let id = server;
    assert_eq!(wire.take(1), [Event::Established { id, private_data }]);
}

/// The request that a client sends, changed.
fn request(wire: &mut Wire, change: impl FnOnce(&mut farlane_rdma_cm::Req)) -> Mad {
    let now = wire.now;
    wire.managers[0]
        .connect(now, connect(0, 1, 100, 7))
        .unwrap();
    let mut mad = Mad::parse(&sent(wire, 0)[0].datagram[..]).unwrap();
    let Message::Req(req) = &mut mad.message else {
        panic!("{mad:?}");
    };
    change(req);
    mad
}

#[test]
fn a_request_that_is_not_its_senders_is_rejected() {
    let mut wire = Wire::new(3, 15);
    let of_another = request(&mut wire, |req| req.primary.local_gid = gid(2));
    let to_another = request(&mut wire, |req| req.primary.remote_gid = gid(2));
    let says_another = request(&mut wire, |req| {
        req.private_data = connect(2, 1, 100, 7).private_data;
    });
    let no_header = request(&mut wire, |req| req.private_data = PrivateData::default());
    let gid = RejectReason::INVALID_GID;
    for (mad, expected) in [
        (of_another, gid),
        (to_another, gid),
        (says_another, gid),
        (no_header, RejectReason::CONSUMER_DEFINED),
    ] {
        receive(&mut wire, 0, 1, &mad);
        let answers = sent(&mut wire, 1);
        let answer = Mad::parse(&answers[0].datagram[..]).unwrap();
        let Message::Rej(rej) = answer.message else {
            panic!("{answer:?}");
        };
        assert_eq!(
            (answers.len(), rej.reason, rej.about),
            (1, expected, About::Req)
        );
        assert_eq!(answer.transaction, mad.transaction);
        assert_eq!(wire.managers[1].counts().connections, 0);
    }
}

#[test]
fn an_extended_connection_has_its_number_where_the_annex_has_it() {
    let mut wire = Wire::new(2, 16);
    let now = wire.now;
    let mut extended = connect(0, 1, 100, 7);
    extended.transport = Transport::ExtendedReliable;
    wire.managers[0].connect(now, extended).unwrap();
    wire.run(SOON);
    let server = wire.take(1)[0].id();
    let now = wire.now;
    wire.managers[1]
        .accept(now, server, &accept(200, 8))
        .unwrap();
    let reply = sent(&mut wire, 1).remove(0);
    let Message::Rep(rep) = Mad::parse(&reply.datagram[..]).unwrap().message else {
        panic!("no reply");
    };
    assert_eq!(
        (rep.local_qpn, rep.local_eecn, rep.srq),
        (Qpn::of(0), Qpn::of(200), true)
    );
    wire.put(reply);
    wire.run(SOON);
    let events = wire.take(0);
    let [Event::Reply { reply, .. }] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!(reply.remote_qpn, Qpn::of(200));
}

#[test]
fn a_message_for_nothing_is_answered_as_the_specification_says() {
    let mut wire = Wire::new(2, 17);
    let mad = |message| Mad {
        transaction: farlane_rdma_cm::TransactionId(5),
        message,
    };
    let (local_comm_id, remote_comm_id) = (CommId(6), CommId(7));
    let dreq = Message::Dreq(farlane_rdma_cm::Dreq {
        local_comm_id,
        remote_comm_id,
        remote_qpn: Qpn::of(8),
        private_data: PrivateData::default(),
    });
    receive(&mut wire, 0, 1, &mad(dreq));
    let drep = Message::Drep(farlane_rdma_cm::Drep {
        local_comm_id: remote_comm_id,
        remote_comm_id: local_comm_id,
        private_data: PrivateData::default(),
    });
    let answers = sent(&mut wire, 1);
    let to = Ports {
        local: gid(1),
        remote: gid(0),
    };
    assert_eq!((answers.len(), answers[0].ports), (1, to));
    assert_eq!(Mad::parse(&answers[0].datagram[..]), Ok(mad(drep)));

    let rtu = Message::Rtu(farlane_rdma_cm::Rtu {
        local_comm_id,
        remote_comm_id,
        private_data: PrivateData::default(),
    });
    receive(&mut wire, 0, 1, &mad(rtu));
    assert_eq!(sent_attributes(&mut wire, 1), []);
}
