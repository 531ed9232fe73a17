//! A backend that is killed, and one that goes on with what was under way.

#![allow(clippy::unwrap_used)]

mod common;

use common::loops::Loop;
use common::vmm::{DATA, STATUSES, Vm};
use common::{Daemon, make_disk, wait_until};
use farlane_support::volatile_disk::{Caches, VolatileDisk};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const DISK: u64 = 16 << 20;
/// Requests at a time, of three descriptors each.
const REQUESTS: u16 = 40;
const LENGTH: u32 = 256 << 10;

fn heads() -> Vec<u16> {
    (0..REQUESTS).map(|n| n * 3).collect()
}

/// The data of request `n` of a round: each sector says whose it is.
fn data(round: u8, n: u16) -> Vec<u8> {
    let mark = [round, u8::try_from(n).unwrap(), 0x5a, 0xa5];
    mark.iter().copied().cycle().take(LENGTH as usize).collect()
}

fn killed_in_the_middle(folder: &Path) {
    let file = make_disk(folder, DISK);
    let mut daemon = Daemon::start(folder, "");
    let mut vm = Vm::new();
    let mut frontend = vm.boot(&folder.join("socket"));
    for round in 0..6_u8 {
        for n in 0..REQUESTS {
            let at = DATA + u64::from(n) * u64::from(LENGTH);
            vm.put(at, &data(round, n));
            let sector = u64::from(n) * u64::from(LENGTH) / 512;
            vm.request(n * 3, 1, sector, at, LENGTH);
        }
        vm.publish(&heads(), true);
        // Some rounds are killed at once, some when a part is done.
        let mut used = vm.wait_used(usize::from(round % 3) * 4);
        daemon.process.kill_and_wait();
        used.extend(vm.used());
        drop(frontend);
        daemon = Daemon::start(folder, "");
        frontend = vm.boot(&folder.join("socket"));
        used.extend(vm.wait_used(usize::from(REQUESTS) - used.len()));
        let mut done: Vec<u16> = used.iter().map(|&(head, ..)| head).collect();
        done.sort_unstable();
        assert_eq!(done, heads());
        assert!(used.iter().all(|&(.., status)| status == 0), "{used:?}");
        let mut found = vec![0; LENGTH as usize];
        for n in 0..REQUESTS {
            let at = u64::from(n) * u64::from(LENGTH);
            file.read_exact_at(&mut found, at).unwrap();
            assert!(found == data(round, n), "request {n} of round {round}");
        }
    }
    // Nothing comes afterwards.
    assert_eq!(vm.does(4, 0, DATA, 512), 0);
    assert!(vm.used().is_empty());
}

/// A backend that has served this VM and was killed when nothing was under way.
fn killed_at_rest(folder: &Path, vm: &mut Vm) {
    let mut daemon = Daemon::start(folder, "");
    let frontend = vm.boot(&folder.join("socket"));
    assert_eq!(vm.does(4, 0, DATA, 512), 0);
    drop(frontend);
    daemon.process.kill_and_wait();
}

#[test]
fn every_request_of_a_killed_backend_is_completed_exactly_once() {
    let folder = tempfile::tempdir().unwrap();
    killed_in_the_middle(folder.path());
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    killed_in_the_middle(folder.path());
}

#[test]
fn what_a_predecessor_had_begun_is_done_in_its_order() {
    let folder = tempfile::tempdir().unwrap();
    let file = make_disk(folder.path(), DISK);
    let mut vm = Vm::new();
    let socket = folder.path().join("socket");
    killed_at_rest(folder.path(), &mut vm);
    // As a backend leaves it that was killed with three requests under way, taken in this order,
    // all of them writes of one sector.
    for (n, head) in [9_u16, 3, 6].into_iter().enumerate() {
        let n = u8::try_from(n).unwrap();
        vm.put(DATA + u64::from(n) * 512, &[n + 1; 512]);
        vm.request(head, 1, 7, DATA + u64::from(n) * 512, 512);
        vm.mark_inflight(head, u64::from(n));
    }
    vm.publish(&[9, 3, 6], false);
    let daemon = Daemon::start(folder.path(), "");
    let _frontend = vm.boot(&socket);
    let mut used: Vec<u16> = vm.wait_used(3).iter().map(|u| u.0).collect();
    used.sort_unstable();
    assert_eq!(used, [3, 6, 9]);
    assert_eq!(daemon.metric("resubmitted"), 3);
    // A request that comes now is the fourth, and no other.
    vm.request(0, 0, 7, DATA, 512);
    vm.publish(&[0], true);
    assert_eq!(vm.wait_used(1), [(0, 513, 0)]);
    let mut sector = [0; 512];
    file.read_exact_at(&mut sector, 7 * 512).unwrap();
    assert!((1..=3).contains(&sector[0]) && sector.iter().all(|&b| b == sector[0]));
    assert_eq!(vm.get::<1>(STATUSES + 3), [0]);
}

#[test]
fn a_queue_that_is_stopped_at_once_has_done_what_a_predecessor_had_begun() {
    use vhost::VhostBackend as _;
    let folder = tempfile::tempdir().unwrap();
    make_disk(folder.path(), DISK);
    let socket = folder.path().join("socket");
    let mut vm = Vm::new();
    for round in 0..10_u16 {
        killed_at_rest(folder.path(), &mut vm);
        for (n, head) in heads().into_iter().enumerate() {
            vm.request(head, 0, 0, DATA, 512);
            vm.mark_inflight(head, n as u64);
        }
        vm.publish(&heads(), false);
        let _daemon = Daemon::start(folder.path(), "");
        let frontend = vm.boot(&socket);
        let base = frontend.get_vring_base(0).unwrap();
        // What comes now may be another driver, which knows nothing of them.
        let used = vm.used();
        assert_eq!(used.len(), heads().len(), "round {round}");
        assert!(used.iter().all(|&(.., status)| status == 0), "{used:?}");
        assert_eq!(base, u32::from((round + 1) * (REQUESTS + 1)));
    }
}

#[test]
fn reads_of_a_killed_backend_end_before_the_next_one_answers_them() {
    // Many may read such a disk, so nothing keeps the next backend from opening it.
    let disk = VolatileDisk::with(vec![3; 1 << 20], Caches::Shared).unwrap();
    let device = Loop::attach(&disk.path());
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let words = [
        "--socket-path",
        socket.to_str().unwrap(),
        "--read-only",
        "--path",
        device.device().to_str().unwrap(),
    ];
    let mut daemon = Daemon::with(folder.path(), &words);
    let mut vm = Vm::new();
    let frontend = vm.boot(&socket);
    disk.hold_reads();
    vm.request(0, 0, 0, DATA, 4096);
    vm.publish(&[0], true);
    disk.await_held_read().unwrap();
    daemon.process.kill_and_wait();
    drop(frontend);
    let daemon = Daemon::with(folder.path(), &words);
    let next = std::thread::spawn(move || {
        let frontend = vm.boot(&socket);
        (vm, frontend)
    });
    wait_until(|| next.is_finished() || daemon.metric("awaited") > 0);
    // A guest that had its read answered would use the page for something else.
    assert!(
        !next.is_finished(),
        "A read of the killed backend is under way"
    );
    disk.release_reads();
    let (mut vm, _frontend) = next.join().unwrap();
    assert_eq!(vm.wait_used(1), [(0, 4097, 0)]);
    assert!(vm.get::<4096>(DATA) == [3; 4096]);
}

#[test]
fn a_driver_that_a_predecessor_has_not_told_is_told() {
    let folder = tempfile::tempdir().unwrap();
    make_disk(folder.path(), DISK);
    let mut vm = Vm::new();
    let socket = folder.path().join("socket");
    killed_at_rest(folder.path(), &mut vm);
    // As a backend leaves it that was killed between publishing a used buffer and telling of it.
    vm.forget_calls();
    let _daemon = Daemon::start(folder.path(), "");
    let _frontend = vm.boot(&socket);
    vm.wait_call();
}

#[test]
fn a_queue_that_is_stopped_has_nothing_under_way_and_goes_on_where_it_was() {
    use vhost::VhostBackend as _;
    let folder = tempfile::tempdir().unwrap();
    let _file = make_disk(folder.path(), DISK);
    let _daemon = Daemon::start(folder.path(), "");
    let mut vm = Vm::new();
    let mut frontend = vm.boot(&folder.path().join("socket"));
    let mut total = 0;
    for round in 1..20_u16 {
        for n in 0..REQUESTS {
            let at = DATA + u64::from(n) * u64::from(LENGTH);
            vm.request(n * 3, 0, 0, at, LENGTH);
        }
        vm.publish(&heads(), true);
        let base = frontend.get_vring_base(0).unwrap();
        // What was taken is complete; what was not is for later.
        let done = vm.used().len();
        total += done;
        assert_eq!(u32::try_from(total).unwrap(), base, "round {round}");
        vm.start(&mut frontend, u16::try_from(base).unwrap());
        total += vm.wait_used(usize::from(REQUESTS) - done).len();
        assert_eq!(total, usize::from(round * REQUESTS));
    }
}
