//! The backend over AF_XDP on one end of a pair of interfaces, with a driver at native speed; the
//! other end is this machine's network stack.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{GUEST, HOST, echo, host_socket, ip, wait_until};
use farlane_support::process::Process;
use farlane_vm_front_end::net::{Nic, Options, feature};
use std::os::unix::net::UnixStream;
use std::process::Command;

fn has_program() -> bool {
    let shown = Command::new("ip").args(["link", "show", "port"]).output();
    String::from_utf8(shown.unwrap().stdout)
        .unwrap()
        .contains("xdp")
}

#[test]
fn frames_go_both_ways_and_a_killed_backend_gives_the_interface_back() {
    assert!(rustix::process::geteuid().is_root(), "run it as root");
    // SAFETY: unshare changes where this thread's sockets are, and no memory.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
    ip("link add port type veth peer name peer");
    ip("link set port up");
    ip("link set peer address 02:00:00:00:00:01 up");
    ip(&format!("address add {}/24 dev peer", HOST.ip));
    ip(&format!(
        "neighbor add {} lladdr 02:00:00:00:00:02 dev peer",
        GUEST.ip
    ));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    for mode in ["port", "port,mode=generic", "port,queues=1,mode=copy"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farlane-net"));
        command.args(["--xdp", mode, "--socket-path"]).arg(&path);
        let backend = Process::start(&mut command);
        let options = Options {
            features: feature::PLAIN,
            ..Options::default()
        };
        let mut nic = None;
        wait_until(|| {
            if UnixStream::connect(&path).is_ok() {
                nic = Nic::connect(&path, &options).ok();
            }
            nic.is_some()
        });
        let mut nic = nic.unwrap();
        assert!(has_program(), "{mode}");
        let socket = host_socket();
        for size in [1, 18, 512, 1472] {
            echo(&mut nic, &socket, 0, &vec![7; size]);
        }
        drop(backend);
        wait_until(|| !has_program());
        let _ = std::fs::remove_file(&path);
    }
}
