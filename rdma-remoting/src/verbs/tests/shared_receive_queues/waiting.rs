//! Who waits for a shared receive queue: for a request, and for its end.

use super::*;
use farlane_abi::arena::{
    ASYNC_ENTRIES, AsyncEvent, BACKEND_AWAKE, BACKEND_SLEEPING, OFF_ASYNC_CONSUMED,
};
use farlane_abi::queue::QP_OFF_BACKEND_STATE;

/// A program posts without ringing a queue pair: those that wait are found through the queue.
#[test]
fn a_post_wakes_a_peer_that_waits_and_nobody_rings_where_none_does() {
    let server = Server::without_workers();
    let (a, b) = (
        Program::start(&port(&server, 1)),
        Program::start(&port(&server, 2)),
    );
    let (own, srq) = (a.srq(1), b.srq(1));
    let (from, to) = (a.qp(2, own).unwrap(), b.qp(2, srq).unwrap());
    a.connect(from.handle, &b, to.qp_num);
    b.connect(to.handle, &a, from.qp_num);
    Program::settle(&[&a, &b]);
    assert_eq!(
        b.word(1, QP_OFF_BACKEND_STATE),
        BACKEND_AWAKE,
        "nobody waits"
    );

    // A message that finds no request.
    for (number, wr_id) in [(0, 7_u64), (1, 8)] {
        let stride = 64;
        let entry = SendEntry {
            wr_id: wr_id.into(),
            opcode: OP_SEND,
            flags: SEND_SIGNALED,
            ..Default::default()
        };
        let at = page(2) + QP_OFF_ENTRIES + number * stride;
        a.pages.write(at, &entry).unwrap();
    }
    a.set(2, QP_OFF_SEND_PRODUCED, 1);
    ring(&a, slot_of(from.handle.get()).unwrap());
    Program::settle(&[&a, &b]);
    assert_eq!(a.completions(), []);
    assert_eq!(
        b.word(1, QP_OFF_BACKEND_STATE),
        BACKEND_SLEEPING,
        "it has to be rung"
    );

    // Its limit is told of when that message takes the only request.
    b.set(1, QP_OFF_RECV_PRODUCED, 1);
    let modify = ModifySrq {
        srq,
        mask: SRQ_LIMIT.into(),
        limit: 1.into(),
        ..Default::default()
    };
    b.host().modify_srq(modify).unwrap();
    assert_eq!(b.events(), []);
    assert_eq!(b.host().query_srq(srq).unwrap().limit.get(), 1);
    ring(&b, MAX_QPS + slot_of(srq.get()).unwrap());
    Program::settle(&[&a, &b]);
    assert_eq!(a.completions(), [(7, 0)]);
    assert_eq!(b.completions(), [(0, 0)]);
    let reached = (EVENT_SRQ_LIMIT_REACHED, srq.get());
    assert_eq!(b.events(), [reached]);
    assert_eq!(b.host().query_srq(srq).unwrap().limit.get(), 0);
    assert_eq!(b.word(1, QP_OFF_BACKEND_STATE), BACKEND_AWAKE);

    // Nonsense is the end of the queue, and of the queue pair that needs it.
    b.set(1, QP_OFF_RECV_PRODUCED, 77);
    a.set(2, QP_OFF_SEND_PRODUCED, 2);
    ring(&a, slot_of(from.handle.get()).unwrap());
    Program::settle(&[&a, &b]);
    assert_eq!(a.completions().len(), 2);
    assert_ne!(a.completions()[1].1, 0);
    let (fatal, last) = (EVENT_QP_FATAL, EVENT_QP_LAST_WQE_REACHED);
    let number = to.handle.get();
    let ends = [(EVENT_SRQ_ERR, srq.get()), (fatal, number), (last, number)];
    assert_eq!(b.events(), [&[reached][..], &ends].concat());
}

/// Before its queue pairs are destroyed a program has each enter its error state, and waits for
/// its last event (IBTA 11.6.3.1): with one thread, first all of the one and then all of the other.
#[test]
fn the_last_event_of_each_queue_pair_comes_however_many_there_are() {
    const QPS: u32 = 100;
    const MORE: u32 = 2;
    let server = Server::without_workers();
    let p = Program::start(&port(&server, 1));
    let (theirs, _ours) = shared("more", u64::from(QPS) * PAGE_BYTES);
    p.context.attach_segment(region(MORE), theirs).unwrap();
    let srq = p.srq(1);
    let create = |at| CreateQpEx {
        base: CreateQp {
            pd: p.pd,
            send_cq: p.cq,
            recv_cq: p.cq,
            qp_type: QPT_RC.into(),
            send_wr: 4.into(),
            send_sge: 1.into(),
            region: MORE.into(),
            offset: u32::try_from(page(at)).unwrap().into(),
            ..Default::default()
        },
        srq,
        ..Default::default()
    };
    let qps: Vec<_> = (0..QPS)
        .map(|at| p.host().create_qp_ex(create(at)).unwrap().handle)
        .collect();
    for &qp in &qps {
        let attr = QpAttr {
            qp_state: QPS_ERR,
            ..Default::default()
        };
        let mask = QP_STATE.into();
        p.host().modify_qp(ModifyQp { qp, mask, attr }).unwrap();
    }
    Program::settle(&[&p]);
    let word = |at| p.header.word(at).unwrap();
    assert_eq!(
        word(OFF_ASYNC_PRODUCED).load(Ordering::SeqCst),
        ASYNC_ENTRIES
    );
    let (mut told, mut consumed) = (Vec::new(), 0_u32);
    while p.turn() || consumed < word(OFF_ASYNC_PRODUCED).load(Ordering::SeqCst) {
        while consumed < word(OFF_ASYNC_PRODUCED).load(Ordering::SeqCst) {
            let at = usize::try_from(consumed % ASYNC_ENTRIES).unwrap() * size_of::<AsyncEvent>();
            let event: AsyncEvent = p.header.read(OFF_ASYNC_RING + at).unwrap();
            assert_eq!(event.kind.get(), EVENT_QP_LAST_WQE_REACHED);
            told.push(event.object.get());
            consumed += 1;
            word(OFF_ASYNC_CONSUMED).store(consumed, Ordering::SeqCst);
        }
        assert_eq!(p.context.has_work(), told.len() < qps.len());
    }
    told.sort_unstable();
    let mut handles: Vec<_> = qps.iter().map(|qp| qp.get()).collect();
    handles.sort_unstable();
    assert_eq!(told, handles);
    for qp in qps {
        p.host().destroy_qp(qp).unwrap();
    }
}

/// Many wait for one queue, and its end is told to some of them in a turn.
#[test]
fn all_who_wait_learn_that_a_queue_makes_no_sense() {
    const QPS: u32 = 150;
    const MORE: u32 = 2;
    let server = Server::without_workers();
    let [a, b] = [1, 2].map(|at| Program::start(&port(&server, at)));
    let (own, srq) = (a.srq(1), b.srq(1));
    let more = [&a, &b].map(|program| {
        let (theirs, ours) = shared("more", u64::from(QPS + 8) * PAGE_BYTES);
        program
            .context
            .attach_segment(region(MORE), theirs)
            .unwrap();
        let cq = program.host().create_cq(CreateCq {
            entries: 256.into(),
            region: MORE.into(),
            offset: u32::try_from(page(QPS)).unwrap().into(),
            ..Default::default()
        });
        (ours, cq.unwrap())
    });
    let create = |program: &Program, at, cq, srq| {
        let made = program.host().create_qp_ex(CreateQpEx {
            base: CreateQp {
                pd: program.pd,
                send_cq: cq,
                recv_cq: cq,
                qp_type: QPT_RC.into(),
                send_wr: 4.into(),
                send_sge: 1.into(),
                region: MORE.into(),
                offset: u32::try_from(page(at)).unwrap().into(),
                ..Default::default()
            },
            srq,
            ..Default::default()
        });
        made.unwrap()
    };
    let senders = (0..QPS).map(|at| {
        let (from, to) = (
            create(&a, at, more[0].1, own),
            create(&b, at, more[1].1, srq),
        );
        a.connect(from.handle, &b, to.qp_num);
        b.connect(to.handle, &a, from.qp_num);
        let entry = SendEntry {
            opcode: OP_SEND,
            flags: SEND_SIGNALED,
            ..Default::default()
        };
        more[0].0.write(page(at) + QP_OFF_ENTRIES, &entry).unwrap();
        from.handle
    });
    let senders: Vec<_> = senders.collect();
    let send = |at: u32, qp: &Handle| {
        let produced = more[0].0.word(page(at) + QP_OFF_SEND_PRODUCED).unwrap();
        produced.store(1, Ordering::SeqCst);
        ring(&a, slot_of(qp.get()).unwrap());
    };
    let (last, others) = senders.split_last().unwrap();
    (0..).zip(others).for_each(|(at, qp)| send(at, qp));
    Program::settle(&[&a, &b]);
    let failed = || {
        let state = |qp: &&Handle| a.host().query_qp(**qp).unwrap().qp_state;
        senders.iter().filter(|qp| state(qp) == QPS_ERR).count()
    };
    assert_eq!(failed(), 0);
    // A message meets it; nobody has rung the queue.
    b.set(1, QP_OFF_RECV_PRODUCED, 77);
    send(QPS - 1, last);
    Program::settle(&[&a, &b]);
    assert_eq!(failed(), senders.len());
}
