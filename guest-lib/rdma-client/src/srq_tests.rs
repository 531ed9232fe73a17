//! Shared receive queues against a backend that the test plays.

use crate::arena::Part;
use crate::loopback::{Rig, agreeable, read};
use crate::{
    Cq, Errno, Payload, Pd, Qp, QpAttr, QpCaps, QpInit, RecvRequest, SendList, SendRequest,
    SendTail, Sge, Srq, Xrcd,
};
use farlane_abi::arena::{BACKEND_SLEEPING, OFF_RUNG, OFF_RUNG_SUMMARY};
use farlane_abi::queue::{
    OP_FETCH_ADD, OP_LOCAL_INVALIDATE, OP_SEND, QP_OFF_BACKEND_STATE, QP_OFF_ENTRIES,
    QP_OFF_RECV_CONSUMED, QP_OFF_RECV_PRODUCED, RecvEntry, SEND_TAIL, SendEntry,
};
use farlane_abi::rdma::{MAX_QPS, QP_STATE, QPS_INIT, QPS_RTS, QPT_XRC_SEND};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The last call that the backend knows: with it domains.
const KNOWN: u32 = 40;

fn shared(rig: &Rig, requests: u32) -> (Arc<Pd>, Arc<Srq>) {
    rig.context.negotiate().unwrap();
    let pd = Pd::allocate(&rig.context).unwrap();
    let srq = Srq::create(&pd, requests, 2).unwrap();
    (pd, srq)
}

fn word(part: &Part, offset: usize) -> u32 {
    part.word(offset).load(Ordering::SeqCst)
}

#[test]
fn an_old_backend_is_not_asked_for_one() {
    let rig = Rig::of_version(16, 0);
    rig.context.negotiate().unwrap();
    let pd = Pd::allocate(&rig.context).unwrap();
    let error = Srq::create(&pd, 4, 1).unwrap_err();
    assert_eq!(error.errno(), Errno::EOPNOTSUPP);
}

#[test]
fn sizes_beyond_the_limits_are_refused() {
    let rig = Rig::of_version(KNOWN, 2);
    let (pd, _) = shared(&rig, 4);
    for (requests, elements) in [(u32::MAX, 1), (1 << 15, 1), (1, 17), (1, u32::MAX)] {
        let error = Srq::create(&pd, requests, elements).unwrap_err();
        assert_eq!(error.errno(), Errno::EINVAL);
    }
}

#[test]
fn requests_lie_where_the_backend_takes_them_and_ring_where_it_wants_it() {
    let rig = Rig::of_version(KNOWN, 2);
    let (_, srq) = shared(&rig, 3);
    assert_eq!((srq.requests(), srq.elements()), (4, 2));
    let part = srq.part();
    let header = rig.transport.segment(0);
    let rung = |at: usize| header.word(at).load(Ordering::SeqCst);
    // Handle 1: the first behind those of queue pairs.
    let at = OFF_RUNG + (MAX_QPS / 8) as usize;
    let sge = Sge {
        addr: 0x1000.into(),
        length: 64.into(),
        lkey: 5.into(),
    };
    for (wr_id, scatter) in [(7, &[sge, sge][..]), (8, &[])] {
        srq.post_recv(&RecvRequest { wr_id, scatter }).unwrap();
    }
    assert_eq!(word(part, QP_OFF_RECV_PRODUCED), 2);
    assert_eq!(
        (rung(at), rung(OFF_RUNG_SUMMARY + 16)),
        (0, 0),
        "nobody waits"
    );
    let entry = |index: usize| -> RecvEntry { read(part, QP_OFF_ENTRIES + index * 64) };
    let entries = [entry(0), entry(1)].map(|entry| (entry.wr_id.get(), entry.num_sge.get()));
    assert_eq!(entries, [(7, 2), (8, 0)]);
    let second = QP_OFF_ENTRIES + size_of::<RecvEntry>() + size_of::<Sge>();
    assert_eq!(read::<Sge>(part, second), sge);

    let state = part.word(QP_OFF_BACKEND_STATE);
    state.store(BACKEND_SLEEPING, Ordering::SeqCst);
    let request = RecvRequest {
        wr_id: 9,
        scatter: &[],
    };
    srq.post_recv(&request).unwrap();
    assert_eq!((rung(at), rung(OFF_RUNG_SUMMARY + 16)), (1, 1));
    // It has room for four; what is given back can be written again.
    let long = RecvRequest {
        wr_id: 0,
        scatter: &[sge; 3],
    };
    assert_eq!(srq.post_recv(&long), Err(Errno::EINVAL));
    srq.post_recv(&request).unwrap();
    assert_eq!(srq.post_recv(&request), Err(Errno::ENOMEM));
    part.word(QP_OFF_RECV_CONSUMED).store(1, Ordering::SeqCst);
    srq.post_recv(&request).unwrap();
    assert_eq!(entry(0).wr_id.get(), 9);
    rig.transport.die();
    assert_eq!(srq.post_recv(&request), Err(Errno::ENODEV));
}

#[test]
fn a_queue_pair_with_one_has_no_receive_queue() {
    let rig = Rig::of_version(KNOWN, 2);
    let (pd, srq) = shared(&rig, 3);
    let cq = Cq::create(&rig.context, 5, None).unwrap();
    let caps = QpCaps {
        send_wr: 4,
        send_sge: 1,
        recv_wr: 1000,
        recv_sge: u32::MAX,
        ..QpCaps::default()
    };
    let init = QpInit {
        srq: Some(&srq),
        ..QpInit::reliable(&cq, caps)
    };
    let qp = Qp::create(&pd, &init).unwrap();
    assert_eq!((qp.caps().recv_wr, qp.caps().recv_sge), (0, 0));
    let attributes = QpAttr {
        qp_state: QPS_INIT,
        ..QpAttr::default()
    };
    qp.modify(&attributes, QP_STATE).unwrap();
    let request = RecvRequest {
        wr_id: 1,
        scatter: &[],
    };
    assert_eq!(qp.post_recv(&request), Err(Errno::EINVAL));
}

/// Through the states that the process knows of.
fn make_ready(qp: &Qp) {
    for qp_state in [QPS_INIT, QPS_RTS] {
        let attributes = QpAttr {
            qp_state,
            ..QpAttr::default()
        };
        qp.modify(&attributes, QP_STATE).unwrap();
    }
}

#[test]
fn each_request_of_an_initiator_says_which_queue_it_goes_to() {
    let rig = Rig::of_version(KNOWN, 2);
    let (pd, _) = shared(&rig, 3);
    let cq = Cq::create(&rig.context, 5, None).unwrap();
    let caps = QpCaps {
        send_wr: 4,
        send_sge: 1,
        recv_wr: 7,
        ..QpCaps::default()
    };
    let init = QpInit {
        qp_type: QPT_XRC_SEND,
        ..QpInit::reliable(&cq, caps)
    };
    let qp = Qp::create(&pd, &init).unwrap();
    assert_eq!((qp.caps().send_wr, qp.caps().recv_wr), (4, 0));
    make_ready(&qp);
    let request = |opcode| SendRequest {
        wr_id: 1,
        opcode,
        flags: 0,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        payload: Payload::Gather(&[]),
    };
    let add = SendTail {
        a: 5.into(),
        b: 0.into(),
    };
    {
        let mut queue = qp.send_queue().unwrap();
        assert!(queue.names_queues());
        queue.push_to(77, &request(OP_SEND), None).unwrap();
        queue
            .push_to(78, &request(OP_FETCH_ADD), Some(&add))
            .unwrap();
    }
    let mut list = SendList::default();
    list.add(request(OP_SEND));
    list.name(79);
    list.add(request(OP_LOCAL_INVALIDATE));
    list.post(&qp).unwrap();
    let head = |index: usize| -> (usize, SendEntry) {
        let at = QP_OFF_ENTRIES + index * qp.layout().send_stride;
        (at, read(qp.map(), at))
    };
    let entry = |index: usize| {
        let (at, entry) = head(index);
        assert_eq!(entry.flags, SEND_TAIL);
        let tail: SendTail = read(qp.map(), at + size_of::<SendEntry>());
        (entry.inline_bytes.get(), tail.a.get())
    };
    // Where an operation has operands of its own, the number lies in the head.
    assert_eq!([entry(0), entry(1), entry(2)], [(0, 77), (78, 5), (0, 79)]);
    // What is no message goes to none.
    let (_, local) = head(3);
    assert_eq!((local.opcode, local.flags), (OP_LOCAL_INVALIDATE, 0));
    let refused = qp.post_recv(&RecvRequest {
        wr_id: 1,
        scatter: &[],
    });
    assert_eq!(refused, Err(Errno::EINVAL));
}

#[test]
fn a_target_has_no_queues() {
    let rig = Rig::of_version(KNOWN, 2);
    let (pd, _) = shared(&rig, 3);
    let xrcd = Xrcd::open(&rig.context).unwrap();
    let cq = Cq::create(&rig.context, 5, None).unwrap();
    let srq = Srq::create_in(&xrcd, &cq, &pd, 3, 1).unwrap();
    assert_eq!(srq.requests(), 4);
    let qp = Qp::create_target(&xrcd).unwrap();
    assert_eq!((qp.caps().send_wr, qp.caps().recv_wr), (0, 0));
    make_ready(&qp);
    assert_eq!(qp.send_queue().map(drop), Err(Errno::EINVAL));
    assert_eq!(qp.recv_queue().map(drop), Err(Errno::EINVAL));
}

#[test]
fn an_old_backend_has_no_domains() {
    let rig = Rig::of_version(16, 0);
    rig.context.negotiate().unwrap();
    let error = Xrcd::open(&rig.context).unwrap_err();
    assert_eq!(error.errno(), Errno::EOPNOTSUPP);
}

#[test]
fn requests_of_a_queue_that_was_resized_lie_elsewhere() {
    // Three were posted before each resize.
    let mut first = 0_u32;
    let answer = move |number, _: &[u8]| match number {
        35 => {
            first += 3;
            Ok(first.to_le_bytes().to_vec())
        }
        17 => Ok(3_u32.to_le_bytes().to_vec()),
        _ => Ok(agreeable(number)),
    };
    let rig = Rig::new(false, Box::new(answer));
    let (_, srq) = shared(&rig, 4);
    let post = |wr_id| {
        let scatter = &[];
        srq.post_recv(&RecvRequest { wr_id, scatter })
    };
    (0..3).for_each(|wr_id| post(wr_id).unwrap());
    for (requests, room) in [(0, None), (u32::MAX, None), (5, Some(8))] {
        let resized = srq.resize(requests);
        assert_eq!(resized.is_ok(), room.is_some());
        assert_eq!(srq.requests(), room.unwrap_or(4));
    }
    // Room for eight, of which three wait where they did.
    (3..8).for_each(|wr_id| post(wr_id).unwrap());
    assert_eq!(post(8), Err(Errno::ENOMEM));
    assert_eq!(word(srq.part(), QP_OFF_RECV_PRODUCED), 8);
    let stride = 64;
    let entry = |part: &Part, at: usize| -> u64 {
        let entry: RecvEntry = read(part, at);
        entry.wr_id.get()
    };
    assert_eq!(entry(srq.part(), QP_OFF_ENTRIES + 2 * stride), 2);
    let moved = srq.moved(|moved| [3, 7].map(|at: usize| entry(&moved.part, at * stride)));
    assert_eq!(moved, Some([3, 7]));
    // What the backend has taken since is given back.
    srq.part()
        .word(QP_OFF_RECV_CONSUMED)
        .store(8, Ordering::SeqCst);
    assert_eq!(srq.resize(16).unwrap_err().errno(), Errno::EPROTO);
    assert_eq!(srq.requests(), 8);
}

#[test]
fn a_backend_that_has_no_such_call_is_not_asked_to_resize_one() {
    let rig = Rig::of_version(KNOWN, 2);
    let (_, srq) = shared(&rig, 4);
    let refused = srq.resize(8).map_err(|e| e.errno());
    assert_eq!((refused, srq.requests()), (Err(Errno::EOPNOTSUPP), 4));
}

#[test]
fn a_queue_that_is_resized_again_and_again_lies_in_few_places() {
    let mut resizes = 0;
    let answer = move |number, _: &[u8]| match number {
        35 => {
            resizes += 1;
            Ok(u32::from(resizes > 1).to_le_bytes().to_vec())
        }
        17 => Ok(3_u32.to_le_bytes().to_vec()),
        _ => Ok(agreeable(number)),
    };
    let rig = Rig::new(false, Box::new(answer));
    let (_, srq) = shared(&rig, 4);
    let request = RecvRequest {
        wr_id: 1,
        scatter: &[],
    };
    srq.resize(8).unwrap();
    // It waits all the time, where it was posted.
    srq.post_recv(&request).unwrap();
    let before = || srq.moved(|moved| moved.before.len());
    for _ in 0..100 {
        srq.resize(64).unwrap();
        assert_eq!(before(), Some(1));
    }
    srq.part()
        .word(QP_OFF_RECV_CONSUMED)
        .store(1, Ordering::SeqCst);
    srq.resize(64).unwrap();
    assert_eq!((before(), srq.requests()), (Some(0), 64));
}
