//! Ports that peers name by GIDs that their guests have set.

use super::*;
use crate::{GidPolicy, GidPrefix, Peers, PortConfig};
use std::collections::BTreeSet;

/// GIDs that guests set.
const A: [u8; 16] = [0xfd; 16];
const B: [u8; 16] = [0xfc; 16];

fn send(from: (&Guest, &Pair), to: (&Guest, &Pair)) -> [Option<(u64, u32)>; 2] {
    to.1.post_recv(2, &[]);
    let (entry, payload) = request(1, WR_SEND, &0_u64, &[]);
    from.1.post(&entry, &payload);
    from.0.ring_for(from.1);
    let mut now = Instant::now();
    for _ in 0..100 {
        run(&[from.0, to.0], now);
        now += Duration::from_millis(100);
    }
    [from.0.next(), to.0.next()]
}

const ARRIVES: [Option<(u64, u32)>; 2] = [Some((1, 0)), Some((2, 0))];

#[test]
fn a_connection_names_its_peer_by_any_of_its_gids() {
    let server = Server::without_workers();
    let ports = [1, 2].map(|gid| port(&server, gid));
    ports[0].add_gid(3, A).unwrap();
    ports[1].add_gid(0, B).unwrap();
    let [a, b] = ports.each_ref().map(Guest::start);
    // Each end goes by another name of the other one, and the operator's is one of them.
    for (to_a, to_b, index) in [(A, B, 3), ([1; 16], B, 3), (A, [2; 16], 3)] {
        let (pa, pb) = (a.pair(QPT_RC), b.pair(QPT_RC));
        a.connect_to(&pa, (to_b, pb.number), 7, index).unwrap();
        b.connect_to(&pb, (to_a, pa.number), 7, 0).unwrap();
        assert_eq!(send((&a, &pa), (&b, &pb)), ARRIVES);
        assert_eq!(send((&b, &pb), (&a, &pa)), ARRIVES);
        let shown = a.host().query_qp(pa.handle).unwrap();
        assert_eq!((shown.dgid, shown.sgid_index), (to_b, index));
        a.host().destroy_qp(pa.handle).unwrap();
        b.host().destroy_qp(pb.handle).unwrap();
    }
    // An entry that is not in use is nobody's source.
    for index in [0, 1, 63, 64, 255] {
        let pair = a.pair(QPT_RC);
        let refused = a.connect_to(&pair, (B, 1.into()), 7, index);
        assert_eq!(refused, Err(Errno::EINVAL), "{index}");
        a.host().destroy_qp(pair.handle).unwrap();
    }
}

#[test]
fn a_connection_stays_with_the_port_that_had_the_gid() {
    let server = Server::without_workers();
    let ports = [1, 2, 3].map(|gid| port(&server, gid));
    ports[1].add_gid(0, B).unwrap();
    let [a, b, c] = ports.each_ref().map(Guest::start);
    let (pa, pb) = (a.pair(QPT_RC), b.pair(QPT_RC));
    a.connect_to(&pa, (B, pb.number), 7, 0).unwrap();
    b.connect_to(&pb, ([1; 16], pa.number), 7, 0).unwrap();
    ports[1].remove_gid(0).unwrap();
    ports[2].add_gid(0, B).unwrap();
    assert_eq!(send((&a, &pa), (&b, &pb)), ARRIVES);
    // A GID that nobody had may be the peer's when it sends.
    let (pa, pc) = (a.pair(QPT_RC), c.pair(QPT_RC));
    a.connect_to(&pa, (A, pc.number), 7, 0).unwrap();
    ports[2].add_gid(1, A).unwrap();
    c.connect_to(&pc, ([1; 16], pa.number), 7, 0).unwrap();
    assert_eq!(send((&a, &pa), (&c, &pc)), ARRIVES);
    assert_eq!(send((&c, &pc), (&a, &pa)), ARRIVES);
}

/// Changes something of a connection that is ready to send: not its peer.
fn change(of: &Guest, pair: &Pair) {
    let attr = QpAttr {
        qp_state: QPS_RTS,
        min_rnr_timer: 13,
        ..Default::default()
    };
    of.modify(pair, QP_STATE | QP_MIN_RNR_TIMER, attr).unwrap();
}

#[test]
fn a_connection_that_is_changed_stays_with_its_port() {
    let server = Server::without_workers();
    let ports = [1, 2, 3].map(|gid| port(&server, gid));
    ports[1].add_gid(0, B).unwrap();
    let [a, b, c] = ports.each_ref().map(Guest::start);
    let (pa, pb) = (a.pair(QPT_RC), b.pair(QPT_RC));
    a.connect_to(&pa, (B, pb.number), 7, 0).unwrap();
    b.connect_to(&pb, ([1; 16], pa.number), 7, 0).unwrap();
    ports[1].remove_gid(0).unwrap();
    ports[2].add_gid(0, B).unwrap();
    change(&a, &pa);
    assert_eq!(send((&a, &pa), (&b, &pb)), ARRIVES);
    assert_eq!(send((&b, &pb), (&a, &pa)), ARRIVES);
    assert_eq!(c.next(), None);
}

#[test]
fn gids_that_a_guest_has_set_go_with_a_reset() {
    let server = Server::without_workers();
    let ports = [1, 2].map(|gid| port(&server, gid));
    ports[0].add_gid(0, A).unwrap();
    let a = Guest::start(&ports[0]);
    let entry = |index: u32| {
        let which = QueryGid {
            port: 1.into(),
            index: index.into(),
        };
        a.host().query_gid(which).unwrap().raw
    };
    assert_eq!((entry(0), entry(1)), (A, [0; 16]));
    assert_eq!(ports[1].add_gid(0, A), Err(Errno::EADDRINUSE));
    assert_eq!(ports[1].add_gid(0, [1; 16]), Err(Errno::EADDRINUSE));
    ports[0].close_all();
    ports[1].add_gid(0, A).unwrap();
    assert_eq!(entry(0), [1; 16]);
}

#[test]
fn a_datagram_says_which_of_its_ports_gids_it_is_from() {
    let server = Server::without_workers();
    let ports = [1, 2].map(|gid| port(&server, gid));
    let mapped = |last| {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, last]);
        gid
    };
    ports[0].add_gid(0, A).unwrap();
    ports[0].add_gid(1, mapped(1)).unwrap();
    ports[1].add_gid(0, mapped(2)).unwrap();
    let [a, b] = ports.each_ref().map(Guest::start);
    let pairs = [a.datagrams(), b.datagrams()];
    let create = |sgid_index| CreateAh {
        pd: a.pd,
        dgid: mapped(2),
        is_global: 1,
        sgid_index,
        port_num: 1,
        ..Default::default()
    };
    for index in [2, 64, 255] {
        let refused = a.host().create_ah(create(index));
        assert_eq!(refused, Err(Errno::EINVAL));
    }
    for (index, header) in [(0, A), (1, mapped(1))] {
        let ah = a.host().create_ah(create(index)).unwrap();
        let datagram = RxeDatagram {
            remote_qpn: pairs[1].number,
            remote_qkey: 0x1111.into(),
            ah_num: ah,
            ..Default::default()
        };
        pairs[1].post_recv(5, &[b.sge(0, 100)]);
        let (entry, payload) = request(4, WR_SEND, &datagram, &[]);
        pairs[0].post(&entry, &payload);
        a.ring_for(&pairs[0]);
        run(&[&a, &b], Instant::now());
        assert_eq!((a.next(), b.next()), (Some((4, 0)), Some((5, 0))));
        // Between IPv4 addresses the header is one of IPv4, in the last 20 bytes.
        let got: [u8; 40] = b.read(0);
        match index {
            0 => assert_eq!(got[8..24], header),
            _ => assert_eq!(got[32..36], header[12..]),
        }
    }
}

#[test]
fn a_datagram_is_from_no_gid_that_its_port_has_no_more() {
    let server = Server::without_workers();
    let ports = [1, 2, 3].map(|gid| port(&server, gid));
    ports[0].add_gid(0, A).unwrap();
    let [a, b] = [&ports[0], &ports[1]].map(Guest::start);
    let pairs = [a.datagrams(), b.datagrams()];
    let ah = a.host().create_ah(CreateAh {
        pd: a.pd,
        dgid: [2; 16],
        is_global: 1,
        port_num: 1,
        ..Default::default()
    });
    let datagram = RxeDatagram {
        remote_qpn: pairs[1].number,
        remote_qkey: 0x1111.into(),
        ah_num: ah.unwrap(),
        ..Default::default()
    };
    let sent = || {
        let (entry, payload) = request(4, WR_SEND, &datagram, &[]);
        pairs[0].post(&entry, &payload);
        a.ring_for(&pairs[0]);
        run(&[&a, &b], Instant::now());
        [a.next(), b.next()]
    };
    pairs[1].post_recv(5, &[b.sge(0, 100)]);
    // It is nobody's, then another port's.
    ports[0].remove_gid(0).unwrap();
    assert_eq!(sent(), [Some((4, 0)), None]);
    ports[2].add_gid(0, A).unwrap();
    assert_eq!(sent(), [Some((4, 0)), None]);
    ports[2].remove_gid(0).unwrap();
    ports[0].add_gid(3, A).unwrap();
    assert_eq!(sent(), [Some((4, 0)), Some((5, 0))]);
}

#[test]
fn a_peer_is_one_that_its_operator_has_named_whatever_it_calls_itself() {
    let server = Server::without_workers();
    let only = |gid| Peers::Only(BTreeSet::from([gid]));
    let victim = PortConfig {
        peers: only(B),
        ..Default::default()
    };
    let victim = server.port_with([1; 16], "victim".into(), victim).unwrap();
    // Not named whole, so that others may have it.
    let named = PortConfig {
        gids: GidPolicy::Only(vec![GidPrefix::new(B, 127).unwrap()]),
        ..Default::default()
    };
    let named = server.port_with([2; 16], "named".into(), named).unwrap();
    let stranger = port(&server, 3);
    let [v, n, s] = [&victim, &named, &stranger].map(Guest::start);
    // A name that nobody has, until somebody takes it whose operator has not named it.
    let (pv, ps) = (v.pair(QPT_RC), s.pair(QPT_RC));
    v.connect_to(&pv, (B, ps.number), 7, 0).unwrap();
    stranger.add_gid(0, B).unwrap();
    s.connect_to(&ps, ([1; 16], pv.number), 7, 0).unwrap();
    let lost = [Some((1, u32::from(WC_STATUS_RETRY_EXC_ERR))), None];
    assert_eq!(send((&v, &pv), (&s, &ps)), lost);
    let (pv, ps) = (v.pair(QPT_RC), s.pair(QPT_RC));
    stranger.remove_gid(0).unwrap();
    v.connect_to(&pv, (B, ps.number), 7, 0).unwrap();
    stranger.add_gid(0, B).unwrap();
    s.connect_to(&ps, ([1; 16], pv.number), 7, 0).unwrap();
    assert_eq!(send((&s, &ps), (&v, &pv)), lost);
    // Nor is it one where something else of the connection is changed.
    let (pv, ps) = (v.pair(QPT_RC), s.pair(QPT_RC));
    stranger.remove_gid(0).unwrap();
    v.connect_to(&pv, (B, ps.number), 7, 0).unwrap();
    stranger.add_gid(0, B).unwrap();
    s.connect_to(&ps, ([1; 16], pv.number), 7, 0).unwrap();
    change(&v, &pv);
    assert_eq!(send((&s, &ps), (&v, &pv)), lost);
    let connect = |gid| v.connect_to(&v.pair(QPT_RC), (gid, n.pair(QPT_RC).number), 7, 0);
    assert_eq!(connect(B), Err(Errno::EACCES));
    assert_eq!(connect([3; 16]), Err(Errno::EACCES));
    stranger.remove_gid(0).unwrap();
    named.add_gid(0, B).unwrap();
    assert_eq!(connect(B), Ok(()));
    assert_eq!(connect([2; 16]), Ok(()));
    assert_eq!(connect([3; 16]), Err(Errno::EACCES));
    // Its own it may always connect to.
    assert_eq!(connect([1; 16]), Ok(()));
}
