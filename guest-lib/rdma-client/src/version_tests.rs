//! Which version a context has with backends of several, and what its queues then look like.

use crate::loopback::{Rig, read};
use crate::{
    Completion, Cq, CqInit, DeviceLimits, Errno, Mr, MrChange, Payload, Pd, Qp, QpAttr, QpCaps,
    QpInit, SendRequest, SendTail, Sge, TimedCompletion, VerbsVersion,
};
use farlane_abi::queue::{
    CQ_OFF_ENTRIES, CQ_OFF_PRODUCED, OP_FETCH_ADD, OP_RDMA_WRITE, OP_SEND, QP_OFF_ENTRIES,
    SEND_TAIL, SendEntry,
};
use farlane_abi::rdma::{QP_STATE, QPS_INIT, QPS_RTS};
use std::sync::atomic::Ordering;

const CAPS: QpCaps = QpCaps {
    send_wr: 4,
    send_sge: 1,
    inline_bytes: 0,
    recv_wr: 1,
    recv_sge: 1,
};

/// A queue pair that is ready to send, as far as the process knows.
fn ready(rig: &Rig) -> Qp {
    let pd = Pd::allocate(&rig.context).unwrap();
    let cq = Cq::create(&rig.context, 5, None).unwrap();
    let qp = Qp::create(&pd, &QpInit::reliable(&cq, CAPS)).unwrap();
    for qp_state in [QPS_INIT, QPS_RTS] {
        let attributes = QpAttr {
            qp_state,
            ..QpAttr::default()
        };
        qp.modify(&attributes, QP_STATE).unwrap();
    }
    qp
}

fn request(opcode: u8, payload: Payload<'_>) -> SendRequest<'_> {
    SendRequest {
        wr_id: 42,
        opcode,
        flags: SEND_TAIL,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        payload,
    }
}

#[test]
fn with_a_backend_that_knows_no_versions_all_is_as_it_was() {
    let rig = Rig::of_version(16, 0);
    assert_eq!(rig.context.negotiate().unwrap(), VerbsVersion::V1);
    assert_eq!(rig.context.limits().unwrap(), &DeviceLimits::default());
    let qp = ready(&rig);
    let tail = SendTail::default();
    let add = request(OP_FETCH_ADD, Payload::Gather(&[]));
    assert_eq!(qp.post_send(&add), Err(Errno::EINVAL));
    let send = request(OP_SEND, Payload::Gather(&[]));
    let refused = qp.send_queue().unwrap().push_with(&send, &tail);
    assert_eq!(refused, Err(Errno::EINVAL));
    // The flag is not the program's to set.
    qp.post_send(&send).unwrap();
    let entry: SendEntry = read(qp.map(), QP_OFF_ENTRIES);
    assert_eq!((entry.opcode, entry.flags), (OP_SEND, 0));
}

#[test]
fn operands_lie_between_the_head_and_the_elements() {
    let rig = Rig::of_version(19, 2);
    assert_eq!(rig.context.negotiate().unwrap(), VerbsVersion::V2);
    let qp = ready(&rig);
    let sge = Sge {
        addr: 0x1000.into(),
        length: 8.into(),
        lkey: 5.into(),
    };
    let tail = SendTail {
        a: 7.into(),
        b: 8.into(),
    };
    let mut queue = qp.send_queue().unwrap();
    let list = [sge];
    let add = request(OP_FETCH_ADD, Payload::Gather(&list));
    queue.push_with(&add, &tail).unwrap();
    let write = request(OP_RDMA_WRITE, Payload::Gather(&list));
    queue.push(&write).unwrap();
    drop(queue);
    let entry: SendEntry = read(qp.map(), QP_OFF_ENTRIES);
    assert_eq!((entry.opcode, entry.flags), (OP_FETCH_ADD, SEND_TAIL));
    let at = QP_OFF_ENTRIES + size_of::<SendEntry>();
    assert_eq!(read::<SendTail>(qp.map(), at), tail);
    let elements = at + size_of::<SendTail>();
    assert_eq!(read::<Sge>(qp.map(), elements), sge);
    // One without operands lies as in version 1.
    let second = QP_OFF_ENTRIES + qp.layout().send_stride;
    let entry: SendEntry = read(qp.map(), second);
    assert_eq!((entry.opcode, entry.flags), (OP_RDMA_WRITE, 0));
    let elements = second + size_of::<SendEntry>();
    assert_eq!(read::<Sge>(qp.map(), elements), sge);
}

#[test]
fn a_version_that_nobody_asked_for_is_refused() {
    for version in [0, 4, u32::MAX] {
        let rig = Rig::of_version(19, version);
        let error = rig.context.negotiate().unwrap_err();
        assert_eq!(error.errno(), Errno::EPROTO);
    }
    let rig = Rig::of_version(19, 1);
    assert_eq!(rig.context.negotiate().unwrap(), VerbsVersion::V1);
}

#[test]
fn a_device_that_is_gone_has_no_version() {
    let mut rig = Rig::of_version(19, 2);
    rig.take_over();
    rig.transport.die();
    let error = rig.context.negotiate().unwrap_err();
    assert_eq!(error.errno(), Errno::ENODEV);
}

#[test]
fn what_a_backend_of_version_1_does_not_have_is_not_supported() {
    let rig = Rig::of_version(16, 0);
    rig.context.negotiate().unwrap();
    let cq = Cq::create(&rig.context, 5, None).unwrap();
    let refused = cq.resize(8).map_err(|e| e.errno());
    assert_eq!((refused, cq.entries()), (Err(Errno::EOPNOTSUPP), 8));
    let pd = Pd::allocate(&rig.context).unwrap();
    let memory = [0_u8; 64];
    let address = memory.as_ptr().expose_provenance();
    // SAFETY: nobody is told of the memory: there is no device.
    let mr = unsafe { Mr::register(&pd, address, 64, 0, 0) }.unwrap();
    // SAFETY: as above.
    let refused = unsafe { mr.reregister(&MrChange::default()) };
    assert_eq!(refused.map_err(|e| e.errno()), Err(Errno::EOPNOTSUPP));
}

#[test]
fn a_backend_of_version_2_has_no_times_one_vector_and_no_registration_of_nothing() {
    let rig = Rig::of_version(34, 2);
    rig.context.negotiate().unwrap();
    assert_eq!(rig.context.comp_vectors().unwrap(), 1);
    let clock = rig.context.clock().map_err(|e| e.errno());
    assert_eq!(clock, Err(Errno::EOPNOTSUPP));
    let create = |comp_vector, is_timed| {
        let init = CqInit {
            entries: 4,
            comp_vector,
            is_timed,
            ..CqInit::default()
        };
        Cq::create_with(&rig.context, &init).map_err(|e| e.errno())
    };
    assert_eq!(create(0, true).unwrap_err(), Errno::EOPNOTSUPP);
    assert_eq!(create(1, false).unwrap_err(), Errno::EINVAL);
    create(0, false).unwrap();
    let pd = Pd::allocate(&rig.context).unwrap();
    let null = Mr::null(&pd).map_err(|e| e.errno());
    assert_eq!(null.unwrap_err(), Errno::EOPNOTSUPP);
}

#[test]
fn a_completion_has_its_time_where_that_was_asked_for() {
    let rig = Rig::of_version(37, 3);
    rig.context.negotiate().unwrap();
    for is_timed in [false, true] {
        let init = CqInit {
            entries: 4,
            is_timed,
            ..CqInit::default()
        };
        let cq = Cq::create_with(&rig.context, &init).unwrap();
        let stride = if is_timed { 40 } else { 32 };
        for number in 0..4_u64 {
            let timed = TimedCompletion {
                completion: Completion {
                    wr_id: number.into(),
                    qp_num: u32::try_from(number % 2).unwrap().into(),
                    ..Completion::default()
                },
                time: (100 + number).into(),
            };
            let at = CQ_OFF_ENTRIES + usize::try_from(number).unwrap() * stride;
            // SAFETY: the test plays the backend.
            unsafe {
                match is_timed {
                    true => cq.part().write(at, &timed),
                    false => cq.part().write(at, &timed.completion),
                }
            }
        }
        cq.part().word(CQ_OFF_PRODUCED).store(4, Ordering::Release);
        let mut taken = Vec::new();
        let mut take = |timed: TimedCompletion| {
            taken.push((timed.completion.wr_id.get(), timed.time.get()));
        };
        assert_eq!(cq.poll_timed(1, &mut take), Ok(1));
        // What a queue pair that is gone has completed is taken out; the others keep their times.
        cq.forget(1);
        assert_eq!(cq.poll_timed(4, &mut take), Ok(1));
        let time = |number: u64| if is_timed { 100 + number } else { 0 };
        assert_eq!(taken, [(0, time(0)), (2, time(2))]);
    }
}

#[test]
fn an_answer_that_no_queue_could_give_is_refused() {
    // As if nine had waited in a queue of eight that has had none.
    let answer = |number, _: &[u8]| match number {
        34 => Ok(9_u32.to_le_bytes().to_vec()),
        17 => Ok(2_u32.to_le_bytes().to_vec()),
        _ => Ok(crate::loopback::agreeable(number)),
    };
    let rig = Rig::new(false, Box::new(answer));
    rig.context.negotiate().unwrap();
    let cq = Cq::create(&rig.context, 5, None).unwrap();
    let refused = cq.resize(64).map_err(|e| e.errno());
    assert_eq!((refused, cq.entries()), (Err(Errno::EPROTO), 8));
}

#[test]
fn a_queue_that_is_resized_again_and_again_lies_in_few_places() {
    let answer = |number, _: &[u8]| match number {
        34 => Ok(1_u32.to_le_bytes().to_vec()),
        17 => Ok(2_u32.to_le_bytes().to_vec()),
        _ => Ok(crate::loopback::agreeable(number)),
    };
    let rig = Rig::new(false, Box::new(answer));
    rig.context.negotiate().unwrap();
    let cq = Cq::create(&rig.context, 5, None).unwrap();
    // One completion waits all the time.
    let produced = cq.part().word(CQ_OFF_PRODUCED);
    produced.store(1, Ordering::Release);
    for _ in 0..100 {
        cq.resize(64).unwrap();
        assert_eq!((cq.places(), cq.entries()), (2, 64));
    }
    let mut taken = [Completion::default(); 2];
    assert_eq!((cq.poll(&mut taken), cq.places()), (Ok(1), 1));
}
