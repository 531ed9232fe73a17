//! The conventions of a backend daemon.

#![allow(clippy::unwrap_used)]

use farlane_daemon::access::Access;
use farlane_daemon::listener::{Kind, Listener};
use farlane_support::conventions;
use farlane_support::process::{Process, wait_until};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
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

#[test]
fn the_next_lender_is_told_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (control, file) = (path("control"), path("borrow.toml"));
    let socket = path("vm").display().to_string();
    let reload = |lender: &str, more: &str| {
        std::fs::write(&file, format!("lender = '{lender}'\n{more}")).unwrap();
        let output = farlane_support::reload::reload(PROGRAM, &control, &file);
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8(output.stderr).unwrap()),
        }
    };
    let mut command = Command::new(PROGRAM);
    command
        .arg(format!("--socket-path={socket}"))
        .args(["--device=nvme0", "--log-level=off"])
        .arg(format!("--control={}", control.display()))
        .arg("--config")
        .arg(&file);
    std::fs::write(&file, "lender = 'unix:/nonexistent'").unwrap();
    let _daemon = Process::start(&mut command);
    wait_until(|| UnixStream::connect(&control).is_ok());
    let other = path("other");
    let kind = Kind::SeqPacket;
    let lender = Listener::bind(&other, kind, &Access::default()).unwrap();
    let other = format!("unix:{}", other.display());
    let refused = |said: Result<(), String>, wanted: &str| {
        assert!(said.as_ref().is_err_and(|e| e.contains(wanted)), "{said:?}");
    };
    refused(
        reload(&other, "interrupts = 'msix'"),
        "borrow.toml:2: `interrupts` cannot",
    );
    refused(reload("tls:127.0.0.1:7411", ""), "needs a certificate");
    refused(reload("tcp:192.0.2.1:1", ""), "borrow.toml:1: ");
    reload(&other, "").unwrap();
    let vmm = std::thread::spawn(move || drop(vfio_user::Client::new(Path::new(&socket))));
    // Whoever connects is the daemon, for that VMM.
    drop(rustix::net::accept(&lender).unwrap());
    vmm.join().unwrap();
}
