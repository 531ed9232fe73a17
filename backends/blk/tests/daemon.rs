//! The conventions of a backend daemon.

#![allow(clippy::unwrap_used)]

mod common;

use common::vmm::{DATA, Vm};
use common::{Daemon, PROGRAM, make_disk};
use farlane_support::conventions;
use farlane_support::process::Process;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process::Command;

/// A name that has to be escaped in a label.
const NAME: &str = r#"a"\b"#;

#[test]
fn it_keeps_the_conventions() {
    let folder = tempfile::tempdir().unwrap();
    make_disk(folder.path(), 1 << 20);
    let path = |name: &str| folder.path().join(name).display().to_string();
    let disk = format!(
        "socket={},path={},serial={NAME}",
        path("socket"),
        path("disk")
    );
    conventions::Daemon {
        program: PROGRAM,
        capabilities: r#"{"type":"block","features":["blk-file","read-only"]}"#,
        arguments: &["--disk".to_owned(), disk],
        by_file: true,
        follows: true,
        folder: folder.path(),
        sockets: &["socket"],
        private: &[],
        prefix: "farlane_blk",
        label: Some(("disk", NAME)),
    }
    .keeps_the_conventions();
}

#[test]
fn what_cannot_be_a_disk_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let run = |words: &[&str]| {
        let output = Command::new(PROGRAM).args(words).output().unwrap();
        assert_eq!(output.status.code().unwrap(), 1);
        String::from_utf8(output.stderr).unwrap()
    };
    let words = ["--socket-path", &path("s"), "--blk-file", &path("none")];
    let said = run(&words);
    assert!(said.contains("none: No such file"), "{said}");
    assert!(!folder.path().join("s").exists());
    let _file = make_disk(folder.path(), 1 << 20);
    let daemon = Daemon::start(folder.path(), "");
    let words = ["--socket-path", &path("s"), "--blk-file", &path("disk")];
    let said = run(&words);
    assert!(said.contains("Cannot lock"), "{said}");
    drop(daemon);
}

#[test]
fn it_ends_with_0_while_it_is_in_use() {
    let folder = tempfile::tempdir().unwrap();
    make_disk(folder.path(), 1 << 20);
    let mut daemon = Daemon::start(folder.path(), "");
    let mut vm = Vm::new();
    let _frontend = vm.boot(&folder.path().join("socket"));
    assert_eq!(vm.does(0, 0, DATA, 4096), 0);
    assert_eq!(daemon.process.terminate(), Some(0));
    assert!(!folder.path().join("socket").exists());
}

#[test]
fn an_inherited_socket_is_served_by_one_disk_alone() {
    use std::os::unix::process::CommandExt as _;
    let folder = tempfile::tempdir().unwrap();
    make_disk(folder.path(), 1 << 20);
    let socket = folder.path().join("socket");
    let listener = OwnedFd::from(UnixListener::bind(&socket).unwrap());
    let number = listener.as_raw_fd();
    let mut command = Command::new(PROGRAM);
    command
        .args(["--fd", "7", "--path"])
        .arg(folder.path().join("disk"));
    // SAFETY: dup2 may be called between fork and exec, and touches no memory.
    unsafe {
        command.pre_exec(move || {
            if libc::dup2(number, 7) < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        })
    };
    let mut process = Process::start(&mut command);
    let mut vm = Vm::new();
    let _frontend = vm.boot(&socket);
    assert_eq!(vm.does(0, 0, DATA, 4096), 0);
    assert_eq!(process.terminate(), Some(0));
    // Whoever made it owns its file.
    assert!(socket.exists());
}
