//! Memory windows and the invalidation of keys (IBTA 10.6.7, 9.4.1.1).

use crate::rig::*;
use farlane_abi::Errno;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::engine::soft::SoftEngine;
use farlane_rdma_remoting::memory::{Access, MemoryRegion, PdHandle, WindowKind};
use farlane_rdma_remoting::request::{Binding, Element, MemoryKey, Opcode};
use std::time::Instant;

/// Regions that the owner may write and bind windows to, and the peer may not touch.
const BINDABLE: Setup = Setup {
    access: ACCESS_LOCAL_WRITE | ACCESS_MW_BIND,
    qp_access: ALL | ACCESS_REMOTE_ATOMIC,
    ..NORMAL
};
const PD: PdHandle = PdHandle(1);

fn window(end: &End, kind: WindowKind) -> MemoryKey {
    end.table.insert_window(PD, kind).unwrap()
}

/// The next key of a window.
fn next(key: MemoryKey) -> MemoryKey {
    MemoryKey(key.0 & !0xff | key.0.wrapping_add(1) & 0xff)
}

/// Binds 64 bytes from byte 128 of an end's memory, for the peer to write.
fn binding(end: &End, window: MemoryKey) -> Binding {
    Binding {
        window,
        key: next(window),
        region: end.key,
        address: IOVA + 128,
        length: 64,
        access: ACCESS_REMOTE_WRITE,
    }
}

/// Has an end carry out a request that concerns it alone; returns the status.
fn local(p: &mut Pair, end: fn(&Pair) -> &End, opcode: Opcode) -> u8 {
    let request = end(p).request(opcode, 77, &[]);
    end(p).sends.post(request);
    p.run();
    let completion = end(p).cq.poll().unwrap();
    assert_eq!(completion.wr_id.get(), 77);
    let expected = match opcode {
        Opcode::Bind(_) => WC_OPCODE_BIND_WINDOW,
        _ => WC_OPCODE_LOCAL_INVALIDATE,
    };
    assert_eq!(completion.opcode, expected);
    completion.status
}

fn owner(p: &Pair) -> &End {
    &p.b
}

fn bind(p: &mut Pair, binding: Binding) -> MemoryKey {
    assert_eq!(local(p, owner, Opcode::Bind(binding)), WC_STATUS_SUCCESS);
    binding.key
}

/// The status of a request of the first end that names the second's memory by a key.
fn ask(p: &mut Pair, opcode: Opcode, key: MemoryKey, address: u64, length: u32) -> u8 {
    let mut request = p.a.request(opcode, 5, &[p.a.element(0, length)]);
    (request.rkey, request.remote_address) = (key, address);
    p.a.sends.post(request);
    p.run();
    let (wr_id, status) = p.a.next().unwrap();
    assert_eq!(wr_id, 5);
    status
}

#[test]
fn a_window_opens_its_own_bytes_with_its_own_rights() {
    let beyond = IOVA + 128 + 64;
    for (opcode, access, address, length, is_allowed) in [
        (Opcode::Write, ACCESS_REMOTE_WRITE, IOVA + 128, 64, true),
        (Opcode::Write, ACCESS_REMOTE_WRITE, beyond - 1, 1, true),
        (Opcode::Write, ACCESS_REMOTE_WRITE, beyond - 1, 2, false),
        (Opcode::Write, ACCESS_REMOTE_WRITE, IOVA + 127, 2, false),
        (Opcode::Write, ACCESS_REMOTE_WRITE, beyond, 1, false),
        (Opcode::Write, ACCESS_REMOTE_READ, IOVA + 128, 8, false),
        // What concerns the owner alone may be asked for, and gives the peer nothing.
        (Opcode::Write, ACCESS_LOCAL_WRITE, IOVA + 128, 8, false),
        (Opcode::Read, ACCESS_REMOTE_WRITE, IOVA + 128, 8, false),
        (Opcode::Read, ACCESS_REMOTE_READ, IOVA + 128, 8, true),
        (
            Opcode::FetchAdd { add: 1 },
            ACCESS_REMOTE_WRITE,
            IOVA + 128,
            8,
            false,
        ),
        (
            Opcode::FetchAdd { add: 1 },
            ACCESS_REMOTE_ATOMIC,
            IOVA + 184,
            8,
            true,
        ),
    ] {
        for kind in [WindowKind::One, WindowKind::Two] {
            let mut p = pair(BINDABLE);
            p.a.fill(5);
            let window = window(&p.b, kind);
            let binding = Binding {
                access,
                ..binding(&p.b, window)
            };
            let key = bind(&mut p, binding);
            let status = ask(&mut p, opcode, key, address, length);
            let expected = match is_allowed {
                true => WC_STATUS_SUCCESS,
                false => WC_STATUS_REM_ACCESS_ERR,
            };
            assert_eq!(
                status, expected,
                "{opcode:?} {access:#x} {address:#x} {length}"
            );
            let around = [p.b.contents(0, 128), p.b.contents(192, 128)].concat();
            assert!(around.iter().all(|byte| *byte == 0));
            // The region itself grants the peer nothing, whatever its window does.
            if is_allowed {
                let region = p.b.key;
                let status = ask(&mut p, opcode, region, IOVA + 128, 8);
                assert_eq!(status, WC_STATUS_REM_ACCESS_ERR);
            }
        }
    }
}

#[test]
fn what_is_written_through_a_window_is_where_its_address_says() {
    let mut p = pair(BINDABLE);
    let bytes = p.a.fill(9);
    let window = window(&p.b, WindowKind::Two);
    let binding = binding(&p.b, window);
    let key = bind(&mut p, binding);
    let status = ask(&mut p, Opcode::Write, key, IOVA + 130, 7);
    assert_eq!(status, WC_STATUS_SUCCESS);
    assert_eq!(p.b.contents(130, 7), bytes[..7]);
    assert_eq!(
        (p.b.contents(129, 1), p.b.contents(137, 1)),
        (vec![0], vec![0])
    );
}

/// A binding that is refused, by what is wrong with it.
#[test]
fn a_binding_that_makes_no_sense_is_refused_and_leaves_the_window_as_it_was() {
    type Forge = fn(&mut Binding, &End);
    let more = |end: &End, access: u32, pd: u32| {
        let memory = MemoryRegion {
            pd: PdHandle(pd),
            iova: IOVA,
            offset: 0,
            length: 4096,
            access: Access::from_wire(access).unwrap(),
            region: end.region.clone(),
            owner: None,
        };
        end.table.insert(memory).unwrap()
    };
    // The first of type 1 and bound, so that it shows whether it is as it was.
    let forgeries: &[(&str, Forge)] = &[
        ("no window", |b, _| b.window.0 ^= 0x100),
        ("a region's key", |b, end| {
            (b.window, b.key) = (end.key, next(end.key));
        }),
        ("a window of another protection domain", |b, end| {
            b.window = end
                .table
                .insert_window(PdHandle(2), WindowKind::One)
                .unwrap();
            b.key = next(b.window);
        }),
        ("a key of another place", |b, _| b.key.0 ^= 0x100),
        ("a region's key as the next one", |b, end| b.key = end.key),
        ("no region", |b, _| b.region.0 ^= 1),
        ("a window as region", |b, _| b.region = b.window),
        ("beyond the end", |b, _| b.address = IOVA + BYTES - 63),
        ("before the begin", |b, _| b.address = IOVA - 1),
        ("an address that wraps", |b, _| b.address = u64::MAX - 10),
        ("a length that wraps", |b, _| b.length = u64::MAX),
        ("a length that wraps to the region's", |b, _| {
            (b.address, b.length) = (IOVA + 8, 0u64.wrapping_sub(8));
        }),
        ("unknown rights", |b, _| b.access = 1 << 10),
        ("addresses from zero", |b, _| b.access |= 1 << 5),
        ("windows to a window", |b, _| b.access |= ACCESS_MW_BIND),
    ];
    for (what, forge) in forgeries {
        let mut p = pair(BINDABLE);
        let window = window(&p.b, WindowKind::One);
        let first = binding(&p.b, window);
        let key = bind(&mut p, first);
        let mut forged = binding(&p.b, key);
        forge(&mut forged, &p.b);
        let status = local(&mut p, owner, Opcode::Bind(forged));
        assert_eq!(status, WC_STATUS_MW_BIND_ERR, "{what}");
        assert_eq!(p.b.state(), QPS_ERR, "{what}");
        let table = &p.b.table;
        assert_eq!(
            table.deregister(p.b.key).unwrap_err(),
            Errno::EBUSY,
            "{what}"
        );
    }
    for (what, access, pd, wanted) in [
        (
            "a region of another protection domain",
            BINDABLE.access,
            2,
            ACCESS_REMOTE_READ,
        ),
        (
            "a region without windows",
            ACCESS_LOCAL_WRITE,
            1,
            ACCESS_REMOTE_READ,
        ),
        (
            "writes where the owner may not write",
            ACCESS_MW_BIND,
            1,
            ACCESS_REMOTE_WRITE,
        ),
        (
            "atomics where the owner may not write",
            ACCESS_MW_BIND,
            1,
            ACCESS_REMOTE_ATOMIC,
        ),
    ] {
        let mut p = pair(BINDABLE);
        let region = more(&p.b, access, pd);
        let window = window(&p.b, WindowKind::Two);
        let forged = Binding {
            region,
            access: wanted,
            ..binding(&p.b, window)
        };
        let status = local(&mut p, owner, Opcode::Bind(forged));
        assert_eq!(status, WC_STATUS_MW_BIND_ERR, "{what}");
        p.b.table.deregister(region).unwrap();
    }
    // Reading needs no right of the owner's but to bind.
    let mut p = pair(BINDABLE);
    let region = more(&p.b, ACCESS_MW_BIND, 1);
    let window = window(&p.b, WindowKind::Two);
    let readable = Binding {
        region,
        access: ACCESS_REMOTE_READ,
        ..binding(&p.b, window)
    };
    let key = bind(&mut p, readable);
    assert_eq!(ask(&mut p, Opcode::Read, key, IOVA + 128, 8), 0);
}

#[test]
fn a_window_of_type_1_is_bound_again_and_unbound() {
    let mut p = pair(BINDABLE);
    let window = window(&p.b, WindowKind::One);
    let first = binding(&p.b, window);
    let old = bind(&mut p, first);
    assert_eq!(ask(&mut p, Opcode::Write, old, IOVA + 128, 8), 0);
    let moved = Binding {
        address: IOVA + 1024,
        ..binding(&p.b, old)
    };
    let new = bind(&mut p, moved);
    assert_eq!(ask(&mut p, Opcode::Write, new, IOVA + 1024, 8), 0);
    assert_eq!(
        ask(&mut p, Opcode::Write, old, IOVA + 128, 8),
        WC_STATUS_REM_ACCESS_ERR
    );

    // Without a byte, and so without a region.
    let mut p = pair(BINDABLE);
    let window = self::window(&p.b, WindowKind::One);
    let first = binding(&p.b, window);
    let key = bind(&mut p, first);
    let nothing = Binding {
        length: 0,
        region: MemoryKey(0),
        ..binding(&p.b, key)
    };
    let unbound = bind(&mut p, nothing);
    p.b.table.deregister(p.b.key).unwrap();
    for key in [unbound, key] {
        reconnect(&mut p, [1, 2]);
        assert_eq!(
            ask(&mut p, Opcode::Write, key, IOVA + 128, 8),
            WC_STATUS_REM_ACCESS_ERR
        );
    }
}

/// Makes the connection of the two ends anew.
fn reconnect(p: &mut Pair, gids: [u8; 2]) {
    let reset = QpAttr {
        qp_state: QPS_RESET,
        ..QpAttr::default()
    };
    for end in [&p.a, &p.b] {
        end.qp.modify(QP_STATE, &reset).unwrap();
        while end.cq.poll().is_some() {}
    }
    connect(&p.a, &p.b, gids[1], [100, 200], &BINDABLE);
    connect(&p.b, &p.a, gids[0], [200, 100], &BINDABLE);
}

#[test]
fn a_window_of_type_2_is_bound_once_until_its_key_is_invalidated() {
    let mut p = pair(BINDABLE);
    let window = window(&p.b, WindowKind::Two);
    let empty = Binding {
        length: 0,
        ..binding(&p.b, window)
    };
    assert_eq!(
        local(&mut p, owner, Opcode::Bind(empty)),
        WC_STATUS_MW_BIND_ERR
    );
    reconnect(&mut p, [1, 2]);
    let first = binding(&p.b, window);
    let key = bind(&mut p, first);
    assert_eq!(ask(&mut p, Opcode::Write, key, IOVA + 128, 8), 0);
    let twice = binding(&p.b, key);
    assert_eq!(
        local(&mut p, owner, Opcode::Bind(twice)),
        WC_STATUS_MW_BIND_ERR
    );
    reconnect(&mut p, [1, 2]);
    assert_eq!(ask(&mut p, Opcode::Write, key, IOVA + 128, 8), 0);
    assert_eq!(local(&mut p, owner, Opcode::LocalInvalidate(key)), 0);
    let second = binding(&p.b, key);
    let other = bind(&mut p, second);
    assert_eq!(ask(&mut p, Opcode::Write, other, IOVA + 128, 8), 0);
    assert_eq!(
        ask(&mut p, Opcode::Write, key, IOVA + 128, 8),
        WC_STATUS_REM_ACCESS_ERR
    );
}

/// The requester's queue is in order: what was asked for before the invalidation is done, what
/// comes after is refused.
#[test]
fn a_key_that_was_invalidated_opens_nothing() {
    let mut p = pair(BINDABLE);
    p.a.fill(5);
    let window = window(&p.b, WindowKind::Two);
    let first = binding(&p.b, window);
    let key = bind(&mut p, first);
    let invalidated = local(&mut p, owner, Opcode::LocalInvalidate(key));
    assert_eq!(invalidated, WC_STATUS_SUCCESS);
    assert_eq!(
        ask(&mut p, Opcode::Write, key, IOVA + 128, 8),
        WC_STATUS_REM_ACCESS_ERR
    );
    assert_eq!(p.b.contents(128, 8), [0; 8]);
    p.b.table.deregister(p.b.key).unwrap();
}

#[test]
fn a_message_under_way_ends_with_the_window_that_it_is_written_through() {
    let mut p = pair(BINDABLE);
    p.a.fill(5);
    let window = window(&p.b, WindowKind::Two);
    let whole = Binding {
        address: IOVA,
        length: BYTES,
        ..binding(&p.b, window)
    };
    let key = bind(&mut p, whole);
    let mut request = p.a.request(Opcode::Write, 1, &[p.a.element(0, 3 << 20)]);
    (request.rkey, request.remote_address) = (key, IOVA);
    p.a.sends.post(request);
    assert!(p.a.qp.progress(p.now.into()).worked);
    let so_far = p.b.contents(0, 3 << 20);
    assert_eq!(
        (so_far[0], so_far.last()),
        (p.a.contents(0, 1)[0], Some(&0))
    );
    let invalidate = p.b.request(Opcode::LocalInvalidate(key), 2, &[]);
    p.b.sends.post(invalidate);
    assert!(p.b.qp.progress(p.now.into()).worked);
    assert_eq!(p.b.next(), Some((2, WC_STATUS_SUCCESS)));
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_REM_ACCESS_ERR)));
    assert!(p.b.contents(0, 3 << 20) == so_far);
}

#[test]
fn a_key_that_cannot_be_invalidated_ends_its_queue_pair_and_stays() {
    type Make = fn(&mut Pair) -> MemoryKey;
    let cases: [(&str, Make); 5] = [
        ("a region's", |p| p.b.key),
        ("nothing's", |p| MemoryKey(p.b.key.0 ^ 0x100)),
        ("a window's that is not bound", |p| {
            window(&p.b, WindowKind::Two)
        }),
        ("a window's of type 1", |p| {
            let window = window(&p.b, WindowKind::One);
            let binding = binding(&p.b, window);
            bind(p, binding)
        }),
        ("a window's by an earlier key", |p| {
            let window = window(&p.b, WindowKind::Two);
            let binding = binding(&p.b, window);
            bind(p, binding);
            window
        }),
    ];
    for (what, make) in cases {
        let mut p = pair(BINDABLE);
        let key = make(&mut p);
        let status = local(&mut p, owner, Opcode::LocalInvalidate(key));
        assert_eq!(status, WC_STATUS_LOC_QP_OP_ERR, "{what}");
        assert_eq!((p.b.state(), p.a.state()), (QPS_ERR, QPS_RTS), "{what}");
        // By the peer: its message arrives, and ends the connection.
        let mut p = pair(BINDABLE);
        p.a.fill(5);
        let key = make(&mut p);
        p.b.post_recv(9, &[p.b.element(0, 64)]);
        let send =
            p.a.request(Opcode::SendInvalidate(key), 4, &[p.a.element(0, 8)]);
        p.a.sends.post(send);
        p.run();
        assert_eq!(p.a.next(), Some((4, WC_STATUS_REM_ACCESS_ERR)), "{what}");
        assert_eq!(p.b.next(), Some((9, WC_STATUS_REM_INV_REQ_ERR)), "{what}");
        assert_eq!((p.a.state(), p.b.state()), (QPS_ERR, QPS_ERR), "{what}");
        assert!(p.b.events.lock().unwrap().contains(&EVENT_QP_ACCESS_ERR));
    }
}

#[test]
fn a_message_invalidates_a_window_of_its_receiver_before_it_is_received() {
    let mut p = pair(BINDABLE);
    let bytes = p.a.fill(5);
    let window = window(&p.b, WindowKind::Two);
    let first = binding(&p.b, window);
    let key = bind(&mut p, first);
    p.b.post_recv(9, &[p.b.element(0, 64)]);
    let send =
        p.a.request(Opcode::SendInvalidate(key), 4, &[p.a.element(0, 8)]);
    p.a.sends.post(send);
    p.run();
    let sent = p.a.cq.poll().unwrap();
    assert_eq!((sent.wr_id.get(), sent.status), (4, WC_STATUS_SUCCESS));
    assert_eq!(sent.opcode, WC_OPCODE_SEND);
    let received = p.b.cq.poll().unwrap();
    assert_eq!(
        (received.wr_id.get(), received.status),
        (9, WC_STATUS_SUCCESS)
    );
    assert_eq!(received.flags.get(), WC_FLAG_INVALIDATED);
    assert_eq!((received.imm.get(), received.byte_len.get()), (key.0, 8));
    assert_eq!(p.b.contents(0, 8), bytes[..8]);
    assert_eq!(
        ask(&mut p, Opcode::Write, key, IOVA + 128, 8),
        WC_STATUS_REM_ACCESS_ERR
    );
    p.b.table.deregister(p.b.key).unwrap();
}

/// Two connections of one owner: the window is for the peer of the one that has bound it.
#[test]
fn a_window_of_type_2_is_of_the_queue_pair_that_has_bound_it_and_one_of_type_1_is_not() {
    for (kind, is_shared) in [(WindowKind::One, true), (WindowKind::Two, false)] {
        let engine = SoftEngine::new();
        let (a, b) = (end(&engine, 1, &BINDABLE), end(&engine, 2, &BINDABLE));
        let peer = end(&engine, 3, &BINDABLE);
        let other = end_in(&engine, 2, &BINDABLE, &b);
        for (one, two, gids) in [(&a, &b, [1, 2]), (&peer, &other, [3, 2])] {
            connect(one, two, gids[1], [100, 200], &BINDABLE);
            connect(two, one, gids[0], [200, 100], &BINDABLE);
        }
        let now = Instant::now();
        let mut p = Pair { a, b, now };
        let mut third = Pair {
            a: peer,
            b: other,
            now,
        };
        let window = window(&p.b, kind);
        let first = binding(&p.b, window);
        let key = bind(&mut p, first);
        let status = ask(&mut third, Opcode::Write, key, IOVA + 128, 8);
        assert_eq!(status == WC_STATUS_SUCCESS, is_shared);
        if is_shared {
            continue;
        }
        // Nor can a peer of another queue pair invalidate it.
        assert_eq!(status, WC_STATUS_REM_ACCESS_ERR);
        reconnect(&mut third, [3, 2]);
        third.b.post_recv(1, &[third.b.element(0, 8)]);
        let send = third.a.request(Opcode::SendInvalidate(key), 4, &[]);
        third.a.sends.post(send);
        third.run();
        assert_eq!(third.a.next(), Some((4, status)));
        assert_eq!(ask(&mut p, Opcode::Write, key, IOVA + 128, 8), 0);
    }
}

#[test]
fn a_windows_key_is_none_for_its_owners_own_requests() {
    let mut p = pair(BINDABLE);
    let window = window(&p.b, WindowKind::One);
    let first = Binding {
        access: ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_LOCAL_WRITE,
        ..binding(&p.b, window)
    };
    let key = bind(&mut p, first);
    let element = Element {
        address: IOVA + 128,
        length: 8,
        lkey: key,
    };
    let send = p.b.request(Opcode::Send, 3, &[element]);
    p.b.sends.post(send);
    p.run();
    assert_eq!(p.b.next(), Some((3, WC_STATUS_LOC_PROT_ERR)));
}

#[test]
fn an_unreliable_connection_has_windows_and_drops_what_invalidates_none() {
    let setup = Setup {
        kind: QPT_UC,
        ..BINDABLE
    };
    let mut p = pair(setup);
    p.a.fill(5);
    let window = window(&p.b, WindowKind::Two);
    let first = binding(&p.b, window);
    let key = bind(&mut p, first);
    assert_eq!(ask(&mut p, Opcode::Write, key, IOVA + 128, 8), 0);
    p.b.post_recv(9, &[p.b.element(0, 64)]);
    for (wr_id, key) in [(1, p.b.key), (2, window), (3, key)] {
        let send =
            p.a.request(Opcode::SendInvalidate(key), wr_id, &[p.a.element(0, 8)]);
        p.a.sends.post(send);
        p.run();
        assert_eq!(p.a.next(), Some((wr_id, WC_STATUS_SUCCESS)));
        assert_eq!(p.b.state(), QPS_RTS);
    }
    let received = p.b.cq.poll().unwrap();
    assert_eq!((received.wr_id.get(), received.imm.get()), (9, key.0));
    assert!(p.b.cq.poll().is_none());
}

/// A region outlives the windows that are bound to it; all else goes in any order.
#[test]
fn regions_windows_and_queue_pairs_go_in_any_order() {
    let made = |kind| {
        let mut p = pair(BINDABLE);
        let window = window(&p.b, kind);
        let first = binding(&p.b, window);
        let key = bind(&mut p, first);
        let busy = p.b.table.deregister(p.b.key).unwrap_err();
        assert_eq!(busy, Errno::EBUSY);
        // It is no region, bound or not.
        assert_eq!(p.b.table.deregister(key).unwrap_err(), Errno::EBADF);
        (p, window, key)
    };
    for kind in [WindowKind::One, WindowKind::Two] {
        let (mut p, window, key) = made(kind);
        p.b.table.remove_window(window).unwrap();
        let gone = p.b.table.remove_window(window);
        assert_eq!(gone, Err(Errno::EBADF));
        assert_eq!(
            ask(&mut p, Opcode::Write, key, IOVA + 128, 8),
            WC_STATUS_REM_ACCESS_ERR
        );
        p.b.table.deregister(p.b.key).unwrap();

        let (p, window, key) = made(kind);
        p.b.qp.destroy();
        p.b.table.remove_window(key).unwrap();
        assert!(p.b.table.remove_window(window).is_err());
        p.b.table.deregister(p.b.key).unwrap();

        let (mut p, _, key) = made(kind);
        assert_eq!(p.b.table.drain().len(), 1);
        assert!(p.b.table.is_empty());
        assert_eq!(
            ask(&mut p, Opcode::Write, key, IOVA + 128, 8),
            WC_STATUS_REM_ACCESS_ERR
        );
    }
}
