#![allow(clippy::unwrap_used)]

use super::tags::{Driver as _, STRIPPING};
use super::*;
use crate::bits::{FrameHeader, HEADER_BYTES, gso, header_flag};
use crate::flow::parse;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

/// In a network namespace of this thread: a pair of interfaces, the port's and its peer.
fn pair(queues: u16) {
    assert!(
        rustix::process::geteuid().is_root(),
        "interfaces are made in a network namespace: run this as root"
    );
    // SAFETY: concerns this thread alone.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
    let ip = |arguments: &str| {
        let done = Command::new("ip")
            .args(arguments.split(' '))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "ip {arguments}: {said}");
    };
    let several = format!("numrxqueues {queues} numtxqueues {queues}");
    ip(&format!(
        "link add port {several} type veth peer name peer {several}"
    ));
    ip("link set port up");
    ip("link set peer up");
}

/// Takes one queue of the port, which somebody has just given back. A process that another test
/// starts meanwhile has all that is open here until it executes its program, so that the one before
/// may be there for a moment.
fn open_again(node: Option<Node>) -> Xdp {
    let begin = Instant::now();
    loop {
        match Xdp::open("port", PairCount(1), Mode::Generic, node) {
            Err(XdpError::Program {
                source: BpfError::System { source, .. },
                ..
            }) if source.kind() == io::ErrorKind::ResourceBusy
                && begin.elapsed() < Duration::from_secs(30) =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            result => return result.unwrap(),
        }
    }
}

/// Everything that comes out at the peer, and frames into it.
struct Peer(OwnedFd);

impl Peer {
    fn new() -> Self {
        // SAFETY: the descriptor is new; the address lives throughout the call.
        unsafe {
            let all = u16::try_from(libc::ETH_P_ALL).unwrap().to_be();
            let fd = libc::socket(
                libc::AF_PACKET,
                libc::SOCK_RAW | libc::SOCK_NONBLOCK,
                all.into(),
            );
            let socket = OwnedFd::from_raw_fd(fd);
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = u16::try_from(libc::AF_PACKET).unwrap();
            address.sll_protocol = all;
            let peer = HostInterface::new("peer", socket.try_clone().unwrap());
            address.sll_ifindex = peer.ask(libc::SIOCGIFINDEX).unwrap().number();
            let bytes = u32::try_from(size_of_val(&address)).unwrap();
            assert_eq!(
                libc::bind(socket.as_raw_fd(), (&raw const address).cast(), bytes),
                0
            );
            Self(socket)
        }
    }

    fn send(&self, frame: &[u8]) {
        assert_eq!(rustix::io::write(&self.0, frame).unwrap(), frame.len());
    }

    /// The next frame of TCP or UDP to the given port.
    fn next(&self, port: u16) -> Vec<u8> {
        let begin = Instant::now();
        let mut bytes = [0; 4096];
        loop {
            if let Ok(got) = rustix::io::read(&self.0, &mut bytes)
                && parse(&bytes[..got])
                    .flow
                    .is_some_and(|flow| flow.destination_port == port)
            {
                return bytes[..got].to_vec();
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "nothing came");
            std::thread::yield_now();
        }
    }
}

fn frame(port: u16, payload: usize) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend([8, 0, 0x45, 0]);
    frame.extend(u16::try_from(payload + 40).unwrap().to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 9]);
    frame.extend(port.to_be_bytes());
    frame.extend([0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    frame.extend((0..payload).map(|n| u8::try_from(n % 251).unwrap()));
    frame
}

/// The next frame of a queue, if there is one.
fn take_one(queue: &mut dyn PortQueue) -> Option<Vec<u8>> {
    let mut header = FrameHeader {
        flags: 7,
        ..FrameHeader::default()
    };
    let mut frame = vec![0; 4000];
    let bytes = queue.receive(FrameRoom {
        header: &mut header,
        guest: GuestRuns::default(),
        own: &mut frame,
    });
    let bytes = bytes.unwrap()?;
    assert_eq!(header, FrameHeader::default());
    frame.truncate(bytes - HEADER_BYTES);
    Some(frame)
}

/// Receives the next frame of TCP to the given port.
fn receive(queue: &mut dyn PortQueue, port: u16) -> Vec<u8> {
    let begin = Instant::now();
    loop {
        if let Some(frame) = take_one(queue)
            && parse(&frame)
                .flow
                .is_some_and(|flow| flow.destination_port == port)
        {
            return frame;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "nothing came");
        std::thread::yield_now();
    }
}

fn send(queue: &mut dyn PortQueue, header: FrameHeader, frame: &[u8]) -> io::Result<bool> {
    queue.send(&header, GuestRuns::default(), frame)
}

#[test]
fn frames_go_both_ways_and_large_ones_are_cut() {
    for mode in [Mode::Any, Mode::Native, Mode::Generic, Mode::Copy] {
        pair(1);
        let peer = Peer::new();
        let port = Xdp::open("port", PairCount(1), mode, None).unwrap();
        assert!(port.link_is_up());
        assert_eq!((port.mtu(), port.queues()), (1500, PairCount::ONE));
        let mut queue = port.open(PairId(0)).unwrap();
        assert!(port.open(PairId(0)).is_err(), "a queue is for one");
        // More than the rings have entries, so that chunks come round.
        for number in 1..5000_u16 {
            peer.send(&frame(number, usize::from(number % 1400)));
            assert_eq!(
                receive(&mut *queue, number),
                frame(number, usize::from(number % 1400)),
                "{mode:?}"
            );
        }
        for number in 1..5000_u16 {
            let bytes = frame(number, usize::from(number % 1400));
            assert!(send(&mut *queue, FrameHeader::default(), &bytes).unwrap());
            queue.flush().unwrap();
            assert_eq!(peer.next(number), bytes, "{mode:?}");
        }
        let large = FrameHeader {
            flags: header_flag::NEEDS_CSUM,
            gso_type: gso::TCPV4,
            gso_size: 1000.into(),
            ..FrameHeader::default()
        };
        assert!(send(&mut *queue, large, &frame(7, 60_000)).unwrap());
        queue.flush().unwrap();
        let mut payload: Vec<u8> = Vec::new();
        for _ in 0..60 {
            payload.extend(&peer.next(7)[54..]);
        }
        assert!(payload == frame(7, 60_000)[54..]);
        let lie = FrameHeader {
            gso_size: 0.into(),
            ..large
        };
        assert!(send(&mut *queue, lie, &frame(7, 60_000)).is_err());
        assert!(send(&mut *queue, FrameHeader::default(), &frame(7, 2000)).is_err());
    }
}

#[test]
fn a_queue_that_is_closed_can_be_opened_again_and_the_program_goes_with_the_port() {
    pair(2);
    let attached = || {
        let shown = Command::new("ip")
            .args(["link", "show", "port"])
            .output()
            .unwrap();
        String::from_utf8(shown.stdout).unwrap().contains("xdp")
    };
    assert!(!attached());
    let port = Xdp::open("port", PairCount(2), Mode::Any, None).unwrap();
    assert!(attached());
    assert!(
        Xdp::open("port", PairCount(2), Mode::Any, None).is_err(),
        "there is a program"
    );
    let peer = Peer::new();
    for number in 1..4 {
        let mut queue = port.open(PairId(0)).unwrap();
        peer.send(&frame(number, 100));
        // A `veth` of two queues receives on that of the sending processor's; both are open.
        let mut other = port.open(PairId(1)).unwrap();
        let begin = Instant::now();
        let mut got = false;
        while !got {
            for queue in [&mut queue, &mut other] {
                got |= take_one(&mut **queue).is_some_and(|got| got == frame(number, 100));
            }
            peer.send(&frame(number, 100));
            assert!(begin.elapsed() < Duration::from_secs(20), "nothing came");
        }
    }
    drop(port);
    // As in `open_again`.
    let begin = Instant::now();
    while attached() {
        assert!(begin.elapsed() < Duration::from_secs(30), "it stays");
    }
    assert!(matches!(
        Xdp::open("nobody", PairCount(1), Mode::Any, None),
        Err(XdpError::System { .. })
    ));
}

#[test]
fn memory_is_of_the_node_that_the_nic_is_on() {
    let folder = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("devices/system/node/online", "0-1");
    for (address, class, node) in [
        (1, "0x020000", "0"),
        (2, "0x020000", "1"),
        (3, "0x030000", "1"),
    ] {
        let pci = format!("bus/pci/devices/0000:0{address}:00.0");
        write(&format!("{pci}/class"), class);
        write(&format!("{pci}/numa_node"), node);
        write(&format!("{pci}/net/eth{address}/mtu"), "1500");
    }
    let sysfs = Sysfs::new(folder.path());
    let nodes = ["eth1", "eth2", "eth3", "tap0"].map(|name| node_of(&sysfs, name));
    assert_eq!(nodes, [Some(Node(0)), Some(Node(1)), None, None]);
    pair(1);
    // A node that this machine has not is one that has no room.
    drop(Xdp::open("port", PairCount(1), Mode::Generic, Some(Node(700))).unwrap());
    let _port = open_again(Some(Node(0)));
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
    // Pages of 4 KiB: 2,048 chunks each way.
    let is_there = |line: &str| line.contains(" prefer:0 ") && line.contains(" anon=4096 ");
    assert!(maps.lines().any(is_there), "{maps}");
}

/// Which of the features of the port's driver are on that take tags out of frames.
fn strips() -> [bool; 2] {
    let port = HostInterface::new("port", socket::raw_socket(libc::AF_PACKET).unwrap());
    Ethtool(&port).are_on(STRIPPING).unwrap()
}

#[test]
fn the_driver_leaves_tags_of_vlans_in_frames() {
    pair(1);
    assert_eq!(strips(), [true; 2], "a veth does, until it is told");
    let port = Xdp::open("port", PairCount(1), Mode::Generic, None).unwrap();
    assert_eq!(strips(), [false; 2]);
    drop(port);
    // Once more, of one that does not.
    let _port = open_again(None);
    assert_eq!(strips(), [false; 2]);
}

#[test]
fn frames_come_with_the_tags_that_they_were_sent_with() {
    for mode in [Mode::Native, Mode::Generic] {
        pair(1);
        let peer = Peer::new();
        let port = Xdp::open("port", PairCount(1), mode, None).unwrap();
        let mut queue = port.open(PairId(0)).unwrap();
        for (number, tags) in (1..).zip([
            &[0x8100_0005_u32][..],
            &[0x88a8_0005],
            &[0x88a8_0005, 0x8100_0007],
        ]) {
            let mut tagged = frame(number, 100);
            let tags: Vec<u8> = tags.iter().flat_map(|tag| tag.to_be_bytes()).collect();
            tagged.splice(12..12, tags);
            peer.send(&tagged);
            assert_eq!(receive(&mut *queue, number), tagged, "{mode:?}");
        }
    }
}

#[test]
fn a_queue_that_somebody_gives_back_is_taken() {
    let mut tries = 0;
    let taken = take(|| {
        tries += 1;
        match tries {
            1..3 => Err(io::ErrorKind::ResourceBusy.into()),
            _ => Ok(tries),
        }
    });
    assert_eq!(taken.unwrap(), 3);
    let refused = take(|| -> io::Result<()> { Err(io::ErrorKind::PermissionDenied.into()) });
    assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
}

#[test]
fn the_queue_of_one_that_has_gone_is_taken_at_once() {
    pair(1);
    for _ in 0..20 {
        drop(open_again(None));
    }
}
