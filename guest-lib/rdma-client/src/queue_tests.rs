//! Queues against a backend that the test plays.

mod events;

use crate::arena::Part;
use crate::loopback::{Rig, read};
use crate::{
    Channel, Completion, Cq, Errno, Mr, Payload, Pd, Qp, QpAttr, QpCaps, QpInit, RecvRequest,
    SendList, SendRequest, Sge, spin,
};
use farlane_abi::arena::{
    AsyncEvent, BACKEND_AWAKE, BACKEND_SLEEPING, OFF_ASYNC_PRODUCED, OFF_ASYNC_RING,
    OFF_BACKEND_STATE, OFF_RUNG, OFF_RUNG_SUMMARY,
};
use farlane_abi::control::{EVENT_ASYNC, EVENT_FIRST_CHANNEL};
use farlane_abi::queue as abi;
use farlane_abi::rdma::{EVENT_DEVICE_FATAL, EVENT_QP_FATAL, MAX_QPS, QP_STATE, QPS_INIT, QPS_RTS};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const CAPS: QpCaps = QpCaps {
    send_wr: 4,
    send_sge: 2,
    inline_bytes: 100,
    recv_wr: 3,
    recv_sge: 1,
};

struct Queues {
    qp: Qp,
    cq: Arc<Cq>,
    rig: Rig,
}

impl Drop for Queues {
    fn drop(&mut self) {
        // Nobody would answer the calls that destroy the objects.
        self.rig.transport.die();
    }
}

/// A queue pair ready to send, over a completion queue of 8; the test plays the backend.
fn queues(channel: bool) -> (Queues, Option<Arc<Channel>>) {
    let mut rig = Rig::agreeable();
    let channel = channel.then(|| Channel::create(&rig.context).unwrap());
    let pd = Pd::allocate(&rig.context).unwrap();
    let cq = Cq::create(&rig.context, 5, channel.as_ref()).unwrap();
    let qp = Qp::create(&pd, &QpInit::reliable(&cq, CAPS)).unwrap();
    for qp_state in [QPS_INIT, QPS_RTS] {
        let attributes = QpAttr {
            qp_state,
            ..QpAttr::default()
        };
        qp.modify(&attributes, QP_STATE).unwrap();
    }
    rig.take_over();
    (Queues { qp, cq, rig }, channel)
}

fn write(wr_id: u64, payload: Payload<'_>) -> SendRequest<'_> {
    SendRequest {
        wr_id,
        opcode: abi::OP_RDMA_WRITE,
        flags: abi::SEND_SIGNALED,
        imm: 0,
        remote_addr: 0x1234,
        rkey: 77,
        payload,
    }
}

fn complete(cq: &Part, entries: u32, wr_id: u64) {
    complete_of(cq, entries, wr_id, 0);
}

/// A completion of the queue pair of a number.
fn complete_of(cq: &Part, entries: u32, wr_id: u64, number: u32) {
    let produced = cq.word(abi::CQ_OFF_PRODUCED).load(Ordering::Relaxed);
    let at = abi::CQ_OFF_ENTRIES + (produced % entries) as usize * size_of::<Completion>();
    let completion = Completion {
        wr_id: wr_id.into(),
        qp_num: number.into(),
        ..Completion::default()
    };
    // SAFETY: the test does not overrun the queue.
    unsafe { cq.write(at, &completion) };
    cq.word(abi::CQ_OFF_PRODUCED)
        .store(produced.wrapping_add(1), Ordering::Release);
}

#[test]
fn a_gathered_write_lies_in_the_queue_as_the_interface_says() {
    let (queues, _) = queues(false);
    let sge = |addr: u64| Sge {
        addr: addr.into(),
        length: 64.into(),
        lkey: 5.into(),
    };
    let elements = [sge(0x1000), sge(0x2000)];
    let request = write(42, Payload::Gather(&elements));
    queues.qp.post_send(&request).unwrap();
    let map = queues.qp.map();
    assert_eq!(
        map.word(abi::QP_OFF_SEND_PRODUCED).load(Ordering::Acquire),
        1
    );
    let entry: abi::SendEntry = read(map, abi::QP_OFF_ENTRIES);
    assert_eq!(entry.wr_id.get(), 42);
    assert_eq!((entry.opcode, entry.num_sge.get()), (abi::OP_RDMA_WRITE, 2));
    assert_eq!((entry.remote_addr.get(), entry.rkey.get()), (0x1234, 77));
    let second: Sge = read(map, abi::QP_OFF_ENTRIES + size_of::<abi::SendEntry>() + 16);
    assert_eq!(second, sge(0x2000));
}

#[test]
fn inline_pieces_are_joined_in_the_request() {
    let (queues, _) = queues(false);
    let request = write(1, Payload::Inline(&[b"abc", b"", b"defg"]));
    queues.qp.post_send(&request).unwrap();
    let map = queues.qp.map();
    let entry: abi::SendEntry = read(map, abi::QP_OFF_ENTRIES);
    assert_eq!((entry.inline_bytes.get(), entry.num_sge.get()), (7, 0));
    assert_eq!(entry.flags, abi::SEND_SIGNALED | abi::SEND_INLINE);
    let data: [u8; 7] = read(map, abi::QP_OFF_ENTRIES + size_of::<abi::SendEntry>());
    assert_eq!(&data, b"abcdefg");
}

#[test]
fn a_list_is_posted_whole() {
    let (queues, _) = queues(false);
    let map = queues.qp.map();
    let produced = || map.word(abi::QP_OFF_SEND_PRODUCED).load(Ordering::Acquire);
    let sge = Sge {
        addr: 0x1000.into(),
        length: 64.into(),
        lkey: 5.into(),
    };
    let mut list = SendList::default();
    list.add(write(1, Payload::Gather(&[])));
    list.gather(&[sge]);
    list.add(write(2, Payload::Gather(&[])));
    let said = b"abcdefg".to_vec();
    list.inline([&said[..3], &said[3..]]);
    drop(said);
    list.add(write(3, Payload::Gather(&[])));
    assert_eq!(produced(), 0);
    list.post(&queues.qp).unwrap();
    assert_eq!(produced(), 3);
    let stride = queues.qp.layout().send_stride;
    let entry =
        |index: usize| -> abi::SendEntry { read(map, abi::QP_OFF_ENTRIES + index * stride) };
    let entries = [entry(0), entry(1), entry(2)];
    assert_eq!(entries.map(|entry| entry.wr_id.get()), [1, 2, 3]);
    assert_eq!(entries.map(|entry| entry.num_sge.get()), [1, 0, 0]);
    assert_eq!(entries.map(|entry| entry.inline_bytes.get()), [0, 7, 0]);
    let payload = |index: usize| abi::QP_OFF_ENTRIES + index * stride + size_of::<abi::SendEntry>();
    assert_eq!(read::<Sge>(map, payload(0)), sge);
    assert_eq!(&read::<[u8; 7]>(map, payload(1)), b"abcdefg");
    // It is empty then, and can be filled again.
    list.post(&queues.qp).unwrap();
    assert_eq!(produced(), 3);
    list.add(write(4, Payload::Gather(&[])));
    list.post(&queues.qp).unwrap();
    assert_eq!((produced(), entry(3).wr_id.get()), (4, 4));
}

#[test]
fn of_a_list_with_an_error_nothing_is_posted() {
    let (queues, _) = queues(false);
    let map = queues.qp.map();
    let produced = || map.word(abi::QP_OFF_SEND_PRODUCED).load(Ordering::Acquire);
    let mut list = SendList::default();
    let mut post = |fill: &dyn Fn(&mut SendList)| {
        list.add(write(1, Payload::Gather(&[])));
        fill(&mut list);
        let result = list.post(&queues.qp);
        (result, produced())
    };
    assert_eq!(
        post(&|list| list.gather(&[Sge::default(); 3])),
        (Err(Errno::EINVAL), 0)
    );
    assert_eq!(
        post(&|list| list.inline([&[0; 60][..], &[0; 41]])),
        (Err(Errno::EINVAL), 0)
    );
    let much = vec![0; 1 << 20];
    assert_eq!(
        post(&|list| list.inline([&much[..]])),
        (Err(Errno::EINVAL), 0)
    );
    let first_of_two = |list: &mut SendList| {
        list.refuse(Errno::EOPNOTSUPP);
        list.refuse(Errno::EINVAL);
    };
    assert_eq!(post(&first_of_two), (Err(Errno::EOPNOTSUPP), 0));
    // The queue has room for four.
    let five = |list: &mut SendList| (0..4).for_each(|_| list.add(write(2, Payload::Gather(&[]))));
    assert_eq!(post(&five), (Err(Errno::ENOMEM), 0));
    let mut empty = SendList::default();
    empty.gather(&[]);
    assert_eq!(empty.post(&queues.qp), Err(Errno::EINVAL));
    // Nothing of it is left behind.
    queues
        .qp
        .post_send(&write(9, Payload::Gather(&[])))
        .unwrap();
    let entry: abi::SendEntry = read(map, abi::QP_OFF_ENTRIES);
    assert_eq!((produced(), entry.wr_id.get()), (1, 9));
}

#[test]
fn what_does_not_fit_is_refused_and_leaves_nothing() {
    let (queues, _) = queues(false);
    let post = |request: &SendRequest<'_>| queues.qp.post_send(request);
    let too_many = [Sge::default(); 3];
    assert_eq!(
        post(&write(1, Payload::Gather(&too_many))),
        Err(Errno::EINVAL)
    );
    assert_eq!(
        post(&write(1, Payload::Inline(&[&[0; 60], &[0; 41]]))),
        Err(Errno::EINVAL)
    );
    let read = SendRequest {
        opcode: abi::OP_RDMA_READ,
        ..write(1, Payload::Inline(&[&[1]]))
    };
    assert_eq!(post(&read), Err(Errno::EINVAL));
    let unknown = SendRequest {
        opcode: 5,
        ..write(1, Payload::Gather(&[]))
    };
    assert_eq!(post(&unknown), Err(Errno::EINVAL));
    for wr_id in 0..4 {
        post(&write(wr_id, Payload::Gather(&[]))).unwrap();
    }
    assert_eq!(post(&write(4, Payload::Gather(&[]))), Err(Errno::ENOMEM));
    let map = queues.qp.map();
    assert_eq!(
        map.word(abi::QP_OFF_SEND_PRODUCED).load(Ordering::Acquire),
        4
    );
    map.word(abi::QP_OFF_SEND_CONSUMED)
        .store(1, Ordering::Release);
    post(&write(4, Payload::Gather(&[]))).unwrap();
}

#[test]
fn a_queue_pair_that_the_backend_does_not_look_at_is_rung() {
    let (queues, _) = queues(false);
    let header = queues.rig.transport.segment(0);
    let map = queues.qp.map();
    let rung = || [OFF_RUNG, OFF_RUNG_SUMMARY].map(|at| header.word(at).load(Ordering::Acquire));
    let post = || {
        let mut queue = queues.qp.send_queue().unwrap();
        queue.push(&write(1, Payload::Gather(&[]))).unwrap();
    };
    post();
    assert_eq!(rung(), [0, 0]);
    map.word(abi::QP_OFF_BACKEND_STATE)
        .store(BACKEND_SLEEPING, Ordering::Release);
    post();
    // The bit of slot 0, of handle 1.
    assert_eq!(rung(), [1, 1]);
    for at in [OFF_RUNG, OFF_RUNG_SUMMARY] {
        header.word(at).store(0, Ordering::Release);
    }
    let request = RecvRequest {
        wr_id: 1,
        scatter: &[],
    };
    queues.qp.recv_queue().unwrap().push(&request).unwrap();
    assert_eq!(rung(), [1, 1]);
    // The bit of the last slot, and of its word: words have 32.
    let state = map.word(abi::QP_OFF_BACKEND_STATE);
    queues.rig.context.header().ring(state, MAX_QPS - 1);
    let last = |at: usize, bits: usize| header.word(at + bits / 8 - 4).load(Ordering::Acquire);
    let words = usize::try_from(MAX_QPS).unwrap() / 32;
    assert_eq!(last(OFF_RUNG, 32 * words), 1 << 31);
    assert_eq!(last(OFF_RUNG_SUMMARY, words), 1 << 31);
    assert_eq!(rung(), [1, 1]);
}

#[test]
fn a_list_is_published_once_and_rings_once_if_the_backend_sleeps() {
    let (queues, _) = queues(false);
    let header = queues.rig.transport.segment(0);
    let map = queues.qp.map();
    let bells = || queues.rig.transport.doorbells.load(Ordering::Relaxed);
    let before = bells();
    header
        .word(OFF_BACKEND_STATE)
        .store(BACKEND_SLEEPING, Ordering::Release);
    let mut queue = queues.qp.send_queue().unwrap();
    assert_eq!(queue.room(), 4);
    for wr_id in 0..3 {
        queue.push(&write(wr_id, Payload::Inline(&[b"x"]))).unwrap();
    }
    assert_eq!(queue.room(), 1);
    assert_eq!(
        map.word(abi::QP_OFF_SEND_PRODUCED).load(Ordering::Acquire),
        0
    );
    queue.ring();
    assert_eq!(
        map.word(abi::QP_OFF_SEND_PRODUCED).load(Ordering::Acquire),
        3
    );
    assert_eq!(bells(), before + 1);
    header.word(OFF_BACKEND_STATE).store(0, Ordering::Release);
    let request = RecvRequest {
        wr_id: 9,
        scatter: &[],
    };
    queues.qp.post_recv(&request).unwrap();
    assert_eq!(bells(), before + 1);
    assert_eq!(
        map.word(abi::QP_OFF_RECV_PRODUCED).load(Ordering::Acquire),
        1
    );
}

#[test]
fn completions_come_in_order_across_the_end_of_the_queue() {
    let (queues, _) = queues(false);
    let map = queues.cq.part();
    assert_eq!(queues.cq.entries(), 8);
    let mut next = 0;
    for round in 0..50_u64 {
        for index in 0..7 {
            complete(map, 8, round * 7 + index);
        }
        let mut taken = [Completion::default(); 3];
        for expected in [3, 3, 1, 0] {
            let got = queues.cq.poll(&mut taken).unwrap();
            assert_eq!(got, expected);
            for completion in &taken[..got] {
                assert_eq!(completion.wr_id.get(), next);
                next += 1;
            }
        }
    }
    assert_eq!(map.word(abi::CQ_OFF_CONSUMED).load(Ordering::Acquire), 350);
}

#[test]
fn a_poll_in_vain_has_looked_after_it_gave_way() {
    let (queues, _) = queues(false);
    let part = queues.cq.entries_part();
    let produced = || {
        let word = queues.cq.part().word(abi::CQ_OFF_PRODUCED);
        word.load(Ordering::Acquire)
    };
    spin::meanwhile(move || complete(&part, 8, 7));
    let mut found = [Completion::default(); 2];
    let mut polls = 0;
    while queues.cq.poll(&mut found).unwrap() == 0 {
        assert_eq!(produced(), 0);
        polls += 1;
        assert!(polls < 10_000, "It gives way to nobody");
    }
    assert_eq!(found[0].wr_id.get(), 7);
}

/// The backend answers that the queue pair has number 0.
#[test]
fn what_a_queue_pair_has_completed_goes_with_it_and_with_its_reset() {
    let rig = Rig::agreeable();
    let pd = Pd::allocate(&rig.context).unwrap();
    let [cq, other] = [(); 2].map(|()| Cq::create(&rig.context, 8, None).unwrap());
    let init = QpInit {
        recv_cq: &other,
        ..QpInit::reliable(&cq, CAPS)
    };
    let qp = Qp::create(&pd, &init).unwrap();
    let maps = [cq.part(), other.part()];
    let polled = |cq: &Cq| {
        let mut taken = [Completion::default(); 8];
        let count = cq.poll(&mut taken).unwrap();
        let wr_ids = taken[..count].iter().map(|one| one.wr_id.get());
        wr_ids.collect::<Vec<_>>()
    };
    // Wherever the queue begins, and whichever of its entries are whose.
    for (round, owners) in (0_u32..).zip(0..=255_u32) {
        for map in &maps {
            for entry in 0..8_u32 {
                complete_of(map, 8, entry.into(), owners >> entry & 1);
            }
        }
        if round % 2 == 0 {
            let reset = QpAttr::default();
            qp.modify(&reset, QP_STATE).unwrap();
        } else {
            // A queue pair of its own, which has the same number.
            drop(Qp::create(&pd, &init).unwrap());
        }
        let kept: Vec<u64> = (0..8).filter(|entry| owners >> entry & 1 == 1).collect();
        for (cq, map) in [&cq, &other].into_iter().zip(&maps) {
            let free = 8 - kept.len();
            let word = |offset| map.word(offset).load(Ordering::Acquire);
            let used = word(abi::CQ_OFF_PRODUCED).wrapping_sub(word(abi::CQ_OFF_CONSUMED));
            assert_eq!(used as usize, kept.len(), "{owners:#b}");
            // The backend fills what is free meanwhile.
            (0..free).for_each(|entry| complete_of(map, 8, 100 + entry as u64, 1));
            let later = (0..free).map(|entry| 100 + entry as u64);
            let all: Vec<_> = kept.iter().copied().chain(later).collect();
            assert_eq!(polled(cq), all, "{owners:#b}");
            // Moves the queue's beginning.
            complete_of(map, 8, 0, 1);
            assert_eq!(polled(cq), [0]);
        }
    }
    // A producer word that makes no sense is left to who polls.
    maps[0]
        .word(abi::CQ_OFF_PRODUCED)
        .fetch_add(9, Ordering::AcqRel);
    drop(qp);
    assert_eq!(cq.poll(&mut [Completion::default(); 1]), Err(Errno::EPROTO));
}

#[test]
fn a_producer_word_beyond_the_queue_is_an_error_and_reads_nothing() {
    let (queues, _) = queues(false);
    let map = queues.cq.part();
    for nonsense in [9, u32::MAX, 1 << 31] {
        map.word(abi::CQ_OFF_PRODUCED)
            .store(nonsense, Ordering::Release);
        let polled = queues.cq.poll_each(64, |_| panic!("nothing to take"));
        assert_eq!(polled, Err(Errno::EPROTO));
    }
}

#[test]
fn a_dead_device_gives_what_had_completed_and_then_enodev() {
    let (queues, _) = queues(false);
    complete(queues.cq.part(), 8, 11);
    queues.rig.transport.die();
    let mut taken = [Completion::default(); 2];
    assert_eq!(queues.cq.poll(&mut taken), Ok(1));
    assert_eq!(queues.cq.poll(&mut taken), Err(Errno::ENODEV));
    let post = queues.qp.post_send(&write(1, Payload::Gather(&[])));
    assert_eq!(post, Err(Errno::ENODEV));
    assert_eq!(queues.cq.arm(false), Err(Errno::ENODEV));
    let fatal = queues.rig.context.next_async_event().unwrap();
    assert_eq!(fatal.kind.get(), EVENT_DEVICE_FATAL);
    for _ in 0..2 {
        assert_eq!(queues.rig.context.next_async_event(), Err(Errno::ENODEV));
    }
}

#[test]
fn a_request_for_any_completion_stands_against_one_for_solicited_ones() {
    let (queues, _) = queues(false);
    let map = queues.cq.part();
    let armed = || map.word(abi::CQ_OFF_ARMED).load(Ordering::Acquire);
    queues.cq.arm(true).unwrap();
    assert_eq!(armed(), abi::ARM_SOLICITED);
    queues.cq.arm(false).unwrap();
    assert_eq!(armed(), abi::ARM_NEXT);
    queues.cq.arm(true).unwrap();
    assert_eq!(armed(), abi::ARM_NEXT);
}

#[test]
fn a_registration_pins_its_memory_and_lets_it_go() {
    let rig = Rig::agreeable();
    let pd = Pd::allocate(&rig.context).unwrap();
    let memory = [0_u8; 100];
    let address = memory.as_ptr().addr();
    // SAFETY: the memory outlives the registration; nobody accesses it.
    let mr = unsafe { Mr::register(&pd, address, 100, 0, 1) }.unwrap();
    let pins = || {
        rig.transport
            .pins
            .lock()
            .unwrap()
            .values()
            .copied()
            .collect::<Vec<_>>()
    };
    assert_eq!(pins(), [(address, 100)]);
    mr.destroy().unwrap();
    mr.destroy().unwrap();
    assert_eq!(pins(), []);
    // SAFETY: as above.
    let nothing = unsafe { Mr::register(&pd, address, 0, 0, 1) };
    assert_eq!(nothing.unwrap_err().errno(), Errno::EINVAL);
}

#[test]
fn registered_memory_is_found_by_the_address_that_requests_name_it_by() {
    let rig = Rig::agreeable();
    let pd = Pd::allocate(&rig.context).unwrap();
    let memory = [0_u8; 100];
    let address = memory.as_ptr().addr();
    let iova = 0x7000;
    // SAFETY: the memory outlives the registration; nobody accesses it.
    let mr = unsafe { Mr::register(&pd, address, 100, iova, 1) }.unwrap();
    assert_eq!(mr.access(), 1);
    assert_eq!(mr.find(iova, 100), Some(address));
    assert_eq!(mr.find(iova + 99, 1), Some(address + 99));
    assert_eq!(mr.find(iova + 100, 0), Some(address + 100));
    let outside = [
        (address as u64, 1),
        (iova - 1, 1),
        (iova, 101),
        (iova + 99, 2),
        (iova + 1, usize::MAX),
        (u64::MAX, 1),
    ];
    for (address, length) in outside {
        assert_eq!(mr.find(address, length), None, "{address:#x}, {length}");
    }
}
