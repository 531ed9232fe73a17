//! Writes and flushes that fail: which of them say so, and which that follow. Needs root,
//! `/dev/fuse` and loop devices.

#![allow(clippy::unwrap_used)]

mod common;

use common::loops::Loop;
use common::machine::{FAR, start_over};
use common::stage::{FLUSH, IOERR, OK, READ, Stage, WRITE, write_through};
use common::vmm::{DATA, Vm};
use common::{Daemon, Driver};
use farlane_support::volatile_disk::{Caches, Operation};
use virtio_driver::VirtioTransport as _;

/// Flushes at once.
const FLUSHES: u16 = 16;

/// The file of the disk, through the page cache as far as farlane-blk knows.
fn cached() -> Stage {
    let mut stage = Stage::bare(Caches::Shared);
    stage.daemon = Some(Daemon::start(stage.folder.path(), ",cache=buffered"));
    stage
}

/// The same, with two names.
fn cached_with_two_names() -> Stage {
    let mut stage = Stage::bare(Caches::Shared);
    let folder = stage.folder.path();
    let [disk, link, socket] = ["disk", "link", "socket"].map(|name| folder.join(name));
    stage.disk.link(&link).unwrap();
    let socket = socket.display();
    let config = format!("socket={socket},cache=buffered,serial=two");
    let [one, other] = [disk, link].map(|path| format!("dev={},disk=two", path.display()));
    let words = ["--disk", &config, "--path", &one, "--path", &other];
    stage.daemon = Some(Daemon::with(folder, &words));
    stage
}

/// A block device over it, through the page cache.
fn cached_device() -> Stage {
    let mut stage = Stage::bare(Caches::Shared);
    stage.loops = vec![Loop::attach(&stage.disk.path())];
    let folder = stage.folder.path();
    let socket = folder.join("socket").display().to_string();
    let device = stage.loops[0].device().display().to_string();
    let disk = format!("socket={socket},path={device},cache=buffered");
    stage.daemon = Some(Daemon::with(folder, &["--disk", &disk]));
    stage
}

/// A block device over it with two names, one a node, around the page cache.
fn device_with_two_names() -> Stage {
    let mut stage = Stage::bare(Caches::Shared);
    stage.loops = vec![Loop::attach(&stage.disk.path())];
    let folder = stage.folder.path();
    let (device, link) = (stage.loops[0].device().to_owned(), folder.join("link"));
    std::os::unix::fs::symlink(&device, &link).unwrap();
    stage.daemon = Some(start_over(folder, &[device, link], &["--split", "512"]));
    stage
}

#[test]
fn what_could_not_be_written_back_fails_all_flushes_that_cover_it_and_all_later_ones() {
    let stage = cached_device();
    let mut vm = Vm::new();
    let _frontend = stage.boot(&mut vm);
    vm.put(DATA, &[3; 4096]);
    // Before the write, which stays in the page cache: the kernel may write it back at any time.
    stage.disk.fail(Operation::Write, libc::EIO);
    assert_eq!(vm.does(WRITE, 8, DATA, 4096), OK);
    let heads: Vec<u16> = (0..FLUSHES).map(|n| n * 3).collect();
    for head in &heads {
        vm.request(*head, FLUSH, 0, DATA, 512);
    }
    vm.publish(&heads, true);
    let used = vm.wait_used(heads.len());
    assert!(used.iter().all(|used| used.2 == IOERR), "{used:?}");
    stage.disk.heal();
    assert_eq!(vm.does(FLUSH, 0, DATA, 512), IOERR);
}

#[test]
fn a_durable_write_that_cannot_be_written_back_fails_all_later_flushes() {
    let stage = cached_device();
    let mut vm = Vm::new();
    let mut frontend = stage.boot(&mut vm);
    write_through(&mut frontend);
    vm.put(DATA, &[4; 4096]);
    assert_eq!(vm.does(WRITE, 0, DATA, 4096), OK);
    assert_eq!(stage.left(4096), [4; 4096]);
    stage.disk.fail(Operation::Write, libc::EIO);
    assert_eq!(vm.does(WRITE, 8, DATA, 4096), IOERR);
    stage.disk.heal();
    assert_eq!(vm.does(FLUSH, 0, DATA, 512), IOERR);
    assert_eq!(vm.does(READ, 0, DATA, 4096), OK);
}

#[test]
fn of_a_durable_write_through_the_page_cache_the_flush_is_the_disks_and_the_write_its_own() {
    let eio = libc::EIO;
    let one = [eio, libc::EREMOTEIO, libc::ENOSPC].map(|errno| (cached as fn() -> Stage, errno));
    for (stage, errno) in one.into_iter().chain([(cached_with_two_names as _, eio)]) {
        let stage = stage();
        let mut vm = Vm::new();
        let mut frontend = stage.boot(&mut vm);
        write_through(&mut frontend);
        stage.disk.fail(Operation::Write, errno);
        assert_eq!(vm.does(WRITE, 0, DATA, 4096), IOERR);
        stage.disk.heal();
        assert_eq!(vm.does(FLUSH, 0, DATA, 512), OK);
        vm.put(DATA, &[5; 4096]);
        assert_eq!(vm.does(WRITE, 0, DATA, 4096), OK);
        assert_eq!(stage.left(4096), [5; 4096]);
        stage.disk.fail(Operation::Flush, errno);
        assert_eq!(vm.does(WRITE, 8, DATA, 4096), IOERR);
        stage.disk.heal();
        assert_eq!(vm.does(FLUSH, 0, DATA, 512), IOERR);
    }
}

#[test]
fn a_flush_through_the_page_cache_that_fails_is_not_done_again() {
    for errno in [libc::EIO, libc::EAGAIN, libc::EINTR] {
        let stage = cached();
        let mut vm = Vm::new();
        let _frontend = stage.boot(&mut vm);
        assert_eq!(vm.does(WRITE, 0, DATA, 4096), OK);
        let before = stage.disk.requests(Operation::Flush);
        stage.disk.fail(Operation::Flush, errno);
        assert_eq!(vm.does(FLUSH, 0, DATA, 512), IOERR, "{errno}");
        assert_eq!(stage.disk.requests(Operation::Flush), before + 1);
        stage.disk.heal();
        assert_eq!(vm.does(FLUSH, 0, DATA, 512), IOERR, "{errno}");
    }
}

#[test]
fn a_disk_that_is_only_read_has_nothing_to_flush() {
    let mut stage = Stage::bare(Caches::Shared);
    stage.daemon = Some(Daemon::start(stage.folder.path(), ",read-only=on"));
    let mut vm = Vm::new();
    let _frontend = stage.boot(&mut vm);
    // As a file system that has no fsync.
    stage.disk.fail(Operation::Flush, libc::EINVAL);
    assert_eq!(vm.does(FLUSH, 0, DATA, 512), OK);
    assert_eq!(stage.disk.requests(Operation::Flush), 0);
    assert_eq!(vm.does(READ, 0, DATA, 4096), OK);
}

#[test]
fn an_error_of_a_durable_write_that_may_be_a_flushs_fails_all_later_flushes() {
    // Of another worker's transfers, too.
    for at in [DATA, FAR] {
        let stage = device_with_two_names();
        let mut vm = Vm::new();
        let mut frontend = stage.boot(&mut vm);
        write_through(&mut frontend);
        stage.disk.fail(Operation::Write, libc::EIO);
        assert_eq!(vm.does(WRITE, 8, at, 4096), IOERR);
        stage.disk.heal();
        assert_eq!(vm.does(FLUSH, 0, DATA, 512), IOERR, "{at:#x}");
    }
}

#[test]
fn flushes_of_several_queues_at_once_all_end() {
    const QUEUES: usize = 4;
    const AT_ONCE: u64 = 8;
    let stage = cached();
    let mut driver = Driver::connect(stage.folder.path(), QUEUES);
    for _ in 0..4 {
        for n in 0..AT_ONCE {
            for queue in &mut driver.queues {
                queue.flush(n).unwrap();
            }
        }
        // All queues are told before one is waited for.
        for queue in 0..QUEUES {
            let notifier = driver.transport.get_submission_notifier(queue);
            notifier.notify().unwrap();
        }
        for queue in 0..QUEUES {
            let done = (0..AT_ONCE).map(|_| driver.complete(queue));
            assert!(done.into_iter().all(|(_, result)| result == 0));
        }
    }
    assert_eq!(stage.daemon().metric("errors"), 0);
}
