//! What the driver was told is durable survives a power loss of the disk below, whose write cache is volatile. Needs root and
//! `/dev/fuse`; the tests with two ways to the disk need loop devices too.

#![allow(clippy::unwrap_used)]

mod common;

use common::loops::Loop;
use common::machine::{FAR, start, start_over};
use common::vmm::{CONFIG_WCE, DATA, FEATURE_FLUSH, Vm};
use common::{Daemon, wait_until};
use farlane_volatile_disk::{
    Caches, Checked, Device, LOAD_BYTES, Load, Operation, PowerLoss, Request, VolatileDisk,
};
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;
const REQUESTS: usize = 400;

/// A disk with a volatile write cache as `disk` of a folder.
struct Stage {
    /// Before the disk: a daemon that ended later would keep it open.
    daemon: Option<Daemon>,
    loops: Vec<Loop>,
    folder: tempfile::TempDir,
    disk: VolatileDisk,
}

impl Stage {
    fn bare(caches: Caches) -> Self {
        let disk = VolatileDisk::new(LOAD_BYTES, caches).unwrap();
        let folder = tempfile::tempdir().unwrap();
        disk.link(&folder.path().join("disk")).unwrap();
        Self {
            daemon: None,
            loops: Vec::new(),
            folder,
            disk,
        }
    }

    /// One path, which is the file.
    fn plain() -> Self {
        let mut stage = Self::bare(Caches::Shared);
        stage.daemon = Some(Daemon::start(stage.folder.path(), ""));
        stage
    }

    /// Two paths that are the same file, one a node.
    fn two_names() -> Self {
        let mut stage = Self::bare(Caches::Shared);
        stage.daemon = Some(start(stage.folder.path(), &["--split", "512"]));
        stage
    }

    /// Two paths, one a node, each of which has a write cache of its own.
    fn two_controllers() -> Self {
        let mut stage = Self::bare(Caches::PerHandle);
        stage.loops = vec![
            Loop::attach(&stage.disk.path()),
            Loop::attach(&stage.disk.path()),
        ];
        let paths = [0, 1].map(|n: usize| stage.loops[n].device().to_owned());
        stage.daemon = Some(start_over(stage.folder.path(), &paths, &["--split", "512"]));
        stage
    }

    /// Ends the daemon, and starts it again over the same paths.
    fn open_again(&mut self) {
        self.daemon = None;
        let folder = self.folder.path();
        self.daemon = Some(match &self.loops[..] {
            [one, other] => {
                let paths = [one, other].map(|device| device.device().to_owned());
                start_over(folder, &paths, &["--split", "512"])
            }
            _ => Daemon::start(folder, ""),
        });
    }

    fn boot(&self, vm: &mut Vm) -> Frontend {
        vm.boot(&self.folder.path().join("socket"))
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }

    /// What a power loss now would leave of so many bytes at the beginning.
    fn left(&self, bytes: usize) -> Vec<u8> {
        self.disk.power_loss(PowerLoss::LosesAll)[..bytes].to_vec()
    }
}

/// Has the disk do without a write cache, as a driver does that negotiated `VIRTIO_BLK_F_CONFIG_WCE` (virtio 1.3, 5.2.6.2).
fn write_through(frontend: &mut Frontend) {
    let flags = VhostUserConfigFlags::empty();
    frontend.set_config(32, flags, &[0]).unwrap();
    let (_, config) = frontend.get_config(32, 1, flags, &[0]).unwrap();
    assert_eq!(config, [0]);
}

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

/// The data of a discard or write-zeroes request (virtio 1.3, 5.2.6: `struct virtio_blk_discard_write_zeroes`).
fn put_range(vm: &Vm, at: u64, sector: u64, sectors: u64) {
    let mut range = [0; 16];
    range[..8].copy_from_slice(&sector.to_le_bytes());
    range[8..12].copy_from_slice(&u32::try_from(sectors).unwrap().to_le_bytes());
    vm.put(at, &range);
}

/// The same, of a write-zeroes request whose blocks may be given back.
fn put_unmapped_range(vm: &Vm, at: u64, sector: u64, sectors: u64) {
    put_range(vm, at, sector, sectors);
    vm.put(at + 12, &[1]);
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
fn a_flush_reaches_what_other_limbs_have_written() {
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
    vm.put(DATA, &[5; 512]);
    assert_eq!(vm.does(WRITE, 0, DATA, 512), OK);
    stage.disk.hold_flushes();
    vm.request(0, FLUSH, 0, DATA, 512);
    vm.publish(&[0], true);
    stage.disk.await_held_flush().unwrap();
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
    // Nobody knows what has become of the write: that another flush succeeds does not bring it back.
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

#[test]
fn errors_of_the_disk_are_those_of_their_requests_and_no_others() {
    for stage in [Stage::plain(), Stage::two_names()] {
        let mut vm = Vm::new();
        let _frontend = stage.boot(&mut vm);
        for at in [DATA, FAR] {
            for (operation, errno, kind) in [
                (Operation::Write, libc::ENOSPC, WRITE),
                (Operation::Write, libc::EIO, WRITE),
                (Operation::Read, libc::EIO, READ),
            ] {
                stage.disk.fail(operation, errno);
                assert_eq!(vm.does(kind, 8, at, 4096), IOERR);
                let other = WRITE - kind;
                assert_eq!(vm.does(other, 8, at, 4096), OK);
                stage.disk.heal();
                assert_eq!(vm.does(kind, 8, at, 4096), OK);
            }
            put_range(&vm, at, 8, 8);
            stage.disk.fail(Operation::Allocate, libc::ENOSPC);
            assert_eq!(vm.does(WRITE_ZEROES, 0, at, 16), IOERR);
            stage.disk.heal();
            assert_eq!(vm.does(WRITE_ZEROES, 0, at, 16), OK);
        }
        assert_eq!(stage.daemon().metric("errors"), 8);
    }
}

#[test]
fn a_range_that_cannot_be_given_back_is_zeroed_in_place_and_so_are_those_after_it() {
    for stage in [Stage::plain(), Stage::two_names()] {
        let mut vm = Vm::new();
        let _frontend = stage.boot(&mut vm);
        vm.put(DATA, &[8; 16384]);
        assert_eq!(vm.does(WRITE, 0, DATA, 16384), OK);
        let written = stage.disk.requests(Operation::Write);
        stage.disk.fail(Operation::PunchHole, libc::EOPNOTSUPP);
        put_unmapped_range(&vm, DATA, 0, 8);
        assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), OK);
        put_range(&vm, DATA, 8, 8);
        assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), OK);
        stage.disk.heal();
        put_unmapped_range(&vm, DATA, 16, 8);
        assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), OK);
        assert_eq!(stage.disk.requests(Operation::Write), written);
        assert!(stage.disk.content()[..12288] == [0; 12288]);
        assert!(stage.disk.content()[12288..16384] == [8; 4096]);
        // Where nothing can be zeroed in place, zeroes are written.
        stage.disk.fail(Operation::Allocate, libc::EOPNOTSUPP);
        put_unmapped_range(&vm, DATA, 24, 8);
        assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), OK);
        assert!(stage.disk.requests(Operation::Write) > written);
        assert!(stage.disk.content()[..16384] == [0; 16384]);
    }
}

#[test]
fn a_discard_that_nothing_can_do_is_said_to_be_unsupported() {
    let mut over_device = Stage::bare(Caches::Shared);
    over_device.loops = vec![Loop::attach(&over_device.disk.path())];
    let device = over_device.loops[0].device().display().to_string();
    let path = |name: &str| over_device.folder.path().join(name).display().to_string();
    let words = ["--socket-path", &path("socket"), "--path", &device];
    over_device.daemon = Some(Daemon::with(over_device.folder.path(), &words));
    for stage in [Stage::plain(), Stage::two_names(), over_device] {
        let mut vm = Vm::new();
        let _frontend = stage.boot(&mut vm);
        vm.put(DATA, &[8; 8192]);
        assert_eq!(vm.does(WRITE, 0, DATA, 8192), OK);
        put_range(&vm, DATA, 0, 8);
        assert_eq!(vm.does(DISCARD, 0, DATA, 16), OK);
        assert_eq!(stage.daemon().metric("discards"), 1);
        stage.disk.fail(Operation::Allocate, libc::EOPNOTSUPP);
        put_range(&vm, DATA, 8, 8);
        assert_eq!(vm.does(DISCARD, 0, DATA, 16), UNSUPP);
        assert_eq!(stage.daemon().metric("discards"), 1);
        assert_eq!(stage.daemon().metric("errors"), 1);
        let content = stage.disk.content();
        assert!(content[..4096] == [0; 4096] && content[4096..8192] == [8; 4096]);
    }
}

/// Sends the daemon SIGTERM, and waits until it has begun to end.
fn terminate(stage: &Stage) {
    let pid = rustix::process::Pid::from_raw(stage.daemon().pid()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let socket = stage.folder.path().join("socket");
    wait_until(|| !socket.exists());
}

#[test]
fn a_backend_that_is_to_end_answers_what_it_has_taken() {
    let mut stage = Stage::plain();
    let mut vm = Vm::new();
    let _frontend = stage.boot(&mut vm);
    vm.put(DATA, &[5; 512]);
    assert_eq!(vm.does(WRITE, 0, DATA, 512), OK);
    stage.disk.hold_flushes();
    vm.request(0, FLUSH, 0, DATA, 512);
    vm.publish(&[0], true);
    stage.disk.await_held_flush().unwrap();
    terminate(&stage);
    stage.disk.release_flushes();
    let ended = stage.daemon.as_mut().unwrap().child().wait().unwrap();
    assert_eq!(ended.code(), Some(0));
    assert_eq!(vm.used(), [(0, 1, OK)]);
    assert_eq!(stage.left(512), [5; 512]);
}

#[test]
fn a_backend_that_is_told_twice_leaves_what_it_has_taken_to_the_next() {
    let mut stage = Stage::plain();
    let mut vm = Vm::new();
    let _frontend = stage.boot(&mut vm);
    vm.put(DATA, &[5; 512]);
    assert_eq!(vm.does(WRITE, 0, DATA, 512), OK);
    stage.disk.hold_flushes();
    vm.request(0, FLUSH, 0, DATA, 512);
    vm.publish(&[0], true);
    stage.disk.await_held_flush().unwrap();
    terminate(&stage);
    terminate(&stage);
    // The process is gone but for what the kernel waits for.
    let status = format!("/proc/{}/status", stage.daemon().pid());
    wait_until(|| {
        std::fs::read_to_string(&status)
            .unwrap()
            .contains("State:\tZ")
    });
    stage.disk.release_flushes();
    let ended = stage.daemon.as_mut().unwrap().child().wait().unwrap();
    assert_eq!(ended.code(), Some(0));
    assert_eq!(vm.used(), []);
    stage.open_again();
    let _frontend = stage.boot(&mut vm);
    assert_eq!(vm.wait_used(1), [(0, 1, OK)]);
    assert_eq!(stage.left(512), [5; 512]);
}

#[test]
fn writes_that_fall_short_go_on_where_they_ended() {
    for stage in [Stage::plain(), Stage::two_names()] {
        let mut vm = Vm::new();
        let mut frontend = stage.boot(&mut vm);
        let data: Vec<u8> = (0..16384_usize)
            .map(|n| (n * 7 + n / 256).to_le_bytes()[0])
            .collect();
        for (round, short) in [512, 1000, 4095].into_iter().enumerate() {
            for (n, at) in [DATA, FAR, FAR + 5].into_iter().enumerate() {
                let sector = (round * 3 + n) as u64;
                vm.put(at, &data);
                let before = stage.disk.requests(Operation::Write);
                stage.disk.shorten_writes(short);
                assert_eq!(vm.does(WRITE, sector, at, 16384), OK);
                assert!(stage.disk.requests(Operation::Write) > before + 4);
                vm.put(at, &[0; 16384]);
                assert_eq!(vm.does(READ, sector, at, 16384), OK);
                assert!(vm.get::<16384>(at)[..] == data);
                stage.disk.heal();
                let start = usize::try_from(sector).unwrap() * 512;
                assert!(stage.disk.content()[start..start + 16384] == data);
            }
        }
        // Durable to the last byte, where that is asked for.
        write_through(&mut frontend);
        stage.disk.shorten_writes(1000);
        vm.put(FAR, &data);
        assert_eq!(vm.does(WRITE, 32, FAR, 16384), OK);
        assert!(stage.left(32768)[16384..] == data);
        assert_eq!(stage.daemon().metric("errors"), 0);
    }
}
