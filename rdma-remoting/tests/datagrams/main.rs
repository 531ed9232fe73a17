//! Semantics of datagrams in the software engine (IBTA 9.8.3): what nobody takes is lost, the
//! sender does not know, and nothing that a stranger sends ends a receiver.

#![allow(clippy::unwrap_used)]

#[path = "reliable_connection/rig.rs"]
#[allow(dead_code, reason = "connections have more to them")]
mod rig;

use farlane_abi::Errno;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::address::{
    AddressVector, AhHandle, Datagram, Destination, GroupGid, QpNumber, Recipients,
};
use farlane_rdma_remoting::engine::soft::{SoftEngine, SoftSrq};
use farlane_rdma_remoting::engine::{Budget, LOOK_COST, OPERATION_COST, Receives, Turn};
use farlane_rdma_remoting::local::{LocalCompletionQueue, LocalQueue};
use farlane_rdma_remoting::memory::PdHandle;
use farlane_rdma_remoting::request::{Element, MemoryKey, Opcode, SendWqe, Target};
use farlane_rdma_remoting::shared_receive_queue::SharedReceives;
use rig::*;
use std::time::Instant;

const DATAGRAMS: Setup = Setup {
    kind: QPT_UD,
    ..NORMAL
};
const QKEY: u32 = 0x1234;
/// Bytes before the data.
const HEADER: u32 = GRH_BYTES;

/// Makes an end ready to send and to receive.
fn ready(end: &End, qkey: u32) {
    let attr = |state| QpAttr {
        qp_state: state,
        port_num: 1,
        qkey: qkey.into(),
        ..Default::default()
    };
    end.qp.modify(UD_TO_INIT, &attr(QPS_INIT)).unwrap();
    end.qp.modify(UD_TO_RTR, &attr(QPS_RTR)).unwrap();
    end.qp.modify(UD_TO_RTS, &attr(QPS_RTS)).unwrap();
}

fn datagrams() -> Pair {
    let engine = SoftEngine::new();
    let (a, b) = (end(&engine, 1, &DATAGRAMS), end(&engine, 2, &DATAGRAMS));
    ready(&a, QKEY);
    ready(&b, QKEY);
    Pair {
        a,
        b,
        now: Instant::now(),
    }
}

fn address(to: Recipients) -> AddressVector {
    AddressVector {
        to,
        sl: 3,
        flow_label: 0,
        traffic_class: 0,
        hop_limit: 1,
    }
}

fn at(gid: u8) -> Recipients {
    Recipients::Port(Destination::Gid([gid; 16]))
}

/// A request for a datagram to that queue pair.
fn to(mut request: SendWqe, to: Recipients, number: QpNumber, qkey: u32) -> SendWqe {
    request.target = Target::Datagram(Datagram {
        handle: AhHandle::default(),
        address: address(to),
        number,
        qkey,
    });
    request
}

impl Pair {
    /// The first end sends so many bytes to the second.
    fn send(&mut self, wr_id: u64, length: u32) {
        self.send_by(wr_id, length, at(2), self.b.qp.number(), QKEY);
    }

    fn send_by(&mut self, wr_id: u64, length: u32, port: Recipients, number: QpNumber, qkey: u32) {
        let elements = [self.a.element(0, length)];
        let request = self.a.request(Opcode::Send, wr_id, &elements);
        self.a.sends.post(to(request, port, number, qkey));
        self.run();
    }

    /// What the first end has sent last is lost, and the second one can receive.
    #[track_caller]
    fn was_lost(&self, wr_id: u64) {
        assert_eq!(self.a.next(), Some((wr_id, WC_STATUS_SUCCESS)));
        assert_eq!(self.b.next(), None);
        assert!(self.b.events.lock().unwrap().is_empty());
        assert_eq!(self.b.state(), QPS_RTS);
    }

    /// A datagram from the first end to the second arrives.
    #[track_caller]
    fn arrives(&mut self) {
        self.b.post_recv(70, &[self.b.element(1 << 20, 100)]);
        let bytes = self.a.fill(9);
        self.send(71, 60);
        assert_eq!(self.a.next(), Some((71, WC_STATUS_SUCCESS)));
        assert_eq!(self.b.next(), Some((70, WC_STATUS_SUCCESS)));
        assert_eq!(self.b.contents((1 << 20) + 40, 60), bytes[..60]);
    }
}

#[test]
fn a_datagram_arrives_behind_its_header_and_says_whence_it_came() {
    let mut p = datagrams();
    let bytes = p.a.fill(1);
    for (wr_id, port, has_header) in [
        (1, at(2), true),
        (2, Recipients::Port(Destination::Lid(lid(2))), false),
    ] {
        let before = p.b.fill(7);
        // In pieces, so that the header is not in one of its own.
        let pieces = [(0, 10), (1000, 50), (5000, 4076)];
        let pieces = pieces.map(|(offset, length)| p.b.element(offset, length));
        p.b.post_recv(wr_id, &pieces);
        let mut request =
            p.a.request(Opcode::SendImm, wr_id, &[p.a.element(3, MAX_DATAGRAM)]);
        (request.immediate, request.solicited) = (77, true);
        p.a.sends.post(to(request, port, p.b.qp.number(), QKEY));
        p.run();
        assert_eq!(p.a.next(), Some((wr_id, WC_STATUS_SUCCESS)));
        let wc = p.b.cq.poll().unwrap();
        assert_eq!((wc.wr_id.get(), wc.status), (wr_id, WC_STATUS_SUCCESS));
        assert_eq!((wc.opcode, wc.imm.get()), (WC_OPCODE_RECV, 77));
        assert_eq!(wc.byte_len.get(), HEADER + MAX_DATAGRAM);
        assert_eq!(wc.src_qp.get(), p.a.qp.number().get());
        assert_eq!(wc.vendor_err.get(), u32::from(lid(1)) | 3 << 16);
        let grh = if has_header { WC_FLAG_GRH } else { 0 };
        assert_eq!(wc.flags.get(), WC_FLAG_IMM | grh);
        let got = [(0, 10), (1000, 50), (5000, 4076)];
        let got: Vec<u8> = got
            .iter()
            .flat_map(|&(offset, length)| p.b.contents(offset, length))
            .collect();
        assert!(got[40..] == bytes[3..3 + 4096]);
        if has_header {
            assert_eq!((&got[8..24], &got[24..40]), (&[1; 16][..], &[2; 16][..]));
        } else {
            assert_eq!(
                (&got[..10], &got[10..40]),
                (&before[..10], &before[1000..1030])
            );
        }
    }
}

/// Data of the longest datagram.
const MAX_DATAGRAM: u32 = 4096;

#[test]
fn what_is_not_taken_is_lost_and_the_receiver_goes_on() {
    let mut p = datagrams();
    let number = p.b.qp.number();
    p.send(1, 8);
    p.was_lost(1); // no receive request
    p.b.post_recv(50, &[p.b.element(0, 40 + 7)]);
    p.send(2, 8);
    p.was_lost(2); // too short for it, with its header
    p.send_by(3, 4, at(2), number, QKEY + 1);
    p.was_lost(3); // another Q_Key
    p.send_by(4, 4, at(3), number, QKEY);
    p.was_lost(4); // no such port
    p.send_by(5, 4, at(2), QpNumber::of(number.get() ^ 1), QKEY);
    p.was_lost(5); // no such queue pair
    p.send_by(6, MAX_DATAGRAM + 1, at(2), number, QKEY);
    p.was_lost(6); // longer than the MTU
    p.b.qp.pause(true);
    p.send(7, 4);
    p.b.qp.pause(false);
    p.was_lost(7);
    // The request is there for the next one.
    p.send(8, 7);
    assert_eq!(p.a.next(), Some((8, WC_STATUS_SUCCESS)));
    assert_eq!(p.b.next(), Some((50, WC_STATUS_SUCCESS)));
    assert_eq!(p.a.state(), QPS_RTS);
    p.arrives();
}

#[test]
fn a_receiver_that_is_not_ready_gets_nothing() {
    let mut p = datagrams();
    let number = p.b.qp.number();
    p.b.post_recv(50, &[p.b.element(0, 100)]);
    let reset = QpAttr {
        qp_state: QPS_RESET,
        ..Default::default()
    };
    p.b.qp.modify(QP_STATE, &reset).unwrap();
    p.send(1, 4);
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    p.b.post_recv(51, &[p.b.element(0, 100)]);
    p.b.qp.destroy();
    p.send_by(2, 4, at(2), number, QKEY);
    assert_eq!(p.a.next(), Some((2, WC_STATUS_SUCCESS)));
    assert_eq!(p.b.next(), None);
}

#[test]
fn the_highest_bit_of_a_key_stands_for_the_senders_own() {
    let mut p = datagrams();
    let number = p.b.qp.number();
    p.b.post_recv(50, &[p.b.element(0, 100)]);
    p.send_by(1, 4, at(2), number, 1 << 31);
    assert_eq!(p.b.next(), Some((50, WC_STATUS_SUCCESS)));
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    // A receiver's key that has the bit is nobody's but who has it, too.
    let attr = QpAttr {
        qkey: (1 << 31 | QKEY).into(),
        ..Default::default()
    };
    p.b.qp.modify(QP_QKEY, &attr).unwrap();
    p.b.post_recv(51, &[p.b.element(0, 100)]);
    p.send_by(2, 4, at(2), number, 1 << 31 | QKEY);
    p.was_lost(2);
}

#[test]
fn an_error_of_the_senders_own_ends_its_sending_alone() {
    for (opcode, element) in [
        (Opcode::Send, true),
        (Opcode::Write, false),
        (Opcode::Read, false),
        (Opcode::AtomicWrite, false),
    ] {
        let mut p = datagrams();
        p.b.post_recv(50, &[p.b.element(0, 100)]);
        let status = if element {
            WC_STATUS_LOC_PROT_ERR
        } else {
            WC_STATUS_LOC_QP_OP_ERR
        };
        let elements = [Element {
            address: 0,
            length: 4,
            lkey: MemoryKey(p.a.key.0 ^ 1),
        }];
        let elements: &[Element] = if element { &elements } else { &[] };
        let request = p.a.request(opcode, 1, elements);
        p.a.sends.post(to(request, at(2), p.b.qp.number(), QKEY));
        p.send(2, 4);
        assert_eq!(p.a.next(), Some((1, status)), "{opcode:?}");
        assert_eq!(p.a.next(), Some((2, WC_STATUS_WR_FLUSH_ERR)));
        assert_eq!((p.a.state(), p.b.next()), (QPS_SQE, None));
        // It can be taken back.
        let attr = QpAttr {
            qp_state: QPS_RTS,
            ..Default::default()
        };
        p.a.qp.modify(QP_STATE, &attr).unwrap();
        p.send(3, 4);
        assert_eq!(p.a.next(), Some((3, WC_STATUS_SUCCESS)));
        assert_eq!(p.b.next(), Some((50, WC_STATUS_SUCCESS)));
    }
}

#[test]
fn a_request_without_an_address_is_the_senders_error() {
    let p = datagrams();
    p.a.post_send(1, &[]);
    let mut p = p;
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_LOC_QP_OP_ERR)));
    // And one with an address is that of a connection.
    let mut p = pair(NORMAL);
    let request = p.a.request(Opcode::Send, 1, &[]);
    p.a.sends.post(to(request, at(2), p.b.qp.number(), QKEY));
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_LOC_QP_OP_ERR)));
}

#[test]
fn memory_that_a_receiver_may_not_write_is_its_own_error() {
    let mut p = datagrams();
    let bad = Element {
        lkey: MemoryKey(p.b.key.0 ^ 1),
        ..p.b.element(0, 100)
    };
    p.b.post_recv(50, &[bad]);
    p.send(1, 4);
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    assert_eq!(p.b.next(), Some((50, WC_STATUS_LOC_PROT_ERR)));
    assert_eq!((p.a.state(), p.b.state()), (QPS_RTS, QPS_ERR));
}

/// What it has posted behind the datagram that has ended it is not sent (IBTA 10.3.1, Error state).
#[test]
fn who_ends_itself_sends_nothing_more() {
    let mut p = datagrams();
    let bad = Element {
        lkey: MemoryKey(p.a.key.0 ^ 1),
        ..p.a.element(0, 100)
    };
    p.a.post_recv(50, &[bad]);
    p.b.post_recv(51, &[p.b.element(0, 100)]);
    for (wr_id, port, number) in [(1, at(1), p.a.qp.number()), (2, at(2), p.b.qp.number())] {
        let request = p.a.request(Opcode::Send, wr_id, &[]);
        p.a.sends.post(to(request, port, number, QKEY));
    }
    p.run();
    assert_eq!(p.a.next(), Some((50, WC_STATUS_LOC_PROT_ERR)));
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    assert_eq!(p.a.next(), Some((2, WC_STATUS_WR_FLUSH_ERR)));
    assert_eq!((p.a.state(), p.b.next()), (QPS_ERR, None));
}

#[test]
fn a_completion_queue_without_room_is_the_receivers_own_error() {
    let engine = SoftEngine::new();
    let a = end(&engine, 1, &DATAGRAMS);
    let b = end_with(&engine, 2, &DATAGRAMS, LocalCompletionQueue::new(1));
    ready(&a, QKEY);
    ready(&b, QKEY);
    let now = Instant::now();
    let mut p = Pair { a, b, now };
    for wr_id in [50, 51] {
        p.b.post_recv(wr_id, &[p.b.element(0, 100)]);
        p.send(wr_id, 4);
        assert_eq!(p.a.next(), Some((wr_id, WC_STATUS_SUCCESS)));
    }
    assert_eq!((p.a.state(), p.b.state()), (QPS_RTS, QPS_ERR));
    assert_eq!(*p.b.events.lock().unwrap(), [EVENT_QP_FATAL]);
}

#[test]
fn a_flood_costs_its_sender_and_leaves_the_receiver_ready() {
    let mut p = datagrams();
    for wr_id in 0..2000 {
        p.send(wr_id, 1000);
        p.was_lost(wr_id);
    }
    // In a turn of so much no more is sent than that.
    let number = p.b.qp.number();
    for wr_id in 0..50 {
        let request = p.a.request(Opcode::Send, wr_id, &[p.a.element(0, 4096)]);
        p.a.sends.post(to(request, at(2), number, QKEY));
    }
    let turn = Turn {
        budget: Budget::UNBOUNDED.within(10 * 4096, u64::MAX),
        ..Turn::from(p.now)
    };
    let used = p.a.qp.progress(turn).used;
    assert_eq!((used.bytes, used.operations), (10 * 4096, 10));
    p.run();
    while p.a.next().is_some() {}
    p.arrives();
}

#[test]
fn a_datagram_may_be_for_its_sender() {
    let mut p = datagrams();
    let number = p.a.qp.number();
    p.a.post_recv(50, &[p.a.element(1000, 100)]);
    p.send_by(1, 4, at(1), number, QKEY);
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    assert_eq!(p.a.next(), Some((50, WC_STATUS_SUCCESS)));
}

#[test]
fn a_shared_request_that_is_too_short_ends_with_a_length_error_of_its_own() {
    let engine = SoftEngine::new();
    let queue = LocalQueue::default();
    let shared = SharedReceives::new(Box::new(queue.clone()), PdHandle(1), Box::new(|_| ()));
    let b = end_receiving(
        &engine,
        2,
        &DATAGRAMS,
        LocalCompletionQueue::new(64),
        queue,
        Receives::Shared(SoftSrq::of(&shared)),
    );
    let mut p = Pair {
        a: end(&engine, 1, &DATAGRAMS),
        b,
        now: Instant::now(),
    };
    ready(&p.a, QKEY);
    ready(&p.b, QKEY);
    p.send(1, 8);
    p.was_lost(1);
    // Others could have had it; nobody but the receiver learns of it.
    p.b.post_recv(50, &[p.b.element(0, HEADER + 7)]);
    p.send(2, 8);
    assert_eq!(p.b.next(), Some((50, WC_STATUS_LOC_LEN_ERR)));
    p.was_lost(2);
    p.arrives();
}

fn group(last: u8) -> GroupGid {
    let mut gid = [0; 16];
    (gid[0], gid[15]) = (0xff, last);
    GroupGid::new(gid).unwrap()
}

/// Number by which a group's members are named.
const ALL_MEMBERS: QpNumber = QpNumber::of(MULTICAST_QPN);

#[test]
fn all_members_of_a_group_get_a_copy_once_each() {
    let engine = SoftEngine::new();
    let ends: Vec<End> = (1..=5).map(|gid| end(&engine, gid, &DATAGRAMS)).collect();
    for end in &ends {
        ready(end, QKEY);
        end.post_recv(50, &[end.element(0, 200)]);
        end.post_recv(51, &[end.element(0, 200)]);
    }
    // The sender, too; the last one is in another group, the one before has another key.
    for member in [0, 1, 2, 3] {
        ends[member].qp.attach(group(1)).unwrap();
        ends[member].qp.attach(group(1)).unwrap();
    }
    ends[4].qp.attach(group(2)).unwrap();
    let attr = QpAttr {
        qkey: 9.into(),
        ..Default::default()
    };
    ends[3].qp.modify(QP_QKEY, &attr).unwrap();
    let now = Instant::now();
    let post = |wr_id, number| {
        let request = ends[0].request(Opcode::Send, wr_id, &[ends[0].element(1000, 60)]);
        ends[0]
            .sends
            .post(to(request, Recipients::Group(group(1)), number, QKEY));
    };
    post(1, ALL_MEMBERS);
    // A turn goes on with the next member where the one before has ended.
    let turn = Turn {
        budget: Budget::UNBOUNDED.within(u64::MAX, 1),
        ..Turn::from(now)
    };
    let mut turns = 0;
    while ends[0].qp.progress(turn).worked {
        turns += 1;
    }
    assert!((3..=5).contains(&turns), "{turns}");
    assert_eq!(ends[0].next(), Some((50, WC_STATUS_SUCCESS)));
    assert_eq!(ends[0].next(), Some((1, WC_STATUS_SUCCESS)));
    for (index, end) in ends.iter().enumerate().skip(1) {
        let got = (index < 3).then_some((50, WC_STATUS_SUCCESS));
        assert_eq!(end.next(), got, "{index}");
        assert_eq!(end.next(), None);
    }
    let header = ends[1].contents(0, 40);
    assert_eq!(
        (&header[8..24], &header[24..]),
        (&[1; 16][..], &group(1).raw()[..])
    );
    // Only by their common number.
    post(2, ends[1].qp.number());
    while ends[0].qp.progress(now.into()).worked {}
    assert_eq!(ends[0].next(), Some((2, WC_STATUS_SUCCESS)));
    assert_eq!(ends[1].next(), None);
    // Who has left gets none.
    ends[1].qp.detach(group(1)).unwrap();
    assert_eq!(ends[1].qp.detach(group(1)), Err(Errno::EINVAL));
    ends[2].qp.destroy();
    post(3, ALL_MEMBERS);
    while ends[0].qp.progress(now.into()).worked {}
    assert_eq!(ends[0].next(), Some((51, WC_STATUS_SUCCESS)));
    assert_eq!(ends[0].next(), Some((3, WC_STATUS_SUCCESS)));
    assert_eq!((ends[1].next(), ends[2].next()), (None, None));
}

/// A sender and the members of a group, each with room for several datagrams.
fn sender_and_members(members: u8) -> (SoftEngine, End, Vec<End>) {
    let engine = SoftEngine::new();
    let sender = end(&engine, 1, &DATAGRAMS);
    ready(&sender, QKEY);
    let members: Vec<End> = (0..members).map(|_| end(&engine, 2, &DATAGRAMS)).collect();
    for member in &members {
        join(member);
    }
    (engine, sender, members)
}

/// Has it receive what is sent to the first group.
fn join(member: &End) {
    ready(member, QKEY);
    for wr_id in 0..4 {
        member.post_recv(wr_id, &[member.element(0, 200)]);
    }
    member.qp.attach(group(1)).unwrap();
}

fn post_to_group(sender: &End, wr_id: u64, length: u32) {
    let request = sender.request(Opcode::Send, wr_id, &[sender.element(1000, length)]);
    let group = Recipients::Group(group(1));
    sender.sends.post(to(request, group, ALL_MEMBERS, QKEY));
}

/// A turn in which at most so many operations begin.
fn turn_of(operations: u64) -> Turn {
    Turn {
        budget: Budget::UNBOUNDED.within(u64::MAX, operations),
        ..Turn::from(Instant::now())
    }
}

/// How many datagrams each has got since this was last asked.
fn got(members: &[End]) -> Vec<usize> {
    let count = |member: &End| std::iter::from_fn(|| member.next()).count();
    members.iter().map(count).collect()
}

#[test]
fn what_is_sent_to_a_group_stops_where_no_operation_is_left() {
    for length in [60, 0] {
        let (_engine, sender, members) = sender_and_members(4);
        post_to_group(&sender, 1, length);
        assert_eq!(sender.qp.progress(turn_of(2)).used.operations, 2);
        for budget in [
            Budget::NO_OPERATION,
            Budget::UNBOUNDED.within(u64::MAX, 0),
            Budget::new(0),
        ] {
            let turn = Turn {
                budget,
                ..turn_of(0)
            };
            let stopped = sender.qp.progress(turn);
            assert!(stopped.more && !stopped.worked, "{stopped:?}");
            assert_eq!((stopped.used.operations, stopped.used.bytes), (0, 0));
        }
        assert_eq!(got(&members), [1, 1, 0, 0]);
        assert_eq!(sender.next(), None);
        assert_eq!(sender.qp.progress(turn_of(9)).used.operations, 2);
        assert_eq!(got(&members), [0, 0, 1, 1]);
        assert_eq!(sender.next(), Some((1, WC_STATUS_SUCCESS)));
    }
}

#[test]
fn who_comes_and_goes_meanwhile_has_nobody_get_a_datagram_twice_or_never() {
    let (engine, sender, mut members) = sender_and_members(4);
    post_to_group(&sender, 1, 60);
    sender.qp.progress(turn_of(2));
    // The others are where they were, and who comes back is not the one that was there.
    let first = &members[0].qp;
    first.detach(group(1)).unwrap();
    first.attach(group(1)).unwrap();
    let late = end(&engine, 3, &DATAGRAMS);
    join(&late);
    members.push(late);
    sender.qp.progress(turn_of(9));
    assert_eq!(got(&members), [1, 1, 1, 1, 0]);
    assert_eq!(sender.next(), Some((1, WC_STATUS_SUCCESS)));
    // Who goes before its turn gets none.
    post_to_group(&sender, 2, 60);
    sender.qp.progress(turn_of(2));
    members[3].qp.detach(group(1)).unwrap();
    sender.qp.progress(turn_of(9));
    assert_eq!(got(&members), [1, 1, 1, 0, 1]);
    assert_eq!(sender.next(), Some((2, WC_STATUS_SUCCESS)));
}

/// Members that come and go in each turn do not keep a request from its end.
#[test]
fn what_is_sent_to_a_group_ends_however_often_its_members_come_back() {
    let (_engine, sender, members) = sender_and_members(2);
    post_to_group(&sender, 1, 60);
    for _ in 0..3 {
        sender.qp.progress(turn_of(1));
        for member in &members {
            member.qp.detach(group(1)).unwrap();
            member.qp.attach(group(1)).unwrap();
        }
    }
    assert_eq!(sender.next(), Some((1, WC_STATUS_SUCCESS)));
    assert_eq!(got(&members), [1, 0]);
}

#[test]
fn members_with_another_key_cost_the_sender_a_look_each() {
    let (_engine, sender, members) = sender_and_members(40);
    let other = QpAttr {
        qkey: 9.into(),
        ..Default::default()
    };
    for stranger in &members[..38] {
        stranger.qp.modify(QP_QKEY, &other).unwrap();
    }
    let all = || got(&members).iter().sum::<usize>();
    // The operation that the request is pays for the first copy, however late that comes.
    post_to_group(&sender, 1, 60);
    let used = sender.qp.progress(turn_of(1)).used;
    assert_eq!((used.operations, used.bytes, all()), (1, 60, 1));
    assert_eq!(used.cost, OPERATION_COST + 60 + 38 * LOOK_COST);
    let used = sender.qp.progress(turn_of(1)).used;
    assert_eq!((used.operations, used.bytes, all()), (1, 60, 1));
    assert_eq!(sender.next(), Some((1, WC_STATUS_SUCCESS)));
    // Looks are paid: a turn has as many as it can pay, and goes on.
    for length in [60, 0] {
        post_to_group(&sender, 2, length);
        let turn = Turn {
            budget: Budget::new(OPERATION_COST + 20 * LOOK_COST),
            ..turn_of(0)
        };
        let first = sender.qp.progress(turn);
        assert!(first.more && first.worked);
        assert_eq!((first.used.bytes, all()), (0, 0));
        assert_eq!(first.used.cost, OPERATION_COST + 20 * LOOK_COST);
        let rest = sender.qp.progress(Turn::from(Instant::now())).used;
        assert_eq!((rest.operations, rest.bytes), (1, 2 * u64::from(length)));
        assert_eq!(sender.next(), Some((2, WC_STATUS_SUCCESS)));
        assert_eq!(all(), 2);
    }
}

/// Who may do no more for now waits for that where somebody is to have a copy, and for nobody else.
#[test]
fn members_with_another_key_keep_no_sender_waiting_who_is_at_a_limit() {
    let other = QpAttr {
        qkey: 9.into(),
        ..Default::default()
    };
    let limits = [
        Budget::UNBOUNDED.within(u64::MAX, 1),
        Budget::UNBOUNDED.within(60, u64::MAX),
    ];
    for (length, budget) in [(60, limits[0]), (60, limits[1]), (0, limits[0])] {
        let (_engine, sender, members) = sender_and_members(40);
        for stranger in &members[1..39] {
            stranger.qp.modify(QP_QKEY, &other).unwrap();
        }
        members[39].qp.detach(group(1)).unwrap();
        post_to_group(&sender, 1, length);
        let turn = Turn {
            budget,
            ..turn_of(0)
        };
        assert_eq!(sender.qp.progress(turn).used.operations, 1);
        assert_eq!(sender.next(), Some((1, WC_STATUS_SUCCESS)));
        // The last one is to have it, and is met in a turn in which nobody can.
        members[39].qp.attach(group(1)).unwrap();
        post_to_group(&sender, 2, length);
        let first = sender.qp.progress(turn);
        assert_eq!((first.used.operations, sender.next()), (1, None));
        let limited = Turn {
            budget: Budget::NO_OPERATION,
            ..turn
        };
        assert!(!sender.qp.progress(limited).worked);
        assert_eq!(got(&members).iter().sum::<usize>(), 2);
        sender.qp.progress(turn);
        assert_eq!(sender.next(), Some((2, WC_STATUS_SUCCESS)));
        assert_eq!(got(&members)[39], 1);
    }
}

#[test]
fn a_port_fills_no_group_and_connections_are_in_none() {
    let engine = SoftEngine::new();
    let ends: Vec<End> = (0..65).map(|_| end(&engine, 1, &DATAGRAMS)).collect();
    for end in &ends[..64] {
        end.qp.attach(group(1)).unwrap();
        assert!(end.qp.is_attached());
    }
    assert_eq!(ends[64].qp.attach(group(1)), Err(Errno::ENOMEM));
    assert!(!ends[64].qp.is_attached());
    // Another port can, and so can the first one's place.
    let other = end(&engine, 2, &DATAGRAMS);
    other.qp.attach(group(1)).unwrap();
    ends[0].qp.destroy();
    ends[64].qp.attach(group(1)).unwrap();
    // A port has so many memberships of all groups.
    let outcomes = (0..=u16::MAX).map(|number| {
        let mut gid = [0xff; 16];
        gid[..2].copy_from_slice(&[0xff, 0xee]);
        gid[14..].copy_from_slice(&number.to_be_bytes());
        ends[1].qp.attach(GroupGid::new(gid).unwrap())
    });
    let attached = outcomes.take_while(Result::is_ok).count();
    assert_eq!(attached, 4096 - 64);
    other.qp.attach(group(3)).unwrap();
    let connection = end(&engine, 1, &NORMAL);
    assert_eq!(connection.qp.attach(group(1)), Err(Errno::EINVAL));
}
