//! How connections end, whatever comes in between.

use super::*;

#[test]
fn what_was_answered_before_its_event_was_taken_ends_with_its_listener() {
    let (_server, client, server) = two(PortConfig::default());
    for answer in [Program::accept, Program::reject] {
        for service in [SERVICE, DATAGRAMS] {
            let listener = server.listen(service);
            let id = client.connect(2, service, b"").unwrap();
            client.turn(Instant::now());
            // Handles are given one after the other.
            answer(&server, listener + 1).unwrap();
            server.destroy(listener).unwrap();
            client.turn(Instant::now());
            let (counts, ids, _) = server.counts();
            assert_eq!((counts.connections, ids), (0, 0));
            client.destroy(id).unwrap();
            // The handle after the request's is the next one's.
            assert_eq!(server.destroy(listener + 1), Err(Errno::EBADF));
        }
    }
}

#[test]
fn a_pause_uses_no_retry_up_but_the_one_that_it_delays() {
    let (_server, client, server) = two(PortConfig::default());
    server.listen(SERVICE);
    server.port.pause();
    let id = client.connect(2, SERVICE, b"").unwrap();
    client.turn(Instant::now());
    client.port.pause();
    let later = Instant::now() + Duration::from_secs(80);
    client.turn(later);
    client.port.resume();
    server.port.resume();
    client.context.connections.advance(later);
    let (again, _) = client.context.connections.take_messages(usize::MAX);
    assert_eq!(again.len(), 1);
    assert_eq!(client.next().map(drop), Err(Errno::EAGAIN));
    // It goes on as before.
    client.turn(later + Duration::from_secs(10));
    let request = server.expect(CM_CONNECT_REQUEST);
    server.accept(request.id.get()).unwrap();
    assert_eq!(client.expect(CM_CONNECT_RESPONSE).id.get(), id);
}

#[test]
fn a_port_that_is_behind_delays_neither_timers_of_others_nor_messages() {
    let (rig, behind, server) = two(PortConfig::default());
    let other = Program::start(&port(&rig, 3, PortConfig::default()), 1);
    server.port.pause();
    for _ in 0..1000 {
        behind.connect(2, SERVICE, b"").unwrap();
    }
    other.connect(2, SERVICE, b"").unwrap();
    let connections = Arc::clone(server.context.connections.all());
    connections.turn(Instant::now());
    // All of them are to be sent again, the other one's last.
    let later = Instant::now() + Duration::from_secs(10);
    let mut timers = Vec::new();
    let mut before = None;
    let mut messages_wait = 0;
    while timers.len() < 4 {
        let work = lock(&connections.list).next(later).unwrap();
        let is_timers = matches!(&work, Work::Timers(_));
        assert!(!(is_timers && before == Some(true) && messages_wait > 0));
        if let Work::Timers(gid) = &work {
            timers.push(gid[0]);
        }
        connections.carry_out(&work, later);
        messages_wait = lock(&connections.list).ready.len();
        before = Some(is_timers);
    }
    assert_eq!(timers, [1, 3, 1, 1]);
}

#[test]
fn a_connection_may_be_ended_twice() {
    let (_server, client, server) = two(PortConfig::default());
    let listener = server.listen(SERVICE);
    let (id, theirs) = connected(&client, &server);
    let end = |program: &Program, id: u32| program.call().cm_disconnect(id.into());
    assert_eq!([end(&client, id), end(&client, id)], [Ok(()); 2]);
    server.expect(CM_DISCONNECTED);
    assert_eq!([end(&server, theirs), end(&server, theirs)], [Ok(()); 2]);
    client.expect(CM_DISCONNECTED);
    assert_eq!(end(&client, id), Ok(()));
    // What was never one is none.
    assert_eq!(end(&server, listener), Err(Errno::EINVAL));
    let asking = client.connect(2, SERVICE, b"").unwrap();
    assert_eq!(end(&client, asking), Err(Errno::EINVAL));
}

#[test]
fn nobody_connects_a_queue_pair_of_another_user() {
    let (_server, client, server) = two(PortConfig::default());
    server.listen(SERVICE);
    let (id, theirs) = connected(&client, &server);
    let [other, _] = of_two_users(&client.port);
    let its = client.last.load(Ordering::SeqCst);
    assert_eq!(other.connect_by(its, 2, SERVICE, b""), Err(Errno::EINVAL));
    // The same of one who accepts.
    other.connect_by(0x55, 2, SERVICE, b"").unwrap();
    let request = server.expect(CM_CONNECT_REQUEST).id.get();
    let [its_user, _] = of_two_users(&server.port);
    its_user.add_queue_pair(0x66);
    assert_eq!(server.accept_by(0x66, request), Err(Errno::EINVAL));
    lock(&its_user.queue_pairs).clear();
    // A number that no queue pair has is anybody's to name, as it was in the request.
    server.accept_by(0x66, request).unwrap();
    // Others of its own party do, as processes of one user may share a queue pair.
    let beside = Program::start(&client.port, 4);
    beside.connect_by(its, 2, SERVICE, b"").unwrap();
    beside.turn(Instant::now());
    // The peer takes that for a connection that is stale.
    assert_eq!(client.expect(CM_DISCONNECTED).id.get(), id);
    assert_ne!(theirs, request);
}

#[test]
fn a_late_port_has_its_turn_although_messages_come_to_it() {
    let (rig, behind, server) = two(PortConfig::default());
    let other = Program::start(&port(&rig, 3, PortConfig::default()), 1);
    server.port.pause();
    for _ in 0..2000 {
        behind.connect(2, SERVICE, b"").unwrap();
    }
    for _ in 0..200 {
        other.connect(2, SERVICE, b"").unwrap();
    }
    let connections = Arc::clone(server.context.connections.all());
    connections.turn(Instant::now());
    let ports = Ports {
        local: Gid([3; 16]),
        remote: Gid([1; 16]),
    };
    let mut now = Instant::now() + Duration::from_secs(10);
    let mut timers = Vec::new();
    let mut most = 0;
    while timers.len() < 20 {
        now += Duration::from_micros(1);
        // Whatever it is: a datagram that is malformed does.
        other.context.connections.receive(now, ports, &[0; 256]);
        now += Duration::from_micros(1);
        let begun = now;
        let work = lock(&connections.list).next(begun).unwrap();
        if let Work::Timers(gid) = &work {
            timers.push(gid[0]);
        }
        // A program calls before the thread has the port's lock: it is noted once all the same.
        now += Duration::from_micros(1);
        behind.context.connections.with(now, |_| ());
        connections.carry_out(&work, begun);
        most = most.max(lock(&connections.list).timers.len());
    }
    let its = timers.iter().filter(|port| **port == 3).count();
    assert!(its >= 4, "{timers:?}");
    assert_eq!(most, 2);
}

#[test]
fn a_port_that_comes_again_is_not_forgotten_with_the_one_before() {
    let (rig, client, server) = two(PortConfig::default());
    let before = client.context.connections.clone();
    drop(client);
    let client = Program::start(&port(&rig, 1, PortConfig::default()), 1);
    drop(before);
    server.listen(SERVICE);
    client.connect(2, SERVICE, b"").unwrap();
    server.expect(CM_CONNECT_REQUEST);
}

#[test]
fn peers_hear_that_a_device_was_reset_from_the_gid_that_they_know() {
    let (_server, client, server) = two(PortConfig::default());
    client.port.add_gid(1, [7; 16]).unwrap();
    server.listen(SERVICE);
    let mut connect = CmConnect {
        local_gid: [7; 16],
        remote_gid: [2; 16],
        service: SERVICE.into(),
        event: EVENT.into(),
        qp_num: 0x77.into(),
        qp_type: 2,
        ack_timeout: 17,
        ..Default::default()
    };
    connect.source_port = 40_000.into();
    let id = client.call().cm_connect(connect).unwrap();
    let request = server.expect(CM_CONNECT_REQUEST);
    assert_eq!(request.remote_gid, [7; 16]);
    server.accept(request.id.get()).unwrap();
    client.expect(CM_CONNECT_RESPONSE);
    client.call().cm_establish(id).unwrap();
    server.expect(CM_ESTABLISHED);
    client.port.close_all();
    server.expect(CM_DISCONNECTED);
}

#[test]
fn a_reset_waits_for_messages_that_are_on_their_way() {
    let (_server, client, server) = two(PortConfig::default());
    client.port.add_gid(1, [7; 16]).unwrap();
    let port = Arc::clone(&client.context.connections);
    let bringing = lock(&port.bringing);
    std::thread::scope(|scope| {
        let reset = scope.spawn(|| client.port.close_all());
        // Long enough for one that does not wait.
        for _ in 0..10_000 {
            std::thread::yield_now();
        }
        assert!(!reset.is_finished() && client.port.gids().len() == 1);
        drop(bringing);
    });
    assert_eq!(client.port.gids(), []);
    drop(server);
}
