//! A client that others have written: that of Cloud Hypervisor.

#![allow(clippy::unwrap_used)]

mod common;

use common::{BAR, BAR_BYTES, CONFIG, FIXED, INTX, MSIX, MSIX_COUNT, PAGE, SPLIT, Served, memfd};
use farlane_vfio_user::wire;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::AsRawFd as _;
use vfio_user::Client;
use vm_memory::{FileOffset, MmapRegion};

#[test]
fn it_finds_regions_and_their_areas() {
    let served = Served::start();
    let client = Client::new(&served.path).unwrap();
    let bar = client.region(BAR).unwrap();
    assert_eq!(bar.size, BAR_BYTES);
    let areas: Vec<_> = bar
        .sparse_areas
        .iter()
        .map(|a| (a.offset, a.size))
        .collect();
    assert_eq!(areas, [(PAGE, PAGE), (2 * PAGE, 2 * PAGE)]);
    let all = wire::REGION_READ | wire::REGION_WRITE | wire::REGION_MMAP | wire::REGION_CAPS;
    assert_eq!(bar.flags, all);
    assert_eq!(bar.file_offset.as_ref().unwrap().start(), 0);

    let fixed = client.region(FIXED).unwrap();
    assert_eq!((fixed.size, fixed.flags), (PAGE, wire::REGION_READ));
    assert!(fixed.file_offset.is_none());
    let absent = client.region(8).unwrap();
    assert_eq!((absent.size, absent.flags), (0, 0));
    assert!(client.region(9).is_none());
}

#[test]
fn what_it_maps_is_the_memory_of_the_device() {
    let served = Served::start();
    let client = Client::new(&served.path).unwrap();
    let bar = client.region(BAR).unwrap();
    let area = bar.sparse_areas[1];
    let file = bar.file_offset.as_ref().unwrap();
    let at = FileOffset::from_arc(file.arc().clone(), file.start() + area.offset);
    let size = usize::try_from(area.size).unwrap();
    let mapped: MmapRegion = MmapRegion::from_file(at, size).unwrap();
    rustix::io::pwrite(&served.file, b"doorbell", 2 * PAGE + 16).unwrap();
    // SAFETY: 24 bytes of a mapping that is longer, which nobody writes to now.
    let seen = unsafe { std::slice::from_raw_parts(mapped.as_ptr().add(16), 8) };
    assert_eq!(seen, b"doorbell");
}

#[test]
fn a_client_that_takes_one_descriptor_is_offered_areas_of_one_file() {
    let served = Served::start();
    let client = Client::new(&served.path).unwrap();
    let split = client.region(SPLIT).unwrap();
    assert_eq!(split.sparse_areas.len(), 1);
    assert_eq!(split.sparse_areas[0].offset, 0);
    assert!(split.file_offset.is_some());
}

#[test]
fn it_reads_and_writes_regions() {
    let served = Served::start();
    let mut client = Client::new(&served.path).unwrap();
    let mut id = [0; 4];
    client.region_read(CONFIG, 0, &mut id).unwrap();
    assert_eq!(id, [0x34, 0x12, 0x78, 0x56]);
    client.region_write(BAR, 0x10, b"hello").unwrap();
    let mut back = [0; 7];
    client.region_read(BAR, 0xf, &mut back).unwrap();
    assert_eq!(&back, b"\0hello\0");
    let big = vec![7; usize::try_from(BAR_BYTES).unwrap()];
    client.region_write(BAR, 0, &big).unwrap();
    client.reset().unwrap();
    client.region_read(BAR, 0xf, &mut back).unwrap();
    assert_eq!(back, [0; 7]);
    let counters = served.counters();
    assert_eq!((counters.reads, counters.writes), (3, 2));
    assert_eq!((counters.refused, counters.connections), (0, 1));
    assert_eq!(counters.connected, 1);
}

#[test]
fn it_sets_interrupts_up() {
    let served = Served::start();
    let mut client = Client::new(&served.path).unwrap();
    let msix = client.get_irq_info(MSIX).unwrap();
    assert_eq!(msix.count, MSIX_COUNT);
    assert_eq!(msix.flags, wire::IRQ_EVENTFD | wire::IRQ_NORESIZE);
    let intx = client.get_irq_info(INTX).unwrap();
    let flags = wire::IRQ_EVENTFD | wire::IRQ_MASKABLE | wire::IRQ_AUTOMASKED;
    assert_eq!((intx.count, intx.flags), (1, flags));
    assert_eq!(client.get_irq_info(1).unwrap().count, 0);
    served.log.take();

    let fds: Vec<_> = (0..MSIX_COUNT)
        .map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap())
        .collect();
    let raw: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    let bind = wire::IRQ_SET_DATA_EVENTFD | wire::IRQ_SET_ACTION_TRIGGER;
    client.set_irqs(MSIX, bind, 0, MSIX_COUNT, &raw).unwrap();
    served.log.with(|seen| {
        let last = seen.eventfds.last().unwrap().as_ref().unwrap();
        rustix::io::write(last, &1_u64.to_ne_bytes()).unwrap();
    });
    let mut count = [0; 8];
    rustix::io::read(&fds[7], &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);

    let none = wire::IRQ_SET_DATA_NONE | wire::IRQ_SET_ACTION_TRIGGER;
    client.set_irqs(MSIX, none, 0, 0, &[]).unwrap();
    let mask = wire::IRQ_SET_DATA_NONE | wire::IRQ_SET_ACTION_MASK;
    client.set_irqs(INTX, mask, 0, 1, &[]).unwrap();
    let bound = [true; 8];
    assert_eq!(
        served.log.take(),
        [
            format!("bind 2 0 Trigger {bound:?}"),
            "disable 2".into(),
            "perform 0 0 Mask [true]".into(),
        ]
    );
}

#[test]
fn it_shows_memory_and_takes_it_away() {
    let served = Served::start();
    let mut client = Client::new(&served.path).unwrap();
    let ram = memfd(16 * PAGE);
    rustix::io::pwrite(&ram, b"guest", 4 * PAGE).unwrap();
    served.log.take();
    client.dma_map(0, 0, 4 * PAGE, ram.as_raw_fd()).unwrap();
    client
        .dma_map(4 * PAGE, 1 << 32, 12 * PAGE, ram.as_raw_fd())
        .unwrap();
    served.log.with(|seen| {
        let (file, offset) = &seen.files[1];
        let mut bytes = [0; 5];
        rustix::io::pread(file, &mut bytes, *offset).unwrap();
        assert_eq!(&bytes, b"guest");
    });
    client.dma_unmap(0, 4 * PAGE).unwrap();
    assert_eq!(
        served.log.take(),
        [
            "map 0x0 0x4000 (true, true, true)",
            "map 0x100000000 0xc000 (true, true, true)",
            "unmap 0x0 0x4000",
        ]
    );
}

#[test]
fn the_next_client_finds_the_device_without_memory_and_interrupts() {
    let served = Served::start();
    for round in 1..=3 {
        let mut client = Client::new(&served.path).unwrap();
        let ram = memfd(PAGE);
        client.dma_map(0, 0x1000, PAGE, ram.as_raw_fd()).unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let bind = wire::IRQ_SET_DATA_EVENTFD | wire::IRQ_SET_ACTION_TRIGGER;
        client
            .set_irqs(INTX, bind, 0, 1, &[event.as_raw_fd()])
            .unwrap();
        client.region_write(BAR, 0, &[round]).unwrap();
        drop(client);
        served.log.wait_for("disconnected", 1);
        assert_eq!(
            served.log.take(),
            [
                "connected",
                "map 0x1000 0x1000 (true, true, true)",
                "bind 0 0 Trigger [true]",
                "unmap 0x1000 0x1000",
                "disable 0",
                "disconnected",
            ]
        );
        // The device's own state is kept.
        let mut client = Client::new(&served.path).unwrap();
        let mut byte = [0];
        client.region_read(BAR, 0, &mut byte).unwrap();
        assert_eq!(byte, [round]);
        drop(client);
        served.log.wait_for("disconnected", 1);
        served.log.take();
    }
}
