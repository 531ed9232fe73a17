//! A backend over a tap in a network of its own, whose other end is this machine's network stack.

#![allow(dead_code)]

use farlane_support::process::{Process, metric, metrics};
use farlane_vm_front_end::net::frame::{End, udp};
use farlane_vm_front_end::net::{Nic, Options, Received};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;
use tempfile::TempDir;

pub use farlane_support::process::{PATIENCE, wait_until};

/// The tap.
pub const TAP: &str = "tap0";
/// This machine's end.
pub const HOST: End = End {
    mac: [2, 0, 0, 0, 0, 1],
    ip: Ipv4Addr::new(10, 9, 0, 1),
    port: 7000,
};
/// The guest's end.
pub const GUEST: End = End {
    mac: [2, 0, 0, 0, 0, 2],
    ip: Ipv4Addr::new(10, 9, 0, 2),
    port: 7001,
};

/// A network namespace for the calling thread, and for what it starts: it goes with them.
fn enter_own_network() {
    assert!(
        rustix::process::geteuid().is_root(),
        "these tests make taps in a network namespace: run them as root"
    );
    // SAFETY: unshare changes where this thread's sockets are, and no memory.
    let rc = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    assert_eq!(
        rc,
        0,
        "no network namespace: {}",
        std::io::Error::last_os_error()
    );
}

/// Runs `ip`.
pub fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status();
    assert!(status.expect("iproute2 is needed").success(), "ip {words}");
}

/// A backend with one interface.
pub struct Backend {
    pub process: Process,
    folder: TempDir,
    words: Vec<String>,
}

impl Backend {
    /// Starts one in a network of its own, with these queue pairs and further words. To be called
    /// once in a test: the test's thread is in that network then.
    pub fn start(queues: u16, words: &[&str]) -> Self {
        enter_own_network();
        let folder = tempfile::tempdir().unwrap();
        ip("link set lo up");
        ip(&format!("tuntap add dev {TAP} mode tap multi_queue"));
        ip(&format!("link set {TAP} address 02:00:00:00:00:01 up"));
        ip(&format!("address add {}/24 dev {TAP}", HOST.ip));
        ip(&format!(
            "neighbor add {} lladdr 02:00:00:00:00:02 dev {TAP}",
            GUEST.ip
        ));
        let path = |name: &str| folder.path().join(name).display().to_string();
        let own = [
            "--socket-path".to_owned(),
            path("socket"),
            "--tap".to_owned(),
            TAP.to_owned(),
            "--queues".to_owned(),
            queues.to_string(),
            "--metrics".to_owned(),
            path("metrics"),
            "--log-level".to_owned(),
            "info".to_owned(),
        ];
        let words: Vec<_> = own
            .into_iter()
            .chain(words.iter().map(|&word| word.to_owned()))
            .collect();
        let backend = Self {
            process: start(&words),
            folder,
            words,
        };
        backend.is_ready();
        backend
    }

    fn is_ready(&self) {
        // Metrics come last.
        wait_until(|| UnixStream::connect(self.folder.path().join("metrics")).is_ok());
        wait_for_carrier();
    }

    /// Where a VMM connects.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Kills it, and starts another.
    pub fn kill_and_start(&mut self) {
        self.process.kill_and_wait();
        self.process = start(&self.words);
        self.is_ready();
    }

    /// A VM.
    pub fn connect(&self, pairs: u16, features: u64) -> Nic {
        let options = Options {
            pairs,
            features,
            ..Options::default()
        };
        Nic::connect(&self.socket(), &options).unwrap()
    }

    /// All counters.
    pub fn metrics(&self) -> String {
        metrics(&self.folder.path().join("metrics"))
    }

    /// A counter.
    pub fn metric(&self, name: &str) -> u64 {
        metric(&self.metrics(), &format!("farlane_net_{name}{{"), &[])
    }
}

/// The kernel takes frames for a tap a while after somebody has opened it: it works that off in the
/// background, and a change of the interface waits for it.
pub fn wait_for_carrier() {
    wait_until(|| {
        let output = Command::new("ip")
            .args(["-o", "link", "show", TAP])
            .output();
        let said = String::from_utf8(output.unwrap().stdout).unwrap();
        assert!(said.contains(TAP), "{said}");
        !said.contains("state DOWN")
    });
    ip(&format!("link set {TAP} up"));
}

fn start(words: &[String]) -> Process {
    Process::start(Command::new(env!("CARGO_BIN_EXE_farlane-net")).args(words))
}

/// A socket at this machine's end.
pub fn host_socket() -> UdpSocket {
    let socket = UdpSocket::bind((HOST.ip, HOST.port)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// A datagram of the guest.
pub fn datagram(payload: &[u8]) -> Vec<u8> {
    udp(&GUEST, &HOST, payload)
}

/// The next datagram for the guest; what else this machine sends by itself is left out. With the
/// queue pair it came on, and its payload.
pub fn next_datagram(nic: &mut Nic) -> (usize, Received, Vec<u8>) {
    let end = Instant::now() + PATIENCE;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let (queue, frame) = nic.receive(left).unwrap().expect("no datagram came");
        let bytes = &frame.bytes;
        let is_ours = bytes.get(12..14) == Some(&[8, 0])
            && bytes.get(23) == Some(&17)
            && bytes.get(30..34) == Some(&GUEST.ip.octets());
        if is_ours {
            let payload = bytes[42..].to_vec();
            return (queue, frame, payload);
        }
    }
}

/// A datagram there, and one back.
pub fn echo(nic: &mut Nic, socket: &UdpSocket, queue: usize, payload: &[u8]) {
    nic.send(queue, &datagram(payload)).unwrap();
    let mut bytes = vec![0; 70_000];
    let (length, from) = socket.recv_from(&mut bytes).unwrap();
    assert_eq!(&bytes[..length], payload);
    socket.send_to(payload, from).unwrap();
    assert_eq!(next_datagram(nic).2, payload);
}
