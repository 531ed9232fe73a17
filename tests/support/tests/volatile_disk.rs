//! The disk as programs see it: an ordinary file.

#![allow(clippy::unwrap_used)]

use farlane_support::volatile_disk::{Caches, Entry, Operation, PowerLoss, VolatileDisk};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::ReadWriteFlags;
use std::fs::File;
use std::io::IoSlice;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

const DISK: usize = 1 << 20;

fn open(disk: &VolatileDisk, flags: OFlags) -> File {
    let flags = i32::try_from(flags.bits()).unwrap();
    let mut options = File::options();
    options.read(true).write(true).custom_flags(flags);
    options.open(disk.path()).unwrap()
}

fn mounts() -> String {
    std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap()
}

#[repr(C, align(4096))]
struct Page([u8; 4096]);

#[test]
fn what_is_written_is_lost_until_it_is_synced() {
    let disk = VolatileDisk::new(DISK, Caches::Shared).unwrap();
    for (n, flags) in [OFlags::empty(), OFlags::DIRECT].into_iter().enumerate() {
        let at = n * 65536;
        let file = open(&disk, flags);
        let page = Page([7; 4096]);
        file.write_all_at(&page.0, at as u64).unwrap();
        let mut found = Page([0; 4096]);
        file.read_exact_at(&mut found.0, at as u64).unwrap();
        assert!(found.0 == page.0);
        let kept = |loss| disk.power_loss(loss)[at..at + 4096] == page.0;
        assert!(!kept(PowerLoss::LosesAll));
        assert!(kept(PowerLoss::LosesNothing));
        file.sync_data().unwrap();
        assert!(kept(PowerLoss::LosesAll));
        // To close a file is not to sync it.
        file.write_all_at(&page.0, 8192 + at as u64).unwrap();
        drop(file);
        assert!(disk.power_loss(PowerLoss::LosesAll)[at + 8192..][..4096] != page.0);
    }
    assert_eq!(disk.log().flushes(), 2);
    let before = disk.position();
    open(&disk, OFlags::empty()).sync_all().unwrap();
    assert_eq!(disk.position(), before + 1);
}

#[test]
fn a_write_with_dsync_is_durable_and_takes_nothing_along() {
    let disk = VolatileDisk::new(DISK, Caches::Shared).unwrap();
    let file = open(&disk, OFlags::empty());
    file.write_all_at(&[1; 512], 0).unwrap();
    let part = [IoSlice::new(&[2; 512])];
    let written = rustix::io::pwritev2(&file, &part, 512, ReadWriteFlags::DSYNC);
    assert_eq!(written, Ok(512));
    open(&disk, OFlags::DSYNC)
        .write_all_at(&[3; 512], 1024)
        .unwrap();
    let left = disk.power_loss(PowerLoss::LosesAll);
    assert_eq!((left[0], left[512], left[1024]), (0, 2, 3));
}

#[test]
fn zeroed_and_given_back_blocks_are_volatile_too() {
    let disk = VolatileDisk::with(vec![9; DISK], Caches::Shared).unwrap();
    let file = open(&disk, OFlags::empty());
    let keep = FallocateFlags::KEEP_SIZE;
    for (how, at) in [
        (FallocateFlags::PUNCH_HOLE, 4096),
        (FallocateFlags::ZERO_RANGE, 16384),
    ] {
        rustix::fs::fallocate(&file, keep | how, at, 4096).unwrap();
        let start = usize::try_from(at).unwrap();
        assert!(disk.content()[start..start + 4096] == [0; 4096]);
        assert!(disk.power_loss(PowerLoss::LosesAll)[start..start + 4096] == [9; 4096]);
        file.sync_data().unwrap();
        assert!(disk.power_loss(PowerLoss::LosesAll)[start..start + 4096] == [0; 4096]);
    }
    assert_eq!(disk.requests(Operation::Allocate), 2);
}

#[test]
fn each_way_to_a_disk_with_several_caches_is_synced_by_itself() {
    let disk = VolatileDisk::new(DISK, Caches::PerHandle).unwrap();
    let files = [0, 1].map(|_| open(&disk, OFlags::empty()));
    for (n, file) in files.iter().enumerate() {
        file.write_all_at(&[5; 512], n as u64 * 512).unwrap();
    }
    files[1].sync_data().unwrap();
    let left = disk.power_loss(PowerLoss::LosesAll);
    assert_eq!((left[0], left[512]), (0, 5));
    assert!(matches!(disk.log().entries(), [_, _, Entry::Flush { .. }]));
}

#[test]
fn operations_fail_and_fall_short_as_they_are_told_to() {
    let disk = VolatileDisk::new(DISK, Caches::Shared).unwrap();
    let file = open(&disk, OFlags::empty());
    let number = |e: std::io::Error| e.raw_os_error();
    disk.fail(Operation::Flush, libc::EIO);
    file.write_all_at(&[1; 512], 0).unwrap();
    assert_eq!(file.sync_data().map_err(number), Err(Some(libc::EIO)));
    assert_eq!(disk.power_loss(PowerLoss::LosesAll)[0], 0);
    disk.fail(Operation::Write, libc::ENOSPC);
    let written = file.write_at(&[2; 512], 0);
    assert_eq!(written.map_err(number), Err(Some(libc::ENOSPC)));
    disk.fail(Operation::Read, libc::EIO);
    let read = file.read_at(&mut [2; 512], 0);
    assert_eq!(read.map_err(number), Err(Some(libc::EIO)));
    disk.heal();
    disk.shorten_writes(1000);
    assert_eq!(file.write_at(&[3; 4096], 0).unwrap(), 1000);
    disk.heal();
    assert_eq!(file.read_at(&mut [0; 4096], 0).unwrap(), 4096);
    assert_eq!(disk.content()[998..1002], [3, 3, 0, 0]);
}

#[test]
fn a_held_flush_is_complete_when_it_is_released() {
    let disk = VolatileDisk::new(DISK, Caches::Shared).unwrap();
    let file = open(&disk, OFlags::empty());
    file.write_all_at(&[1; 512], 0).unwrap();
    disk.hold_flushes();
    let syncing = std::thread::spawn(move || file.sync_data());
    disk.await_held_flush().unwrap();
    assert_eq!(disk.log().flushes(), 0);
    assert!(!syncing.is_finished());
    disk.release_flushes();
    syncing.join().unwrap().unwrap();
    assert_eq!(disk.log().flushes(), 1);
}

#[test]
fn nothing_is_left_of_the_disk_when_its_test_panics() {
    let mounted = std::panic::catch_unwind(|| {
        let disk = VolatileDisk::new(DISK, Caches::Shared).unwrap();
        let folder = disk.path().parent().unwrap().to_owned();
        let _open = open(&disk, OFlags::empty());
        assert!(mounts().contains(folder.to_str().unwrap()));
        // Nobody else sees it.
        let all = std::fs::read_to_string("/proc/1/mountinfo").unwrap();
        assert!(!all.contains(folder.to_str().unwrap()));
        std::panic::resume_unwind(Box::new(folder));
    });
    let folder = mounted.unwrap_err();
    let folder = folder.downcast::<std::path::PathBuf>().unwrap();
    assert!(!mounts().contains(folder.to_str().unwrap()));
    assert!(!folder.exists());
}
