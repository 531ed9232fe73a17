//! The conventions of a backend daemon.

#![allow(clippy::unwrap_used)]

use farlane_support::conventions;
use farlane_support::process::{Process, wait_until};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_farlane-borrow");

#[test]
fn it_keeps_the_conventions() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vm");
    conventions::Daemon {
        program: PROGRAM,
        capabilities: r#"{"type":"borrow"}"#,
        arguments: &[
            format!("--socket-path={}", socket.display()),
            "--device=nvme0".to_owned(),
            "--lender=unix:/nonexistent".to_owned(),
            format!("--publish={}", folder.path().join("publish").display()),
        ],
        by_file: true,
        follows: true,
        folder: folder.path(),
        sockets: &["vm"],
        private: &["publish"],
        prefix: "farlane_borrow",
        label: Some(("device", "nvme0")),
    }
    .keeps_the_conventions();
}

#[test]
fn what_cannot_work_ends_it_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    let _listener = UnixListener::bind(&taken).unwrap();
    let taken = format!("--socket-path={}", taken.display());
    let free = format!("--socket-path={}", folder.path().join("free").display());
    let device = "--device=nvme0";
    let runs = [
        (vec![], "Nothing to borrow"),
        (vec![device], "0 sockets and 1 devices"),
        (vec![taken.as_str(), device], "is in use by another process"),
        (vec!["--fd=77", device], "Descriptor 77 is not open"),
        (
            vec![free.as_str(), device, "--lender=tls:127.0.0.1:7411"],
            "needs a certificate",
        ),
        (
            vec![free.as_str(), device, "--window=ram=/nonexistent"],
            "/nonexistent",
        ),
    ];
    conventions::ends_with_messages(PROGRAM, &runs);
    assert!(!folder.path().join("free").exists());
}

#[test]
fn without_a_lender_a_monitor_is_told_that_there_is_no_device() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vm");
    let mut command = Command::new(PROGRAM);
    command
        .arg(format!("--socket-path={}", socket.display()))
        .args(["--device=nvme0", "--lender=unix:/nonexistent"])
        .arg("--log-level=off");
    let mut daemon = Process::start(&mut command);
    // A socket that is there is not yet one that it listens at.
    wait_until(|| UnixStream::connect(&socket).is_ok());
    // Again and again: each monitor is refused, none is remembered.
    for _ in 0..3 {
        let client = std::panic::catch_unwind(|| vfio_user::Client::new(&socket));
        let usable = client.is_ok_and(|c| c.is_ok_and(|c| c.region(7).is_some_and(|r| r.size > 0)));
        assert!(!usable);
    }
    assert_eq!(daemon.terminate(), Some(0));
    assert!(!socket.exists());
}
