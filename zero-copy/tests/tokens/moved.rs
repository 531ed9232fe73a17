//! Requests whose tokens are good.

use crate::vm::{
    DEVICE, DEVICE_PAGES, PHONY, Page, SLOTS, Vm, context, read_disk, region, slot_at,
};
use farlane_abi::PAGE_BYTES;
use farlane_abi::tunnel::{
    DIRECTION_INTO_DEVICE, DIRECTION_OUT_OF_DEVICE, Disk, OFF_DISK_COUNT, OFF_DISKS,
    OFF_SLOT_COUNT, SLOT_KEY, SLOT_REGION,
};
use farlane_zero_copy::tokens::{Direction, TokenError};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

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
        let byte = |i: usize| u8::try_from((i / 512 * 7 + i) % 256).unwrap();
        let data: Vec<u8> = (0..8 * 4096).map(byte).collect();
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
        .add_device(context(0), region(1), &[(DEVICE, PAGE_BYTES)], false)
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
