//! Atomic operations and atomic writes (IBTA 9.4.5): each once, on one word, or an error.

use crate::rig::*;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::engine::soft::SoftEngine;
use farlane_rdma_remoting::memory::{Access, MemoryRegion, PdHandle};
use farlane_rdma_remoting::request::{Element, MemoryKey, Opcode, SendWqe};
use farlane_zero_copy::{Pool, Process, Region, WordLocks, copy_from_slice};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What both sides need for all operations.
const ATOMIC: Setup = Setup {
    access: ALL | ACCESS_REMOTE_ATOMIC,
    qp_access: ALL | ACCESS_REMOTE_ATOMIC,
    ..NORMAL
};
const ADD: Opcode = Opcode::FetchAdd { add: 2 };

fn put(end: &End, offset: u64, word: u64) {
    copy_from_slice(&end.region, offset, &word.to_ne_bytes()).unwrap();
}

fn word(end: &End, offset: u64) -> u64 {
    u64::from_ne_bytes(end.contents(offset, 8).try_into().unwrap())
}

/// A request of the first end on the second's word at an offset; its result goes to offset 8.
fn post(p: &Pair, wr_id: u64, opcode: Opcode, offset: u64) {
    let request = p.a.request(opcode, wr_id, &[p.a.element(8, 8)]);
    p.a.sends.post(remote(request, &p.b, offset));
}

#[test]
fn a_word_in_use_is_waited_for_with_a_timer() {
    for (held_for, status) in [(3, WC_STATUS_SUCCESS), (4000, WC_STATUS_RETRY_EXC_ERR)] {
        let mut p = pair(ATOMIC);
        put(&p.b, 24, 5);
        let locks = Arc::clone(&p.b.table);
        let mut held = locks.word_locks().hold(24);
        assert!(held.is_some());
        post(&p, 1, ADD, 24);
        p.a.qp.progress(p.now.into());
        for _ in 0..held_for {
            let came = p.a.qp.progress(p.now.into());
            if came.worked {
                break;
            }
            // It costs something, and is not looked at before its timer is over.
            assert!(!came.more && came.used.cost > 0);
            let again = came.deadline.unwrap();
            assert!(again > p.now && again <= p.now + Duration::from_millis(1));
            p.now = again;
        }
        if status == WC_STATUS_SUCCESS {
            held.take();
        }
        p.run();
        assert_eq!(p.a.next(), Some((1, status)));
        assert_eq!(
            word(&p.b, 24),
            if status == WC_STATUS_SUCCESS { 7 } else { 5 }
        );
    }
}

#[test]
fn an_operation_changes_its_word_alone_and_returns_what_was_there() {
    let mut p = pair(ATOMIC);
    p.b.fill(3);
    let compare_swap = |compare, swap| Opcode::CompareSwap { compare, swap };
    let mut expected = p.b.contents(0, 64);
    let mut value = u64::from_ne_bytes(expected[24..32].try_into().unwrap());
    for (wr_id, (opcode, new, wc_opcode)) in [
        (ADD, value + 2, WC_OPCODE_FETCH_ADD),
        (
            Opcode::FetchAdd { add: u64::MAX },
            value + 1,
            WC_OPCODE_FETCH_ADD,
        ),
        (compare_swap(value + 1, 7), 7, WC_OPCODE_COMPARE_SWAP),
        (compare_swap(8, 9), 7, WC_OPCODE_COMPARE_SWAP),
    ]
    .into_iter()
    .enumerate()
    {
        p.a.fill(5);
        let around = p.a.contents(0, 64);
        post(&p, wr_id as u64, opcode, 24);
        p.run();
        let completion = p.a.cq.poll().unwrap();
        assert_eq!(completion.wr_id.get(), wr_id as u64);
        assert_eq!(
            (completion.status, completion.opcode),
            (WC_STATUS_SUCCESS, wc_opcode)
        );
        assert_eq!(completion.byte_len.get(), 8);
        let mut result = around;
        result[8..16].copy_from_slice(&value.to_ne_bytes());
        assert_eq!(p.a.contents(0, 64), result, "{opcode:?}");
        value = new;
        expected[24..32].copy_from_slice(&value.to_ne_bytes());
        assert_eq!(p.b.contents(0, 64), expected, "{opcode:?}");
    }
    assert!(p.b.cq.poll().is_none(), "no receive request is consumed");
}

#[test]
fn requests_are_carried_out_in_the_order_of_their_posts() {
    let mut p = pair(ATOMIC);
    for wr_id in 0..300 {
        let opcode = match wr_id % 3 {
            0 => ADD,
            1 => Opcode::CompareSwap {
                compare: wr_id / 3 + 2,
                swap: wr_id / 3 + 1,
            },
            _ => Opcode::Read,
        };
        let element = p.a.element(8 * wr_id, 8);
        let request = p.a.request(opcode, wr_id, &[element]);
        p.a.sends.post(remote(request, &p.b, 16));
    }
    p.run();
    for wr_id in 0..300 {
        assert_eq!(p.a.next(), Some((wr_id, WC_STATUS_SUCCESS)));
        let before = [wr_id / 3, wr_id / 3 + 2, wr_id / 3 + 1][(wr_id % 3) as usize];
        assert_eq!(word(&p.a, 8 * wr_id), before, "{wr_id}");
    }
    assert_eq!(word(&p.b, 16), 100);
}

/// The result may be scattered over elements, and go where the operand was.
#[test]
fn a_result_is_scattered_and_may_go_to_the_word_itself() {
    let mut p = pair(ATOMIC);
    put(&p.b, 0, 0x1122_3344_5566_7788);
    let elements = [(3, 3), (100, 0), (64, 5)].map(|(at, length)| p.a.element(at, length));
    let request = p.a.request(ADD, 1, &elements);
    p.a.sends.post(remote(request, &p.b, 0));
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    let result = [p.a.contents(3, 3), p.a.contents(64, 5)].concat();
    assert_eq!(result, 0x1122_3344_5566_7788u64.to_ne_bytes());
    assert_eq!(p.a.contents(0, 3), [0; 3]);
}

#[test]
fn an_atomic_write_stores_its_word_and_needs_the_right_to_write_alone() {
    let mut p = pair(NORMAL);
    p.b.fill(1);
    let mut expected = p.b.contents(0, 64);
    put(&p.a, 0, 0xfeed_face_cafe_beef);
    let halves = [p.a.element(0, 5), p.a.element(5, 3)];
    let request = p.a.request(Opcode::AtomicWrite, 1, &halves);
    p.a.sends.post(remote(request, &p.b, 16));
    let mut inline = p.a.request(Opcode::AtomicWrite, 2, &[]);
    inline.set_inline(&77u64.to_ne_bytes()).unwrap();
    p.a.sends.post(remote(inline, &p.b, 32));
    p.run();
    for wr_id in [1, 2] {
        let completion = p.a.cq.poll().unwrap();
        assert_eq!(
            (completion.wr_id.get(), completion.status),
            (wr_id, WC_STATUS_SUCCESS)
        );
        assert_eq!(completion.opcode, WC_OPCODE_ATOMIC_WRITE);
    }
    expected[16..24].copy_from_slice(&0xfeed_face_cafe_beefu64.to_ne_bytes());
    expected[32..40].copy_from_slice(&77u64.to_ne_bytes());
    assert_eq!(p.b.contents(0, 64), expected);
}

/// What is wrong with a request, and what comes of it: the word is as it was.
#[test]
fn what_is_not_allowed_is_not_carried_out() {
    type Forge = fn(&mut SendWqe, &Pair);
    let without = |right: u32, setup: Setup| Setup {
        access: setup.access & !right,
        ..setup
    };
    let queue_pair_without = |right: u32| Setup {
        qp_access: ATOMIC.qp_access & !right,
        ..ATOMIC
    };
    let nothing: Forge = |_, _| ();
    let cases: [(&str, Setup, Opcode, Forge, u8); 14] = [
        (
            "no right of the queue pair",
            queue_pair_without(ACCESS_REMOTE_ATOMIC),
            ADD,
            nothing,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "no right of the memory",
            without(ACCESS_REMOTE_ATOMIC, ATOMIC),
            ADD,
            nothing,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "an atomic write where the queue pair grants none",
            queue_pair_without(ACCESS_REMOTE_WRITE),
            Opcode::AtomicWrite,
            nothing,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "an atomic write to memory that grants none",
            without(ACCESS_REMOTE_WRITE, ATOMIC),
            Opcode::AtomicWrite,
            nothing,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "odd address",
            ATOMIC,
            ADD,
            |r, _| r.remote_address += 4,
            WC_STATUS_REM_INV_REQ_ERR,
        ),
        (
            "odd address of an atomic write",
            ATOMIC,
            Opcode::AtomicWrite,
            |r, _| r.remote_address += 1,
            WC_STATUS_REM_INV_REQ_ERR,
        ),
        (
            "unknown rkey",
            ATOMIC,
            ADD,
            |r, _| r.rkey.0 += 1,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "beyond the end",
            ATOMIC,
            ADD,
            |r, _| r.remote_address = IOVA + BYTES,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "address that wraps",
            ATOMIC,
            ADD,
            |r, _| r.remote_address = u64::MAX - 7,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "unknown lkey",
            ATOMIC,
            ADD,
            |r, p| set(r, &[(p.a.key.0 + 1, 8)]),
            WC_STATUS_LOC_PROT_ERR,
        ),
        (
            "no room for the result",
            ATOMIC,
            ADD,
            |r, _| r.elements.set(&[]).unwrap(),
            WC_STATUS_LOC_LEN_ERR,
        ),
        (
            "too little room",
            ATOMIC,
            ADD,
            |r, p| set(r, &[(p.a.key.0, 7)]),
            WC_STATUS_LOC_LEN_ERR,
        ),
        (
            "too much room",
            ATOMIC,
            ADD,
            |r, p| set(r, &[(p.a.key.0, 8), (p.a.key.0, 8)]),
            WC_STATUS_LOC_LEN_ERR,
        ),
        (
            "atomic write of half a word",
            ATOMIC,
            Opcode::AtomicWrite,
            |r, p| set(r, &[(p.a.key.0, 4)]),
            WC_STATUS_LOC_LEN_ERR,
        ),
    ];
    fn set(request: &mut SendWqe, elements: &[(u32, u32)]) {
        let elements: Vec<_> = elements
            .iter()
            .map(|&(key, length)| Element {
                address: IOVA + 8,
                length,
                lkey: MemoryKey(key),
            })
            .collect();
        request.elements.set(&elements).unwrap();
    }
    for (what, setup, opcode, forge, status) in cases {
        let mut p = pair(setup);
        p.b.fill(1);
        let before = (p.a.contents(0, 64), p.b.contents(0, 64));
        let request = p.a.request(opcode, 3, &[p.a.element(8, 8)]);
        let mut request = remote(request, &p.b, 16);
        forge(&mut request, &p);
        p.a.sends.post(request);
        p.run();
        assert_eq!(p.a.next(), Some((3, status)), "{what}");
        assert_eq!(p.a.state(), QPS_ERR, "{what}");
        let (of_peer, event) = match status {
            WC_STATUS_REM_INV_REQ_ERR => (true, EVENT_QP_REQ_ERR),
            WC_STATUS_REM_ACCESS_ERR => (true, EVENT_QP_ACCESS_ERR),
            _ => (false, 0),
        };
        assert_eq!(p.b.state() == QPS_ERR, of_peer, "{what}");
        let told = p.b.events.lock().unwrap().contains(&event);
        assert_eq!(told, of_peer, "{what}");
        assert_eq!((p.a.contents(0, 64), p.b.contents(0, 64)), before, "{what}");
    }
}

/// Memory whose address is not that of work requests: both have to be aligned.
#[test]
fn a_word_is_one_where_it_lies_too() {
    let mut p = pair(ATOMIC);
    let memory = |iova, offset| MemoryRegion {
        pd: PdHandle(1),
        iova,
        offset,
        length: 64,
        access: Access::from_wire(ATOMIC.access).unwrap(),
        region: p.b.region.clone(),
        owner: None,
    };
    let shifted = p.b.table.insert(memory(IOVA, 4)).unwrap();
    let mut request = p.a.request(ADD, 1, &[p.a.element(8, 8)]);
    (request.remote_address, request.rkey) = (IOVA, shifted);
    p.a.sends.post(request);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_REM_INV_REQ_ERR)));
    assert_eq!(p.b.contents(0, 64), [0; 64]);
}

#[test]
fn who_may_have_no_operations_outstanding_has_none() {
    let ends = || {
        let engine = SoftEngine::new();
        (end(&engine, 1, &ATOMIC), end(&engine, 2, &ATOMIC))
    };
    for (own, peers, status, broken) in [
        (0, 1, WC_STATUS_LOC_QP_OP_ERR, false),
        (1, 0, WC_STATUS_REM_INV_REQ_ERR, true),
        (1, 1, WC_STATUS_SUCCESS, false),
    ] {
        let (a, b) = ends();
        a.qp.modify(QP_TO_INIT, &init(&ATOMIC)).unwrap();
        a.qp.modify(QP_TO_RTR, &receive_from(&b, 2, 200)).unwrap();
        let rts = QpAttr {
            qp_state: QPS_RTS,
            sq_psn: 100.into(),
            max_rd_atomic: own,
            ..QpAttr::default()
        };
        a.qp.modify(QP_TO_RTS, &rts).unwrap();
        let limited = |attr: &mut QpAttr| attr.max_dest_rd_atomic = peers;
        connect_by(&b, &a, 1, [200, 100], &ATOMIC, limited);
        let mut p = Pair {
            a,
            b,
            now: Instant::now(),
        };
        post(&p, 1, ADD, 0);
        p.run();
        assert_eq!(p.a.next(), Some((1, status)));
        assert_eq!(p.b.state() == QPS_ERR, broken);
        assert_eq!(word(&p.b, 0), if status == 0 { 2 } else { 0 });
    }
}

/// The word has changed, its old value cannot be stored: the request fails, and is not tried again.
#[test]
fn an_operation_whose_result_is_lost_is_not_carried_out_twice() {
    let mut p = pair(ATOMIC);
    let pin = Pool::separate_files(4096).allocate(4096).unwrap();
    let region = Region::from_buffer(&pin);
    let memory = MemoryRegion {
        pd: PdHandle(1),
        iova: 0,
        offset: 0,
        length: 4096,
        access: Access::from_wire(ACCESS_LOCAL_WRITE).unwrap(),
        region: region.clone(),
        owner: None,
    };
    let lkey = p.a.table.insert(memory).unwrap();
    region.revoke();
    let element = Element {
        address: 0,
        length: 8,
        lkey,
    };
    let request = p.a.request(ADD, 1, &[element]);
    p.a.sends.post(remote(request, &p.b, 0));
    post(&p, 2, ADD, 0);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_LOC_PROT_ERR)));
    assert_eq!(p.a.next(), Some((2, WC_STATUS_WR_FLUSH_ERR)));
    assert_eq!(word(&p.b, 0), 2);
}

#[test]
fn an_operation_waits_for_a_peer_and_is_carried_out_once() {
    let engine = SoftEngine::new();
    let (a, b) = (end(&engine, 1, &ATOMIC), end(&engine, 2, &ATOMIC));
    connect(&a, &b, 2, [100, 200], &ATOMIC);
    let mut p = Pair {
        a,
        b,
        now: Instant::now(),
    };
    post(&p, 1, ADD, 0);
    p.run();
    p.pass(ANSWER_TIMEOUT);
    assert_eq!((p.a.next(), word(&p.b, 0)), (None, 0));
    connect(&p.b, &p.a, 1, [200, 100], &ATOMIC);
    p.pass(ANSWER_TIMEOUT);
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    assert_eq!(word(&p.b, 0), 2);
}

#[test]
fn an_unreliable_connection_has_none() {
    let setup = Setup {
        kind: QPT_UC,
        ..ATOMIC
    };
    for opcode in [ADD, Opcode::AtomicWrite] {
        let mut p = pair(setup);
        put(&p.b, 0, 1);
        post(&p, 1, opcode, 0);
        p.run();
        assert_eq!(p.a.next(), Some((1, WC_STATUS_LOC_QP_OP_ERR)));
        assert_eq!((p.a.state(), p.b.state()), (QPS_SQE, QPS_RTS));
        assert_eq!(word(&p.b, 0), 1);
    }
}

/// Two connections, each with a thread of its own, add to one word of one memory.
#[test]
fn what_two_connections_add_on_two_threads_adds_up() {
    const ADDS: u64 = 100_000;
    let words = [const { AtomicU64::new(0) }; 2];
    let address = words.as_ptr().expose_provenance() as u64;
    let process = Process::current().unwrap();
    let buffer = Pool::separate_files(4096).allocate(4096).unwrap();
    for (region, adds) in [
        (Region::from_buffer(&buffer), ADDS),
        (
            Region::from_process(&process, address, 16, true).unwrap(),
            ADDS / 10,
        ),
    ] {
        let locks = Arc::new(WordLocks::default());
        // Whoever holds the word may lose its CPU for long.
        let patient = Setup {
            timeout: 0,
            ..ATOMIC
        };
        let pairs = [(); 2].map(|()| pair_with_locks(patient, &locks));
        let pairs = pairs.map(|p| {
            let memory = MemoryRegion {
                pd: PdHandle(1),
                iova: 0,
                offset: 0,
                length: 16,
                access: Access::from_wire(ATOMIC.access).unwrap(),
                region: region.clone(),
                owner: None,
            };
            let key = p.b.table.insert(memory).unwrap();
            (p, key)
        });
        let sums = std::thread::scope(|scope| {
            let threads = pairs.map(|(mut p, rkey)| {
                scope.spawn(move || {
                    let mut done = 0;
                    let mut largest = 0;
                    while done < adds {
                        for wr_id in 0..100 {
                            let add = Opcode::FetchAdd { add: 1 };
                            let mut request = p.a.request(add, wr_id, &[p.a.element(8 * wr_id, 8)]);
                            (request.remote_address, request.rkey) = (8, rkey);
                            p.a.sends.post(request);
                        }
                        for wr_id in 0..100 {
                            let next = loop {
                                p.run();
                                if let Some(next) = p.a.next() {
                                    break next;
                                }
                                // The other one has the word.
                                std::thread::yield_now();
                                p.now = Instant::now();
                            };
                            assert_eq!(next, (wr_id, WC_STATUS_SUCCESS));
                            let before = word(&p.a, 8 * wr_id);
                            assert!(done == 0 || before > largest, "a value was seen twice");
                            largest = before;
                            done += 1;
                        }
                    }
                    largest
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        let total = region.atomic(8, farlane_zero_copy::AtomicOp::FetchAdd(0), &locks);
        assert_eq!(total.unwrap(), 2 * adds);
        assert_eq!(sums.into_iter().max(), Some(2 * adds - 1));
    }
    assert_eq!(words[0].load(Ordering::SeqCst), 0);
}
