//! A guest's kernel that breaks rules: what it calls pages of its VM, and whom it sends management
//! datagrams.

use super::kernel::{Fast, QKEY, SECOND, message, registering};
use super::*;
use crate::testing::guest_memory;
use crate::{Peers, PortConfig};
use farlane_zero_copy::Region;
use std::collections::BTreeSet;

#[test]
fn general_services_reach_those_whom_operators_let() {
    let server = Server::without_workers();
    let config = PortConfig {
        peers: Peers::Only(BTreeSet::from([[2; 16]])),
        ..Default::default()
    };
    let victim = server.port_with([1; 16], "victim".into(), config).unwrap();
    let [friend, stranger] = [2, 3].map(|gid| port(&server, gid));
    // A name that the friend has had makes nobody else one.
    friend.add_gid(0, [0xfd; 16]).unwrap();
    friend.remove_gid(0).unwrap();
    stranger.add_gid(0, [0xfd; 16]).unwrap();
    let [v, f, s] = [&victim, &friend, &stranger].map(Guest::start_kernel);
    let pairs = [&v, &f, &s].map(|guest| guest.datagrams_of(QPT_GSI, QKEY));
    pairs[0].post_recv(5, &[v.sge(0, 296)]);
    for (from, at, arrives) in [(&s, 2, None), (&f, 1, Some((5, 0)))] {
        let datagram = message(from, [1; 16], 1);
        let (entry, payload) = request(4, WR_SEND, &datagram, &[]);
        pairs[at].post(&entry, &payload);
        from.ring_for(&pairs[at]);
        run(&[&v, &f, &s], Instant::now());
        assert_eq!((from.next(), v.next()), (Some((4, 0)), arrives));
    }
    for gid in [[3; 16], [0xfd; 16]] {
        let ah = v.host().create_ah(CreateAh {
            pd: v.pd,
            dgid: gid,
            is_global: 1,
            port_num: 1,
            ..Default::default()
        });
        assert_eq!(ah, Err(Errno::EACCES));
    }
}

#[test]
fn pages_outside_memory_are_no_registration() {
    let fast = Fast::new();
    let refused = u32::from(WC_STATUS_LOC_QP_OP_ERR);
    let register = fast.register(1);
    let last = u64::MAX - PAGE_BYTES + 1;
    for pages in [
        [PAGE_BYTES, 0],
        [0, PAGE_BYTES],
        [SECOND - PAGE_BYTES, SECOND],
        [SECOND + PAGE_BYTES, 0],
        [1 << 63, 0],
        [0, last],
        [last, 0],
        [last, last],
        [u64::MAX, 0],
        [1, 0],
    ] {
        fast.set_pages(&pages);
        let got = fast.carry_out(&[registering(&register)]);
        assert_eq!(got, [refused], "{pages:x?}");
    }
    // One page twice is its own affair.
    fast.set_pages(&[SECOND, SECOND]);
    assert_eq!(fast.carry_out(&[registering(&register)]), [0]);
}

#[test]
fn pages_of_any_length_are_no_longer_than_memory() {
    let fast = Fast::new();
    fast.guest.host().dereg_mr(fast.mr.handle).unwrap();
    fast.set_pages(&[0, 1 << 31]);
    let alloc = AllocFastMr {
        page_bytes: (1_u32 << 31).into(),
        ..Fast::alloc(&fast.guest)
    };
    let mr = fast.guest.host().alloc_fast_mr(alloc).unwrap();
    let fast = Fast { mr, ..fast };
    let refused = u32::from(WC_STATUS_LOC_QP_OP_ERR);
    for (offset, length) in [
        (0, PAGE_BYTES + 1),
        (4096, 1),
        ((1 << 31) - 1, 2),
        (0, 1 << 32),
    ] {
        let bad = RxeRegister {
            offset: u32::into(offset),
            length: u64::into(length),
            ..fast.register(1)
        };
        let got = fast.carry_out(&[registering(&bad)]);
        assert_eq!(got, [refused], "{length:#x} at {offset:#x}");
    }
    let all = RxeRegister {
        offset: 0.into(),
        ..fast.register(1)
    };
    assert_eq!(fast.carry_out(&[registering(&all)]), [0]);
}

#[test]
fn a_list_that_is_changed_afterwards_changes_no_registration() {
    let fast = Fast::new();
    fast.peer.fill(0, b"eight by");
    fast.set_pages(&[SECOND, 0]);
    assert_eq!(fast.carry_out(&[registering(&fast.register(1))]), [0]);
    fast.set_pages(&[u64::MAX, PAGE_BYTES]);
    assert_eq!(fast.write(0x7000_0000, fast.key(1)), 0);
    let mut bytes = [0; 8];
    let second = usize::try_from(PAGE_BYTES).unwrap();
    fast.memory.read_bytes(second + 8, &mut bytes).unwrap();
    assert_eq!(bytes, *b"eight by");
    // Nor does it go before what it is the list of.
    let list = region(Fast::LIST);
    assert_eq!(fast.guest.context.detach(list), Err(Errno::EBUSY));
    fast.guest.host().dereg_mr(fast.mr.handle).unwrap();
    fast.guest.context.detach(list).unwrap();
}

#[test]
fn what_is_registered_ends_where_its_memory_is_unplugged() {
    let server = Server::without_workers();
    let [guest, peer] = [1, 2].map(|gid| Guest::start_kernel(&port(&server, gid)));
    let (space, memory) = guest_memory(&[(0, PAGE_BYTES), (SECOND, PAGE_BYTES)]);
    let all = Region::all_of_guest(&space, true).unwrap();
    let attached = guest
        .context
        .attach_all_memory(region(3), all, Arc::clone(&space));
    attached.unwrap();
    let (theirs, list) = shared("list", PAGE_BYTES);
    let id = region(Fast::LIST);
    guest.context.attach_segment(id, theirs).unwrap();
    let mr = guest.host().alloc_fast_mr(Fast::alloc(&guest)).unwrap();
    let fast = Fast {
        guest,
        peer,
        memory,
        list,
        mr,
    };
    fast.set_pages(&[SECOND, 0]);
    assert_eq!(fast.carry_out(&[registering(&fast.register(1))]), [0]);
    assert_eq!(fast.write(0x7000_0000, fast.key(1)), 0);
    space.unmap(SECOND, PAGE_BYTES).unwrap();
    let no_access = u32::from(WC_STATUS_REM_ACCESS_ERR);
    assert_eq!(fast.write(0x7000_0000, fast.key(1)), no_access);
    // The key is spent: it is invalidated as any other, and what is left can be registered.
    let refused = u32::from(WC_STATUS_LOC_QP_OP_ERR);
    let end = super::kernel::invalidating(fast.key(1));
    let again = registering(&fast.register(2));
    assert_eq!(fast.carry_out(&[end, again]), [0, refused]);
    fast.set_pages(&[0]);
    let one = RxeRegister {
        pages: 1.into(),
        length: 8.into(),
        ..fast.register(2)
    };
    assert_eq!(fast.carry_out(&[registering(&one)]), [0]);
    assert_eq!(fast.write(0x7000_0000, fast.key(2)), 0);
}

#[test]
fn all_memory_that_may_only_be_read_is_not_registered_for_writing() {
    let server = Server::without_workers();
    let guest = Guest::start_kernel(&port(&server, 1));
    let (space, _memory) = guest_memory(&[(0, PAGE_BYTES)]);
    let all = Region::all_of_guest(&space, false).unwrap();
    guest
        .context
        .attach_all_memory(region(3), all, space)
        .unwrap();
    let register = |access: u32| {
        guest.host().reg_mr(RegMr {
            pd: guest.pd,
            access: access.into(),
            source: MR_SOURCE_PIN.into(),
            object: 3.into(),
            ..Default::default()
        })
    };
    assert_eq!(register(ACCESS_LOCAL_WRITE), Err(Errno::EACCES));
    assert_eq!(register(ACCESS_REMOTE_WRITE), Err(Errno::EINVAL));
    register(ACCESS_REMOTE_READ).unwrap();
}
