//! The conventions of a backend daemon.

#![allow(clippy::unwrap_used)]

use farlane_support::conventions;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_farlane-borrow");

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().unwrap()
}

/// Killed when it is dropped.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn it_says_what_it_is() {
    let output = run(&["--print-capabilities"]);
    assert!(output.status.success());
    assert_eq!(output.stdout, b"{\"type\":\"borrow\"}\n");
}

#[test]
fn it_keeps_the_conventions() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vm");
    conventions::Daemon {
        program: PROGRAM,
        arguments: &[
            format!("--socket-path={}", socket.display()),
            "--device=nvme0".to_owned(),
            "--lender=unix:/nonexistent".to_owned(),
            format!("--publish={}", folder.path().join("publish").display()),
        ],
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
    for (arguments, message) in [
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
    ] {
        let output = run(&arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(text.contains(message), "{arguments:?}: {text}");
    }
    assert!(!folder.path().join("free").exists());
}

#[test]
fn without_a_lender_a_monitor_is_told_that_there_is_no_device() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vm");
    let child = Command::new(PROGRAM)
        .arg(format!("--socket-path={}", socket.display()))
        .args(["--device=nvme0", "--lender=unix:/nonexistent"])
        .arg("--log-level=off")
        .spawn()
        .unwrap();
    let mut daemon = Daemon(child);
    let end = Instant::now() + Duration::from_secs(20);
    // A socket that is there is not yet one that it listens at.
    while UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < end, "the daemon does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Again and again: each monitor is refused, none is remembered.
    for _ in 0..3 {
        let client = std::panic::catch_unwind(|| vfio_user::Client::new(&socket));
        let usable = client.is_ok_and(|c| c.is_ok_and(|c| c.region(7).is_some_and(|r| r.size > 0)));
        assert!(!usable);
    }
    let pid = rustix::process::Pid::from_child(&daemon.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
    assert!(!socket.exists());
}
