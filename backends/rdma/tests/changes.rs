//! Completion queues and shared receive queues that are resized and memory that is registered anew,
//! while they are in use.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, End, connect, connect_to, context, until};
use farlane_abi::Errno;
use farlane_abi::queue::{OP_RDMA_WRITE, OP_SEND, SEND_SIGNALED, WC_STATUS_REM_ACCESS_ERR};
use farlane_abi::rdma::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE};
use farlane_rdma_client::{
    Completion, Cq, Error, Mr, MrChange, Payload, Pd, Qp, QpCaps, QpInit, RecvRequest, SendRequest,
    Sge, Srq, VerbsVersion,
};

/// Bytes of each end's memory.
const BYTES: usize = 64;

/// Memory of a process, of one byte over and over.
struct Local(Vec<u8>);

impl Local {
    fn of(byte: u8) -> Self {
        Self(vec![byte; BYTES])
    }

    fn address(&self) -> usize {
        self.0.as_ptr().expose_provenance()
    }
}

/// Two ends of a connection of processes of the host, that have settled their version.
fn ends(backend: &Backend, locals: [&Local; 2]) -> [End; 2] {
    let ends = locals.map(|local| {
        let context = context(backend.host_link());
        assert_eq!(context.negotiate().unwrap(), VerbsVersion::V3);
        // SAFETY: memory of a test outlives its ends, and is looked at when a transfer has ended.
        unsafe { End::new(&context, local.address(), BYTES) }
    });
    connect(&ends[0], &ends[1]);
    ends
}

/// Writes all of one end's memory to the other's.
fn post(from: &End, to: &Mr, wr_id: u64) {
    let element = Sge {
        addr: (from.mr.address() as u64).into(),
        length: u32::try_from(BYTES).unwrap().into(),
        lkey: from.mr.lkey().into(),
    };
    from.qp
        .post_send(&SendRequest {
            wr_id,
            opcode: OP_RDMA_WRITE,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: to.address() as u64,
            rkey: to.rkey(),
            payload: Payload::Gather(&[element]),
        })
        .unwrap();
}

fn status(from: &End, to: &Mr) -> u8 {
    post(from, to, 1);
    from.completion().status
}

/// Takes so many completions, of these numbers.
fn take(cq: &Cq, numbers: std::ops::Range<u64>) {
    let mut taken = [Completion::default(); 3];
    for number in numbers {
        until("a completion", || cq.poll(&mut taken[..1]).unwrap() == 1);
        assert_eq!((taken[0].status, taken[0].wr_id.get()), (0, number));
    }
}

fn empty_send(wr_id: u64) -> SendRequest<'static> {
    SendRequest {
        wr_id,
        opcode: OP_SEND,
        flags: SEND_SIGNALED,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        payload: Payload::Gather(&[]),
    }
}

fn errno(result: Result<(), Error>) -> Option<Errno> {
    result.err().map(|e| e.errno())
}

#[test]
fn a_completion_queue_keeps_what_waits_however_often_it_is_resized() {
    let backend = Backend::start();
    let locals = [Local::of(1), Local::of(2)];
    let [one, other] = ends(&backend, [&locals[0], &locals[1]]);
    let (mut posted, mut taken) = (0, 0);
    for (round, entries) in [256, 32, 8, 9, 512, 64, 8, 100_000, 8]
        .iter()
        .cycle()
        .take(200)
        .enumerate()
    {
        // As many as there is room for with the smallest of the sizes.
        let round = u64::try_from(round).unwrap();
        let waiting = 1 + round % 8;
        while posted - taken < waiting {
            post(&one, &other.mr, posted);
            posted += 1;
        }
        one.cq.resize(*entries).unwrap();
        assert!(one.cq.entries() >= *entries);
        let some = taken + round % 5 % waiting;
        take(&one.cq, taken..some);
        taken = some;
    }
    take(&one.cq, taken..posted);
    assert_eq!(one.cq.poll(&mut [Completion::default(); 8]).unwrap(), 0);
    assert_eq!(errno(one.cq.resize(0)), Some(Errno::EINVAL));
    assert_eq!(errno(one.cq.resize(u32::MAX)), Some(Errno::EINVAL));
}

/// What was posted counts, also where nobody has seen it yet.
#[test]
fn a_completion_queue_does_not_become_smaller_than_what_waits_in_it() {
    let backend = Backend::start();
    let locals = [Local::of(1), Local::of(2)];
    let [one, other] = ends(&backend, [&locals[0], &locals[1]]);
    for first in (0..700).step_by(7) {
        (first..first + 7).for_each(|number| post(&one, &other.mr, number));
        assert_eq!(errno(one.cq.resize(4)), Some(Errno::EINVAL));
        one.cq.resize(7).unwrap();
        take(&one.cq, first..first + 7);
    }
    one.cq.resize(1).unwrap();
    post(&one, &other.mr, 0);
    take(&one.cq, 0..1);
}

#[test]
fn an_event_that_was_asked_for_comes_from_a_queue_that_was_resized_since() {
    let backend = Backend::start();
    let locals = [Local::of(1), Local::of(2)];
    let [one, other] = ends(&backend, [&locals[0], &locals[1]]);
    for (round, entries) in [4, 512, 1, 16].into_iter().enumerate() {
        let number = u64::try_from(round).unwrap();
        one.cq.arm(false).unwrap();
        one.cq.resize(entries).unwrap();
        post(&one, &other.mr, number);
        assert_eq!(one.channel.wait().unwrap().handle(), one.cq.handle());
        take(&one.cq, number..number + 1);
    }
}

/// Messages that come while the queue that they take requests from is resized.
#[test]
fn a_shared_receive_queue_keeps_what_waits_however_often_it_is_resized() {
    let backend = Backend::start();
    let context = context(backend.host_link());
    context.negotiate().unwrap();
    let pd = Pd::allocate(&context).unwrap();
    let (sends, receives) = (
        Cq::create(&context, 64, None).unwrap(),
        Cq::create(&context, 64, None).unwrap(),
    );
    let srq = Srq::create(&pd, 4, 1).unwrap();
    let caps = QpCaps {
        send_wr: 64,
        send_sge: 1,
        ..QpCaps::default()
    };
    let init = |srq| QpInit {
        recv_cq: &receives,
        srq,
        ..QpInit::reliable(&sends, caps)
    };
    let sender = Qp::create(&pd, &init(None)).unwrap();
    let receiver = Qp::create(&pd, &init(Some(&srq))).unwrap();
    let gid = context.gid(1, 0).unwrap().raw;
    connect_to(&sender, receiver.number(), gid);
    connect_to(&receiver, sender.number(), gid);
    let (mut posted, mut sent, mut received) = (0, 0, 0);
    let sizes = [64, 16, 8, 9, 512, 8, 10_000, 8].iter().cycle();
    for (round, requests) in sizes.take(200).enumerate() {
        let round = u64::try_from(round).unwrap();
        while posted - received < 1 + round % 8 {
            let request = RecvRequest {
                wr_id: posted,
                scatter: &[],
            };
            srq.post_recv(&request).unwrap();
            posted += 1;
        }
        // A message is under way.
        sender.post_send(&empty_send(sent)).unwrap();
        sent += 1;
        srq.resize(*requests).unwrap();
        assert_eq!(srq.query().unwrap().requests.get(), srq.requests());
        assert!(srq.requests() >= *requests);
        take(&receives, received..received + 1);
        take(&sends, received..received + 1);
        received += 1;
    }
    while posted > received {
        sender.post_send(&empty_send(received)).unwrap();
        take(&receives, received..received + 1);
        take(&sends, received..received + 1);
        received += 1;
    }
    // One that waits for a request is told of it wherever it lies.
    sender.post_send(&empty_send(received)).unwrap();
    srq.resize(3).unwrap();
    let request = RecvRequest {
        wr_id: received,
        scatter: &[],
    };
    srq.post_recv(&request).unwrap();
    take(&receives, received..received + 1);
    take(&sends, received..received + 1);
    assert_eq!(errno(srq.resize(0)), Some(Errno::EINVAL));
    assert_eq!(errno(srq.resize(u32::MAX)), Some(Errno::EINVAL));
}

#[test]
fn keys_go_on_with_other_memory_rights_and_domain() {
    let backend = Backend::start();
    let locals = [Local::of(1), Local::of(2)];
    let elsewhere = Local::of(3);
    let [one, other] = ends(&backend, [&locals[0], &locals[1]]);
    let keys = (other.mr.lkey(), other.mr.rkey(), other.mr.handle());
    let memory = Some((elsewhere.address(), BYTES));
    let change = MrChange {
        memory,
        ..MrChange::default()
    };
    // SAFETY: memory of a test outlives its ends.
    unsafe { other.mr.reregister(&change) }.unwrap();
    assert_eq!((other.mr.lkey(), other.mr.rkey(), other.mr.handle()), keys);
    assert_eq!(status(&one, &other.mr), 0);
    assert_eq!((elsewhere.0[0], locals[1].0[0]), (1, 2));

    // What is refused changes nothing.
    let strange = Pd::allocate(&one.context).unwrap();
    for refused in [
        MrChange {
            access: Some(ACCESS_REMOTE_WRITE),
            ..MrChange::default()
        },
        MrChange {
            memory: Some((elsewhere.address(), 0)),
            ..MrChange::default()
        },
        MrChange {
            pd: Some(&strange),
            ..MrChange::default()
        },
        MrChange {
            access: Some(1 << 30 | ACCESS_LOCAL_WRITE),
            ..MrChange::default()
        },
    ] {
        // SAFETY: as above.
        assert!(unsafe { other.mr.reregister(&refused) }.is_err());
        assert_eq!(status(&one, &other.mr), 0, "{refused:?}");
    }

    let pd = Pd::allocate(&other.context).unwrap();
    let moved = MrChange {
        pd: Some(&pd),
        access: Some(ACCESS_LOCAL_WRITE),
        ..MrChange::default()
    };
    // SAFETY: as above.
    unsafe { other.mr.reregister(&moved) }.unwrap();
    assert_eq!(errno(pd.destroy()), Some(Errno::EBUSY));
    assert_eq!(status(&one, &other.mr), WC_STATUS_REM_ACCESS_ERR);
}

#[test]
fn a_registration_on_demand_goes_on_with_other_memory() {
    let backend = Backend::start();
    let locals = [Local::of(1), Local::of(2)];
    let elsewhere = Local::of(3);
    let [one, other] = ends(&backend, [&locals[0], &locals[1]]);
    let (address, access) = (
        locals[1].address(),
        ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE,
    );
    // SAFETY: memory of a test outlives its ends, and is looked at when a transfer has ended.
    let mr = unsafe { Mr::register_on_demand(&other.pd, address, BYTES, address as u64, 0) };
    let mr = mr.unwrap();
    let change = MrChange {
        memory: Some((elsewhere.address(), BYTES)),
        access: Some(access),
        ..MrChange::default()
    };
    // SAFETY: as above.
    unsafe { mr.reregister(&change) }.unwrap();
    assert_eq!(status(&one, &mr), 0);
    assert_eq!((elsewhere.0[0], locals[1].0[0]), (1, 2));
    mr.destroy().unwrap();
    assert_eq!(status(&one, &mr), WC_STATUS_REM_ACCESS_ERR);
    // SAFETY: nothing is registered.
    let late = unsafe { mr.reregister(&change) };
    assert_eq!(errno(late), Some(Errno::EINVAL));
}
