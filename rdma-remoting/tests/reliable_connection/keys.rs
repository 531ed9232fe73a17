//! Keys of memory: each is checked, and ends what uses it when it goes.

use crate::rig::*;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::engine::soft::SoftEngine;
use farlane_rdma_remoting::memory::{Access, MemoryRegion, PdHandle};
use farlane_rdma_remoting::request::{Element, MemoryKey, Opcode, SendWqe};
use farlane_zero_copy::Region;
use rustix::fs::{MemfdFlags, SealFlags};
use std::time::{Duration, Instant};

/// What forging a key, an address or a right gets, and that no byte moves.
#[test]
fn every_key_is_checked() {
    type Forge = fn(&mut SendWqe, &End);
    let forgeries: [(&str, Setup, Opcode, Forge, u8); 9] = [
        (
            "unknown rkey",
            NORMAL,
            Opcode::Write,
            |r, _| r.rkey.0 ^= 0x40,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "before",
            NORMAL,
            Opcode::Write,
            |r, _| r.remote_address = IOVA - 1,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "beyond",
            NORMAL,
            Opcode::Read,
            |r, _| r.remote_address = IOVA + BYTES - 7,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "wraps",
            NORMAL,
            Opcode::Write,
            |r, _| r.remote_address = u64::MAX - 3,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "no right to write",
            Setup {
                access: ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ,
                ..NORMAL
            },
            Opcode::Write,
            |_, _| (),
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "no right to read",
            Setup {
                access: ACCESS_LOCAL_WRITE,
                ..NORMAL
            },
            Opcode::Read,
            |_, _| (),
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "queue pair without rights",
            Setup {
                qp_access: 0,
                ..NORMAL
            },
            Opcode::Write,
            |_, _| (),
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "unknown lkey",
            NORMAL,
            Opcode::Write,
            |r, _| {
                r.elements
                    .set(&[Element {
                        address: IOVA,
                        length: 8,
                        lkey: MemoryKey(0),
                    }])
                    .unwrap()
            },
            WC_STATUS_LOC_PROT_ERR,
        ),
        (
            "read into read-only memory",
            Setup {
                access: 0,
                ..NORMAL
            },
            Opcode::Read,
            |_, _| (),
            WC_STATUS_LOC_PROT_ERR,
        ),
    ];
    for (what, setup, opcode, forge, status) in forgeries {
        let mut p = pair(setup);
        p.a.fill(5);
        let before = p.b.contents(0, 64);
        let request = p.a.request(opcode, 3, &[p.a.element(0, 8)]);
        let mut request = remote(request, &p.b, 0);
        forge(&mut request, &p.b);
        p.a.sends.post(request);
        p.run();
        assert_eq!(p.a.next(), Some((3, status)), "{what}");
        assert_eq!(p.a.state(), QPS_ERR, "{what}");
        let remote_fault = status == WC_STATUS_REM_ACCESS_ERR;
        assert_eq!(p.b.state() == QPS_ERR, remote_fault, "{what}");
        assert_eq!(p.b.contents(0, 64), before, "{what}");
    }
}

#[test]
fn memory_revoked_in_flight_is_an_error_and_is_not_touched_again() {
    let mut p = pair(NORMAL);
    p.a.fill(6);
    let request = p.a.request(Opcode::Write, 1, &[p.a.element(0, 3 << 20)]);
    p.a.sends.post(remote(request, &p.b, 0));
    assert!(
        p.a.qp.progress(p.now.into()).worked,
        "the first turn moves a part"
    );
    p.b.region.revoke();
    p.b.table.remove(p.b.key).unwrap();
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_REM_ACCESS_ERR)));
}

/// What a request in progress has opened is not what its owner has since given back, and somebody
/// else may have: the window of a pool stays mapped.
#[test]
fn a_key_that_is_gone_ends_what_uses_it() {
    // A sender that waits for a receive request.
    let mut p = pair(NORMAL);
    p.a.fill(1);
    p.a.post_send(1, &[p.a.element(0, 64)]);
    p.run();
    assert_eq!(p.a.next(), None, "no receive request yet");
    p.a.table.remove(p.a.key).unwrap();
    p.b.post_recv(2, &[p.b.element(0, 64)]);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_LOC_PROT_ERR)));
    assert_eq!(p.b.contents(0, 64), [0; 64]);

    // A reader whose peer is not there yet.
    let engine = SoftEngine::new();
    let (a, b) = (end(&engine, 1, &NORMAL), end(&engine, 2, &NORMAL));
    connect(&a, &b, 2, [100, 200], &NORMAL);
    let mut p = Pair {
        a,
        b,
        now: Instant::now(),
    };
    p.b.fill(2);
    let read = p.a.request(Opcode::Read, 3, &[p.a.element(0, 64)]);
    p.a.sends.post(remote(read, &p.b, 0));
    p.run();
    p.a.table.remove(p.a.key).unwrap();
    connect(&p.b, &p.a, 1, [200, 100], &NORMAL);
    p.pass(Duration::from_millis(100));
    assert_eq!(p.a.next(), Some((3, WC_STATUS_LOC_PROT_ERR)));
    assert_eq!(p.a.contents(0, 64), [0; 64]);

    // A receiver in the middle of a message.
    let mut p = pair(NORMAL);
    p.a.fill(3);
    p.b.post_recv(4, &[p.b.element(0, 4 << 20)]);
    p.a.post_send(5, &[p.a.element(0, 4 << 20)]);
    assert!(p.a.qp.progress(p.now.into()).worked);
    let so_far = p.b.contents(0, 4 << 20);
    assert_eq!(so_far.last(), Some(&0), "it has arrived whole in one turn");
    p.b.table.remove(p.b.key).unwrap();
    p.run();
    assert!(p.b.contents(0, 4 << 20) == so_far);
    assert_eq!(p.b.next(), Some((4, WC_STATUS_LOC_PROT_ERR)));
}

/// Mappings that this process has of memfds of a name.
fn mapped(name: &str) -> usize {
    let file = format!("/memfd:{name} (deleted)");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.ends_with(&file)).count()
}

/// A request that waits has opened memory. It does not keep it: its owner may have gone long since,
/// and come back with more.
#[test]
fn a_request_that_waits_keeps_no_memory_that_was_taken_back() {
    let pin = || {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("waited-for", flags).unwrap();
        rustix::fs::ftruncate(&file, BYTES).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        Region::from_memfd(file, BYTES, true).unwrap()
    };
    let memory = |region| MemoryRegion {
        pd: PdHandle(1),
        iova: IOVA,
        offset: 0,
        length: BYTES,
        access: Access::from_wire(NORMAL.access).unwrap(),
        region,
        owner: None,
    };
    // The memory is unplugged or detached, or the only key to it is given back.
    for is_detached in [true, false] {
        let mut p = pair(NORMAL);
        let whole = pin();
        let kept = is_detached.then(|| whole.clone());
        p.a.key = p.a.table.insert(memory(whole)).unwrap();
        p.a.post_send(1, &[p.a.element(0, 64)]);
        p.run();
        assert_eq!((p.a.next(), mapped("waited-for")), (None, 1));
        match kept {
            Some(pin) => pin.revoke(),
            None => drop(p.a.table.remove(p.a.key).unwrap()),
        }
        assert_eq!(mapped("waited-for"), 0, "detached: {is_detached}");
        p.b.post_recv(2, &[p.b.element(0, 64)]);
        p.run();
        assert_eq!(p.a.next(), Some((1, WC_STATUS_LOC_PROT_ERR)));
    }
}
