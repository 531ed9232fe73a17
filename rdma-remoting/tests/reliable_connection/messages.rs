//! Messages that arrive, and what the two ends are told of them.

use crate::rig::*;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::engine::soft::SoftEngine;
use farlane_rdma_remoting::engine::{Budget, Turn};
use farlane_rdma_remoting::local::LocalCompletionQueue;
use farlane_rdma_remoting::request::{Element, MemoryKey, Opcode};
use std::sync::Arc;
use std::time::Instant;

#[test]
fn a_write_longer_than_a_turn_arrives_whole() {
    let mut p = pair(NORMAL);
    let bytes = p.a.fill(1);
    let length = 3 * (1 << 20) + 17;
    let request = p.a.request(Opcode::Write, 9, &[p.a.element(5, length)]);
    p.a.sends.post(remote(request, &p.b, 11));
    p.run();
    assert_eq!(p.a.next(), Some((9, WC_STATUS_SUCCESS)));
    let length = length as usize;
    assert!(p.b.contents(11, length) == bytes[5..5 + length]);
    assert_eq!(p.b.contents(0, 11), [0; 11]);
    assert_eq!(p.b.contents(11 + length as u64, 8), [0; 8]);
    assert_eq!(p.b.next(), None, "a plain write is not seen by the peer");
}

/// Others wait: however little it costs, no turn goes on behind its end.
#[test]
fn a_turn_ends_with_its_time() {
    let p = pair(NORMAL);
    let bytes = p.a.fill(1);
    let over = Turn {
        budget: Budget::UNBOUNDED,
        until: Some(p.now),
        ..p.now.into()
    };
    let write = |p: &Pair, id, length| {
        let request = p.a.request(Opcode::Write, id, &[p.a.element(0, length)]);
        p.a.sends.post(remote(request, &p.b, 0));
    };
    for id in 0..8 {
        write(&p, id, 8);
    }
    let mut arrived = 0;
    while arrived < 8 {
        assert!(p.a.qp.progress(over).worked);
        // One that had begun, and one more.
        let came = std::iter::from_fn(|| p.a.next()).count();
        assert!((1..=2).contains(&came), "{came} in a turn");
        arrived += came;
    }
    let length = 3 << 20;
    write(&p, 9, length);
    let mut turns = 0;
    while p.a.next().is_none() {
        let came = p.a.qp.progress(over);
        assert!(came.worked && came.used.bytes < (1 << 20), "{came:?}");
        turns += 1;
    }
    assert!(turns > 3, "{turns}");
    let length = length as usize;
    assert!(p.b.contents(0, length) == bytes[..length]);
}

#[test]
fn a_read_brings_the_peers_bytes() {
    let mut p = pair(NORMAL);
    let bytes = p.b.fill(2);
    let elements = [
        p.a.element(0, 100),
        p.a.element(1000, 0),
        p.a.element(500, 300),
    ];
    let request = p.a.request(Opcode::Read, 1, &elements);
    p.a.sends.post(remote(request, &p.b, 64));
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    assert!(p.a.contents(0, 100) == bytes[64..164]);
    assert!(p.a.contents(500, 300) == bytes[164..464]);
}

#[test]
fn a_send_fills_the_receive_request_and_says_so() {
    let mut p = pair(NORMAL);
    let bytes = p.a.fill(3);
    p.b.post_recv(70, &[p.b.element(0, 10), p.b.element(100, 1000)]);
    let mut request = p.a.request(Opcode::SendImm, 8, &[p.a.element(0, 300)]);
    request.immediate = 0xdead_beef;
    p.a.sends.post(request);
    p.run();
    let c = p.b.cq.poll().unwrap();
    assert_eq!((c.wr_id.get(), c.status, c.opcode), (70, 0, WC_OPCODE_RECV));
    assert_eq!((c.byte_len.get(), c.imm.get()), (300, 0xdead_beef));
    assert_eq!(c.flags.get(), WC_FLAG_IMM);
    assert_eq!(
        (c.qp_num.get(), c.src_qp.get()),
        (p.b.qp.number().get(), p.a.qp.number().get())
    );
    assert!(p.b.contents(0, 10) == bytes[..10] && p.b.contents(100, 290) == bytes[10..300]);
    assert_eq!(p.a.next(), Some((8, WC_STATUS_SUCCESS)));
}

/// So the completion of a request is there before any answer to it.
#[test]
fn a_sender_is_told_before_its_receiver() {
    let engine = SoftEngine::new();
    let cq = LocalCompletionQueue::new(8);
    let [a, b] = [1, 2].map(|gid| end_with(&engine, gid, &NORMAL, Arc::clone(&cq)));
    connect(&a, &b, 2, [100, 200], &NORMAL);
    connect(&b, &a, 1, [200, 100], &NORMAL);
    b.post_recv(1, &[b.element(0, 4)]);
    a.post_send(2, &[a.element(0, 4)]);
    a.qp.progress(Instant::now().into());
    let opcodes = std::iter::from_fn(|| cq.poll()).map(|completion| completion.opcode);
    assert_eq!(
        opcodes.collect::<Vec<_>>(),
        [WC_OPCODE_SEND, WC_OPCODE_RECV]
    );
}

#[test]
fn a_write_with_immediate_consumes_a_receive_request() {
    let mut p = pair(NORMAL);
    let bytes = p.a.fill(4);
    let mut request = p.a.request(Opcode::WriteImm, 1, &[p.a.element(0, 64)]);
    request.immediate = 5;
    p.a.sends.post(remote(request, &p.b, 0));
    p.run();
    assert_eq!(p.a.next(), None, "no receive request yet");
    p.b.post_recv(2, &[]);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    let c = p.b.cq.poll().unwrap();
    assert_eq!(
        (c.opcode, c.byte_len.get(), c.imm.get()),
        (WC_OPCODE_RECV_RDMA_WITH_IMM, 64, 5)
    );
    assert!(p.b.contents(0, 64) == bytes[..64]);
}

#[test]
fn inline_data_needs_no_memory_and_unsignalled_requests_are_silent() {
    let mut p = pair(NORMAL);
    let mut request = p.a.request(Opcode::Write, 1, &[]);
    request.signalled = false;
    request.set_inline(b"inline!").unwrap();
    p.a.sends.post(remote(request, &p.b, 3));
    p.run();
    assert_eq!(p.b.contents(3, 7), b"inline!");
    assert_eq!(p.a.next(), None);
}

#[test]
fn a_message_too_long_for_its_receive_request_breaks_the_connection() {
    let mut p = pair(NORMAL);
    p.b.post_recv(7, &[p.b.element(0, 9)]);
    p.b.post_recv(8, &[p.b.element(0, 9)]);
    p.a.post_send(1, &[p.a.element(0, 10)]);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_REM_INV_REQ_ERR)));
    assert_eq!(p.b.next(), Some((7, WC_STATUS_LOC_LEN_ERR)));
    assert_eq!(p.b.next(), Some((8, WC_STATUS_WR_FLUSH_ERR)));
    assert_eq!((p.a.state(), p.b.state()), (QPS_ERR, QPS_ERR));
    assert_eq!(*p.b.events.lock().unwrap(), [EVENT_QP_REQ_ERR]);
}

/// Also of an element that it reaches: what begins in a region may be longer than that.
#[test]
fn memory_that_a_message_does_not_reach_is_not_looked_at() {
    for (bytes, status) in [(16, WC_STATUS_SUCCESS), (17, WC_STATUS_LOC_PROT_ERR)] {
        let mut p = pair(NORMAL);
        p.a.fill(9);
        let end = BYTES - 16;
        let long = p.b.element(end, 64);
        let unknown = Element {
            lkey: MemoryKey(0),
            ..long
        };
        p.b.post_recv(1, &[long, unknown]);
        p.a.post_send(2, &[p.a.element(0, bytes)]);
        p.run();
        assert_eq!(p.b.next(), Some((1, status)), "{bytes}");
        let arrived = p.b.contents(end, 16) == p.a.contents(0, 16);
        assert_eq!(arrived, status == WC_STATUS_SUCCESS, "{bytes}");
    }
}
