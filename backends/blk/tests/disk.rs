//! A disk as a driver sees it that knows nothing of its backend.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Daemon, Driver, make_disk, wait_until};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use virtio_driver::VirtioTransport as _;

const DISK: u64 = 4 << 20;

fn pattern(seed: u8, bytes: &mut [u8]) {
    for (n, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::try_from(n % 251).unwrap() ^ seed;
    }
}

/// Every disk is tried in a file system with direct I/O, if there is one, and in memory.
fn on_both(test: impl Fn(&std::path::Path)) {
    let folder = tempfile::tempdir().unwrap();
    test(folder.path());
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    test(folder.path());
}

#[test]
fn what_is_written_is_in_the_file_and_is_read_again() {
    on_both(|folder| {
        let file = make_disk(folder, DISK);
        let daemon = Daemon::start(folder, "");
        let mut driver = Driver::connect(folder, 1);
        pattern(7, driver.memory.bytes(0, 65536));
        assert_eq!(driver.write(8192, 0, 65536), 0);
        driver.queues[0].flush(3).unwrap();
        assert_eq!(driver.complete(0), (3, 0));
        let mut found = vec![0; 65536];
        file.read_exact_at(&mut found, 8192).unwrap();
        assert_eq!(found, driver.memory.bytes(0, 65536));
        assert_eq!(driver.read(8192, 1 << 20, 65536), 0);
        assert_eq!(driver.memory.bytes(1 << 20, 65536), found);
        // The last sector, and the one after it.
        assert_eq!(driver.read(DISK - 512, 0, 512), 0);
        assert_eq!(driver.read(DISK, 0, 512), -libc::EIO);
        assert_eq!(driver.write(DISK - 512, 0, 1024), -libc::EIO);
        assert_eq!(daemon.metric("bytes_written"), 65536);
        assert_eq!(daemon.metric("flushes"), 1);
        assert_eq!(daemon.metric("errors"), 2);
        let took = |operation| {
            let labels = [("operation", operation)];
            daemon.labelled("request_seconds_count", &labels)
        };
        assert_eq!(
            ["read", "write", "flush", "discard"].map(took),
            [2, 1, 1, 0]
        );
    });
}

#[test]
fn memory_at_odd_addresses_is_read_and_written_all_the_same() {
    on_both(|folder| {
        let file = make_disk(folder, DISK);
        let _daemon = Daemon::start(folder, "");
        let mut driver = Driver::connect(folder, 1);
        // More than is copied at once.
        let length = (2 << 20) + 512;
        pattern(9, driver.memory.bytes(3, length));
        assert_eq!(driver.write(512, 3, length), 0);
        let mut found = vec![0; length];
        file.read_exact_at(&mut found, 512).unwrap();
        assert_eq!(found, driver.memory.bytes(3, length));
        let at = (4 << 20) + 1;
        assert_eq!(driver.read(512, at, length), 0);
        assert_eq!(driver.memory.bytes(at, length), found);
    });
}

#[test]
fn blocks_are_given_back_and_zeroed() {
    on_both(|folder| {
        let file = make_disk(folder, DISK);
        file.write_all_at(&vec![0xff; 4 << 20], 0).unwrap();
        let _daemon = Daemon::start(folder, "");
        let before = file.metadata().unwrap().blocks();
        let mut driver = Driver::connect(folder, 1);
        driver.queues[0].discard(1 << 20, 1 << 20, 1).unwrap();
        assert_eq!(driver.complete(0), (1, 0));
        assert!(file.metadata().unwrap().blocks() < before);
        let given_back = file.metadata().unwrap().blocks();
        for (offset, unmap) in [(512, false), (3 << 20, true)] {
            driver.queues[0]
                .write_zeroes(offset, 70_144, unmap, 2)
                .unwrap();
            assert_eq!(driver.complete(0), (2, 0));
            let mut found = vec![1; 70_144 + 1024];
            file.read_exact_at(&mut found, offset - 512).unwrap();
            assert_eq!((found[511], found[70_144 + 512]), (0xff, 0xff));
            assert!(found[512..70_144 + 512].iter().all(|&byte| byte == 0));
        }
        assert!(file.metadata().unwrap().blocks() < given_back);
        driver.queues[0].discard(DISK - 512, 1024, 3).unwrap();
        assert_eq!(driver.complete(0), (3, -libc::EIO));
    });
}

/// Discards that a block device has done (Documentation/block/stat.rst).
fn discards_of(device: &std::path::Path) -> u64 {
    let name = device.file_name().unwrap().to_str().unwrap();
    let text = std::fs::read_to_string(format!("/sys/block/{name}/stat")).unwrap();
    text.split_whitespace().nth(11).unwrap().parse().unwrap()
}

/// Whether this kernel has `BLOCK_URING_CMD_DISCARD`.
fn kernel_discards() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next().unwrap().parse::<u32>().unwrap();
    (number(), number()) >= (6, 12)
}

#[test]
fn blocks_of_a_device_are_given_back_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = make_disk(folder.path(), DISK);
    file.write_all_at(&vec![0xff; 4 << 20], 0).unwrap();
    let device = common::loops::Loop::attach(&folder.path().join("disk"));
    let path = |name: &str| folder.path().join(name).display().to_string();
    let disk = format!(
        "socket={},path={}",
        path("socket"),
        device.device().display()
    );
    let daemon = Daemon::with(folder.path(), &["--disk", &disk]);
    let before = file.metadata().unwrap().blocks();
    let mut driver = Driver::connect(folder.path(), 1);
    let done = discards_of(device.device());
    driver.queues[0].discard(1 << 20, 1 << 20, 1).unwrap();
    assert_eq!(driver.complete(0), (1, 0));
    assert!(file.metadata().unwrap().blocks() < before);
    // Zeroing is not what was asked for: there are devices that have the one and not the other.
    assert!(discards_of(device.device()) > done || !kernel_discards());
    let mut kept = [0; 2];
    file.read_exact_at(&mut kept[..1], (1 << 20) - 1).unwrap();
    file.read_exact_at(&mut kept[1..], 2 << 20).unwrap();
    assert_eq!(kept, [0xff; 2]);
    drop(driver);
    drop(daemon);
}

#[test]
fn a_read_only_disk_refuses_writes() {
    on_both(|folder| {
        let file = make_disk(folder, DISK);
        file.write_all_at(b"kept", 0).unwrap();
        let _daemon = Daemon::start(folder, ",read-only=on");
        let mut driver = Driver::connect(folder, 1);
        assert_eq!(driver.read(0, 0, 512), 0);
        assert_eq!(&driver.memory.bytes(0, 4)[..], b"kept");
        assert_eq!(driver.write(0, 512, 512), -libc::EIO);
        driver.queues[0].discard(0, 4096, 3).unwrap();
        assert_eq!(driver.complete(0), (3, -libc::EIO));
        assert_eq!(driver.read(0, 0, 512), 0);
        assert_eq!(&driver.memory.bytes(0, 4)[..], b"kept");
    });
}

#[test]
fn queues_work_side_by_side_with_many_requests_each() {
    on_both(|folder| {
        let _file = make_disk(folder, DISK);
        let daemon = Daemon::start(folder, "");
        let mut driver = Driver::connect(folder, 4);
        for round in 0..4_u8 {
            for n in 0..32_usize {
                for queue in 0..4 {
                    let at = (n * 4 + queue) * 4096;
                    let bytes = driver.memory.bytes(at, 4096);
                    bytes.fill(round ^ u8::try_from(n * 4 + queue).unwrap());
                    driver.queues[queue]
                        .write(at as u64, bytes, n as u64)
                        .unwrap();
                }
            }
            for queue in 0..4 {
                let mut done: Vec<u64> = (0..32)
                    .map(|_| driver.complete(queue))
                    .map(|(context, result)| {
                        assert_eq!(result, 0);
                        context
                    })
                    .collect();
                done.sort_unstable();
                assert_eq!(done, (0..32).collect::<Vec<_>>());
            }
            assert_eq!(driver.read(0, 4 << 20, 128 * 4096), 0);
            for n in 0..128_u8 {
                let at = (4 << 20) + usize::from(n) * 4096;
                let page = driver.memory.bytes(at, 4096);
                assert!(page.iter().all(|&byte| byte == round ^ n), "{n}");
            }
        }
        assert_eq!(daemon.metric("writes"), 512);
    });
}

#[test]
fn one_vmm_after_the_other_is_served() {
    on_both(|folder| {
        let _file = make_disk(folder, DISK);
        let daemon = Daemon::start(folder, "");
        for n in 0..10_u8 {
            let mut driver = Driver::connect(folder, 2);
            driver.memory.bytes(0, 512).fill(n);
            assert_eq!(driver.write(u64::from(n) * 512, 0, 512), 0);
            // With something under way.
            for _ in 0..16 {
                let bytes = driver.memory.bytes(4096, 65536);
                driver.queues[1].read(0, bytes, 0).unwrap();
            }
            let notifier = driver.transport.get_submission_notifier(1);
            notifier.notify().unwrap();
        }
        let mut driver = Driver::connect(folder, 1);
        assert_eq!(driver.read(0, 0, 5120), 0);
        for n in 0..10_u8 {
            assert_eq!(driver.memory.bytes(usize::from(n) * 512, 1)[0], n);
        }
        assert_eq!(daemon.metric("connections"), 11);
        assert_eq!(daemon.metric("connected"), 1);
        drop(driver);
        wait_until(|| daemon.metric("connected") == 0);
    });
}
