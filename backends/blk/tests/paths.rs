//! A disk with several paths, on a machine that is described with two nodes.

#![allow(clippy::unwrap_used)]

mod common;

use common::machine::{BORDER, FAR, start};
use common::vmm::{DATA, NEXT, STATUSES, Vm, WRITE};
use common::{Daemon, Driver, PROGRAM, make_disk};
use std::fs::write;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

const DISK: u64 = 16 << 20;

/// Bytes that were moved: of node `data`, by the worker of node `worker`, over `path`.
fn bytes(daemon: &Daemon, data: &str, worker: &str, path: &str) -> u64 {
    let labels = [("data", data), ("worker", worker), ("path", path)];
    daemon.labelled("locality_bytes", &labels)
}

fn pattern(seed: u64, length: u32) -> Vec<u8> {
    let byte = |n: u64| u8::try_from((n * 7 + seed) % 251).unwrap();
    (0..u64::from(length)).map(byte).collect()
}

fn on_both(test: impl Fn(&Path)) {
    for place in [std::env::temp_dir(), "/dev/shm".into()] {
        let folder = tempfile::tempdir_in(place).unwrap();
        test(folder.path());
    }
}

#[test]
fn every_request_is_done_where_its_data_is() {
    on_both(|folder| {
        let file = make_disk(folder, DISK);
        let daemon = start(folder, &[]);
        let mut vm = Vm::new();
        let mut frontend = vm.boot(&folder.join("socket"));
        for (seed, at) in [(1, DATA), (2, FAR)] {
            let data = pattern(seed, 65536);
            vm.put(at, &data);
            assert_eq!(vm.does(1, seed * 128, at, 65536), 0);
            assert_eq!(vm.does(4, 0, DATA, 512), 0);
            let mut found = vec![0; 65536];
            file.read_exact_at(&mut found, seed * 65536).unwrap();
            assert!(found == data);
            assert_eq!(vm.does(0, seed * 128, at + (1 << 20), 65536), 0);
            assert!(vm.get::<65536>(at + (1 << 20))[..] == data);
        }
        assert_eq!(bytes(&daemon, "0", "0", "disk"), 131_072);
        assert_eq!(bytes(&daemon, "1", "1", "link"), 131_072);
        assert_eq!(daemon.metric("handed"), 2);
        let text = daemon.metrics();
        let lines = text
            .lines()
            .filter(|l| l.starts_with("farlane_blk_locality_bytes"));
        let sum: u64 = lines
            .map(|l| l.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap())
            .sum();
        assert_eq!(sum, 262_144);
        // Beyond the end it is an error at any worker, and memory that is not aligned is copied
        // there.
        assert_eq!(vm.does(0, DISK / 512, FAR, 512), 1);
        assert_eq!(vm.does(0, 128, FAR + 3, 65536), 0);
        assert!(vm.get::<65536>(FAR + 3)[..] == pattern(1, 65536));
        assert_eq!(vm.does(1, 512, FAR + 3, 65536), 0);
        let mut found = vec![0; 65536];
        file.read_exact_at(&mut found, 512 * 512).unwrap();
        assert!(found == pattern(1, 65536));
        let _ = common::vmm::capacity(&mut frontend);
    });
}

#[test]
fn a_request_whose_data_is_on_two_nodes_is_split_and_completed_once() {
    on_both(|folder| {
        let file = make_disk(folder, DISK);
        let daemon = start(folder, &["--split", "4K"]);
        let mut vm = Vm::new();
        let _frontend = vm.boot(&folder.join("socket"));
        let data = pattern(5, 262_144);
        let at = BORDER - 65536;
        vm.put(at, &data);
        assert_eq!(vm.does(1, 8, at, 262_144), 0);
        let mut found = vec![0; 262_144];
        file.read_exact_at(&mut found, 4096).unwrap();
        assert!(found == data);
        vm.put(at, &vec![0; 262_144]);
        vm.request(0, 0, 8, at, 262_144);
        vm.publish(&[0], true);
        assert_eq!(vm.wait_used(1), [(0, 262_145, 0)]);
        assert!(vm.get::<262_144>(at)[..] == data);
        assert_eq!(daemon.metric("split"), 2);
        assert_eq!(daemon.metric("reads") + daemon.metric("writes"), 2);
        assert_eq!(bytes(&daemon, "0", "0", "disk"), 131_072);
        assert_eq!(bytes(&daemon, "1", "1", "link"), 393_216);
        // The border in the middle of a block, and segments of both nodes in turns.
        vm.put(BORDER - 512, &data[..8192]);
        assert_eq!(vm.does(1, 8, BORDER - 512, 8192), 0);
        let mut found = vec![0; 8192];
        file.read_exact_at(&mut found, 4096).unwrap();
        assert!(found == data[..8192]);
        let ats: Vec<u64> = (0..8)
            .map(|n| (n % 2) * FAR + (4 << 20) + n * 8192)
            .collect();
        vm.request(0, 1, 64, ats[0], 8192);
        for (n, at) in ats.iter().enumerate() {
            vm.put(*at, &data[n * 8192..(n + 1) * 8192]);
            let index = u16::try_from(n + 1).unwrap();
            vm.describe(index, *at, 8192, NEXT, index + 1);
        }
        vm.describe(9, STATUSES, 1, WRITE, 0);
        vm.publish(&[0], true);
        assert_eq!(vm.wait_used(1), [(0, 1, 0)]);
        let mut found = vec![0; 65536];
        file.read_exact_at(&mut found, 32768).unwrap();
        assert!(found == data[..65536]);
        // One end of the request is not on the disk.
        assert_eq!(vm.does(0, DISK / 512 - 128, at, 262_144), 1);
        assert!(vm.used().is_empty());
    });
}

#[test]
fn below_the_stated_size_a_request_goes_where_most_of_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let _file = make_disk(folder.path(), DISK);
    let daemon = start(folder.path(), &["--split", "64K"]);
    let mut vm = Vm::new();
    let _frontend = vm.boot(&folder.path().join("socket"));
    assert_eq!(vm.does(0, 0, BORDER - 4096, 65536), 0);
    assert_eq!(daemon.metric("split"), 0);
    assert_eq!(bytes(&daemon, "1", "1", "link"), 61440);
    assert_eq!(bytes(&daemon, "0", "1", "link"), 4096);
}

#[test]
fn a_worker_follows_its_data_to_another_node_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let _file = make_disk(folder.path(), DISK);
    let daemon = start(folder.path(), &[]);
    let mut vm = Vm::new();
    let _frontend = vm.boot(&folder.path().join("socket"));
    let mut read = |at: u64, count: u64| {
        for n in 0..count {
            assert_eq!(vm.does(0, n * 8, at, 4096), 0);
        }
    };
    read(FAR, 1024);
    assert_eq!(daemon.metric("rehomed"), 1);
    assert_eq!(daemon.metric("handed"), 256);
    read(DATA, 1024);
    assert_eq!(daemon.metric("rehomed"), 2);
    assert_eq!(daemon.metric("handed"), 512);
    // Wherever it was, each was moved where its data is.
    assert_eq!(bytes(&daemon, "0", "0", "disk"), 1024 * 4096);
    assert_eq!(bytes(&daemon, "1", "1", "link"), 1024 * 4096);
}

#[test]
fn without_steering_the_queues_worker_does_everything() {
    let folder = tempfile::tempdir().unwrap();
    let _file = make_disk(folder.path(), DISK);
    let daemon = start(folder.path(), &["--steer", "off"]);
    let mut vm = Vm::new();
    let _frontend = vm.boot(&folder.path().join("socket"));
    for at in [DATA, FAR] {
        assert_eq!(vm.does(0, 0, at, 4096), 0);
    }
    assert_eq!(vm.does(0, 0, BORDER - 65536, 131_072), 0);
    assert_eq!(daemon.metric("handed") + daemon.metric("split"), 0);
    assert_eq!(bytes(&daemon, "0", "0", "disk"), 4096 + 65536);
    assert_eq!(bytes(&daemon, "1", "0", "disk"), 4096 + 65536);
}

#[test]
fn a_driver_of_others_works_with_workers() {
    let folder = tempfile::tempdir().unwrap();
    let _file = make_disk(folder.path(), DISK);
    let _daemon = start(folder.path(), &["--split", "512"]);
    let mut driver = Driver::connect(folder.path(), 2);
    driver.memory.bytes(0, 1 << 20).fill(7);
    assert_eq!(driver.write(0, 0, 1 << 20), 0);
    assert_eq!(driver.read(0, 2 << 20, 1 << 20), 0);
    assert!(
        driver
            .memory
            .bytes(2 << 20, 1 << 20)
            .iter()
            .all(|&b| b == 7)
    );
}

#[test]
fn a_backend_that_is_killed_with_parts_at_other_workers_loses_nothing() {
    const REQUESTS: u16 = 40;
    const LENGTH: u32 = 131_072;
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let file = make_disk(folder, DISK);
    let mut daemon = start(folder, &["--split", "4K"]);
    let mut vm = Vm::new();
    let mut frontend = vm.boot(&folder.join("socket"));
    let heads: Vec<u16> = (0..REQUESTS).map(|n| n * 3).collect();
    // Around the border: the nearer to the middle, the more of it is on both.
    let at = |n: u16| BORDER - (1 << 20) + u64::from(n) * u64::from(LENGTH) - 65536;
    for round in 0..6_u64 {
        for n in 0..REQUESTS {
            vm.put(at(n), &pattern(round * 50 + u64::from(n), LENGTH));
            vm.request(n * 3, 1, u64::from(n) * 256, at(n), LENGTH);
        }
        vm.publish(&heads, true);
        let mut used = vm.wait_used(usize::try_from(round % 3).unwrap() * 4);
        daemon.process.kill_and_wait();
        used.extend(vm.used());
        drop(frontend);
        daemon = start(folder, &["--split", "4K"]);
        frontend = vm.boot(&folder.join("socket"));
        used.extend(vm.wait_used(usize::from(REQUESTS) - used.len()));
        let mut done: Vec<u16> = used.iter().map(|u| u.0).collect();
        done.sort_unstable();
        assert_eq!(done, heads);
        assert!(used.iter().all(|u| u.2 == 0), "{used:?}");
        let mut found = vec![0; LENGTH as usize];
        for n in 0..REQUESTS {
            file.read_exact_at(&mut found, u64::from(n) * u64::from(LENGTH))
                .unwrap();
            assert!(
                found == pattern(round * 50 + u64::from(n), LENGTH),
                "{n}, {round}"
            );
        }
    }
}

#[test]
fn a_queue_that_is_stopped_has_no_part_at_another_worker() {
    use vhost::VhostBackend as _;
    let folder = tempfile::tempdir().unwrap();
    let _file = make_disk(folder.path(), DISK);
    let _daemon = start(folder.path(), &["--split", "4K"]);
    let mut vm = Vm::new();
    let mut frontend = vm.boot(&folder.path().join("socket"));
    let heads: Vec<u16> = (0..40).map(|n| n * 3).collect();
    let mut total = 0;
    for round in 1..20_usize {
        for head in &heads {
            vm.request(*head, 0, 0, BORDER - 65536, 131_072);
        }
        vm.publish(&heads, true);
        let base = frontend.get_vring_base(0).unwrap();
        let done = vm.used().len();
        total += done;
        assert_eq!(u32::try_from(total).unwrap(), base, "round {round}");
        vm.start(&mut frontend, u16::try_from(base).unwrap());
        total += vm.wait_used(heads.len() - done).len();
    }
}

#[test]
fn paths_that_are_not_the_same_disk_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let _file = make_disk(folder.path(), DISK);
    write(path("other"), vec![0; 1 << 20]).unwrap();
    let said = |one: &str, two: &str| {
        let dev = |name: &str| format!("dev={}", path(name));
        let output = Command::new(PROGRAM)
            .args(["--socket-path", &path("s"), "--path", &dev(one)])
            .args(["--path", &dev(two)])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let told = said("disk", "other");
    assert!(told.contains("are not the same disk"), "{told}");
    let told = said("disk", "none");
    assert!(told.contains("none: No such file"), "{told}");
    assert!(!folder.path().join("s").exists());
}
