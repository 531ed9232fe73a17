//! A backend that is told to end. Needs root and `/dev/fuse`.

#![allow(clippy::unwrap_used)]

mod common;

use common::stage::{OK, Stage};
use common::vmm::Vm;
use common::wait_until;

/// Sends the daemon SIGTERM, and waits until it has begun to end.
fn terminate(stage: &Stage) {
    stage.daemon().process.signal(rustix::process::Signal::TERM);
    let socket = stage.folder.path().join("socket");
    wait_until(|| !socket.exists());
}

#[test]
fn a_backend_that_is_to_end_answers_what_it_has_taken() {
    let mut stage = Stage::plain();
    let mut vm = Vm::new();
    let _frontend = stage.boot(&mut vm);
    stage.hold_flush(&mut vm);
    terminate(&stage);
    stage.disk.release_flushes();
    let ended = stage.daemon.as_mut().unwrap().process.wait().unwrap();
    assert_eq!(ended.code(), Some(0));
    assert_eq!(vm.used(), [(0, 1, OK)]);
    assert_eq!(stage.left(512), [5; 512]);
}

#[test]
fn a_backend_that_is_told_twice_leaves_what_it_has_taken_to_the_next() {
    let mut stage = Stage::plain();
    let mut vm = Vm::new();
    let _frontend = stage.boot(&mut vm);
    stage.hold_flush(&mut vm);
    terminate(&stage);
    terminate(&stage);
    // The process is gone but for what the kernel waits for.
    let status = format!("/proc/{}/status", stage.daemon().process.id());
    wait_until(|| {
        std::fs::read_to_string(&status)
            .unwrap()
            .contains("State:\tZ")
    });
    stage.disk.release_flushes();
    let ended = stage.daemon.as_mut().unwrap().process.wait().unwrap();
    assert_eq!(ended.code(), Some(0));
    assert_eq!(vm.used(), []);
    stage.open_again();
    let _frontend = stage.boot(&mut vm);
    assert_eq!(vm.wait_used(1), [(0, 1, OK)]);
    assert_eq!(stage.left(512), [5; 512]);
}
