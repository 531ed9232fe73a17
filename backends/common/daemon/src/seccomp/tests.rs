//! What a confined process can do, and what ends it.

use super::*;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

/// Says which act `child` is to do: a filter stays, so each has a process of its own.
const ACT: &str = "FARLANE_TEST_SECCOMP_ACT";

fn confined(act: &str) -> std::process::ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "seccomp::tests::child"])
        .env(ACT, act)
        .env("RUST_BACKTRACE", "full")
        .output()
        .unwrap()
        .status
}

#[test]
fn a_confined_process_works_and_dies_of_a_socket() {
    assert!(confined("work").success());
    assert_eq!(confined("socket").signal(), Some(libc::SIGSYS));
    assert_eq!(confined("program").signal(), Some(libc::SIGSYS));
}

#[test]
fn calls_that_are_newer_than_the_list_are_said_not_to_exist() {
    assert!(confined("newer calls").success());
    assert_eq!(confined("newest call").signal(), Some(libc::SIGSYS));
    if cfg!(target_arch = "x86_64") {
        assert_eq!(confined("other interface").signal(), Some(libc::SIGSYS));
    }
}

#[test]
fn arguments_tell_what_a_confined_process_may() {
    for act in ["some sockets", "some requests", "no requests", "process"] {
        assert!(confined(act).success(), "{act}");
    }
    for act in [
        "some other socket",
        "code",
        "code later",
        "older process",
        "limits of another",
        "memory of another",
    ] {
        assert_eq!(confined(act).signal(), Some(libc::SIGSYS), "{act}");
    }
}

/// What a request of `ioctl` that takes a number fails with.
fn request(socket: &impl std::os::fd::AsRawFd, request: libc::Ioctl) -> Option<i32> {
    let mut number = 1_i32;
    // SAFETY: the number lives throughout the call.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw mut number) };
    (rc < 0).then(|| std::io::Error::last_os_error().raw_os_error().unwrap())
}

/// All that per-node workers and those who follow a VM's memory do.
fn workers() {
    use crate::per_node::{SYSTEM_CALLS, WorkerNodes};
    use farlane_zero_copy::AddressSpace;
    use farlane_zero_copy::placement::Placement;
    use farlane_zero_copy::topology::{Sysfs, Topology};
    use std::os::fd::AsFd as _;
    use std::time::Duration;

    let folder = tempfile::tempdir().unwrap();
    let nodes = folder.path().join("devices/system/node");
    for node in ["node0", "node1"] {
        std::fs::create_dir_all(nodes.join(node)).unwrap();
        std::fs::write(nodes.join(node).join("cpulist"), "0").unwrap();
    }
    std::fs::write(nodes.join("online"), "0-1").unwrap();
    let topology = Topology::of(Sysfs::new(folder.path()));
    folder.close().unwrap();
    confine(SeccompMode::Kill, &SystemCalls::any(&[SYSTEM_CALLS])).unwrap();

    let nodes = WorkerNodes::new(topology.clone());
    for node in nodes.all() {
        let thread = node.spawn("worker".to_owned(), || vec![7; 32 << 20]);
        assert_eq!(thread.unwrap().join().unwrap().len(), 32 << 20);
    }
    let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 16 << 20).unwrap();
    rustix::io::write(&fd, &[1; 4096]).unwrap();
    let space = AddressSpace::new();
    space.map(0, 16 << 20, fd.as_fd(), 0, true).unwrap();
    let placement = Placement::new(space, topology.clone(), Vec::new());
    drop(placement.watch(Duration::ZERO).unwrap().unwrap());
    placement.refresh();
    let this = std::process::id();
    assert!(topology.node_of_thread(this, this).is_none_or(|n| n.0 < 2));
}

#[test]
fn per_node_workers_work_in_a_confined_process() {
    assert!(confined("workers").success());
}

#[test]
fn a_panic_in_a_confined_process_is_not_a_kill() {
    // The code of a test harness that has seen an ordinary panic.
    assert_eq!(confined("panic").code(), Some(101));
    assert_eq!(confined("abort").signal(), Some(libc::SIGABRT));
}

#[test]
fn child() {
    let Ok(act) = std::env::var(ACT) else {
        return;
    };
    if act == "workers" {
        return workers();
    }
    let with = [UNIX_SOCKETS, NONBLOCKING];
    let calls = match act.starts_with("some ") {
        true => SystemCalls::default().with(&with),
        false => SystemCalls::default(),
    };
    confine(SeccompMode::Kill, &calls).unwrap();
    match act.as_str() {
        "work" => {
            let made = std::thread::spawn(|| vec![7; 32 << 20]).join().unwrap();
            assert_eq!(made.len(), 32 << 20);
            std::thread::sleep(std::time::Duration::from_millis(1));
            let error = std::fs::File::open("/etc/passwd").unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EACCES));
        }
        "socket" | "some other socket" => drop(std::net::UdpSocket::bind("127.0.0.1:0")),
        "some sockets" => {
            let socket = std::os::unix::net::UnixDatagram::unbound().unwrap();
            socket.set_nonblocking(true).unwrap();
            let mut room = [0; 1];
            let error = socket.recv(&mut room).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
            // Any other request fails.
            assert_eq!(request(&socket, libc::FIONREAD), Some(libc::EACCES));
        }
        "some requests" | "no requests" => {
            let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
            let expected = (act == "no requests").then_some(libc::EACCES);
            assert_eq!(request(&socket, libc::FIONBIO), expected);
        }
        "newer calls" => {
            // The next one, which some kernels have, and the last that there could be:
            // libraries go on with an older one.
            for call in [NEWEST + 1, libc::c_long::from(OTHER_INTERFACE - 1)] {
                // SAFETY: there is none: the call fails.
                let rc = unsafe { libc::syscall(call, 0, 0, 0, 0, 0, 0) };
                let error = std::io::Error::last_os_error().raw_os_error();
                assert_eq!((rc, error), (-1, Some(libc::ENOSYS)), "{call}");
            }
        }
        "newest call" | "other interface" => {
            let call = match act.as_str() {
                "newest call" => NEWEST,
                // getpid().
                _ => libc::c_long::from(OTHER_INTERFACE) + libc::SYS_getpid,
            };
            // SAFETY: no memory is named.
            unsafe { libc::syscall(call, 0, 0, 0, 0, 0, 0) };
        }
        "code" => {
            let (read, exec) = (libc::PROT_READ, libc::PROT_EXEC);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping.
            unsafe { libc::mmap(std::ptr::null_mut(), 4096, read | exec, flags, -1, 0) };
        }
        "code later" => {
            let page = farlane_zero_copy::Mapping::reserve(4096).unwrap();
            // SAFETY: a page that nobody uses.
            unsafe { libc::mprotect(page.base().cast(), 4096, libc::PROT_EXEC) };
        }
        "process" => {
            // A clone_args that asks for a process.
            let arguments = [0_u64; 8];
            // SAFETY: there is none: the call fails.
            let rc = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, 64) };
            let error = std::io::Error::last_os_error().raw_os_error();
            assert_eq!((rc, error), (-1, Some(libc::ENOSYS)));
        }
        "older process" => {
            // SAFETY: there is none.
            unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        }
        "limits of another" => {
            // SAFETY: nothing is set.
            unsafe { libc::prlimit(1, libc::RLIMIT_CORE, std::ptr::null(), std::ptr::null_mut()) };
        }
        "memory of another" => {
            // SAFETY: no memory is read.
            unsafe { libc::process_vm_readv(1, std::ptr::null(), 0, std::ptr::null(), 0, 0) };
        }
        "program" => drop(Command::new("/bin/true").status()),
        "panic" => panic!("an ordinary panic"),
        "abort" => std::process::abort(),
        other => unreachable!("{other}"),
    }
}
