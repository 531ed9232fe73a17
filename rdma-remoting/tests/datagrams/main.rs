//! Semantics of datagrams in the software engine (IBTA 9.8.3): what nobody takes is lost, the
//! sender does not know, and nothing that a stranger sends ends a receiver.

#![allow(clippy::unwrap_used)]

mod groups;
#[path = "../reliable_connection/rig.rs"]
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
        source: None,
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
    // With a header its type is in place of the service level, which its address has else.
    for (wr_id, port, header) in [
        (1, at(2), Some(0b1001)),
        (2, Recipients::Port(Destination::Lid(lid(2))), None),
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
        assert_eq!(
            wc.vendor_err.get(),
            u32::from(lid(1)) | header.unwrap_or(3) << 16
        );
        let grh = header.map_or(0, |_| WC_FLAG_GRH);
        assert_eq!(wc.flags.get(), WC_FLAG_IMM | grh);
        let got = [(0, 10), (1000, 50), (5000, 4076)];
        let got: Vec<u8> = got
            .iter()
            .flat_map(|&(offset, length)| p.b.contents(offset, length))
            .collect();
        assert!(got[40..] == bytes[3..3 + 4096]);
        if header.is_some() {
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
