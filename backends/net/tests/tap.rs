//! The backend over a tap, with a driver at native speed.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{
    Backend, GUEST, HOST, TAP, datagram, echo, host_socket, ip, next_datagram, wait_for_carrier,
    wait_until,
};
use farlane_support::process::metric;
use farlane_vm_front_end::net::frame::{self, End};
use farlane_vm_front_end::net::{Header, Nic, Options, feature};
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::net::UdpSocket;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;

#[test]
fn datagrams_go_both_ways() {
    let backend = Backend::start(1, &[]);
    let socket = host_socket();
    let mut nic = backend.connect(1, feature::PLAIN);
    for size in [1, 18, 512, 1472] {
        echo(&mut nic, &socket, 0, &vec![7; size]);
    }
    assert_eq!(backend.metric("tx_frames"), 4);
    assert!(backend.metric("rx_frames") >= 4);
    each_has_a_time(&backend);
}

/// Each frame has a time, whichever way it has come.
fn each_has_a_time(backend: &Backend) {
    for way in ["rx", "tx"] {
        let labels = [("direction", way)];
        let times = "farlane_net_frame_seconds_count{";
        wait_until(|| {
            let metrics = backend.metrics();
            let frames = metric(&metrics, &format!("farlane_net_{way}_frames{{"), &[]);
            frames > 0 && metric(&metrics, times, &labels) == frames
        });
    }
}

#[test]
fn large_datagrams_take_several_buffers() {
    let backend = Backend::start(1, &["--mtu", "9000"]);
    let socket = host_socket();
    let options = Options {
        features: feature::LINUX & !feature::CTRL_VQ,
        receive_buffer_bytes: Some(1024),
        ..Options::default()
    };
    let mut nic = Nic::connect(&backend.socket(), &options).unwrap();
    assert_eq!(nic.config().unwrap().unwrap().mtu, 9000);
    let payload: Vec<u8> = (0..8000_u32).map(|n| n.to_le_bytes()[0]).collect();
    socket.send_to(&payload, (GUEST.ip, GUEST.port)).unwrap();
    let (_, frame, got) = next_datagram(&mut nic);
    assert!(got == payload);
    assert_eq!(frame.header.num_buffers.get(), 8);
}

#[test]
fn the_host_completes_checksums() {
    let backend = Backend::start(1, &[]);
    let socket = host_socket();
    let mut nic = backend.connect(1, feature::PLAIN | feature::CSUM);
    let mut frame = datagram(b"sum");
    // What the network stack would put there: the sum of the pseudo header.
    frame[40..42].copy_from_slice(&[0, 0]);
    let header = Header {
        flags: 1,
        csum_start: 34.into(),
        csum_offset: 6.into(),
        ..Header::default()
    };
    let words = |bytes: &[u8]| -> u32 {
        let pairs = bytes
            .chunks(2)
            .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
        pairs.sum()
    };
    let length = u32::try_from(frame.len() - 34).unwrap();
    let sum = words(&GUEST.ip.octets()) + words(&HOST.ip.octets()) + 17 + length;
    let folded = u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
    frame[40..42].copy_from_slice(&folded.to_be_bytes());
    nic.send_as(0, &header, &frame).unwrap();
    let mut bytes = [0; 100];
    let length = socket.recv(&mut bytes).unwrap();
    assert_eq!(&bytes[..length], b"sum");
}

#[test]
fn frames_that_lie_are_dropped_and_the_next_ones_go() {
    let backend = Backend::start(1, &[]);
    let socket = host_socket();
    let mut nic = backend.connect(1, feature::LINUX & !feature::CTRL_VQ);
    let frame = datagram(b"lie");
    let outside = Header {
        flags: 1,
        csum_start: 0xfff0.into(),
        csum_offset: 0xfff0.into(),
        ..Header::default()
    };
    let nothing = Header {
        flags: 1,
        gso_type: 1,
        ..Header::default()
    };
    let unknown = Header {
        gso_type: 0x7f,
        ..Header::default()
    };
    for header in [outside, nothing, unknown] {
        nic.send_as(0, &header, &frame).unwrap();
    }
    nic.send(0, &frame[..10]).unwrap();
    nic.send(0, &vec![0; 70_000]).unwrap();
    echo(&mut nic, &socket, 0, b"truth");
    wait_until(|| backend.metric("tx_invalid") == 5);
    assert_eq!(backend.metric("broken_queues"), 0);
}

#[test]
fn queues_stop_and_go_on() {
    let backend = Backend::start(2, &[]);
    let socket = host_socket();
    let mut nic = backend.connect(2, feature::PLAIN);
    for round in 0..5_u8 {
        for queue in 0..2 {
            echo(&mut nic, &socket, queue, &[round; 100]);
        }
        let bases = nic.vmm.stop().unwrap();
        nic.vmm.start(&bases).unwrap();
    }
    // A driver that goes back to one pair.
    nic.vmm.enable(2, false).unwrap();
    nic.vmm.enable(3, false).unwrap();
    for _ in 0..20 {
        echo(&mut nic, &socket, 0, b"one");
    }
    nic.vmm.enable(2, true).unwrap();
    nic.vmm.enable(3, true).unwrap();
    echo(&mut nic, &socket, 1, b"two");
    nic.reset().unwrap();
    echo(&mut nic, &socket, 1, b"again");
}

#[test]
fn another_backend_goes_on_where_one_was_killed() {
    let mut backend = Backend::start(2, &[]);
    let socket = host_socket();
    let mut nic = backend.connect(2, feature::PLAIN);
    for round in 0..3_u8 {
        for queue in 0..2 {
            echo(&mut nic, &socket, queue, &[round; 1000]);
        }
        // What was sent and is not yet used may be sent again, as on any network.
        nic.drain().unwrap();
        backend.kill_and_start();
        nic.reconnect(&backend.socket()).unwrap();
    }
    echo(&mut nic, &socket, 1, b"still here");
}

#[test]
fn one_vm_comes_after_the_other() {
    let mut backend = Backend::start(2, &[]);
    let socket = host_socket();
    for pairs in [1, 2, 1] {
        let mut nic = backend.connect(pairs, feature::PLAIN);
        echo(&mut nic, &socket, usize::from(pairs - 1), b"hello");
        assert_eq!(backend.metric("connected"), 1);
    }
    assert_eq!(backend.metric("connections"), 3);
    wait_until(|| backend.metric("connected") == 0);
    assert_eq!(backend.process.terminate(), Some(0));
}

#[test]
fn a_vm_gets_no_frame_that_came_before_it() {
    let backend = Backend::start(1, &[]);
    let socket = host_socket();
    for _ in 0..3 {
        // Nobody takes a frame any more, or yet.
        wait_until(|| {
            !backend
                .process
                .thread_names()
                .contains(&"pair 0".to_owned())
        });
        for _ in 0..100 {
            socket.send_to(b"before", (GUEST.ip, GUEST.port)).unwrap();
        }
        let mut nic = backend.connect(1, feature::PLAIN);
        nic.send(0, &datagram(b"out")).unwrap();
        let (_, from) = socket.recv_from(&mut [0; 100]).unwrap();
        socket.send_to(b"after", from).unwrap();
        assert_eq!(next_datagram(&mut nic).2, b"after");
    }
    assert!(backend.metric("rx_dropped") >= 300);
}

#[test]
fn a_vm_that_pauses_gets_what_comes_meanwhile() {
    let backend = Backend::start(1, &[]);
    let socket = host_socket();
    let mut nic = backend.connect(1, feature::PLAIN);
    echo(&mut nic, &socket, 0, b"before");
    let bases = nic.vmm.stop().unwrap();
    for number in 0..100_u8 {
        socket.send_to(&[number], (GUEST.ip, GUEST.port)).unwrap();
    }
    nic.vmm.start(&bases).unwrap();
    for number in 0..100_u8 {
        assert_eq!(next_datagram(&mut nic).2, [number]);
    }
}

#[test]
fn a_flow_comes_to_where_the_guest_sends_it_from_in_order() {
    let backend = Backend::start(2, &[]);
    let socket = host_socket();
    let mut nic = backend.connect(2, feature::PLAIN);
    let mut next_sent = 0_u64;
    let mut next_got = 0_u64;
    let mut bytes = [0; 100];
    let mut moves = 0;
    for round in 0..40 {
        let queue = round % 2;
        let mut came = 0;
        // Some frames are under way all the time.
        for _ in 0..2000 {
            nic.send(queue, &datagram(b"more")).unwrap();
            let (_, from) = socket.recv_from(&mut bytes).unwrap();
            while next_sent < next_got + 8 {
                socket.send_to(&next_sent.to_le_bytes(), from).unwrap();
                next_sent += 1;
            }
            let (at, _, payload) = next_datagram(&mut nic);
            let number = u64::from_le_bytes(payload[..8].try_into().unwrap());
            assert_eq!(number, next_got, "out of order on queue {at}");
            next_got += 1;
            came = if at == queue { came + 1 } else { 0 };
            if came == 20 {
                moves += 1;
                break;
            }
        }
    }
    assert!(moves >= 30, "it has followed {moves} times of 40");
    assert!(backend.metric("handed_over") > 0);
    each_has_a_time(&backend);
}

/// The guest sends on a queue until the tap itself gives the flow to that pair, and nothing is
/// handed over any more.
fn draw_to(queue: usize, backend: &Backend, socket: &UdpSocket, nic: &mut Nic) {
    let mut quiet = 0;
    for _ in 0..2000 {
        let before = backend.metric("handed_over");
        nic.send(queue, &datagram(b"here")).unwrap();
        let (_, from) = socket.recv_from(&mut [0; 100]).unwrap();
        socket.send_to(b"there", from).unwrap();
        let (at, ..) = next_datagram(nic);
        let stays = at == queue && backend.metric("handed_over") == before;
        quiet = if stays { quiet + 1 } else { 0 };
        if quiet == 20 {
            return;
        }
    }
    panic!("The flow does not come to queue {queue}");
}

#[test]
fn a_vmm_begins_with_a_tap_that_steers_no_flow_of_the_one_before() {
    let backend = Backend::start(2, &[]);
    let socket = host_socket();
    // A guest that sends nothing gets the flow where the tap puts it by itself.
    let arrives = |nic: &mut Nic| {
        let queues: Vec<_> = (0..20)
            .map(|_| {
                socket.send_to(b"in", (GUEST.ip, GUEST.port)).unwrap();
                next_datagram(nic).0
            })
            .collect();
        assert_eq!(queues, [queues[0]; 20]);
        queues[0]
    };
    let mut nic = backend.connect(2, feature::PLAIN);
    let usual = arrives(&mut nic);
    draw_to(1 - usual, &backend, &socket, &mut nic);
    drop(nic);
    let mut nic = backend.connect(2, feature::PLAIN);
    assert_eq!(arrives(&mut nic), usual);
}

#[test]
fn a_flow_goes_on_when_the_driver_gives_up_its_queue_pair() {
    let backend = Backend::start(2, &[]);
    let socket = host_socket();
    let mut nic = backend.connect(2, feature::PLAIN);
    // Once per queue: one of them is not the one from which the tap gives the flow by itself.
    for queue in [0, 1] {
        draw_to(queue, &backend, &socket, &mut nic);
    }
    for ring in [2, 3] {
        nic.vmm.enable(ring, false).unwrap();
    }
    // The guest says nothing more: what comes finds its way all the same.
    for _ in 0..20 {
        socket.send_to(b"still", (GUEST.ip, GUEST.port)).unwrap();
        assert_eq!(next_datagram(&mut nic).0, 0);
    }
    for ring in [2, 3] {
        nic.vmm.enable(ring, true).unwrap();
    }
    for queue in [1, 0, 1] {
        echo(&mut nic, &socket, queue, b"again");
    }
}

/// Takes a queue of the tap, as another program does.
fn take_queue() -> File {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .unwrap();
    // SAFETY: all zeroes is an ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(TAP.bytes()) {
        *to = libc::c_char::try_from(from).unwrap();
    }
    // IFF_TAP, IFF_NO_PI, IFF_MULTI_QUEUE.
    request.ifr_ifru.ifru_flags = 0x1102;
    // SAFETY: TUNSETIFF takes an ifreq, which lives throughout the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), 0x4004_54ca, &raw mut request) };
    assert!(result >= 0, "{}", std::io::Error::last_os_error());
    file
}

#[test]
fn a_tap_that_stays_is_left_without_the_backends_program() {
    let mut backend = Backend::start(2, &[]);
    assert_eq!(backend.process.terminate(), Some(0));
    let mut queues = [take_queue(), take_queue()];
    wait_for_carrier();
    let socket = host_socket();
    // By itself a tap gives a flow to the queue that has last sent something of it.
    for port in 8000..8004 {
        let guest = End { port, ..GUEST };
        for queue in [0, 1] {
            let frame = frame::udp(&guest, &HOST, b"out");
            assert_eq!(queues[queue].write(&frame).unwrap(), frame.len());
            socket.recv_from(&mut [0; 10]).unwrap();
            socket.send_to(b"back", (guest.ip, port)).unwrap();
            let mut at = None;
            wait_until(|| {
                for (number, queue) in queues.iter_mut().enumerate() {
                    let mut bytes = [0; 2000];
                    if let Ok(length) = queue.read(&mut bytes)
                        && bytes[..length].ends_with(b"back")
                    {
                        at = Some(number);
                    }
                }
                at.is_some()
            });
            assert_eq!(at, Some(queue), "port {port}");
        }
    }
}

#[test]
fn a_tap_that_goes_away_lets_the_backend_sleep() {
    let mut backend = Backend::start(1, &[]);
    let socket = host_socket();
    let mut nic = backend.connect(1, feature::PLAIN);
    echo(&mut nic, &socket, 0, b"before");
    ip(&format!("link delete {TAP}"));
    wait_until(|| nic.config().unwrap().unwrap().status == 0);
    nic.send(0, &datagram(b"nowhere")).unwrap();
    nic.drain().unwrap();
    assert_eq!(backend.metric("tx_dropped"), 1);
    // It sleeps, but for a look now and then: a thread that span would hardly ever be seen asleep.
    let mut asleep = 0;
    wait_until(|| {
        asleep = if backend.process.sleeps() {
            asleep + 1
        } else {
            0
        };
        asleep == 20
    });
    assert_eq!(backend.process.terminate(), Some(0));
}
