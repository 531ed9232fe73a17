//! What the protocol says of each message, and what comes back where a client does otherwise.

#![allow(clippy::unwrap_used)]

mod common;

use common::{
    BAR, BAR_BYTES, CONFIG, CONFIG_BYTES, FIXED, INTX, MSIX, MSIX_COUNT, PAGE, SPLIT, Served,
    memfd, refused,
};
use farlane_vfio_user::wire::{self, Command};
use farlane_vfio_user::{Errno, MAX_DMA_MAPS, MAX_TRANSFER_BYTES};
use farlane_vm_front_end::vfio_user::{ClientError, RawClient};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{Mode, OFlags, open};
use std::os::fd::{AsFd as _, AsRawFd as _};
use zerocopy::{FromBytes as _, IntoBytes as _};

#[test]
fn the_device_is_a_pci_function() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let info = peer.device_info().unwrap();
    assert_eq!((info.argsz, info.num_regions, info.num_irqs), (16, 9, 5));
    assert_eq!(info.flags, wire::DEVICE_PCI | wire::DEVICE_RESET);
    for ask in [
        [15_u32, 0, 0, 0],
        [16, 1, 0, 0],
        [16, 0, 9, 0],
        [16, 0, 0, 5],
    ] {
        refused(
            peer.call(Command::DeviceGetInfo, ask.as_bytes(), &[]),
            Errno::INVAL,
        );
    }
    let larger = [4096_u32, 0, 0, 0];
    let reply = peer
        .call(Command::DeviceGetInfo, larger.as_bytes(), &[])
        .unwrap();
    assert_eq!(reply.body.len(), 16);
}

#[test]
fn a_region_is_told_whole_where_there_is_room() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let short = peer.region_info(BAR, 32).unwrap();
    let (info, rest) = short.split::<wire::RegionInfo>().unwrap();
    assert_eq!((info.argsz, info.cap_offset, rest.len()), (80, 0, 0));
    assert_eq!(info.flags & wire::REGION_CAPS, 0);
    assert!(short.fds.is_empty());
    let short = peer.region_info(BAR, 79).unwrap();
    assert_eq!((short.body.len(), short.fds.len()), (32, 0));

    let whole = peer.region_info(BAR, 80).unwrap();
    let (info, rest) = whole.split::<wire::RegionInfo>().unwrap();
    assert_eq!(
        (info.size, info.offset, info.cap_offset),
        (BAR_BYTES, 0, 32)
    );
    let (cap, areas) = wire::SparseMmap::read_from_prefix(rest).unwrap();
    assert_eq!(
        (cap.header.id, cap.header.version, cap.header.next),
        (1, 1, 0)
    );
    assert_eq!((cap.nr_areas, cap.reserved), (2, 0));
    assert_eq!(areas, [PAGE, PAGE, 2 * PAGE, 2 * PAGE].as_bytes());
    // One file, one descriptor: QEMU takes no more.
    assert_eq!(whole.fds.len(), 1);

    let split = peer.region_info(SPLIT, 1000).unwrap();
    assert_eq!((split.body.len(), split.fds.len()), (80, 2));
    let lengths: Vec<_> = split
        .fds
        .iter()
        .map(|fd| rustix::fs::fstat(fd).unwrap().st_size)
        .collect();
    assert_eq!(lengths, [16384, 8192]);

    let none = peer.region_info(3, 32).unwrap();
    assert_eq!(none.split::<wire::RegionInfo>().unwrap().0.size, 0);
    refused(peer.region_info(9, 32), Errno::INVAL);
    refused(peer.region_info(u32::MAX, 32), Errno::INVAL);
    refused(peer.region_info(BAR, 31), Errno::INVAL);
    for field in 1..8 {
        let mut ask = [0_u32; 8];
        ask[0] = 32;
        ask[field] = 1;
        let result = peer.call(Command::DeviceGetRegionInfo, ask.as_bytes(), &[]);
        if field == 2 {
            result.unwrap();
        } else {
            refused(result, Errno::INVAL);
        }
    }
}

#[test]
fn descriptors_for_parts_of_a_region_are_shared() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let mut ask = |argsz: u32, region| {
        let ask = [argsz, 0, region, 0];
        peer.call(Command::DeviceGetRegionIoFds, ask.as_bytes(), &[])
    };
    let short = ask(16, BAR).unwrap();
    assert_eq!(short.body, [136_u32, 0, BAR, 3].as_bytes());
    assert!(short.fds.is_empty());
    let whole = ask(136, BAR).unwrap();
    assert_eq!(whole.fds.len(), 2);
    let parts: Vec<_> = whole.body[16..]
        .chunks_exact(40)
        .map(|part| wire::IoFd::read_from_bytes(part).unwrap())
        .collect();
    let eventfd = wire::IoFd {
        offset: 0x100,
        size: 4,
        kind: wire::IO_FD_IOEVENTFD,
        ..wire::IoFd::default()
    };
    assert_eq!(parts[0], eventfd);
    let datamatch = wire::IoFd {
        offset: 0x104,
        flags: wire::IOEVENTFD_DATAMATCH,
        value: 7,
        ..eventfd
    };
    assert_eq!(parts[1], datamatch);
    let ioregion = wire::IoFd {
        offset: 0x200,
        size: 0,
        fd_index: 1,
        kind: wire::IO_FD_IOREGIONFD,
        flags: wire::IOREGION_POSTED_WRITES,
        padding: 0,
        value: 0xabcd,
    };
    assert_eq!(parts[2], ioregion);
    let none = ask(16, CONFIG).unwrap();
    assert_eq!(none.body, [16_u32, 0, CONFIG, 0].as_bytes());
    refused(ask(16, 9), Errno::INVAL);
    refused(ask(15, BAR), Errno::INVAL);
    served
        .log
        .with(|seen| seen.fail = Some(("io_fds", Errno::NODEV)));
    refused(ask(16, BAR), Errno::NODEV);
}

#[test]
fn accesses_stay_in_their_region() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    assert_eq!(peer.read(CONFIG, CONFIG_BYTES - 1, 1).unwrap(), [0]);
    assert!(peer.read(CONFIG, CONFIG_BYTES, 0).unwrap().is_empty());
    for (region, offset, count) in [
        (CONFIG, CONFIG_BYTES, 1),
        (CONFIG, 0, 257),
        (CONFIG, u64::MAX, 1),
        (CONFIG, u64::MAX, 4096),
        (CONFIG, CONFIG_BYTES + 1, 0),
        (3, 0, 1),
        (8, 0, 4),
        (9, 0, 4),
        (u32::MAX, 0, 4),
    ] {
        refused(peer.read(region, offset, count), Errno::INVAL);
        let data = vec![0; usize::try_from(count).unwrap()];
        refused(peer.write(region, offset, &data), Errno::INVAL);
    }
    assert_eq!(peer.read(FIXED, 8, 2).unwrap(), [0x5a, 0x5a]);
    refused(peer.write(FIXED, 8, &[1]), Errno::INVAL);
    refused(peer.read(BAR, 0, MAX_TRANSFER_BYTES + 1), Errno::TOOBIG);
    refused(peer.read(BAR, 0, u32::MAX), Errno::TOOBIG);
    served
        .log
        .with(|seen| seen.fail = Some(("read", Errno::IO)));
    refused(peer.read(BAR, 0, 1), Errno::IO);
    served
        .log
        .with(|seen| seen.fail = Some(("write", Errno::NODEV)));
    refused(peer.write(BAR, 0, &[1]), Errno::NODEV);
    // More or fewer bytes than it says.
    for (count, data) in [(4_u32, &[0; 3][..]), (4, &[0; 5]), (0, &[0])] {
        let access = [0_u32, 0, BAR, count];
        let body = [access.as_bytes(), data].concat();
        refused(peer.call(Command::RegionWrite, &body, &[]), Errno::INVAL);
    }
    assert_eq!(served.counters().dma_reads, 0);
}

#[test]
fn several_writes_are_carried_out_in_order_up_to_the_first_that_fails() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let one = |region, offset, count, byte| wire::WriteOne {
        offset,
        region,
        count,
        data: [byte; 8],
    };
    let body =
        |count: u64, writes: &[wire::WriteOne]| [count.as_bytes(), writes.as_bytes()].concat();
    let good = [
        one(BAR, 0, 8, 1),
        one(BAR, 4, 2, 2),
        one(BAR, 5, 1, 3),
        one(BAR, 9, 0, 4),
    ];
    let reply = peer
        .call(Command::RegionWriteMulti, &body(4, &good), &[])
        .unwrap();
    assert_eq!(reply.body, 4_u64.as_bytes());
    assert_eq!(
        peer.read(BAR, 0, 10).unwrap(),
        [1, 1, 1, 1, 2, 3, 1, 1, 0, 0]
    );
    assert_eq!(served.counters().writes, 4);

    let bad = [one(BAR, 0, 1, 9), one(FIXED, 0, 1, 9), one(BAR, 1, 1, 9)];
    let reply = peer
        .call(Command::RegionWriteMulti, &body(3, &bad), &[])
        .unwrap();
    assert_eq!(reply.body, 1_u64.as_bytes());
    assert_eq!(peer.read(BAR, 0, 2).unwrap(), [9, 1]);
    let multi = |peer: &mut RawClient, body: &[u8]| peer.call(Command::RegionWriteMulti, body, &[]);
    refused(multi(&mut peer, &body(2, &bad[1..])), Errno::INVAL);
    refused(multi(&mut peer, &body(2, &bad)), Errno::INVAL);
    refused(multi(&mut peer, &body(4, &bad)), Errno::INVAL);
    refused(multi(&mut peer, &body(u64::MAX, &bad)), Errno::INVAL);
    refused(
        multi(&mut peer, &body(u64::MAX / 24 + 2, &[])),
        Errno::INVAL,
    );
    refused(
        multi(&mut peer, &body(1, &[one(BAR, 0, 9, 7)])),
        Errno::INVAL,
    );
    assert_eq!(peer.read(BAR, 0, 2).unwrap(), [9, 1]);

    drop(peer);
    let mut plain = RawClient::connect(&served.path).unwrap();
    plain.negotiate("{}").unwrap();
    refused(multi(&mut plain, &body(1, &good[..1])), Errno::OPNOTSUPP);
}

#[test]
fn commands_that_want_no_reply_get_none() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let quiet = wire::FLAG_NO_REPLY;
    let write = [&[0; 8], BAR.as_bytes(), 1_u32.as_bytes(), &[7]].concat();
    peer.command(Command::RegionWrite, quiet, &write, &[])
        .unwrap();
    peer.command(Command::RegionWrite, quiet, &write[1..], &[])
        .unwrap();
    let multi = [
        1_u64.as_bytes(),
        &[1, 0, 0, 0, 0, 0, 0, 0],
        BAR.as_bytes(),
        1_u32.as_bytes(),
        &[8; 8],
    ];
    peer.command(Command::RegionWriteMulti, quiet, &multi.concat(), &[])
        .unwrap();
    peer.command(Command::DeviceReset, quiet, &[1], &[])
        .unwrap();
    peer.command(Command::DmaMap, quiet, &[], &[]).unwrap();
    // The next reply is the one to this.
    let id = peer.command(
        Command::RegionRead,
        0,
        &[&[0; 8], BAR.as_bytes(), 2_u32.as_bytes()].concat(),
        &[],
    );
    let message = peer.receive().unwrap();
    assert_eq!(message.header.id, id.unwrap());
    assert_eq!(message.body[16..], [7, 8]);
    assert_eq!(served.counters().refused, 3);
}

#[test]
fn memory_is_mapped_once_and_unmapped_as_it_was_mapped() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let ram = memfd(8 * PAGE);
    peer.map(PAGE, 2 * PAGE, Some((ram.as_fd(), 2 * PAGE)))
        .unwrap();
    for (address, size) in [(PAGE, PAGE), (0, 2 * PAGE), (2 * PAGE, PAGE), (0, 8 * PAGE)] {
        refused(
            peer.map(address, size, Some((ram.as_fd(), 0))),
            Errno::EXIST,
        );
        refused(peer.map(address, size, None), Errno::EXIST);
    }
    peer.map(3 * PAGE, PAGE, None).unwrap();
    for (address, size) in [
        (PAGE, PAGE),
        (2 * PAGE, PAGE),
        (0, 2 * PAGE),
        (2 * PAGE, 2 * PAGE),
    ] {
        refused(peer.unmap(0, address, size), Errno::INVAL);
    }
    refused(peer.unmap(0, 0, PAGE), Errno::NOENT);
    served
        .log
        .with(|seen| seen.fail = Some(("dma_unmap", Errno::BUSY)));
    refused(peer.unmap(0, PAGE, 2 * PAGE), Errno::BUSY);
    peer.unmap(0, PAGE, 2 * PAGE).unwrap();
    refused(peer.unmap(0, PAGE, 2 * PAGE), Errno::NOENT);
    served
        .log
        .with(|seen| seen.fail = Some(("dma_map", Errno::NOMEM)));
    refused(peer.map(PAGE, PAGE, None), Errno::NOMEM);
    peer.map(PAGE, PAGE, None).unwrap();
    served.log.take();
    // A guest's IOMMU gives back more than it has been given.
    peer.unmap(0, 0, 64 * PAGE).unwrap();
    refused(peer.unmap(0, 0, 64 * PAGE), Errno::NOENT);
    assert_eq!(
        served.log.take(),
        ["unmap 0x1000 0x1000", "unmap 0x3000 0x1000"]
    );
    peer.map(PAGE, PAGE, None).unwrap();
    peer.map(3 * PAGE, PAGE, None).unwrap();
    served.log.take();
    peer.unmap(wire::UNMAP_ALL, 0, 0).unwrap();
    assert_eq!(
        served.log.take(),
        ["unmap 0x1000 0x1000", "unmap 0x3000 0x1000"]
    );
    peer.unmap(wire::UNMAP_ALL, 0, 0).unwrap();
    refused(peer.unmap(wire::UNMAP_ALL, 0, PAGE), Errno::INVAL);
    refused(peer.unmap(wire::UNMAP_ALL, PAGE, 0), Errno::INVAL);
    refused(
        peer.unmap(wire::UNMAP_GET_DIRTY_BITMAP, 0, PAGE),
        Errno::INVAL,
    );
    assert!(served.log.take().is_empty());
}

#[test]
fn ranges_of_memory_are_pages_of_a_file_that_is_long_enough() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let ram = memfd(8 * PAGE);
    let at = |offset| Some((ram.as_fd(), offset));
    let top = 0_u64.wrapping_sub(PAGE);
    for (address, size, offset) in [
        (0, 0, 0),
        (1, PAGE, 0),
        (0, PAGE + 1, 0),
        (0, PAGE, 8),
        (top, PAGE, 0),
        (top, 2 * PAGE, 0),
        (0, top, top),
        (0, 9 * PAGE, 0),
        (0, PAGE, 8 * PAGE),
        (0, PAGE, top),
    ] {
        refused(peer.map(address, size, at(offset)), Errno::INVAL);
    }
    let path = |path: &str, flags| open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let zero = path("/dev/zero", OFlags::RDWR);
    refused(peer.map(0, PAGE, Some((zero.as_fd(), 0))), Errno::INVAL);
    let again = format!("/proc/self/fd/{}", ram.as_raw_fd());
    let readable = path(&again, OFlags::RDONLY);
    refused(
        peer.map(0, PAGE, Some((readable.as_fd(), 0))),
        Errno::ACCESS,
    );
    let name = path(&again, OFlags::PATH);
    refused(peer.map(0, PAGE, Some((name.as_fd(), 0))), Errno::ACCESS);
    // A page long, and served by others than the memory or a disk: a fault in it might never end.
    let served_by_others = path(
        "/sys/kernel/mm/transparent_hugepage/enabled",
        OFlags::RDONLY,
    );
    let mut map = wire::DmaMap {
        argsz: 32,
        flags: wire::DMA_READ,
        offset: 0,
        address: 0,
        size: PAGE,
    };
    let mut send = |map: &wire::DmaMap, fds: &[_]| peer.call(Command::DmaMap, map.as_bytes(), fds);
    refused(send(&map, &[served_by_others.as_fd()]), Errno::INVAL);
    send(&map, &[readable.as_fd()]).unwrap();
    map.address = PAGE;
    refused(send(&map, &[ram.as_fd(), ram.as_fd()]), Errno::INVAL);
    for argsz in [0, 31, 33, u32::MAX] {
        refused(send(&wire::DmaMap { argsz, ..map }, &[]), Errno::INVAL);
    }
    for flags in [0, 4, 7, u32::MAX] {
        refused(send(&wire::DmaMap { flags, ..map }, &[]), Errno::INVAL);
    }
    let offset = PAGE;
    refused(send(&wire::DmaMap { offset, ..map }, &[]), Errno::INVAL);
    send(&map, &[]).unwrap();
    assert_eq!(
        served.log.take()[1..],
        [
            "map 0x0 0x1000 (true, false, true)",
            "map 0x1000 0x1000 (true, false, false)"
        ]
    );
}

#[test]
fn the_number_of_mappings_is_limited() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let limit = u64::try_from(MAX_DMA_MAPS).unwrap();
    for page in 0..limit {
        peer.map(page * PAGE, PAGE, None).unwrap();
    }
    refused(peer.map(limit * PAGE, PAGE, None), Errno::NOSPC);
    peer.unmap(0, 0, PAGE).unwrap();
    peer.map(limit * PAGE, PAGE, None).unwrap();
    drop(peer);
    let mut modest = RawClient::connect(&served.path).unwrap();
    let said = modest
        .negotiate(r#"{"capabilities":{"max_dma_maps":1}}"#)
        .unwrap();
    assert!(said.contains(r#""max_dma_maps":1,"#));
    modest.map(0, PAGE, None).unwrap();
    refused(modest.map(PAGE, PAGE, None), Errno::NOSPC);
}

#[test]
fn interrupts_are_set_in_all_forms() {
    use wire::{
        IRQ_SET_ACTION_MASK as MASK, IRQ_SET_ACTION_TRIGGER as TRIGGER,
        IRQ_SET_ACTION_UNMASK as UNMASK, IRQ_SET_DATA_BOOL as BOOL,
        IRQ_SET_DATA_EVENTFD as EVENTFD, IRQ_SET_DATA_NONE as NONE,
    };
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let fds = [event.as_fd(), event.as_fd(), event.as_fd()];
    served.log.take();
    peer.set_irqs(EVENTFD | TRIGGER, (MSIX, 2, 3), &[], &fds)
        .unwrap();
    peer.set_irqs(EVENTFD | TRIGGER, (MSIX, 3, 2), &[], &[])
        .unwrap();
    peer.set_irqs(EVENTFD | UNMASK, (INTX, 0, 1), &[], &fds[..1])
        .unwrap();
    peer.set_irqs(EVENTFD | MASK, (INTX, 0, 1), &[], &[])
        .unwrap();
    peer.set_irqs(NONE | TRIGGER, (MSIX, 1, 2), &[], &[])
        .unwrap();
    peer.set_irqs(BOOL | TRIGGER, (MSIX, 5, 3), &[0, 1, 255], &[])
        .unwrap();
    peer.set_irqs(BOOL | MASK, (INTX, 0, 1), &[1], &[]).unwrap();
    peer.set_irqs(NONE | UNMASK, (INTX, 0, 1), &[], &[])
        .unwrap();
    peer.set_irqs(NONE | TRIGGER, (MSIX, 0, 0), &[], &[])
        .unwrap();
    assert_eq!(
        served.log.take(),
        [
            "bind 2 2 Trigger [true, true, true]",
            "bind 2 3 Trigger [false, false]",
            "bind 0 0 Unmask [true]",
            "bind 0 0 Mask [false]",
            "perform 2 1 Trigger [true, true]",
            "perform 2 5 Trigger [false, true, true]",
            "perform 0 0 Mask [true]",
            "perform 0 0 Unmask [true]",
            "disable 2",
        ]
    );

    let (none, one, three) = (&[][..], &fds[..1], &fds[..]);
    for (flags, what, data, fds) in [
        (EVENTFD | TRIGGER, (MSIX, 0, 3), &[][..], one),
        (EVENTFD | TRIGGER, (MSIX, 0, 2), &[], three),
        (EVENTFD | TRIGGER, (MSIX, 0, 0), &[], none),
        (EVENTFD | TRIGGER, (MSIX, 0, 0), &[], one),
        (EVENTFD | TRIGGER, (MSIX, 0, 1), &[0; 4], one),
        (EVENTFD | TRIGGER, (MSIX, 6, 3), &[], three),
        (EVENTFD | TRIGGER, (MSIX, u32::MAX, 1), &[], one),
        (EVENTFD | TRIGGER, (4, 0, 1), &[], one),
        (EVENTFD | TRIGGER, (3, 0, 1), &[], one),
        (EVENTFD | TRIGGER, (5, 0, 1), &[], one),
        (NONE | TRIGGER, (MSIX, 0, MSIX_COUNT + 1), &[], none),
        (NONE | TRIGGER, (MSIX, 0, u32::MAX), &[], none),
        (NONE | TRIGGER, (MSIX, 1, 0), &[], none),
        (NONE | MASK, (MSIX, 0, 0), &[], none),
        // A type of which there is none.
        (NONE | TRIGGER, (3, 0, 0), &[], none),
        (NONE | TRIGGER, (MSIX, 0, 1), &[1], none),
        (NONE | TRIGGER, (MSIX, 0, 1), &[], one),
        (BOOL | TRIGGER, (MSIX, 0, 2), &[1], none),
        (BOOL | TRIGGER, (MSIX, 0, 2), &[1; 3], none),
        (BOOL | TRIGGER, (MSIX, 0, 0), &[], none),
        (BOOL | TRIGGER, (MSIX, 0, 1), &[1], one),
        (TRIGGER, (MSIX, 0, 1), &[], none),
        (NONE, (MSIX, 0, 1), &[], none),
        (NONE | BOOL | TRIGGER, (MSIX, 0, 1), &[1], none),
        (NONE | TRIGGER | MASK, (MSIX, 0, 1), &[], none),
        (NONE | TRIGGER | 64, (MSIX, 0, 1), &[], none),
    ] {
        let result = peer.set_irqs(flags, what, data, fds);
        assert!(
            matches!(result, Err(ClientError::Refused(Errno::INVAL))),
            "{flags:#x} {what:?} {data:?} {result:?}"
        );
    }
    let file = memfd(8);
    let strange = [event.as_fd(), file.as_fd()];
    refused(
        peer.set_irqs(EVENTFD | TRIGGER, (MSIX, 0, 2), &[], &strange),
        Errno::INVAL,
    );
    for argsz in [0_u32, 19, 21, u32::MAX] {
        let set = [argsz, NONE | TRIGGER, MSIX, 0, 1];
        refused(
            peer.call(Command::DeviceSetIrqs, set.as_bytes(), &[]),
            Errno::INVAL,
        );
    }
    assert!(served.log.take().is_empty());
}

#[test]
fn interrupt_types_are_told() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let mut ask = |argsz: u32, flags: u32, index: u32, count: u32| {
        let body = [argsz, flags, index, count];
        peer.call(Command::DeviceGetIrqInfo, body.as_bytes(), &[])
    };
    let msix = [16, wire::IRQ_EVENTFD | wire::IRQ_NORESIZE, MSIX, MSIX_COUNT];
    assert_eq!(ask(16, 0, MSIX, 0).unwrap().body, msix.as_bytes());
    assert_eq!(ask(16, 0, 3, 0).unwrap().body, [16_u32, 0, 3, 0].as_bytes());
    refused(ask(16, 0, 5, 0), Errno::INVAL);
    refused(ask(15, 0, MSIX, 0), Errno::INVAL);
    refused(ask(16, 1, MSIX, 0), Errno::INVAL);
    refused(ask(16, 0, MSIX, 1), Errno::INVAL);
}

#[test]
fn a_reset_is_carried_out_and_its_failure_told() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    peer.write(BAR, 0, &[1]).unwrap();
    assert!(
        peer.call(Command::DeviceReset, &[], &[])
            .unwrap()
            .body
            .is_empty()
    );
    assert_eq!(peer.read(BAR, 0, 1).unwrap(), [0]);
    served
        .log
        .with(|seen| seen.fail = Some(("reset", Errno::IO)));
    refused(peer.call(Command::DeviceReset, &[], &[]), Errno::IO);
    refused(peer.call(Command::DeviceReset, &[0], &[]), Errno::INVAL);
}
