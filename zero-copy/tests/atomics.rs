//! Atomic operations on regions over guest memory, memfds, buffers and processes.
// Small numbers of a test.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use farlane_zero_copy::*;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

const PAGE: u64 = 4096;

fn memfd(pages: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("ram", flags).unwrap();
    rustix::fs::ftruncate(&fd, pages * PAGE).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    fd
}

fn word(region: &Region, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    copy_to_slice(region, offset, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

/// Memory of this process, as of another one.
fn process_region(address: u64, length: u64, writable: bool) -> Region {
    let process = Process::current().unwrap();
    Region::from_process(&process, address, length, writable).unwrap()
}

/// Adds to the same word through each region in a thread of its own, by both operations; returns
/// the sum of what was added.
///
/// Each test has locks of its own: another's thread that is not scheduled while it holds one of the
/// same place in a page would have an operation find it in use.
fn add_through(regions: &[&Region], offset: u64, times: u64) -> u64 {
    let locks = &WordLocks::default();
    thread::scope(|scope| {
        for (i, region) in regions.iter().enumerate() {
            let addend = 1 + i as u64;
            scope.spawn(move || {
                let mut seen = 0;
                let mut done = 0;
                while done < times {
                    let operation = if done.is_multiple_of(2) {
                        AtomicOp::FetchAdd(addend)
                    } else {
                        let swap = seen + addend;
                        AtomicOp::CompareSwap {
                            compare: seen,
                            swap,
                        }
                    };
                    match (region.atomic(offset, operation, locks), operation) {
                        (Ok(old), AtomicOp::CompareSwap { compare, .. }) => {
                            done += u64::from(old == compare);
                            seen = old;
                        }
                        (Ok(old), _) => (seen, done) = (old + addend, done + 1),
                        (Err(RegionError::Busy), _) => thread::yield_now(),
                        (Err(e), _) => panic!("{e}"),
                    }
                }
            });
        }
    });
    (1..=regions.len() as u64).sum::<u64>() * times
}

#[test]
fn the_operations_of_two_threads_on_mapped_memory_add_up() {
    let buffer = Pool::separate_files(1 << 20).allocate(4096).unwrap();
    let region = Region::from_buffer(&buffer);
    let sum = add_through(&[&region, &region.clone().share()], 64, 100_000);
    assert_eq!(word(&region, 64), sum);
}

#[test]
fn the_operations_of_two_threads_on_memory_of_a_process_add_up() {
    let words = [const { AtomicU64::new(0) }; 2];
    let region = process_region(words.as_ptr().addr() as u64, 16, true);
    let sum = add_through(&[&region, &region.clone().share()], 8, 20_000);
    assert_eq!(words[1].load(Ordering::SeqCst), sum);
    assert_eq!(words[0].load(Ordering::SeqCst), 0);
}

#[test]
fn operations_by_different_ways_to_the_same_memory_add_up() {
    let locks = WordLocks::default();
    let file = memfd(2);
    let space = AddressSpace::new();
    space
        .map(16 * PAGE, 2 * PAGE, file.as_fd(), 0, true)
        .unwrap();
    let guest = Region::from_guest(&space, &[(16 * PAGE + 8, 4096)], true).unwrap();
    let mapped = Region::from_memfd(file.try_clone().unwrap(), 2 * PAGE, true).unwrap();
    let program = Mapping::new(file.as_fd(), 0, 2 * PAGE, true).unwrap();
    let address = program.base().expose_provenance() as u64;
    let process = process_region(address + 8, 4096, true);
    let memfd = Region::from_memfd(file.try_clone().unwrap(), 2 * PAGE, true).unwrap();
    // The same word, at different offsets of the regions: all go by its place in the page.
    assert_eq!(guest.atomic(4088, AtomicOp::Store(7), &locks).unwrap(), 0);
    assert_eq!(process.atomic(4088, AtomicOp::Store(0), &locks).unwrap(), 7);
    assert_eq!(
        mapped.atomic(4096, AtomicOp::FetchAdd(0), &locks).unwrap(),
        0
    );
    let sum = add_through(&[&guest, &process, &process.clone()], 4088, 20_000);
    assert_eq!(word(&memfd, 4096), sum);
    assert_eq!((word(&memfd, 4088), word(&memfd, 4104)), (0, 0));
}

#[test]
fn an_operation_needs_what_a_write_needs() {
    let locks = WordLocks::default();
    let file = memfd(1);
    let read_only = Region::from_memfd(file.try_clone().unwrap(), PAGE, false).unwrap();
    let region = Region::from_memfd(file, PAGE, true).unwrap();
    let mine = [7u64; 2];
    let address = mine.as_ptr().addr() as u64;
    for (region, last) in [(&region, PAGE - 8), (&process_region(address, 16, true), 8)] {
        assert!(region.atomic(last, AtomicOp::FetchAdd(0), &locks).is_ok());
        for beyond in [last + 1, last + 8, u64::MAX, u64::MAX - 7] {
            let outcome = region.atomic(beyond, AtomicOp::FetchAdd(1), &locks);
            assert!(matches!(outcome, Err(RegionError::Bounds { .. })));
        }
        for odd in 1..8 {
            let outcome = region.atomic(last - 8 + odd, AtomicOp::FetchAdd(1), &locks);
            assert!(matches!(outcome, Err(RegionError::Misaligned { .. })));
        }
    }
    for region in [&read_only, &process_region(address, 16, false)] {
        let outcome = region.atomic(0, AtomicOp::FetchAdd(1), &locks);
        assert!(matches!(outcome, Err(RegionError::ReadOnly)));
    }
    let nowhere = process_region(4096, 4096, true);
    assert!(matches!(
        nowhere.atomic(0, AtomicOp::FetchAdd(1), &locks),
        Err(RegionError::Io(_))
    ));
    region.revoke();
    assert!(matches!(
        region.atomic(0, AtomicOp::FetchAdd(1), &locks),
        Err(RegionError::Revoked)
    ));
    assert_eq!((mine, word(&read_only, 0)), ([7; 2], 0));
}

#[test]
fn memory_of_a_process_that_may_only_be_read_is_not_changed() {
    let locks = WordLocks::default();
    let file = memfd(1);
    let program = Mapping::new(file.as_fd(), 0, PAGE, false).unwrap();
    let region = process_region(program.base().expose_provenance() as u64, PAGE, true);
    let outcome = region.atomic(0, AtomicOp::FetchAdd(1), &locks);
    assert!(matches!(outcome, Err(RegionError::Io(_))));
    // One that changes nothing writes nothing.
    let swap = AtomicOp::CompareSwap {
        compare: 1,
        swap: 2,
    };
    assert_eq!(region.atomic(0, swap, &locks).unwrap(), 0);
}

#[test]
fn a_word_of_two_extents_is_none() {
    let locks = WordLocks::default();
    let file = memfd(4);
    let space = AddressSpace::new();
    space.map(0, 4 * PAGE, file.as_fd(), 0, true).unwrap();
    let guest = |extents: &[_]| Region::from_guest(&space, extents, true).unwrap();
    let operation = AtomicOp::FetchAdd(u64::MAX);
    for extents in [
        [(0, 4), (PAGE, 12)],
        [(4, 4), (2 * PAGE, 12)],
        [(PAGE - 4, 4), (3 * PAGE, 12)],
    ] {
        let region = guest(&extents);
        let outcome = region.atomic(0, operation, &locks);
        assert!(matches!(outcome, Err(RegionError::Misaligned { .. })));
        // The first word of the second extent, which begins at an odd offset of the region.
        assert_eq!(region.atomic(4, AtomicOp::Store(1), &locks).unwrap(), 0);
    }
    let all = guest(&[(0, 4 * PAGE)]);
    let mut bytes = vec![0; 4 * PAGE as usize];
    copy_to_slice(&all, 0, &mut bytes).unwrap();
    assert_eq!(bytes.iter().map(|b| u64::from(*b)).sum::<u64>(), 3);
}

proptest! {
    #[test]
    fn an_operation_touches_its_word_and_no_other(
        kind in 0..2, at in 0u64..512, old: u64, operand: u64, equal: bool, operation in 0..3,
    ) {
        let locks = WordLocks::default();
        let mut mine = vec![0x5a5a_5a5a_5a5a_5a5au64; 512];
        let buffer = Pool::separate_files(1 << 20).allocate(4096).unwrap();
        let region = match kind {
            0 => Region::from_buffer(&buffer),
            _ => process_region(mine.as_mut_ptr().expose_provenance() as u64, 4096, true),
        };
        copy_from_slice(&region, 0, &[0x5a; 4096]).unwrap();
        copy_from_slice(&region, at * 8, &old.to_ne_bytes()).unwrap();
        let compare = if equal { old } else { !old };
        let (operation, new) = match operation {
            0 => (AtomicOp::FetchAdd(operand), old.wrapping_add(operand)),
            1 => (AtomicOp::Store(operand), operand),
            _ => (
                AtomicOp::CompareSwap { compare, swap: operand },
                if equal { operand } else { old },
            ),
        };
        prop_assert_eq!(region.atomic(at * 8, operation, &locks).unwrap(), old);
        let mut expect = [0x5a; 4096];
        let place = (at * 8) as usize;
        expect[place..place + 8].copy_from_slice(&new.to_ne_bytes());
        let mut all = [0; 4096];
        copy_to_slice(&region, 0, &mut all).unwrap();
        prop_assert!(all == expect);
    }
}
