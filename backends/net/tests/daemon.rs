//! The conventions of a backend daemon.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_farlane-net");

#[test]
fn it_says_what_it_is() {
    let output = Command::new(PROGRAM)
        .arg("--print-capabilities")
        .output()
        .unwrap();
    assert!(output.status.success());
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said.trim(), r#"{"type":"net"}"#);
}

/// What becomes of its sockets is the same for all backends (farlane-daemon); here is one that makes two of them.
#[test]
fn its_sockets_are_for_a_group_where_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["socket", "metrics"].map(|name| folder.path().join(name));
    assert!(rustix::process::geteuid().is_root(), "run it as root");
    // SAFETY: unshare changes where this thread's sockets are, and no memory.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
    let mut child = Command::new(PROGRAM)
        .args(["--tap", "tap0", "--socket-group", "7", "--socket-path"])
        .arg(&paths[0])
        .arg("--metrics")
        .arg(&paths[1])
        .spawn()
        .unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    // It is connected to when it is as it is to be.
    while UnixStream::connect(&paths[1]).is_err() {
        assert!(Instant::now() < end, "no socket");
        std::thread::yield_now();
    }
    let shown = paths.map(|path| {
        let file = std::fs::metadata(path).unwrap();
        (file.gid(), file.mode() & 0o7777)
    });
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(shown, [(7, 0o660); 2]);
}

#[test]
fn what_cannot_be_an_interface_is_named_before_there_is_a_socket() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let run = |tap: &str| {
        let output = Command::new(PROGRAM)
            .arg("--socket-path")
            .arg(&socket)
            .args(["--tap", tap])
            .output()
            .unwrap();
        assert_eq!(output.status.code().unwrap(), 1);
        assert!(!socket.exists());
        String::from_utf8(output.stderr).unwrap()
    };
    let said = run("a name");
    assert!(said.contains("no name of an interface"), "{said}");
    // There is one, and it is no tap.
    let said = run("lo");
    assert!(said.contains("Tap lo: cannot take a queue of it"), "{said}");
}
