//! The conventions of a backend daemon.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, PROGRAM, context, is_blocked, until};
use farlane_support::conventions;
use farlane_vm_front_end::guest_device::Vm;
use rustix::process::Signal;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

#[test]
fn it_keeps_the_conventions() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    conventions::Daemon {
        program: PROGRAM,
        capabilities: r#"{"type":"rdma"}"#,
        arguments: &[
            format!("--vm=socket={},gid=10.0.0.1", path("vm")),
            format!("--host-socket={}", path("host")),
        ],
        by_file: true,
        follows: true,
        folder: folder.path(),
        sockets: &["vm"],
        private: &["host"],
        prefix: "farlane_rdma",
        label: Some(("vm", "10.0.0.1")),
    }
    .keeps_the_conventions();
}

#[test]
fn what_cannot_work_ends_it_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    let _listener = UnixListener::bind(&taken).unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let taken = format!("--host-socket={}", taken.display());
    let file = format!("--host-socket={}", file.display());
    let runs = [
        (vec![], "Nobody to serve"),
        (vec!["--vm=gid=10.0.0.1"], "socket=PATH or fd=N is missing"),
        (
            vec!["--vm=fd=3,gid=10.0.0.1,max_qp=4K"],
            "\"4K\" is not a number, or max",
        ),
        (
            vec!["--host-socket=/a,window=1"],
            "\"window=1\" is not known here",
        ),
        (vec![taken.as_str()], "is in use by another process"),
        (vec![file.as_str()], "exists and is not a socket"),
        (
            vec!["--host-socket=/nonexistent/socket"],
            "No such file or directory",
        ),
        (vec!["--vm=fd=77,gid=10.0.0.1"], "Descriptor 77 is not open"),
    ];
    conventions::ends_with_messages(PROGRAM, &runs);
}

#[test]
fn sigterm_ends_it_while_a_vm_is_connected_and_its_sockets_go() {
    let mut backend = Backend::start();
    let _vm = backend.vm(0);
    backend.process.signal(Signal::TERM);
    let mut status = None;
    until("the backend to end", || {
        status = backend.process.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().code(), Some(0));
    for name in ["vm0", "vm1", "host", "metrics"] {
        assert!(!backend.path(name).exists(), "{name}");
    }
}

#[test]
fn a_second_vm_waits_until_the_first_has_gone() {
    let backend = Backend::start();
    let first = backend.vm(0);
    let path = backend.path("vm0");
    let (sender, thread) = std::sync::mpsc::channel();
    let second = std::thread::spawn(move || {
        sender.send(rustix::thread::gettid()).unwrap();
        Vm::connect(&path, 16 << 20).unwrap()
    });
    let thread = u32::try_from(thread.recv().unwrap().as_raw_nonzero().get()).unwrap();
    // It waits for an answer that does not come, however much the first one does.
    until("the second to wait", || is_blocked(thread));
    for _ in 0..20 {
        drop(context(first.open().unwrap()));
        until("the second to wait", || {
            second.is_finished() || is_blocked(thread)
        });
        assert!(!second.is_finished());
    }
    drop(first);
    let second = second.join().unwrap();
    second.open().unwrap();
}

#[test]
fn a_malformed_message_ends_its_own_connection_only() {
    use std::io::{Read as _, Write as _};
    let mut backend = Backend::start();
    let other = backend.vm(1);
    for length in [1, 11, 12, 13, 4096] {
        let mut stream = UnixStream::connect(backend.path("vm0")).unwrap();
        stream.write_all(&vec![0xff; length]).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = stream.read(&mut [0; 16]);
    }
    other.open().unwrap();
    backend.vm(0).open().unwrap();
    backend.assert_alive();
}

#[test]
fn a_listening_socket_can_be_handed_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let fd = listener.as_raw_fd();
    let mut command = Command::new(PROGRAM);
    command.args(["--vm=fd=9,gid=10.0.0.1", "--log-level=warn"]);
    // SAFETY: dup2 is all that happens between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let rc = libc::dup2(fd, 9);
            if rc == 9 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        })
    };
    let mut child = command.spawn().unwrap();
    drop(listener);
    Vm::connect(&path, 16 << 20).unwrap().open().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(path.exists());
}

#[test]
fn a_killed_backend_is_followed_by_another_at_the_same_sockets() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm");
    let start = || {
        Command::new(PROGRAM)
            .arg(format!("--vm=socket={},gid=10.0.0.1", path.display()))
            .arg("--log-level=warn")
            .spawn()
            .unwrap()
    };
    for _ in 0..3 {
        let mut child = start();
        until("the backend to serve", || {
            Vm::connect(&path, 16 << 20).is_ok_and(|vm| vm.open().is_ok())
        });
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(path.exists());
    }
}
