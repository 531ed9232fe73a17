//! The conventions of a backend daemon.

#![allow(clippy::unwrap_used)]

use farlane_support::conventions;
use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_farlane-net");

#[test]
fn it_keeps_the_conventions() {
    assert!(rustix::process::geteuid().is_root(), "run it as root");
    // SAFETY: unshare changes where this thread's sockets are, and no memory.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    conventions::Daemon {
        program: PROGRAM,
        capabilities: r#"{"type":"net"}"#,
        arguments: &[
            "--net".to_owned(),
            format!("socket={},tap=tap0", socket.display()),
        ],
        by_file: true,
        follows: true,
        folder: folder.path(),
        sockets: &["socket"],
        private: &[],
        prefix: "farlane_net",
        label: Some(("net", "tap0")),
    }
    .keeps_the_conventions();
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
