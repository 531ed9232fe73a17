//! Tokens as a process, its disks and its device see them.
#![allow(clippy::unwrap_used)]

use farlane_abi::tunnel::{
    DIRECTION_INTO_DEVICE, DIRECTION_OUT_OF_DEVICE, Disk, ENVELOPE_MAGIC, Envelope, OFF_DISK_COUNT,
    OFF_DISKS, OFF_EPOCH, OFF_SLOT_COUNT, OFF_SLOTS, SLOT_ARMED, SLOT_BYTES, SLOT_KEY, SLOT_LANDED,
    SLOT_LENGTH, SLOT_OFFSET, SLOT_REGION, TOKEN_EPOCHS, segment_bytes,
};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_abi::{Errno, PAGE_BYTES};
use farlane_zero_copy::tokens::{Direction, Opened, TokenError, Tokens};
use farlane_zero_copy::{AddressSpace, Mapping, SharedMemory};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const SLOTS: u32 = 512;
const RAM_BYTES: u64 = 64 * PAGE_BYTES;
/// Guest-physical address of device memory, in two runs with a hole between them.
const DEVICE: u64 = 0x10_0000_0000;
const DEVICE_PAGES: u64 = 16;
/// Where the phony buffer lies, and how long it is.
const PHONY: u64 = 8 * PAGE_BYTES;
const PHONY_PAGES: u64 = 16;
const PIN: u32 = 7;
const REGION: u32 = 9;

fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

/// A VM with two processes, 0 and 1; 0 has a phony buffer and all device memory.
struct Vm {
    ram: Arc<AddressSpace>,
    device: Arc<AddressSpace>,
    tokens: Arc<Tokens>,
    processes: [SharedMemory; 2],
}

/// What a process puts into one page.
#[derive(Clone, Copy)]
struct Page {
    slot: u32,
    sequence: u64,
    /// In device memory.
    offset: u64,
    length: u32,
    direction: u32,
}

impl Page {
    fn new(slot: u32, offset: u64) -> Self {
        Self {
            slot,
            sequence: 1,
            offset,
            length: 4096,
            direction: DIRECTION_INTO_DEVICE,
        }
    }
}

fn slot_at(slot: u32, field: usize) -> usize {
    OFF_SLOTS + usize::try_from(slot).unwrap() * SLOT_BYTES + field
}

impl Vm {
    fn new() -> Self {
        let ram = AddressSpace::new();
        ram.map(0, RAM_BYTES, memory(RAM_BYTES).as_fd(), 0, true)
            .unwrap();
        let device = AddressSpace::new();
        let fd = memory(DEVICE_PAGES * PAGE_BYTES);
        let half = DEVICE_PAGES / 2 * PAGE_BYTES;
        device.map(DEVICE, half, fd.as_fd(), 0, true).unwrap();
        device
            .map(DEVICE + 2 * half, half, fd.as_fd(), half, true)
            .unwrap();
        let mut disk = Disk::default();
        disk.serial[..2].copy_from_slice(b"d0");
        let tokens = Tokens::new(Arc::clone(&device), vec![disk]);
        let processes = [0, 1].map(|id| {
            tokens.open_context(id).unwrap();
            let bytes = segment_bytes(SLOTS);
            let header = memory(bytes);
            let map = || SharedMemory::new(Mapping::new(header.as_fd(), 0, bytes, true).unwrap());
            tokens.set_header(id, map()).unwrap();
            map()
        });
        tokens
            .add_phony(0, PIN, &[(PHONY, PHONY_PAGES * PAGE_BYTES)])
            .unwrap();
        let runs = [(DEVICE, half), (DEVICE + 2 * half, half)];
        tokens.add_device(0, REGION, &runs, true).unwrap();
        Self {
            ram,
            device,
            tokens,
            processes,
        }
    }

    /// Arms a slot of process 0.
    fn arm(&self, page: Page) {
        let header = &self.processes[0];
        let word = |field, value: u64| header.write(slot_at(page.slot, field), &value).unwrap();
        let epoch = header.word(OFF_EPOCH).unwrap().load(Ordering::Acquire);
        word(
            SLOT_REGION,
            u64::from(REGION) | u64::from(page.direction) << 32,
        );
        word(SLOT_OFFSET, page.offset);
        word(SLOT_LENGTH, u64::from(page.length) | u64::from(epoch) << 32);
        word(SLOT_ARMED, page.sequence);
    }

    fn envelope(&self, process: usize, page: Page, sector: u32) -> Envelope {
        let key: [u64; 2] = self.processes[process]
            .read(slot_at(page.slot, SLOT_KEY))
            .unwrap();
        Envelope {
            magic: ENVELOPE_MAGIC.into(),
            key: key.map(Into::into),
            sequence: page.sequence.into(),
            slot: page.slot.into(),
            sector: sector.into(),
        }
    }

    /// Puts the envelopes of process `process` into a phony page.
    fn fill(&self, process: usize, at: u64, page: Page) {
        for sector in 0..8 {
            let envelope = self.envelope(process, page, sector);
            let at = PHONY + at * PAGE_BYTES + u64::from(sector) * 512;
            self.ram.view().write(at, envelope.as_bytes()).unwrap();
        }
    }

    fn prepare(&self, at: u64, page: Page) {
        self.arm(page);
        self.fill(0, at, page);
    }

    fn open_with(
        &self,
        direction: Direction,
        segments: &[(u64, u64)],
    ) -> Result<Option<Opened>, TokenError> {
        self.tokens.open(&self.ram.view(), direction, segments)
    }

    fn open(&self, segments: &[(u64, u64)]) -> Result<Opened, TokenError> {
        self.open_with(Direction::IntoDevice, segments)
            .map(Option::unwrap)
    }

    fn landed(&self, slot: u32) -> u64 {
        self.processes[0].read(slot_at(slot, SLOT_LANDED)).unwrap()
    }

    /// Bytes of device memory as the process counts them.
    fn device_bytes(&self, offset: u64, length: usize) -> Vec<u8> {
        let half = DEVICE_PAGES / 2 * PAGE_BYTES;
        (offset..)
            .take(length)
            .map(|at| {
                let mut byte = [0];
                let address = if at < half {
                    DEVICE + at
                } else {
                    DEVICE + half + at
                };
                self.device.view().read(address, &mut byte).unwrap();
                byte[0]
            })
            .collect()
    }
}

/// Plays the disk: its bytes go where the request says.
fn read_disk(opened: Opened, bytes: &[u8]) {
    let mut rest = bytes;
    for &(base, length) in opened.runs() {
        let (part, after) = rest.split_at(length);
        // SAFETY: `opened` keeps `length` bytes at `base` mapped; nobody else looks at them now.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), base, length) };
        rest = after;
    }
    assert!(rest.is_empty());
    opened.landed();
}

#[test]
fn a_request_of_a_phony_buffer_moves_device_memory() {
    let vm = Vm::new();
    let header = &vm.processes[0];
    assert_eq!(
        header.word(OFF_SLOT_COUNT).unwrap().load(Ordering::Acquire),
        SLOTS
    );
    assert_eq!(
        header.word(OFF_DISK_COUNT).unwrap().load(Ordering::Acquire),
        1
    );
    assert_eq!(
        &header.read::<Disk>(OFF_DISKS).unwrap().serial[..3],
        b"d0\0"
    );
    // Misaligned in device memory, and across the hole.
    let first = DEVICE_PAGES / 2 * PAGE_BYTES - 100;
    let page = Page::new(3, first);
    vm.prepare(0, page);
    let key: [u64; 2] = header.read(slot_at(3, SLOT_KEY)).unwrap();
    let opened = vm.open(&[(PHONY, PAGE_BYTES)]).unwrap();
    assert_eq!(opened.tunnelled_bytes(), PAGE_BYTES);
    assert_eq!(vm.landed(3), 0);
    let data: Vec<u8> = (0..4096u32)
        .map(|i| u8::try_from(i % 251).unwrap())
        .collect();
    read_disk(opened, &data);
    assert_eq!(vm.device_bytes(first, 4096), data);
    assert_eq!(vm.landed(3), 1 << 16 | 0xff);
    assert_ne!(header.read::<[u64; 2]>(slot_at(3, SLOT_KEY)).unwrap(), key);
    // Ordinary memory is no business of tokens.
    assert!(
        vm.open_with(Direction::IntoDevice, &[(0, PAGE_BYTES)])
            .unwrap()
            .is_none()
    );
}

#[test]
fn what_is_not_right_in_every_part_is_refused() {
    let vm = Vm::new();
    let whole = [(PHONY, PAGE_BYTES)];
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::NotAnEnvelope { .. })
    ));
    let page = Page::new(1, 0);
    // Not armed.
    vm.fill(0, 0, page);
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Stale { slot: 1 })
    ));
    // The key of another process's slot of the same number.
    vm.arm(page);
    vm.fill(1, 0, page);
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Forged { slot: 1 })
    ));
    // The other direction; the attempt uses the token up.
    vm.fill(0, 0, page);
    let other = vm.open_with(Direction::OutOfDevice, &whole);
    assert!(matches!(other, Err(TokenError::Direction { slot: 1 })));
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Replayed { slot: 1 })
    ));
    // Beyond the region, and a length that is none.
    let end = DEVICE_PAGES * PAGE_BYTES;
    vm.prepare(
        0,
        Page {
            sequence: 2,
            offset: end - 4095,
            ..page
        },
    );
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::OutOfBounds { .. })
    ));
    vm.prepare(
        0,
        Page {
            sequence: 3,
            offset: u64::MAX - 10,
            ..page
        },
    );
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::OutOfBounds { .. })
    ));
    for length in [0, 511, 513, 4608, u32::MAX] {
        vm.prepare(
            0,
            Page {
                sequence: 4,
                length,
                ..page
            },
        );
        assert!(matches!(
            vm.open(&whole),
            Err(TokenError::Stale { slot: 1 })
        ));
    }
    // More than the token is for.
    vm.prepare(
        0,
        Page {
            sequence: 5,
            length: 1024,
            ..page
        },
    );
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Replayed { slot: 1 })
    ));
    read_disk(vm.open(&[(PHONY, 1024)]).unwrap(), &[1; 1024]);
    assert_eq!(vm.landed(1), 5 << 16 | 3);
    // Replayed, and an earlier number.
    assert!(vm.open(&[(PHONY, 512)]).is_err());
    vm.prepare(
        0,
        Page {
            sequence: 2,
            ..page
        },
    );
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Stale { slot: 1 })
    ));
    // Parts of sectors.
    vm.prepare(
        0,
        Page {
            sequence: 6,
            ..page
        },
    );
    for segment in [(PHONY + 1, 512), (PHONY, 100)] {
        assert!(matches!(
            vm.open(&[segment]),
            Err(TokenError::Misaligned { .. })
        ));
    }
    read_disk(vm.open(&whole).unwrap(), &[2; 4096]);
}

#[test]
fn tokens_expire_and_are_revoked() {
    let vm = Vm::new();
    let whole = [(PHONY, PAGE_BYTES)];
    vm.prepare(0, Page::new(0, 0));
    for _ in 0..TOKEN_EPOCHS {
        vm.tokens.tick();
    }
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Expired { slot: 0 })
    ));
    // From a time to come.
    let header = &vm.processes[0];
    let clock = header.word(OFF_EPOCH).unwrap();
    let now = clock.load(Ordering::Acquire);
    clock.store(now + 1, Ordering::Release);
    vm.prepare(
        0,
        Page {
            sequence: 2,
            ..Page::new(0, 0)
        },
    );
    assert!(matches!(
        vm.open(&whole),
        Err(TokenError::Expired { slot: 0 })
    ));
    clock.store(now, Ordering::Release);
    // The device memory goes: under way it stays, afterwards nothing begins.
    vm.prepare(
        0,
        Page {
            sequence: 3,
            ..Page::new(0, 0)
        },
    );
    let opened = vm.open(&whole).unwrap();
    let gone = Arc::new(AtomicBool::new(false));
    let detaching = std::thread::spawn({
        let (tokens, gone) = (Arc::clone(&vm.tokens), Arc::clone(&gone));
        move || {
            tokens.detach(0, REGION).unwrap();
            gone.store(true, Ordering::SeqCst);
        }
    });
    let mut sequence = 4;
    loop {
        vm.prepare(
            1,
            Page {
                sequence,
                ..Page::new(1, 0)
            },
        );
        match vm.open(&[(PHONY + PAGE_BYTES, PAGE_BYTES)]) {
            Ok(opened) => drop(opened),
            Err(e) => {
                assert!(matches!(e, TokenError::NoRegion { region: REGION }));
                break;
            }
        }
        sequence += 1;
    }
    assert!(!gone.load(Ordering::SeqCst));
    read_disk(opened, &[5; 4096]);
    detaching.join().unwrap();
    assert_eq!(vm.tokens.detach(0, REGION), Err(Errno::ENOENT));
    // The phony buffer goes: its pages are ordinary memory again.
    vm.tokens.detach(0, PIN).unwrap();
    assert!(
        vm.open_with(Direction::IntoDevice, &whole)
            .unwrap()
            .is_none()
    );
}

#[test]
fn device_memory_that_vanishes_is_an_error() {
    let vm = Vm::new();
    vm.prepare(0, Page::new(0, 0));
    let opened = vm.open(&[(PHONY, PAGE_BYTES)]).unwrap();
    let unmapping = std::thread::spawn({
        let device = Arc::clone(&vm.device);
        move || device.unmap(DEVICE, DEVICE_PAGES / 2 * PAGE_BYTES).unwrap()
    });
    while vm.device.view().word(DEVICE).is_ok() {
        std::thread::yield_now();
    }
    read_disk(opened, &[6; 4096]);
    unmapping.join().unwrap();
    vm.prepare(
        0,
        Page {
            sequence: 2,
            ..Page::new(0, 0)
        },
    );
    assert!(matches!(
        vm.open(&[(PHONY, PAGE_BYTES)]),
        Err(TokenError::Memory(_))
    ));
}

#[test]
fn receipts_wait_while_the_vm_does_not_run() {
    let vm = Vm::new();
    vm.prepare(0, Page::new(0, 0));
    vm.prepare(1, Page::new(1, PAGE_BYTES));
    let first = vm.open(&[(PHONY, PAGE_BYTES)]).unwrap();
    vm.tokens.suspend();
    read_disk(first, &[1; 4096]);
    read_disk(
        vm.open(&[(PHONY + PAGE_BYTES, PAGE_BYTES)]).unwrap(),
        &[2; 4096],
    );
    vm.tokens.tick();
    assert_eq!([vm.landed(0), vm.landed(1)], [0, 0]);
    vm.tokens.resume();
    assert_eq!([vm.landed(0), vm.landed(1)], [1 << 16 | 0xff; 2]);
    // A process that has gone gets none.
    vm.prepare(2, Page::new(2, 0));
    let last = vm.open(&[(PHONY + 2 * PAGE_BYTES, PAGE_BYTES)]).unwrap();
    let tokens = Arc::clone(&vm.tokens);
    let closing = std::thread::spawn(move || tokens.close_context(0).unwrap());
    while vm.tokens.has_context(0) {
        std::thread::yield_now();
    }
    read_disk(last, &[3; 4096]);
    closing.join().unwrap();
    assert_eq!(vm.landed(2), 0);
    assert!(
        vm.open_with(Direction::IntoDevice, &[(PHONY, 512)])
            .unwrap()
            .is_none()
    );
}

#[test]
fn phony_pages_have_one_owner() {
    let vm = Vm::new();
    for pages in [
        (PHONY, PAGE_BYTES),
        (PHONY - PAGE_BYTES, 2 * PAGE_BYTES),
        (0, RAM_BYTES),
        (PHONY + (PHONY_PAGES - 1) * PAGE_BYTES, PAGE_BYTES),
    ] {
        let free = (PHONY + PHONY_PAGES * PAGE_BYTES, PAGE_BYTES);
        assert_eq!(vm.tokens.add_phony(1, 1, &[free, pages]), Err(Errno::EBUSY));
    }
    assert_eq!(
        vm.tokens.add_phony(1, 1, &[(1, PAGE_BYTES)]),
        Err(Errno::EINVAL)
    );
    assert_eq!(vm.tokens.add_phony(1, 1, &[(0, 0)]), Err(Errno::EINVAL));
    assert_eq!(
        vm.tokens.add_phony(2, 1, &[(0, PAGE_BYTES)]),
        Err(Errno::ENOENT)
    );
    vm.tokens
        .add_phony(1, 1, &[(PHONY + PHONY_PAGES * PAGE_BYTES, PAGE_BYTES)])
        .unwrap();
    // Another process's token in this one's page.
    let page = Page::new(0, 0);
    vm.arm(page);
    let at = PHONY + PHONY_PAGES * PAGE_BYTES;
    vm.ram
        .view()
        .write(at, vm.envelope(0, page, 0).as_bytes())
        .unwrap();
    assert!(vm.open(&[(at, 512)]).is_err());
}

proptest! {
    /// The block layer cuts, merges and reorders: each sector lands where its page was to go.
    #[test]
    fn every_sector_lands_right(
        cuts in prop::collection::vec(any::<bool>(), 8 * 8 - 1),
        order in Just((0..64usize).collect::<Vec<_>>()).prop_shuffle(),
        targets in Just((0..8u64).collect::<Vec<_>>()).prop_shuffle(),
        shift in 0..4096u64,
        merged: bool,
    ) {
        let vm = Vm::new();
        for (at, &target) in targets.iter().enumerate() {
            let slot = u32::try_from(at).unwrap();
            vm.prepare(slot.into(), Page::new(slot, target * PAGE_BYTES + shift));
        }
        let data: Vec<u8> = (0..8 * 4096usize).map(|i| u8::try_from((i / 512 * 7 + i) % 256).unwrap()).collect();
        let mut pieces = Vec::new();
        let mut start = 0;
        for end in 1..=64 {
            if end == 64 || cuts[end - 1] {
                pieces.push((start, end));
                start = end;
            }
        }
        pieces.sort_by_key(|&(start, _)| order[start]);
        let segment = |&(start, end): &(usize, usize)| {
            (PHONY + start as u64 * 512, (end - start) as u64 * 512)
        };
        let bytes = |&(start, end): &(usize, usize)| data[start * 512..end * 512].to_vec();
        if merged {
            let segments: Vec<_> = pieces.iter().map(segment).collect();
            let whole: Vec<u8> = pieces.iter().flat_map(bytes).collect();
            read_disk(vm.open(&segments).unwrap(), &whole);
        } else {
            for piece in &pieces {
                read_disk(vm.open(&[segment(piece)]).unwrap(), &bytes(piece));
            }
        }
        for (at, &target) in targets.iter().enumerate() {
            let page = vm.device_bytes(target * PAGE_BYTES + shift, 4096);
            prop_assert_eq!(&page[..], &data[at * 4096..][..4096]);
            prop_assert_eq!(vm.landed(u32::try_from(at).unwrap()), 1 << 16 | 0xff);
        }
    }
}

#[test]
fn writes_of_the_disk_read_device_memory_and_other_segments_stay_what_they_are() {
    let vm = Vm::new();
    vm.ram.view().write(0, &[1; 4096]).unwrap();
    vm.device
        .view()
        .write(DEVICE + PAGE_BYTES, &[2; 4096])
        .unwrap();
    vm.prepare(
        0,
        Page {
            direction: DIRECTION_OUT_OF_DEVICE,
            ..Page::new(0, PAGE_BYTES)
        },
    );
    let opened = vm
        .open_with(
            Direction::OutOfDevice,
            &[(0, 512), (PHONY, PAGE_BYTES), (512, 512)],
        )
        .unwrap()
        .unwrap();
    let mut written = Vec::new();
    for &(base, length) in opened.runs() {
        // SAFETY: `opened` keeps them mapped and nobody writes them now.
        written.extend_from_slice(unsafe { std::slice::from_raw_parts(base, length) });
    }
    assert_eq!(opened.tunnelled_bytes(), 4096);
    opened.landed();
    assert_eq!(written, [&[1; 512][..], &[2; 4096], &[1; 512]].concat());
    // Read-only device memory is not written.
    vm.tokens
        .add_device(0, 1, &[(DEVICE, PAGE_BYTES)], false)
        .unwrap();
    vm.arm(Page {
        sequence: 2,
        ..Page::new(0, 0)
    });
    vm.processes[0]
        .write(
            slot_at(0, SLOT_REGION),
            &(1 | u64::from(DIRECTION_INTO_DEVICE) << 32),
        )
        .unwrap();
    vm.fill(
        0,
        0,
        Page {
            sequence: 2,
            ..Page::new(0, 0)
        },
    );
    assert!(matches!(
        vm.open(&[(PHONY, PAGE_BYTES)]),
        Err(TokenError::Direction { .. })
    ));
}

#[test]
fn a_token_that_is_no_good_costs_its_own_page_only() {
    let vm = Vm::new();
    // The block layer has merged what a process with a forged envelope asks for with what others do.
    let forged = PHONY + PHONY_PAGES * PAGE_BYTES;
    vm.tokens
        .add_phony(1, 1, &[(forged, 2 * PAGE_BYTES)])
        .unwrap();
    let forge = || vm.ram.view().write(forged, &[0x55; 8192]).unwrap();
    let segments = [
        (PHONY, PAGE_BYTES),
        (forged, 2 * PAGE_BYTES),
        (0, 512),
        (PHONY + PAGE_BYTES, PAGE_BYTES),
    ];
    forge();
    vm.prepare(0, Page::new(3, 0));
    vm.prepare(1, Page::new(4, 2 * PAGE_BYTES));
    let opened = vm.open(&segments).unwrap();
    assert_eq!(opened.refused(), [(PAGE_BYTES, 2 * PAGE_BYTES)]);
    assert!(matches!(
        opened.why_refused(),
        Some(TokenError::NotAnEnvelope { .. })
    ));
    assert_eq!(opened.tunnelled_bytes(), 2 * PAGE_BYTES);
    let disk: Vec<u8> = (0..4 * 4096 + 512_u32)
        .map(|i| u8::try_from(i % 253).unwrap())
        .collect();
    read_disk(opened, &disk);
    assert!(vm.device_bytes(0, 4096) == disk[..4096]);
    assert!(vm.device_bytes(2 * PAGE_BYTES, 4096) == disk[3 * 4096 + 512..]);
    assert_eq!([vm.landed(3), vm.landed(4)], [1 << 16 | 0xff; 2]);
    let mut plain = vec![0; 8192];
    vm.ram.view().read(forged, &mut plain).unwrap();
    assert!(plain == disk[4096..3 * 4096]);
    vm.ram.view().read(0, &mut plain[..512]).unwrap();
    assert!(plain[..512] == disk[3 * 4096..][..512]);
    // What there is no token for is not written, and nothing is in its place.
    forge();
    for (at, slot) in [(0, 3), (1, 4)] {
        let page = Page {
            sequence: 2,
            direction: DIRECTION_OUT_OF_DEVICE,
            ..Page::new(slot, at * 2 * PAGE_BYTES)
        };
        vm.prepare(at, page);
    }
    let opened = vm.open_with(Direction::OutOfDevice, &segments).unwrap();
    let opened = opened.unwrap();
    assert_eq!(opened.refused(), [(PAGE_BYTES, 2 * PAGE_BYTES)]);
    let mut written = Vec::new();
    for &(base, length) in opened.runs() {
        // SAFETY: `opened` keeps them mapped and nobody writes them now.
        written.extend_from_slice(unsafe { std::slice::from_raw_parts(base, length) });
    }
    opened.landed();
    assert!(written[..4096] == disk[..4096] && written[4096..] == disk[3 * 4096..]);
    // Where there is nothing else, the request is refused.
    assert!(vm.open(&segments[1..2]).is_err());
    // Memory that is not there is nobody's page.
    let nowhere = [(PHONY, PAGE_BYTES), (RAM_BYTES, 512)];
    assert!(matches!(vm.open(&nowhere), Err(TokenError::Memory(_))));
}

#[test]
fn envelopes_of_a_backend_that_is_no_more_are_not_written_as_data() {
    let vm = Vm::new();
    vm.prepare(3, Page::new(0, 0));
    let next = Tokens::new(Arc::clone(&vm.device), Vec::new());
    let write = |segments: &[(u64, u64)]| {
        let view = vm.ram.view();
        next.open(&view, Direction::OutOfDevice, segments)
    };
    let phony = PHONY + 3 * PAGE_BYTES;
    // A VM that has just begun has none.
    assert!(write(&[(phony, PAGE_BYTES)]).unwrap().is_none());
    // Nor does one whose processes have been told of this backend.
    let own = next.hand_over(None).unwrap();
    assert_eq!(next.hand_over(Some(own)).unwrap(), own);
    assert!(write(&[(phony, PAGE_BYTES)]).unwrap().is_none());
    let secret = vm.tokens.hand_over(None).unwrap();
    assert_eq!(next.hand_over(Some(secret)).unwrap(), secret);
    for segments in [
        vec![(phony, PAGE_BYTES)],
        vec![(0, 512), (phony + 1024, 512)],
        vec![(phony - 2 * PAGE_BYTES, 4 * PAGE_BYTES)],
    ] {
        let result = write(&segments);
        assert!(
            matches!(result, Err(TokenError::Orphan { .. })),
            "{segments:?}"
        );
    }
    assert!(
        write(&[(0, PAGE_BYTES), (phony - 512, 512)])
            .unwrap()
            .is_none()
    );
    // Reading into it harms nothing: there is no receipt.
    let read = next.open(
        &vm.ram.view(),
        Direction::IntoDevice,
        &[(phony, PAGE_BYTES)],
    );
    assert!(read.unwrap().is_none());
    // Whoever comes now has been told of the backend that is no more.
    next.open_context(0).unwrap();
    assert!(write(&[(phony, PAGE_BYTES)]).unwrap().is_none());
    // A queue that goes on is no other backend; and a secret that comes late changes nothing for those who are here.
    assert_eq!(next.hand_over(Some(secret)).unwrap(), secret);
    assert_eq!(next.hand_over(Some([1, 2].into())).unwrap(), secret);
    next.close_all();
    assert!(write(&[(phony, PAGE_BYTES)]).unwrap().is_none());
}

#[test]
fn what_only_looks_like_an_envelope_is_data() {
    let vm = Vm::new();
    let next = Tokens::new(Arc::clone(&vm.device), Vec::new());
    next.hand_over(Some(vm.tokens.hand_over(None).unwrap()))
        .unwrap();
    let write = || {
        let view = vm.ram.view();
        next.open(&view, Direction::OutOfDevice, &[(PHONY, PAGE_BYTES)])
    };
    vm.prepare(0, Page::new(0, 0));
    assert!(matches!(write(), Err(TokenError::Orphan { .. })));
    // A file may hold anything, and its pages are written some time.
    let good = vm.envelope(0, Page::new(0, 0), 0);
    for key in [
        [0, 0],
        [good.key[0].get() ^ 1, good.key[1].get()],
        [good.key[0].get(), good.key[1].get() ^ 1],
    ] {
        let forged = Envelope {
            key: key.map(Into::into),
            ..good
        };
        vm.ram.view().write(PHONY, forged.as_bytes()).unwrap();
        assert!(write().unwrap().is_none());
    }
}
