//! Flushes (IBTA annex A19): which are carried out, which are refused, and in what order.

use crate::rig::*;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::memory::{Access, MemoryRegion, PdHandle};
use farlane_rdma_remoting::request::{Flush, MemoryKey, Opcode, SendWqe};

const FLUSHING: Setup = Setup {
    access: ALL | ACCESS_FLUSH_GLOBAL,
    qp_access: ALL | ACCESS_FLUSH_GLOBAL,
    ..NORMAL
};

const fn of(length: Option<u64>) -> Flush {
    Flush {
        is_persistent: false,
        length,
    }
}

/// A flush by the first end, of a key of the second.
fn request(p: &Pair, wr_id: u64, flush: Flush, address: u64, rkey: MemoryKey) -> SendWqe {
    let mut request = p.a.request(Opcode::Flush(flush), wr_id, &[]);
    (request.remote_address, request.rkey) = (address, rkey);
    request
}

fn outcome(setup: Setup, flush: Flush, address: u64) -> u8 {
    let mut p = pair(setup);
    let before = p.b.fill(7);
    p.a.sends.post(request(&p, 1, flush, address, p.b.key));
    p.run();
    let (wr_id, status) = p.a.next().unwrap();
    assert_eq!(wr_id, 1);
    let state = if status == 0 { QPS_RTS } else { QPS_ERR };
    assert_eq!((p.a.state(), p.b.state()), (state, state));
    let events: &[u32] = match status {
        WC_STATUS_SUCCESS => &[],
        _ => &[EVENT_QP_ACCESS_ERR],
    };
    assert_eq!(*p.b.events.lock().unwrap(), events);
    assert!(p.b.cq.poll().is_none(), "no receive request is consumed");
    assert_eq!(p.b.contents(0, before.len()), before);
    status
}

#[test]
fn what_the_peer_may_flush_is_flushed() {
    for (flush, address) in [
        (of(Some(BYTES)), IOVA),
        (of(Some(0)), IOVA),
        (of(Some(1)), IOVA + BYTES - 1),
        (of(Some(0)), IOVA + BYTES),
        // Of a region address and length say nothing.
        (of(None), 0),
        (of(None), u64::MAX),
    ] {
        let status = outcome(FLUSHING, flush, address);
        assert_eq!(status, WC_STATUS_SUCCESS, "{flush:?} {address:#x}");
    }
}

#[test]
fn what_the_peer_may_not_flush_is_refused() {
    let without_right = Setup {
        access: ALL,
        ..FLUSHING
    };
    let not_granted = Setup {
        qp_access: ALL,
        ..FLUSHING
    };
    let persistent = |length| Flush {
        is_persistent: true,
        length,
    };
    for (setup, flush, address) in [
        (FLUSHING, of(Some(BYTES + 1)), IOVA),
        (FLUSHING, of(Some(1)), IOVA - 1),
        (FLUSHING, of(Some(1)), IOVA + BYTES),
        (FLUSHING, of(Some(0)), IOVA + BYTES + 1),
        (FLUSHING, of(Some(u64::MAX)), IOVA),
        (FLUSHING, of(Some(2)), u64::MAX),
        (without_right, of(Some(1)), IOVA),
        (without_right, of(None), IOVA),
        (not_granted, of(Some(1)), IOVA),
        (not_granted, of(None), IOVA),
        // No memory here outlasts a loss of power.
        (FLUSHING, persistent(Some(1)), IOVA),
        (FLUSHING, persistent(None), IOVA),
    ] {
        let status = outcome(setup, flush, address);
        assert_eq!(status, WC_STATUS_REM_ACCESS_ERR, "{flush:?} {address:#x}");
    }
}

#[test]
fn a_key_that_names_nothing_there_is_refused() {
    for change in [0, 1, 1 << 8, u32::MAX] {
        for flush in [of(Some(1)), of(None)] {
            let mut p = pair(FLUSHING);
            let key = match change {
                // That of another protection domain.
                0 => {
                    let memory = MemoryRegion {
                        pd: PdHandle(2),
                        iova: IOVA,
                        offset: 0,
                        length: BYTES,
                        access: Access::from_wire(FLUSHING.access).unwrap(),
                        region: p.b.region.clone(),
                        owner: None,
                    };
                    p.b.table.insert(memory).unwrap()
                }
                bits => MemoryKey(p.b.key.0 ^ bits),
            };
            p.a.sends.post(request(&p, 1, flush, IOVA, key));
            p.run();
            assert_eq!(p.a.next(), Some((1, WC_STATUS_REM_ACCESS_ERR)));
        }
    }
}

#[test]
fn what_was_written_before_a_flush_is_there_when_it_completes() {
    let p = pair(FLUSHING);
    let bytes = p.a.fill(9);
    // A long write, of which a turn moves some.
    let length = u32::try_from(BYTES).unwrap();
    let write = p.a.request(Opcode::Write, 1, &[p.a.element(0, length)]);
    p.a.sends.post(remote(write, &p.b, 0));
    p.a.sends.post(request(&p, 2, of(None), 0, p.b.key));
    let mut turns = 0;
    while !p.a.sends.is_empty() || p.a.cq.len() < 2 {
        p.a.qp.progress(p.now.into());
        turns += 1;
        assert!(turns < 10_000);
    }
    assert!(turns > 1);
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    let flushed = p.a.cq.poll().unwrap();
    assert_eq!((flushed.wr_id.get(), flushed.status), (2, 0));
    assert_eq!(flushed.opcode, WC_OPCODE_FLUSH);
    assert_eq!(flushed.byte_len.get(), 0);
    assert_eq!(p.b.contents(0, bytes.len()), bytes);
}
