//! What a context of a guest's kernel may do, and no other.

use super::*;
use crate::testing::{file, guest_memory};
use crate::{Peers, PortConfig};
use farlane_zero_copy::Region;
use std::collections::BTreeSet;
use std::os::fd::AsFd as _;

/// Where the second range of a VM's memory begins.
pub(super) const SECOND: u64 = 1 << 32;
/// Q_Key of general services.
pub(super) const QKEY: u32 = 0x8001_0000;

/// A datagram to general services of the port of a guest.
pub(super) fn message(from: &Guest, to: [u8; 16], number: u32) -> RxeDatagram {
    let ah = from.host().create_ah(CreateAh {
        pd: from.pd,
        dgid: to,
        is_global: 1,
        port_num: 1,
        ..Default::default()
    });
    RxeDatagram {
        remote_qpn: number.into(),
        remote_qkey: QKEY.into(),
        ah_num: ah.unwrap(),
        ..Default::default()
    }
}

#[test]
fn general_services_of_two_ports_exchange_datagrams() {
    let server = Server::without_workers();
    let ports = [1, 2].map(|gid| port(&server, gid));
    ports[1].add_gid(0, [0xfd; 16]).unwrap();
    let [a, b] = ports.each_ref().map(Guest::start_kernel);
    let pairs = [&a, &b].map(|guest| guest.datagrams_of(QPT_GSI, QKEY));
    assert_eq!(pairs.each_ref().map(|pair| pair.number.get()), [1, 1]);
    a.fill(0, b"management");
    for gid in [[2; 16], [0xfd; 16]] {
        pairs[1].post_recv(5, &[b.sge(0, 296)]);
        let (entry, payload) = request(4, WR_SEND, &message(&a, gid, 1), &[a.sge(0, 10)]);
        pairs[0].post(&entry, &payload);
        a.ring_for(&pairs[0]);
        run(&[&a, &b], Instant::now());
        assert_eq!(a.next(), Some((4, 0)));
        let received = b.poll().unwrap();
        let numbers = (received.qp_num.get(), received.src_qp.get());
        assert_eq!((numbers, received.byte_len.get()), ((1, 1), 50));
        assert_eq!(b.read(40), *b"management");
    }
}

#[test]
fn a_datagram_of_the_kernel_needs_no_address_handle() {
    let server = Server::without_workers();
    let config = PortConfig {
        peers: Peers::Only(BTreeSet::from([[2; 16]])),
        ..Default::default()
    };
    let limited = server.port_with([1; 16], "limited".into(), config).unwrap();
    let (other, _stranger) = (port(&server, 2), port(&server, 3));
    let [a, b] = [&limited, &other].map(Guest::start_kernel);
    let pairs = [&a, &b].map(|guest| guest.datagrams_of(QPT_GSI, QKEY));
    a.fill(0, b"management");
    let send = |dgid, sgid_index| {
        let addressed = RxeAddressed {
            remote_qpn: 1.into(),
            remote_qkey: QKEY.into(),
            dgid,
            sgid_index,
            hop_limit: 64,
            ..Default::default()
        };
        let (entry, payload) = request(4, WR_SEND, &addressed, &[a.sge(0, 10)]);
        pairs[0].post(&entry, &payload);
        a.ring_for(&pairs[0]);
        run(&[&a, &b], Instant::now());
        let status = a.next().unwrap().1;
        // An error of the send queue alone, of which general services bring it back.
        if status != 0 {
            let on = QpAttr {
                qp_state: QPS_RTS,
                cur_qp_state: QPS_SQE,
                ..Default::default()
            };
            a.modify(&pairs[0], QP_STATE | QP_CUR_STATE, on).unwrap();
        }
        status
    };
    let refused = u32::from(WC_STATUS_LOC_QP_OP_ERR);
    // Whom the operator excludes, and a GID of its own that it has not.
    assert_eq!(send([3; 16], 0), refused);
    assert_eq!(send([2; 16], 5), refused);
    pairs[1].post_recv(5, &[b.sge(0, 296)]);
    assert_eq!(send([2; 16], 0), 0);
    assert_eq!(b.poll().unwrap().byte_len.get(), 50);
    assert_eq!(b.read(40), *b"management");
}

#[test]
fn a_port_has_one_and_it_is_the_kernels() {
    let server = Server::without_workers();
    let vm = port(&server, 1);
    let (user, kernel) = (Guest::start(&vm), Guest::start_kernel(&vm));
    let create = |guest: &Guest| {
        let (send, recv) = (guest.sends(), guest.receives());
        let create = guest.create(QPT_GSI, &send, Some(&recv));
        guest.host().create_qp_rings(create)
    };
    assert_eq!(create(&user), Err(Errno::EPERM));
    let qp = create(&kernel).unwrap();
    assert_eq!(create(&kernel), Err(Errno::EBUSY));
    kernel.host().destroy_qp(qp.handle).unwrap();
    create(&kernel).unwrap();
}

#[test]
fn no_program_is_taken_for_general_services() {
    let server = Server::without_workers();
    let ports = [1, 2].map(|gid| port(&server, gid));
    let (user, kernel) = (Guest::start(&ports[0]), Guest::start_kernel(&ports[1]));
    let pairs = [
        user.datagrams_of(QPT_UD, QKEY),
        kernel.datagrams_of(QPT_GSI, QKEY),
    ];
    for (from, to, at) in [(&user, &kernel, 0), (&kernel, &user, 1)] {
        pairs[1 - at].post_recv(5, &[to.sge(0, 296)]);
        let number = pairs[1 - at].number.get();
        let datagram = message(from, to.context.gid(), number);
        let (entry, payload) = request(4, WR_SEND, &datagram, &[]);
        pairs[at].post(&entry, &payload);
        from.ring_for(&pairs[at]);
        run(&[&user, &kernel], Instant::now());
        // Sent, and nobody has it.
        assert_eq!((from.next(), to.next()), (Some((4, 0)), None));
    }
}

/// All memory of a VM: two ranges, and none between.
fn all_memory(context: &Context, id: u32) -> Result<SharedMemory, Errno> {
    let (space, memory) = guest_memory(&[(0, PAGE_BYTES), (SECOND, PAGE_BYTES)]);
    let all = Region::all_of_guest(&space, true).unwrap();
    context
        .attach_all_memory(region(id), all, space)
        .map(|()| memory)
}

#[test]
fn all_memory_is_reached_at_its_addresses_and_nothing_between() {
    let server = Server::without_workers();
    let [a, b] = [1, 2].map(|gid| Guest::start_kernel(&port(&server, gid)));
    let memory = all_memory(&a.context, 3).unwrap();
    let mr = a.host().reg_mr(RegMr {
        pd: a.pd,
        access: ACCESS_LOCAL_WRITE.into(),
        source: MR_SOURCE_PIN.into(),
        object: 3.into(),
        ..Default::default()
    });
    let lkey = mr.unwrap().lkey;
    b.fill(0, b"remotely");
    let read = |addr: u64, length: u32| {
        let (pa, pb) = (a.pair(QPT_RC), b.pair(QPT_RC));
        a.connect(&pa, &b, &pb, 7);
        b.connect(&pb, &a, &pa, 7);
        let from = RxeRdma {
            rkey: b.mr.rkey,
            ..Default::default()
        };
        let sge = Sge {
            addr: addr.into(),
            length: length.into(),
            lkey,
        };
        let (entry, payload) = request(1, WR_RDMA_READ, &from, &[sge]);
        pa.post(&entry, &payload);
        a.ring_for(&pa);
        run(&[&a, &b], Instant::now());
        a.host().destroy_qp(pa.handle).unwrap();
        b.host().destroy_qp(pb.handle).unwrap();
        a.next().unwrap().1
    };
    assert_eq!(read(SECOND + 8, 8), 0);
    let mut bytes = [0; 8];
    memory
        .read_bytes(usize::try_from(PAGE_BYTES).unwrap() + 8, &mut bytes)
        .unwrap();
    assert_eq!(bytes, *b"remotely");
    let refused = u32::from(WC_STATUS_LOC_PROT_ERR);
    for (addr, length) in [
        (PAGE_BYTES, 8),
        (PAGE_BYTES - 4, 8),
        (SECOND - 8, 8),
        (SECOND - 4, 8),
        (SECOND + PAGE_BYTES, 8),
        (SECOND + PAGE_BYTES - 4, 8),
        (u64::MAX, 8),
    ] {
        assert_eq!(read(addr, length), refused, "{addr:#x}");
    }
    // What is plugged in or out later.
    let space = a.context.space().unwrap();
    let plugged = file("plugged", PAGE_BYTES);
    let behind = SECOND + PAGE_BYTES;
    let mapped = space.map(behind, PAGE_BYTES, plugged.as_fd(), 0, true);
    mapped.unwrap();
    assert_eq!(read(behind - 4, 8), 0);
    space.unmap(SECOND, PAGE_BYTES).unwrap();
    assert_eq!(read(behind - 4, 8), refused);
    assert_eq!(read(behind, 8), 0);
    assert_eq!(read(0, 8), 0);
    a.context.detach(region(3)).unwrap();
    assert_eq!(read(0, 8), refused);
}

#[test]
fn all_memory_lies_where_the_kernel_has_it_mapped() {
    const MAPPED: u64 = 0xffff_8880_0000_0000;
    let server = Server::without_workers();
    let [a, b] = [1, 2].map(|gid| Guest::start_kernel(&port(&server, gid)));
    let memory = all_memory(&a.context, 3).unwrap();
    let at = |iova: u64| {
        a.host().reg_mr(RegMr {
            pd: a.pd,
            access: ACCESS_LOCAL_WRITE.into(),
            source: MR_SOURCE_PIN.into(),
            object: 3.into(),
            iova: iova.into(),
            ..Default::default()
        })
    };
    assert_eq!(at(u64::MAX), Err(Errno::EINVAL));
    let lkey = at(MAPPED).unwrap().lkey;
    b.fill(0, b"remotely");
    let (pa, pb) = (a.pair(QPT_RC), b.pair(QPT_RC));
    a.connect(&pa, &b, &pb, 7);
    b.connect(&pb, &a, &pa, 7);
    let from = RxeRdma {
        rkey: b.mr.rkey,
        ..Default::default()
    };
    for (addr, status) in [
        (MAPPED + SECOND + 8, 0),
        (SECOND + 8, u32::from(WC_STATUS_LOC_PROT_ERR)),
    ] {
        let sge = Sge {
            addr: addr.into(),
            length: 8.into(),
            lkey,
        };
        let (entry, payload) = request(1, WR_RDMA_READ, &from, &[sge]);
        pa.post(&entry, &payload);
        a.ring_for(&pa);
        run(&[&a, &b], Instant::now());
        assert_eq!(a.next(), Some((1, status)), "{addr:#x}");
    }
    let mut bytes = [0; 8];
    memory
        .read_bytes(usize::try_from(PAGE_BYTES).unwrap() + 8, &mut bytes)
        .unwrap();
    assert_eq!(bytes, *b"remotely");
}

#[test]
fn no_program_has_all_memory_of_its_vm() {
    let server = Server::without_workers();
    let user = Guest::start(&port(&server, 1));
    assert_eq!(all_memory(&user.context, 3).unwrap_err(), Errno::EPERM);
}

/// The kernel's use of a registration that requests make.
pub(super) struct Fast {
    pub guest: Guest,
    pub peer: Guest,
    pub memory: SharedMemory,
    pub list: SharedMemory,
    pub mr: Mr,
}

impl Fast {
    /// Region of the list of its pages.
    pub const LIST: u32 = 4;

    pub fn new() -> Self {
        let server = Server::without_workers();
        let [guest, peer] = [1, 2].map(|gid| Guest::start_kernel(&port(&server, gid)));
        let memory = all_memory(&guest.context, 3).unwrap();
        let (theirs, list) = shared("list", PAGE_BYTES);
        guest
            .context
            .attach_segment(region(Fast::LIST), theirs)
            .unwrap();
        let mr = guest.host().alloc_fast_mr(Self::alloc(&guest)).unwrap();
        Self {
            guest,
            peer,
            memory,
            list,
            mr,
        }
    }

    pub fn alloc(guest: &Guest) -> AllocFastMr {
        AllocFastMr {
            pd: guest.pd,
            region: Self::LIST.into(),
            pages: 4.into(),
            page_bytes: u32::try_from(PAGE_BYTES).unwrap().into(),
        }
    }

    pub fn set_pages(&self, pages: &[u64]) {
        for (at, page) in pages.iter().enumerate() {
            self.list.write_bytes(8 * at, &page.to_le_bytes()).unwrap();
        }
    }

    /// Its key with another tag.
    pub fn key(&self, tag: u32) -> u32 {
        (self.mr.rkey.get() & !0xff) | ((self.mr.rkey.get() + tag) & 0xff)
    }

    pub fn register(&self, tag: u32) -> RxeRegister {
        RxeRegister {
            mr: self.mr.handle,
            pages: 2.into(),
            key: self.key(tag).into(),
            access: (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE).into(),
            iova: 0x7000_0000.into(),
            length: PAGE_BYTES.into(),
            offset: 8.into(),
            ..Default::default()
        }
    }

    /// Carries out requests of the kernel over a connection of their own, one after the other.
    pub fn carry_out(&self, requests: &[RxeSendEntry]) -> Vec<u32> {
        let (pa, pb) = (self.guest.pair(QPT_RC), self.peer.pair(QPT_RC));
        self.guest.connect(&pa, &self.peer, &pb, 7);
        self.peer.connect(&pb, &self.guest, &pa, 7);
        for entry in requests {
            pa.post(entry, &[]);
        }
        self.guest.ring_for(&pa);
        run(&[&self.guest, &self.peer], Instant::now());
        self.guest.host().destroy_qp(pa.handle).unwrap();
        self.peer.host().destroy_qp(pb.handle).unwrap();
        let statuses = std::iter::from_fn(|| self.guest.poll());
        statuses.map(|c| c.status.get()).collect()
    }

    /// The peer writes 8 bytes there by this key.
    pub fn write(&self, addr: u64, key: u32) -> u32 {
        let (pa, pb) = (self.guest.pair(QPT_RC), self.peer.pair(QPT_RC));
        self.guest.connect(&pa, &self.peer, &pb, 7);
        self.peer.connect(&pb, &self.guest, &pa, 7);
        let to = RxeRdma {
            remote_addr: addr.into(),
            rkey: key.into(),
            ..Default::default()
        };
        let (entry, payload) = request(9, WR_RDMA_WRITE, &to, &[self.peer.sge(0, 8)]);
        pb.post(&entry, &payload);
        self.peer.ring_for(&pb);
        run(&[&self.guest, &self.peer], Instant::now());
        self.guest.host().destroy_qp(pa.handle).unwrap();
        self.peer.host().destroy_qp(pb.handle).unwrap();
        while self.guest.poll().is_some() {}
        self.peer.poll().unwrap().status.get()
    }
}

pub(super) fn registering(register: &RxeRegister) -> RxeSendEntry {
    request(1, WR_REG_MR, register, &[]).0
}

pub(super) fn invalidating(key: u32) -> RxeSendEntry {
    let (mut entry, _) = request(2, WR_LOCAL_INVALIDATE, &0_u64, &[]);
    entry.wr.imm = key.into();
    entry
}

#[test]
fn a_request_registers_pages_and_another_one_ends_that() {
    let fast = Fast::new();
    let no_access = u32::from(WC_STATUS_REM_ACCESS_ERR);
    fast.peer.fill(0, b"two halv");
    assert_eq!(fast.write(0x7000_0000, fast.key(0)), no_access);
    // The second range first, then the first: not in the order of addresses.
    fast.set_pages(&[SECOND, 0]);
    for tag in 1..4 {
        assert_eq!(fast.carry_out(&[registering(&fast.register(tag))]), [0]);
        let end = 0x7000_0000 + PAGE_BYTES - 8;
        // Bytes before and behind the page's end, by the present key alone.
        assert_eq!(fast.write(end - 4, fast.key(tag)), 0);
        assert_eq!(fast.write(end + 4, fast.key(tag)), no_access);
        assert_eq!(fast.write(end, fast.key(tag - 1)), no_access);
        assert_eq!(fast.write(0x7000_0000 - 1, fast.key(tag)), no_access);
        let mut halves = [[0; 8]; 2];
        let bytes = usize::try_from(PAGE_BYTES).unwrap();
        fast.memory
            .read_bytes(2 * bytes - 8, &mut halves[0])
            .unwrap();
        fast.memory.read_bytes(0, &mut halves[1]).unwrap();
        assert_eq!(
            (&halves[0][4..], &halves[1][..4]),
            (&b"two "[..], &b"halv"[..])
        );
        assert_eq!(fast.carry_out(&[invalidating(fast.key(tag))]), [0]);
        assert_eq!(fast.write(end, fast.key(tag)), no_access);
    }
    // By the name of the beginning it ends, whatever its key is now.
    fast.guest.host().dereg_mr(fast.mr.handle).unwrap();
    let again = fast.guest.host().dereg_mr(fast.mr.handle);
    assert_eq!(again, Err(Errno::EBADF));
    // The list is another's.
    let alloc = Fast::alloc(&fast.guest);
    fast.guest.host().alloc_fast_mr(alloc).unwrap();
}

#[test]
fn a_peer_invalidates_what_a_request_has_registered() {
    let fast = Fast::new();
    fast.set_pages(&[0, SECOND]);
    assert_eq!(fast.carry_out(&[registering(&fast.register(1))]), [0]);
    let (pa, pb) = (fast.guest.pair(QPT_RC), fast.peer.pair(QPT_RC));
    fast.guest.connect(&pa, &fast.peer, &pb, 7);
    fast.peer.connect(&pb, &fast.guest, &pa, 7);
    pa.post_recv(5, &[]);
    let (mut entry, _) = request(6, WR_SEND_INVALIDATE, &0_u64, &[]);
    entry.wr.imm = fast.key(1).into();
    pb.post(&entry, &[]);
    fast.peer.ring_for(&pb);
    run(&[&fast.guest, &fast.peer], Instant::now());
    assert_eq!(
        (fast.peer.next(), fast.guest.next()),
        (Some((6, 0)), Some((5, 0)))
    );
    let no_access = u32::from(WC_STATUS_REM_ACCESS_ERR);
    assert_eq!(fast.write(0x7000_0000, fast.key(1)), no_access);
}

#[test]
fn a_registration_that_makes_no_sense_is_refused() {
    let fast = Fast::new();
    fast.set_pages(&[0, SECOND, PAGE_BYTES, 8]);
    let good = fast.register(1);
    let refused = u32::from(WC_STATUS_LOC_QP_OP_ERR);
    for bad in [
        // Another place, a registration of another kind, none.
        RxeRegister {
            key: (fast.key(1) ^ 0x100).into(),
            ..good
        },
        RxeRegister {
            mr: fast.guest.mr.handle,
            key: fast.guest.mr.rkey,
            ..good
        },
        RxeRegister {
            mr: 0.into(),
            ..good
        },
        // No bytes, more than its pages have, pages that it has not or that are not memory, an
        // address that is none of a page.
        RxeRegister {
            length: 0.into(),
            ..good
        },
        RxeRegister {
            length: (2 * PAGE_BYTES - 7).into(),
            ..good
        },
        RxeRegister {
            length: u64::MAX.into(),
            ..good
        },
        RxeRegister {
            iova: u64::MAX.into(),
            ..good
        },
        RxeRegister {
            pages: 5.into(),
            ..good
        },
        RxeRegister {
            pages: u32::MAX.into(),
            ..good
        },
        RxeRegister {
            pages: 0.into(),
            ..good
        },
        RxeRegister {
            pages: 3.into(),
            length: (2 * PAGE_BYTES).into(),
            ..good
        },
        RxeRegister {
            pages: 4.into(),
            length: (3 * PAGE_BYTES).into(),
            ..good
        },
        RxeRegister {
            offset: u32::try_from(PAGE_BYTES).unwrap().into(),
            ..good
        },
        RxeRegister {
            access: ACCESS_REMOTE_WRITE.into(),
            ..good
        },
        RxeRegister {
            access: u32::MAX.into(),
            ..good
        },
    ] {
        assert_eq!(fast.carry_out(&[registering(&bad)]), [refused], "{bad:?}");
    }
    // Twice, without an end between.
    let twice = [registering(&good), registering(&fast.register(2))];
    assert_eq!(fast.carry_out(&twice), [0, refused]);
    assert_eq!(fast.write(0x7000_0000, fast.key(1)), 0);
}

#[test]
fn a_list_of_pages_that_makes_no_sense_is_refused() {
    let fast = Fast::new();
    let alloc = |alloc| fast.guest.host().alloc_fast_mr(alloc).unwrap_err();
    let good = Fast::alloc(&fast.guest);
    assert_eq!(alloc(good), Errno::EBUSY);
    fast.guest.host().dereg_mr(fast.mr.handle).unwrap();
    for (pages, page_bytes) in [(0, 4096), (513, 4096), (u32::MAX, 4096), (4, 0), (4, 2048)] {
        let bad = AllocFastMr {
            pages: u32::into(pages),
            page_bytes: u32::into(page_bytes),
            ..good
        };
        assert_eq!(alloc(bad), Errno::EINVAL);
    }
    let bad = AllocFastMr {
        region: 3.into(),
        ..good
    };
    assert_eq!(alloc(bad), Errno::EINVAL);
    let bad = AllocFastMr {
        pd: 0.into(),
        ..good
    };
    assert_eq!(alloc(bad), Errno::EBADF);
    let server = Server::without_workers();
    let vm = port(&server, 1);
    let (user, kernel) = (Guest::start(&vm), Guest::start_kernel(&vm));
    assert_eq!(user.host().alloc_fast_mr(good), Err(Errno::EPERM));
    let (theirs, _) = shared("list", PAGE_BYTES);
    kernel
        .context
        .attach_segment(region(Fast::LIST), theirs)
        .unwrap();
    let without = kernel.host().alloc_fast_mr(Fast::alloc(&kernel));
    assert_eq!(without, Err(Errno::EINVAL));
}

#[test]
fn no_program_registers_memory_by_a_request() {
    let two = Two::connected();
    let refused = u32::from(WC_STATUS_LOC_QP_OP_ERR);
    let request = request(1, WR_REG_MR, &RxeRegister::default(), &[]);
    assert_eq!(two.carry_out(request).status.get(), refused);
}

#[test]
fn a_message_that_meets_no_receive_request_is_no_drop_that_its_receiver_has_sent() {
    let server = Server::without_workers();
    let ports = [1, 2].map(|gid| port(&server, gid));
    let (a, b) = (Guest::start(&ports[0]), Guest::start_kernel(&ports[1]));
    let _pair = b.datagrams_of(QPT_GSI, QKEY);
    let datagram = crate::engine::ManagementDatagram {
        port: a.context.connections.address(),
        from: [1; 16],
        to: [2; 16],
        bytes: &[0; 256],
    };
    assert!(b.context.engine.deliver_management(&datagram));
    let of = b.host().port_counters(1.into()).unwrap();
    assert_eq!((of.out_of_buffer.get(), of.tx_drops.get()), (1, 0));
}
