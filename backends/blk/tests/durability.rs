//! What the driver was told is durable survives a power loss of the disk below, whose write cache
//! is volatile. Needs root and `/dev/fuse`; the tests with two ways to the disk need loop devices
//! too.

#![allow(clippy::unwrap_used)]

mod common;

use common::machine::FAR;
use common::stage::{
    DISCARD, FLUSH, IOERR, OK, READ, Stage, WRITE, WRITE_ZEROES, put_range, write_through,
};
use common::vmm::{CONFIG_WCE, DATA, FEATURE_FLUSH, Vm};
use common::wait_until;
use farlane_support::volatile_disk::{Checked, Device, Load, Operation, Request};

const REQUESTS: usize = 400;

/// The driver of a load, whose data is in these areas in turns.
struct Guest<'a> {
    vm: &'a mut Vm,
    areas: &'a [u64],
    submitted: usize,
}

impl Device for Guest<'_> {
    fn submit(&mut self, tag: usize, request: &Request) {
        let head = u16::try_from(tag * 3).unwrap();
        let area = self.areas[self.submitted % self.areas.len()];
        self.submitted += 1;
        let data = area + tag as u64 * 65536;
        match request {
            Request::Write { offset, bytes, .. } => {
                self.vm.put(data, bytes);
                let length = u32::try_from(bytes.len()).unwrap();
                self.vm.request(head, WRITE, offset / 512, data, length);
            }
            Request::Zero {
                offset,
                length,
                discard,
            } => {
                put_range(self.vm, data, offset / 512, length / 512);
                let kind = if *discard { DISCARD } else { WRITE_ZEROES };
                self.vm.request(head, kind, 0, data, 16);
            }
            Request::Flush => self.vm.request(head, FLUSH, 0, data, 512),
        }
        self.vm.publish(&[head], true);
    }

    fn await_completions(&mut self) -> Vec<usize> {
        let used = self.vm.wait_used(1);
        assert!(used.iter().all(|u| u.2 == OK), "{used:?}");
        used.iter().map(|u| usize::from(u.0) / 3).collect()
    }
}

/// Puts a random load on the disk and replays the power loss at every point of it.
fn replay(stage: &Stage, vm: &mut Vm, areas: &[u64], write_cache: bool) -> Checked {
    let load = Load {
        seed: 11,
        requests: REQUESTS,
        write_cache,
        forced_writes: false,
    };
    let mut guest = Guest {
        vm,
        areas,
        submitted: 0,
    };
    let checked = load.run(&stage.disk, &mut guest).unwrap();
    assert!(
        checked.images > REQUESTS && checked.sectors > REQUESTS * 10,
        "{checked:?}"
    );
    checked
}

#[test]
fn what_was_flushed_survives_a_power_loss_at_any_time() {
    let stage = Stage::plain();
    let mut vm = Vm::new();
    let _frontend = stage.boot(&mut vm);
    replay(&stage, &mut vm, &[DATA], true);
    assert!(stage.disk.log().flushes() > 10);
    assert_eq!(stage.daemon().metric("errors"), 0);
}

#[test]
fn without_a_write_cache_what_is_complete_survives_a_power_loss() {
    let stage = Stage::plain();
    let mut vm = Vm::new();
    let mut frontend = stage.boot(&mut vm);
    // With one, it does not: this is what the switch is for.
    vm.put(DATA, &[3; 512]);
    assert_eq!(vm.does(WRITE, 0, DATA, 512), OK);
    assert_eq!(stage.left(512), [0; 512]);
    write_through(&mut frontend);
    assert_eq!(vm.does(WRITE, 0, DATA, 512), OK);
    assert_eq!(stage.left(512), [3; 512]);
    replay(&stage, &mut vm, &[DATA], false);
    // Unaligned memory is copied; zeroes are written where the file system cannot zero.
    vm.put(DATA + 3, &[4; 1024]);
    assert_eq!(vm.does(WRITE, 1, DATA + 3, 1024), OK);
    assert_eq!(stage.left(1536)[512..], [4; 1024]);
    stage.disk.fail(Operation::Allocate, libc::EOPNOTSUPP);
    put_range(&vm, DATA, 1, 1);
    assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), OK);
    assert_eq!(stage.left(1536)[512..1024], [0; 512]);
}

#[test]
fn a_driver_that_cannot_flush_has_no_write_cache() {
    // virtio 1.3, 5.2.6.2: without VIRTIO_BLK_F_FLUSH a write is durable when it is complete.
    let stage = Stage::plain();
    let mut vm = Vm::new();
    vm.features &= !(CONFIG_WCE | FEATURE_FLUSH);
    let _frontend = stage.boot(&mut vm);
    replay(&stage, &mut vm, &[DATA], false);
}

#[test]
fn a_flush_reaches_what_other_workers_have_written() {
    let stage = Stage::two_names();
    let mut vm = Vm::new();
    let _frontend = stage.boot(&mut vm);
    replay(&stage, &mut vm, &[DATA, FAR, FAR - (1 << 20) - 2048], true);
    assert!(stage.daemon().metric("handed") > 0 && stage.daemon().metric("split") > 0);
}

#[test]
fn a_flush_reaches_what_was_written_over_every_path() {
    let stage = Stage::two_controllers();
    let mut vm = Vm::new();
    let mut frontend = stage.boot(&mut vm);
    for (sector, at) in [(0, DATA), (1, FAR)] {
        vm.put(at, &[7; 512]);
        assert_eq!(vm.does(WRITE, sector, at, 512), OK);
    }
    assert_eq!(stage.left(1024), [0; 1024]);
    assert_eq!(vm.does(FLUSH, 0, DATA, 512), OK);
    assert_eq!(stage.left(1024), [7; 1024]);
    replay(&stage, &mut vm, &[DATA, FAR, FAR - (1 << 20) - 2048], true);
    write_through(&mut frontend);
    replay(&stage, &mut vm, &[DATA, FAR, FAR - (1 << 20) - 2048], false);
    assert_eq!(stage.daemon().metric("errors"), 0);
}

#[test]
fn a_flush_is_complete_when_the_disk_has_done_it() {
    let stage = Stage::plain();
    let mut vm = Vm::new();
    let _frontend = stage.boot(&mut vm);
    stage.hold_flush(&mut vm);
    // The queue goes on meanwhile.
    for _ in 0..20 {
        vm.request(3, READ, 8, DATA + 4096, 512);
        vm.publish(&[3], true);
        let used = vm.wait_used(1);
        assert_eq!((used.len(), used[0].0, used[0].2), (1, 3, OK));
    }
    assert_eq!(stage.left(512), [0; 512]);
    stage.disk.release_flushes();
    assert_eq!(vm.wait_used(1), [(0, 1, OK)]);
    assert_eq!(stage.left(512), [5; 512]);
}

#[test]
fn a_flush_that_fails_is_an_error_for_the_driver() {
    let mut stage = Stage::plain();
    let mut vm = Vm::new();
    let mut frontend = stage.boot(&mut vm);
    vm.put(DATA, &[6; 512]);
    assert_eq!(vm.does(WRITE, 0, DATA, 512), OK);
    for errno in [libc::EIO, libc::ENOSPC] {
        stage.disk.fail(Operation::Flush, errno);
        assert_eq!(vm.does(FLUSH, 0, DATA, 512), IOERR);
        assert_eq!(stage.left(512), [0; 512]);
    }
    // So are zeroes that are to be durable, and are not.
    write_through(&mut frontend);
    put_range(&vm, DATA, 0, 1);
    assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), IOERR);
    assert_eq!(vm.does(DISCARD, 0, DATA, 16), IOERR);
    // Nobody knows what has become of the write: that another flush succeeds does not bring it
    // back.
    stage.disk.heal();
    assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), IOERR);
    assert_eq!(vm.does(FLUSH, 0, DATA, 512), IOERR);
    assert_eq!(stage.daemon().metric("errors"), 6);
    // What needs no flush goes on.
    vm.put(DATA, &[7; 512]);
    assert_eq!(vm.does(WRITE, 8, DATA, 512), OK);
    drop(frontend);
    // Nor does another VMM.
    let frontend = stage.boot(&mut vm);
    assert_eq!(vm.does(FLUSH, 0, DATA, 512), IOERR);
    drop(frontend);
    stage.open_again();
    let _frontend = stage.boot(&mut vm);
    assert_eq!(vm.does(WRITE, 0, DATA, 512), OK);
    assert_eq!(vm.does(FLUSH, 0, DATA, 512), OK);
    assert_eq!(stage.left(512), [7; 512]);
}

#[test]
fn a_flush_that_fails_on_the_path_that_was_written_is_an_error_for_the_driver() {
    let mut stage = Stage::two_controllers();
    let mut vm = Vm::new();
    let frontend = stage.boot(&mut vm);
    vm.put(FAR, &[6; 512]);
    assert_eq!(vm.does(WRITE, 0, FAR, 512), OK);
    stage.disk.fail(Operation::Flush, libc::EIO);
    assert_eq!(vm.does(FLUSH, 0, DATA, 512), IOERR);
    assert_eq!(stage.left(512), [0; 512]);
    stage.disk.heal();
    let paths = |stage: &Stage| {
        let text = stage.daemon().metrics();
        let up = text
            .lines()
            .filter(|l| l.starts_with("farlane_blk_path_up{"));
        up.filter(|l| l.ends_with(" 1")).count()
    };
    wait_until(|| paths(&stage) == 2);
    assert_eq!(vm.does(FLUSH, 0, DATA, 512), IOERR);
    drop(frontend);
    // What was not flushed is not forgotten.
    stage.open_again();
    let _frontend = stage.boot(&mut vm);
    assert_eq!(vm.does(FLUSH, 0, DATA, 512), OK);
    assert_eq!(stage.left(512), [6; 512]);
}
