//! Guests and VMMs that do what they must not.

#![allow(clippy::unwrap_used)]

mod common;

use common::stage::{WRITE_ZEROES, put_unmapped_range};
use common::vmm::{
    AVAILABLE, DATA, DESCRIPTORS, NEXT, RAM, STATUSES, Vm, WRITE, capacity, open_channel,
};
use common::{Daemon, make_disk};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use vhost::VhostBackend as _;
use vhost::vhost_user::VhostUserFrontend as _;

const DISK: u64 = 1 << 20;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

struct Stage {
    folder: tempfile::TempDir,
    daemon: Daemon,
}

impl Stage {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        make_disk(folder.path(), DISK);
        let daemon = Daemon::start(folder.path(), "");
        Self { folder, daemon }
    }

    fn socket(&self) -> std::path::PathBuf {
        self.folder.path().join("socket")
    }

    /// Whoever comes next finds a disk that works.
    fn still_serves(&mut self) {
        assert!(self.daemon.process.try_wait().unwrap().is_none());
        let mut vm = Vm::new();
        let frontend = vm.boot(&self.socket());
        assert_eq!(vm.does(0, 0, DATA, 4096), OK);
        drop(frontend);
    }
}

#[test]
fn requests_that_cannot_be_are_answered_with_errors_and_the_queue_goes_on() {
    let mut stage = Stage::new();
    let mut vm = Vm::new();
    let frontend = vm.boot(&stage.socket());
    for (kind, sector, data, length, status) in [
        (0, DISK / 512, DATA, 512, IOERR),
        (0, u64::MAX, DATA, 512, IOERR),
        (0, 0, DATA, 513, IOERR),
        (0, 0, RAM, 512, IOERR),
        (0, 0, RAM - 512, 1024, IOERR),
        (1, 0, u64::MAX - 511, 512, IOERR),
        (8, 0, DATA, 19, IOERR),
        (11, 0, DATA, 15, IOERR),
        (13, 0, DATA, 16 * 33, IOERR),
        (77, 0, DATA, 512, UNSUPP),
        (u32::MAX, 0, DATA, 512, UNSUPP),
        (0, 0, DATA, 512, OK),
    ] {
        assert_eq!(
            vm.does(kind, sector, data, length),
            status,
            "{kind} {sector}"
        );
    }
    // A range that must not be unmapped.
    vm.put(DATA, &[0; 12]);
    vm.put(DATA + 12, &[1, 0, 0, 0]);
    assert_eq!(vm.does(11, 0, DATA, 16), UNSUPP);
    // The serial number.
    assert_eq!(vm.does(8, 0, DATA, 20), OK);
    assert_eq!(vm.get::<2>(DATA), *b"FL");
    drop(frontend);
    stage.still_serves();
}

#[test]
fn a_queue_that_makes_no_sense_stops_and_its_vmm_is_told() {
    let mut stage = Stage::new();
    let loops = |vm: &mut Vm| {
        vm.describe(0, DATA, 16, NEXT, 0);
        vm.publish(&[0], true);
    };
    let no_status = |vm: &mut Vm| {
        vm.describe(0, DATA, 16, 0, 0);
        vm.publish(&[0], true);
    };
    let no_header = |vm: &mut Vm| {
        vm.describe(0, DATA, 15, NEXT, 1);
        vm.describe(1, STATUSES, 1, WRITE, 0);
        vm.publish(&[0], true);
    };
    let status_nowhere = |vm: &mut Vm| {
        vm.describe(0, DATA, 16, NEXT, 1);
        vm.describe(1, RAM, 1, WRITE, 0);
        vm.publish(&[0], true);
    };
    let no_descriptor = |vm: &mut Vm| vm.publish(&[4000], true);
    let too_many = |vm: &mut Vm| {
        vm.put(AVAILABLE + 2, &999_u16.to_le_bytes());
        vm.kick.write(1).unwrap();
    };
    let table_in_itself = |vm: &mut Vm| {
        vm.describe(0, DESCRIPTORS, 16, 4, 0);
        vm.publish(&[0], true);
    };
    let attacks: [&dyn Fn(&mut Vm); 7] = [
        &loops,
        &no_status,
        &no_header,
        &status_nowhere,
        &no_descriptor,
        &too_many,
        &table_in_itself,
    ];
    for attack in attacks {
        let mut vm = Vm::new();
        let mut frontend = vm.boot(&stage.socket());
        assert_eq!(vm.does(0, 0, DATA, 512), OK);
        attack(&mut vm);
        vm.wait_error();
        // It can be stopped all the same, and after a reset nothing is left of it.
        frontend.get_vring_base(0).unwrap();
        assert!(vm.used().is_empty());
        vm.clear_queue();
        vm.start(&mut frontend, 0);
        assert_eq!(vm.does(0, 0, DATA, 512), OK);
        assert!(vm.used().is_empty());
    }
    stage.still_serves();
}

#[test]
fn memory_that_goes_away_under_a_queue_does_no_harm() {
    let mut stage = Stage::new();
    let mut vm = Vm::new();
    let frontend = vm.boot(&stage.socket());
    let heads: Vec<u16> = (0..40).map(|n| n * 3).collect();
    for _ in 0..50 {
        for &head in &heads {
            vm.request(head, 0, 0, DATA, 65536);
        }
        vm.publish(&heads, true);
        // The same memory: what is in it stays.
        vm.share(&frontend);
        assert!(vm.wait_used(heads.len()).iter().all(|&(.., s)| s == OK));
    }
    for &head in &heads {
        vm.request(head, 0, 0, DATA, 65536);
    }
    vm.publish(&heads, true);
    // Other memory: the queue is no longer there.
    let other = Vm::new();
    other.ram.set_len(4096).unwrap();
    frontend
        .set_mem_table(&[vhost::VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: 4096,
            userspace_addr: 0,
            mmap_offset: 0,
            mmap_handle: std::os::fd::AsRawFd::as_raw_fd(&other.ram),
        }])
        .unwrap();
    vm.kick.write(1).unwrap();
    vm.wait_error();
    drop(frontend);
    // A VMM that shrinks the memory that it has shared.
    let mut vm = Vm::new();
    let frontend = vm.boot(&stage.socket());
    vm.request(0, 0, 0, DATA, 65536);
    vm.ram.set_len(0).unwrap();
    vm.kick.write(1).unwrap();
    frontend.get_vring_base(0).unwrap();
    drop(frontend);
    stage.still_serves();
}

#[test]
fn messages_that_make_no_sense_end_their_connection_only() {
    let mut stage = Stage::new();
    let vm = Vm::new();
    let frontend = vm.connect(&stage.socket());
    assert!(frontend.set_vring_num(0, 7).is_err());
    drop(frontend);
    let frontend = vm.connect(&stage.socket());
    assert!(frontend.set_vring_base(64, 0).is_err());
    drop(frontend);
    let frontend = vm.connect(&stage.socket());
    assert!(frontend.set_features(u64::MAX).is_err());
    drop(frontend);
    // A queue that lies nowhere.
    let mut frontend = vm.connect(&stage.socket());
    let started = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        vm.start(&mut frontend, 0);
    }));
    assert!(started.is_err());
    drop(frontend);
    for junk in [&[0xff; 64][..], &[0; 12], &[1], b"GET / HTTP/1.1\r\n\r\n"] {
        let mut stream = UnixStream::connect(stage.socket()).unwrap();
        stream.write_all(junk).unwrap();
    }
    stage.still_serves();
}

#[test]
fn a_vmm_is_told_when_the_disk_grows() {
    let stage = Stage::new();
    let vm = Vm::new();
    let mut frontend = vm.connect(&stage.socket());
    let mut channel = open_channel(&mut frontend);
    assert_eq!(capacity(&mut frontend), DISK / 512);
    let file = std::fs::File::options()
        .write(true)
        .open(stage.folder.path().join("disk"))
        .unwrap();
    file.set_len(2 * DISK).unwrap();
    channel.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut message = [0; 12];
    channel.read_exact(&mut message).unwrap();
    // CONFIG_CHANGE_MSG, version 1, nothing follows.
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(capacity(&mut frontend), 2 * DISK / 512);
}

#[test]
fn zeroes_beyond_the_end_of_a_disk_that_has_become_smaller_are_an_error() {
    // Once would do, but for the look at the size once a second, after which the request is refused
    // without being tried.
    for _ in 0..4 {
        let stage = Stage::new();
        let mut vm = Vm::new();
        let _frontend = vm.boot(&stage.socket());
        let disk = stage.folder.path().join("disk");
        let file = std::fs::File::options().write(true).open(disk).unwrap();
        put_unmapped_range(&vm, DATA, DISK / 512 - 16, 16);
        file.set_len(DISK - 4096).unwrap();
        // The kernel says nothing of the blocks that are not there.
        assert_eq!(vm.does(WRITE_ZEROES, 0, DATA, 16), IOERR);
    }
}

#[test]
fn the_write_cache_can_be_switched_and_nothing_else_of_the_configuration() {
    let stage = Stage::new();
    let mut vm = Vm::new();
    let mut frontend = vm.boot(&stage.socket());
    let flags = vhost::vhost_user::message::VhostUserConfigFlags::empty();
    for state in [0, 1, 0] {
        frontend.set_config(32, flags, &[state]).unwrap();
        let (_, config) = frontend.get_config(32, 1, flags, &[9]).unwrap();
        assert_eq!(config, [state]);
        assert_eq!(vm.does(1, 9, DATA, 512), OK);
    }
    assert!(frontend.set_config(0, flags, &[0]).is_err());
}
