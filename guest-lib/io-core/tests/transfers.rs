//! Reads and writes between a file on this machine's disk and device memory as a host has it. The
//! modes and the totals belong to the process: one test at a time.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Disk, Memory, pattern, transfer};
use farlane_io_core::descriptors::{DescriptorOwner, closing};
use farlane_io_core::{Direction, Mode, set_mode, totals};
use farlane_sys::sync::lock;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::io::{Seek as _, SeekFrom};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, MutexGuard};

static TURN: Mutex<()> = Mutex::new(());

fn turn(mode: Mode) -> MutexGuard<'static, ()> {
    let turn = lock(&TURN);
    set_mode(mode);
    turn
}

const FILE: usize = 300_001;

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![1_usize..9000, 4000_usize..200_000, Just(4096), Just(65536)]
}

#[test]
fn reads_of_any_size_and_alignment_are_what_the_file_holds() {
    let content = pattern(1, FILE);
    for mode in [Mode::Auto, Mode::P2p, Mode::Cache, Mode::Off] {
        let _turn = turn(mode);
        let disk = Disk::new(&content);
        let memory = Memory::registered(1 << 20);
        let before = totals();
        let requests = (
            0_usize..FILE + 5000,
            0_usize..9000,
            lengths(),
            any::<bool>(),
            any::<bool>(),
        );
        let mut runner = TestRunner::new(Config::with_cases(120));
        let result = runner.run(&requests, |(offset, at, length, aligned, cold)| {
            let (offset, at) = if aligned {
                (offset & !4095, at & !4095)
            } else {
                (offset, at)
            };
            if cold {
                disk.drop_cache();
            }
            memory.put(0, &vec![0xee; 1 << 19]);
            let moved = memory.read(&disk, at, length, offset as u64);
            let expected = content.get(offset..).unwrap_or_default();
            let expected = &expected[..length.min(expected.len())];
            prop_assert_eq!(moved, expected.len());
            prop_assert!(memory.get(at, moved) == expected, "other bytes");
            // Nothing around it has been touched.
            prop_assert!(memory.get(0, at).iter().all(|byte| *byte == 0xee));
            prop_assert!(
                memory
                    .get(at + moved, 4096)
                    .iter()
                    .all(|byte| *byte == 0xee)
            );
            Ok(())
        });
        result.unwrap();
        let after = totals();
        assert_eq!(
            after.p2p > before.p2p,
            matches!(mode, Mode::Auto | Mode::P2p),
            "{mode:?}"
        );
        assert_eq!(
            after.requests > before.requests,
            mode != Mode::Off,
            "{mode:?}"
        );
    }
}

#[test]
fn writes_of_any_size_and_alignment_are_found_in_the_file() {
    for mode in [Mode::Auto, Mode::P2p, Mode::Cache] {
        let _turn = turn(mode);
        let mut content = pattern(2, FILE);
        let disk = Disk::new(&content);
        let memory = Memory::registered(1 << 20);
        let before = totals();
        let requests = (
            0_usize..FILE + 9000,
            0_usize..9000,
            lengths(),
            any::<u64>(),
            any::<bool>(),
        );
        let mut runner = TestRunner::new(Config::with_cases(80));
        let content = std::cell::RefCell::new(&mut content);
        let result = runner.run(&requests, |(offset, at, length, seed, aligned)| {
            let (offset, at) = if aligned {
                (offset & !4095, at & !4095)
            } else {
                (offset, at)
            };
            let content = &mut **content.borrow_mut();
            let bytes = pattern(seed, length);
            memory.put(at, &bytes);
            prop_assert_eq!(memory.write(&disk, at, length, offset as u64), length);
            content.resize(content.len().max(offset + length), 0);
            content[offset..offset + length].copy_from_slice(&bytes);
            prop_assert!(disk.content() == *content, "other bytes in the file");
            Ok(())
        });
        result.unwrap();
        assert_eq!(totals().p2p > before.p2p, mode != Mode::Cache, "{mode:?}");
    }
}

#[test]
fn a_mixed_request_takes_cached_pages_from_the_cache_and_the_rest_by_p2p() {
    let _turn = turn(Mode::Auto);
    let content = pattern(3, 16 << 20);
    let disk = Disk::new(&content);
    let memory = Memory::registered(16 << 20);
    // The system may take pages away by itself meanwhile, but not each time.
    let mut found = Vec::new();
    for _ in 0..5 {
        disk.drop_cache();
        disk.cache(0, 8 << 20);
        let cached = disk.cached_pages();
        let before = totals();
        assert_eq!(memory.read(&disk, 0, 16 << 20, 0), 16 << 20);
        assert!(memory.get(0, 16 << 20) == content);
        let after = totals();
        assert_eq!(
            after.cache + after.p2p - before.cache - before.p2p,
            16 << 20
        );
        // Without a calibration of this disk a mixed request is one transfer; with one it is what
        // the model says.
        assert!(after.p2p - before.p2p >= 8 << 20);
        found.push((cached, disk.cached_pages()));
        if found.last() == Some(&(2048, 2048)) {
            return;
        }
    }
    panic!("The decision or P2P changes what is cached: pages before and after {found:?}");
}

#[test]
fn what_is_cached_comes_from_the_cache() {
    let _turn = turn(Mode::Auto);
    let content = pattern(4, 1 << 20);
    let disk = Disk::new(&content);
    let memory = Memory::registered(1 << 20);
    disk.drop_cache();
    disk.cache(0, 1 << 20);
    let before = totals();
    assert_eq!(memory.read(&disk, 0, 64 << 10, 512 << 10), 64 << 10);
    assert_eq!(memory.read(&disk, 0, 1 << 20, 0), 1 << 20);
    let after = totals();
    assert_eq!(
        (after.p2p, after.cache),
        (before.p2p, before.cache + (1 << 20) + (64 << 10))
    );
}

#[test]
fn reads_see_what_the_page_cache_holds_and_it_sees_what_is_written() {
    let _turn = turn(Mode::P2p);
    let mut content = pattern(5, 256 << 10);
    let disk = Disk::new(&content);
    let memory = Memory::registered(256 << 10);
    for round in 0..50_u64 {
        // A writer through the page cache, and no fsync.
        let page = pattern(round, 4096);
        let offset = (round * 7919 * 512) % (252 << 10);
        disk.file.write_all_at(&page, offset).unwrap();
        let at = usize::try_from(offset).unwrap();
        content[at..at + 4096].copy_from_slice(&page);
        memory.read(&disk, 0, 256 << 10, 0);
        assert!(memory.get(0, 256 << 10) == content, "round {round}");
        // And the reverse, with a reader that has everything in the page cache.
        let pages = pattern(!round, 16384);
        let offset = (round * 7919 * 4096) % (240 << 10);
        memory.put(0, &pages);
        assert_eq!(memory.write(&disk, 0, 16384, offset), 16384);
        let at = usize::try_from(offset).unwrap();
        content[at..at + 16384].copy_from_slice(&pages);
        assert!(disk.content() == content, "round {round}");
    }
    assert!(totals().p2p > 0);
}

#[test]
fn threads_read_and_write_parts_of_one_file() {
    for mode in [Mode::Auto, Mode::P2p] {
        let _turn = turn(mode);
        const PART: usize = 1 << 20;
        let disk = Disk::new(&pattern(6, 8 * PART));
        let memory = Memory::registered(8 * PART);
        std::thread::scope(|scope| {
            for thread in 0..8_usize {
                let (disk, memory) = (&disk, &memory);
                scope.spawn(move || {
                    let base = thread * PART;
                    for round in 0..12_u64 {
                        let bytes = pattern(round * 100 + thread as u64, PART / 4 + 777);
                        let offset = base + usize::try_from(round).unwrap() * 1531;
                        memory.put(base, &bytes);
                        assert_eq!(
                            memory.write(disk, base, bytes.len(), offset as u64),
                            bytes.len()
                        );
                        memory.put(base, &vec![0; bytes.len()]);
                        assert_eq!(
                            memory.read(disk, base, bytes.len(), offset as u64),
                            bytes.len()
                        );
                        assert!(memory.get(base, bytes.len()) == bytes, "thread {thread}");
                    }
                });
            }
        });
    }
}

#[test]
fn a_sequence_of_short_reads_goes_through_read_ahead_and_leaves_little_behind() {
    let _turn = turn(Mode::Auto);
    const LENGTH: usize = 64 << 20;
    let content = pattern(7, LENGTH);
    let disk = Disk::new(&content);
    let memory = Memory::registered(1 << 20);
    disk.drop_cache();
    // Somebody else's pages, near the beginning.
    disk.cache(1 << 20, 256 << 10);
    farlane_io_core::sys::advise(disk.fd(), 0, 0, libc::POSIX_FADV_NORMAL).unwrap();
    let others = disk.cached_pages();
    let before = totals();
    for offset in (0..LENGTH).step_by(16 << 10) {
        assert_eq!(memory.read(&disk, 0, 16 << 10, offset as u64), 16 << 10);
        assert!(memory.get(0, 16 << 10) == content[offset..offset + (16 << 10)]);
    }
    let after = totals();
    assert_eq!(after.p2p, before.p2p);
    assert!(after.read_ahead - before.read_ahead > LENGTH as u64 / 2);
    let left = disk.cached_pages();
    // The private set, and what had not been counted as read when the last step was taken.
    assert!(
        left <= others + 2 * 512 + 64,
        "{left} pages are left, {others} of them others'"
    );
    let stat = farlane_io_core::sys::cachestat(disk.fd(), 1 << 20, 256 << 10).unwrap();
    assert_eq!(stat.cached, 64, "Pages of others were dropped");
}

#[test]
fn errors_and_ends_of_files_are_those_of_the_plain_calls() {
    let _turn = turn(Mode::P2p);
    let disk = Disk::new(&pattern(8, 10_000));
    let memory = Memory::registered(1 << 20);
    let read_only = std::fs::File::open(disk.path()).unwrap();
    use std::os::fd::AsRawFd as _;
    let buffer = memory.at(0).cast();
    // SAFETY: memory of the test.
    unsafe {
        let pread =
            |fd, buffer, length, offset| transfer(Direction::Read, fd, buffer, length, offset);
        use rustix::io::Errno;
        assert_eq!(pread(disk.fd(), buffer, 100, 10_000), Ok(0));
        assert_eq!(pread(disk.fd(), buffer, 8192, 8192), Ok(1808));
        assert_eq!(pread(disk.fd(), buffer, 1 << 20, 0), Ok(10_000));
        assert_eq!(pread(disk.fd(), buffer, 10, u64::MAX), Err(Errno::INVAL));
        assert_eq!(pread(-1, buffer, 10, 0), Err(Errno::BADF));
        assert_eq!(
            transfer(Direction::Write, read_only.as_raw_fd(), buffer, 8192, 0),
            Err(Errno::BADF)
        );
        assert_eq!(pread(disk.fd(), buffer, 0, 0), Ok(0));
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&writer, b"pipe").unwrap();
        assert_eq!(pread(reader.as_raw_fd(), buffer, 4, 0), Err(Errno::SPIPE));
    }
}

#[test]
fn read_and_write_move_the_file_position_as_far_as_they_have_moved_bytes() {
    use farlane_io_core::Position;
    use farlane_io_core::route::{Call, serve};
    let _turn = turn(Mode::P2p);
    let content = pattern(9, 20_000);
    let mut disk = Disk::new(&content);
    let memory = Memory::registered(1 << 20);
    let call = |length| Call {
        name: "read",
        fd: disk.fd(),
        address: memory.address(),
        length,
        position: Position::Current,
    };
    let (first, second, past) = (call(9000), call(1 << 20), call(5));
    disk.file.seek(SeekFrom::Start(100)).unwrap();
    let read = |call| serve(call, Direction::Read);
    assert_eq!(read(&first), Some(Ok(9000)));
    assert_eq!(disk.file.stream_position().unwrap(), 9100);
    assert_eq!(read(&second), Some(Ok(10_900)));
    assert!(memory.get(0, 10_900) == content[9100..]);
    assert_eq!(read(&past), Some(Ok(0)));
    assert_eq!(disk.file.stream_position().unwrap(), 20_000);
    assert_eq!(serve(&past, Direction::Write), Some(Ok(5)));
    assert_eq!(disk.file.stream_position().unwrap(), 20_005);
}

#[test]
fn locks_that_end_with_a_close_keep_no_file_from_p2p_that_is_read_before_it_is_closed() {
    let _turn = turn(Mode::P2p);
    let disk = Disk::new(&pattern(11, 1 << 16));
    let memory = Memory::registered(1 << 16);
    let is_p2p = || {
        let before = totals().p2p;
        assert_eq!(memory.read(&disk, 0, 8192, 4096), 8192);
        totals().p2p > before
    };
    // SAFETY: a structure of numbers, which is read.
    let locked = unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = libc::F_WRLCK.try_into().unwrap();
        libc::fcntl(disk.fd(), libc::F_SETLK, &raw const lock)
    };
    assert_eq!(locked, 0);
    // As long as it is locked, however often it is read.
    assert!((0..100).all(|_| !is_p2p()));
    let other = std::fs::File::open(disk.path()).unwrap();
    // The library is told, and another thread reads before the descriptor is closed.
    assert_eq!(closing(other.as_raw_fd()), DescriptorOwner::Program);
    assert!((0..10).all(|_| !is_p2p()));
    drop(other);
    assert!((0..100).any(|_| is_p2p()));
}

#[test]
fn memory_can_be_unregistered_while_others_read_to_it() {
    let _turn = turn(Mode::P2p);
    let disk = Disk::new(&pattern(10, 1 << 20));
    let memory = Memory::registered(1 << 20);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            (0..200)
                .map(|_| memory.read(&disk, 0, 1 << 20, 0))
                .sum::<usize>()
        });
        while !reader.is_finished() {
            farlane_io_core::unregister(memory.address()).unwrap();
            farlane_io_core::register(memory.address(), memory.0.len(), "soft").unwrap();
        }
        assert_eq!(reader.join().unwrap(), 200 << 20);
    });
    let again = farlane_io_core::register(memory.address() + 4096, 10, "soft").unwrap_err();
    assert_eq!(again.errno(), libc::EEXIST);
}
