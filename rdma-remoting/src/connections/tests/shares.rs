//! What programs that do not trust each other share of one port.

use super::*;
use farlane_abi::width::to_u64;
use farlane_rdma_cm::attribute;

/// Has a program listen at ports from this one on, until it may have no more. Returns how many.
fn listen_until_refused(program: &Program, first_port: u64) -> usize {
    let service = SERVICE & !0xffff;
    let ids = (first_port..0xffff).map(|port| {
        let id = program.bind(service | port)?.id;
        let backlog = 1.into();
        program.call().cm_listen(CmListen { id, backlog })
    });
    ids.take_while(|listening| *listening != Err(Errno::ENOMEM))
        .inspect(|listening| assert_eq!(*listening, Ok(())))
        .count()
}

#[test]
fn a_user_leaves_listeners_of_its_port_to_another() {
    let (_server, client, _) = two(PortConfig::default());
    let [greedy, other] = of_two_users(&client.port);
    let taken = listen_until_refused(&greedy, 1);
    // What was refused to the other one is bound.
    let left = listen_until_refused(&other, 2 + to_u64(taken));
    assert!(left >= taken / 3, "{taken} are taken, and {left} were left");
}

#[test]
fn a_user_leaves_ports_of_a_protocol_to_another() {
    let (_server, client, _) = two(PortConfig::default());
    let [greedy, other] = of_two_users(&client.port);
    let any = SERVICE & !0xffff;
    let one = greedy.bind(any).unwrap();
    let taken = 1 + std::iter::from_fn(|| greedy.bind(any).ok()).count();
    assert_eq!(taken, 28_232 / 2);
    assert_eq!(greedy.bind(any), Err(Errno::EADDRINUSE));
    // Nor by name.
    let by_name = (32_768..61_000).find_map(|port| greedy.bind(any | port).ok());
    assert_eq!(by_name, None);
    greedy.bind(SERVICE).unwrap();
    greedy.bind(DATAGRAMS & !0xffff).unwrap();
    let left = (0..).take_while(|_| other.bind(any).is_ok()).count();
    assert_eq!(left, 28_232 / 4);
    // What is given back is there for whoever has less.
    greedy.destroy(one.id.get()).unwrap();
    assert_eq!(greedy.bind(any), Err(Errno::EADDRINUSE));
    other.bind(any).unwrap();
    greedy.port.close(ContextId::new(2).unwrap()).unwrap();
    assert_eq!(
        (0..).take_while(|_| other.bind(any).is_ok()).count(),
        28_232 / 4 - 1
    );
}

fn with_ids(most: u64) -> PortConfig {
    PortConfig {
        limits: Limits::default().with(Resource::ConnectionIds, Some(most)),
        ..PortConfig::default()
    }
}

#[test]
fn a_peer_leaves_ids_of_an_operators_limit_to_programs() {
    let (_server, client, server) = two(with_ids(8));
    server.listen(SERVICE);
    let other = Program::start(&client.port, 2);
    for program in [&client, &other] {
        while program.connect(2, SERVICE, b"").is_ok() {
            program.turn(Instant::now());
        }
    }
    let waiting = std::iter::from_fn(|| server.next().ok()).count();
    assert_eq!(waiting, 4);
    let own = (0..).take_while(|_| server.connect(1, SERVICE, b"").is_ok());
    assert_eq!(own.count(), 8 - 1 - 4);
}

#[test]
fn an_id_counts_until_its_peer_has_answered_that_it_ends() {
    let (_server, client, server) = two(with_ids(32));
    server.listen(SERVICE);
    let ids = [0x31, 0x32, 0x33].map(|number| {
        server.add_queue_pair(number);
        connected_by(&client, &server, number).0
    });
    server.port.pause();
    for id in ids {
        client.destroy(id).unwrap();
    }
    client.turn(Instant::now());
    let fill = || -> Vec<u32> {
        let ids = std::iter::from_fn(|| client.bind(SERVICE & !0xffff).ok());
        ids.map(|bound| bound.id.get()).collect()
    };
    let beside = fill();
    assert_eq!(beside.len(), 32 - 3);
    server.port.resume();
    client.turn(Instant::now() + Duration::from_secs(10));
    for _ in ids {
        let ended = server.expect(CM_DISCONNECTED).id.get();
        server.call().cm_disconnect(ended.into()).unwrap();
    }
    client.turn(Instant::now() + Duration::from_secs(10));
    assert_eq!(fill().len(), 3);
}

#[test]
fn a_flood_of_requests_to_nobody_leaves_room_for_own_messages() {
    let (_server, client, server) = two(PortConfig::default());
    client.connect(2, SERVICE, b"").unwrap();
    let connections = &client.context.connections;
    let req = connections.take_messages(1).0.remove(0);
    let ports = Ports {
        local: req.ports.remote,
        remote: req.ports.local,
    };
    let flooded = &server.context.connections;
    for _ in 0..20_000 {
        flooded.receive(Instant::now(), ports, &req.datagram[..]);
    }
    server.connect(1, SERVICE, b"").unwrap();
    let (messages, more) = flooded.take_messages(usize::MAX);
    assert!(!more && messages.len() < 2000, "{} wait", messages.len());
    let is_own = |message: &&Transmit| message.datagram[16..18] == attribute::REQ.to_be_bytes();
    assert_eq!(messages.iter().filter(is_own).count(), 1);
    // And what has been brought makes room.
    flooded.receive(Instant::now(), ports, &req.datagram[..]);
    assert_eq!(flooded.take_messages(usize::MAX).0.len(), 1);
}

#[test]
fn a_peer_that_answers_no_end_leaves_ids_of_a_program_to_other_peers() {
    let (rig, client, server) = two(with_ids(64));
    let other = Program::start(&port(&rig, 3, PortConfig::default()), 1);
    let [server, _] = of_two_users(&server.port);
    server.listen(SERVICE);
    // The server ends each at once.
    for number in 0x31..0x59 {
        server.add_queue_pair(number);
        client.add_queue_pair(number + 0x1000);
        let id = client.connect_by(number + 0x1000, 2, SERVICE, b"").unwrap();
        client.turn(Instant::now());
        let its = server.next().unwrap().id.get();
        server.accept_by(number, its).unwrap();
        client.turn(Instant::now());
        client.call().cm_establish(id.into()).unwrap();
        client.turn(Instant::now());
        while server.next().is_ok() {}
        server.destroy(its).unwrap();
        // What would be answered is lost.
        server.context.connections.take_messages(usize::MAX);
        while client.next().is_ok() {}
        client.context.connections.close(ContextId::new(1).unwrap());
        client.context.connections.take_messages(usize::MAX);
    }
    other.connect(2, SERVICE, b"").unwrap();
    other.turn(Instant::now());
    let request = server.expect(CM_CONNECT_REQUEST);
    assert_eq!(request.remote_gid, [3; 16]);
}

#[test]
fn a_user_that_has_ports_left_is_given_one() {
    let (_server, client, _) = two(PortConfig::default());
    let any = SERVICE & !0xffff;
    let users = users(&client.port, 2..9);
    // Six that have all that they may.
    for user in &users[..6] {
        while user.bind(any).is_ok() {}
    }
    // The next one has half of what is left.
    let given = (0..).take_while(|_| users[6].bind(any).is_ok()).count();
    assert_eq!(given, 28_232_usize.div_ceil(1 << 7));
}

#[test]
fn a_flood_of_a_peer_leaves_room_for_an_answer_to_another() {
    let (_server, client, server) = two(PortConfig::default());
    client.connect(2, SERVICE, b"").unwrap();
    let req = client.context.connections.take_messages(1).0.remove(0);
    let flooded = &server.context.connections;
    let from = |peer: u8| Ports {
        local: Gid([2; 16]),
        remote: Gid([peer; 16]),
    };
    for _ in 0..2000 {
        flooded.receive(Instant::now(), from(1), &req.datagram[..]);
    }
    flooded.receive(Instant::now(), from(3), &req.datagram[..]);
    let (messages, _) = flooded.take_messages(usize::MAX);
    assert_eq!(messages.last().unwrap().ports.remote, Gid([3; 16]));
}

#[test]
fn what_is_refused_for_want_of_an_id_is_not_asked_for() {
    let (_server, client, server) = two(with_ids(1));
    server.listen(SERVICE);
    client.bind(SERVICE).unwrap();
    assert_eq!(client.connect(2, SERVICE, b""), Err(Errno::ENOMEM));
    assert_eq!(client.context.connections.take_messages(usize::MAX).0, []);
}

#[test]
fn a_number_that_a_connection_names_is_its_users_until_it_ends() {
    let (_server, client, server) = two(PortConfig::default());
    let [one, other] = of_two_users(&client.port);
    server.listen(SERVICE);
    let id = one.connect_by(0x77, 2, SERVICE, b"").unwrap();
    assert_eq!(other.connect_by(0x77, 2, SERVICE, b""), Err(Errno::EINVAL));
    let request = server.expect(CM_CONNECT_REQUEST).id.get();
    server.accept_by(0x88, request).unwrap();
    one.expect(CM_CONNECT_RESPONSE);
    one.call().cm_establish(id.into()).unwrap();
    server.expect(CM_ESTABLISHED);
    // It is of whoever accepts, too.
    let [its_user, _] = of_two_users(&server.port);
    let elsewhere = its_user.connect_by(0x88, 1, SERVICE, b"");
    assert_eq!(elsewhere, Err(Errno::EINVAL));
    // While the peer has not answered that it ends.
    server.port.pause();
    one.destroy(id).unwrap();
    client.turn(Instant::now());
    assert_eq!(other.connect_by(0x77, 2, SERVICE, b""), Err(Errno::EINVAL));
    server.port.resume();
    client.turn(Instant::now() + Duration::from_secs(10));
    let ended = server.expect(CM_DISCONNECTED).id.get();
    server.call().cm_disconnect(ended.into()).unwrap();
    client.turn(Instant::now() + Duration::from_secs(10));
    other.connect_by(0x77, 2, SERVICE, b"").unwrap();
    server.destroy(ended).unwrap();
    its_user.connect_by(0x88, 1, SERVICE, b"").unwrap();
}

#[test]
fn an_engine_knows_which_numbers_connections_name() {
    let (_server, client, server) = two(PortConfig::default());
    let management = Taken(Arc::downgrade(client.context.connections.all()));
    let is_named = |port: RawGid| management.is_named(&port, QpNumber::of(0x77));
    assert!(!is_named([1; 16]));
    let id = client.connect_by(0x77, 2, SERVICE, b"").unwrap();
    assert!(is_named([1; 16]) && !is_named([2; 16]));
    client.destroy(id).unwrap();
    assert!(!is_named([1; 16]));
    drop(server);
}
