//! The control queue, and what a driver is told, where the backend has them
//! (`vhost-user-test-device-pci` in QEMU).

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{
    Backend, GUEST, HOST, PATIENCE, TAP, datagram, echo, host_socket, ip, next_datagram, wait_until,
};
use farlane_vm_front_end::net::{Nic, Options, feature};
use std::time::Instant;

const OK: u8 = 0;
const ERR: u8 = 1;
/// Classes of commands (virtio 1.2, 5.1.6.5).
const RX: u8 = 0;
const MAC: u8 = 1;
const VLAN: u8 = 2;
const PAIRS: u8 = 4;
const OFFLOADS: u8 = 5;

/// A VM whose interface has the guest's address.
fn boot(backend: &Backend, pairs: u16) -> Nic {
    let mut nic = backend.connect(pairs, feature::LINUX);
    assert_eq!(nic.command(MAC, 1, &GUEST.mac).unwrap(), OK);
    assert_eq!(nic.config().unwrap().unwrap().mac, GUEST.mac);
    nic
}

#[test]
fn frames_for_others_are_filtered() {
    let backend = Backend::start(1, &[]);
    let socket = host_socket();
    let mut nic = boot(&backend, 1);
    echo(&mut nic, &socket, 0, b"mine");
    // A driver that has said nothing gets everything.
    assert_eq!(nic.command(RX, 0, &[0]).unwrap(), OK);
    echo(&mut nic, &socket, 0, b"mine still");
    // Another address: what comes for the old one is not wanted any more.
    assert_eq!(nic.command(MAC, 1, &[2, 0, 0, 0, 0, 9]).unwrap(), OK);
    let before = backend.metric("rx_filtered");
    socket.send_to(b"not mine", (GUEST.ip, GUEST.port)).unwrap();
    wait_until(|| backend.metric("rx_filtered") > before);
    // Promiscuous: everything.
    assert_eq!(nic.command(RX, 0, &[1]).unwrap(), OK);
    socket
        .send_to(b"everybody's", (GUEST.ip, GUEST.port))
        .unwrap();
    assert_eq!(next_datagram(&mut nic).2, b"everybody's");
    // VLAN tags that were not asked for.
    assert_eq!(nic.command(RX, 0, &[0]).unwrap(), OK);
    assert_eq!(nic.command(VLAN, 0, &7_u16.to_le_bytes()).unwrap(), OK);
    assert_eq!(nic.command(VLAN, 0, &[7]).unwrap(), ERR);
    assert_eq!(nic.command(99, 0, &[]).unwrap(), ERR);
    assert_eq!(nic.command(MAC, 1, &[0; 2000]).unwrap(), ERR);
    nic.reset().unwrap();
    assert_ne!(nic.config().unwrap().unwrap().mac, [2, 0, 0, 0, 0, 9]);
}

#[test]
fn a_frame_that_is_filtered_is_nowhere_in_the_guests_memory() {
    let backend = Backend::start(2, &[]);
    let socket = host_socket();
    let options = Options {
        pairs: 2,
        memory_bytes: 16 << 20,
        ..Options::default()
    };
    let mut nic = Nic::connect(&backend.socket(), &options).unwrap();
    assert_eq!(nic.command(MAC, 1, &GUEST.mac).unwrap(), OK);
    assert_eq!(nic.command(RX, 0, &[0]).unwrap(), OK);
    echo(&mut nic, &socket, 0, b"a frame for the guest");
    assert!(nic.has_in_memory(b"a frame for the guest"));
    assert_eq!(nic.command(MAC, 1, &[2, 0, 0, 0, 0, 9]).unwrap(), OK);
    for secret in [&b"a frame for another"[..], &[0xa5; 1400]] {
        let before = backend.metric("rx_filtered");
        socket.send_to(secret, (GUEST.ip, GUEST.port)).unwrap();
        wait_until(|| backend.metric("rx_filtered") > before);
        assert!(!nic.has_in_memory(secret));
    }
}

#[test]
fn only_pairs_that_the_driver_wants_get_frames() {
    let backend = Backend::start(2, &[]);
    let socket = host_socket();
    let mut nic = boot(&backend, 2);
    assert_eq!(nic.config().unwrap().unwrap().max_pairs, 2);
    // One until it says otherwise.
    nic.send(1, &datagram(b"hello")).unwrap();
    let mut bytes = [0; 100];
    let (_, from) = socket.recv_from(&mut bytes).unwrap();
    for _ in 0..50 {
        socket.send_to(b"first", from).unwrap();
        assert_eq!(next_datagram(&mut nic).0, 0);
    }
    for pairs in [0_u16, 3] {
        assert_eq!(nic.command(PAIRS, 0, &pairs.to_le_bytes()).unwrap(), ERR);
    }
    assert_eq!(nic.command(PAIRS, 0, &2_u16.to_le_bytes()).unwrap(), OK);
    let end = Instant::now() + PATIENCE;
    loop {
        echo(&mut nic, &socket, 1, b"both");
        nic.send(1, &datagram(b"again")).unwrap();
        socket.recv_from(&mut bytes).unwrap();
        socket.send_to(b"second", from).unwrap();
        if next_datagram(&mut nic).0 == 1 {
            break;
        }
        assert!(Instant::now() < end, "the second pair gets nothing");
    }
    assert_eq!(nic.command(PAIRS, 0, &1_u16.to_le_bytes()).unwrap(), OK);
    for _ in 0..50 {
        socket.send_to(b"first", from).unwrap();
    }
    // What was on its way when the driver said so may still come to the second.
    let queues: Vec<_> = (0..50).map(|_| next_datagram(&mut nic).0).collect();
    assert_eq!(queues[40..], [0; 10]);
}

#[test]
fn offloads_are_switched() {
    let backend = Backend::start(1, &[]);
    let socket = host_socket();
    let mut nic = boot(&backend, 1);
    let checksum = feature::GUEST_CSUM.to_le_bytes();
    assert_eq!(nic.command(OFFLOADS, 0, &checksum).unwrap(), OK);
    assert_eq!(
        nic.command(OFFLOADS, 0, &u64::MAX.to_le_bytes()).unwrap(),
        ERR
    );
    // This machine leaves the checksum to whoever takes the frame.
    socket.send_to(b"partial", (GUEST.ip, GUEST.port)).unwrap();
    assert_eq!(next_datagram(&mut nic).1.header.flags & 1, 1);
    assert_eq!(nic.command(OFFLOADS, 0, &[0; 8]).unwrap(), OK);
    socket.send_to(b"whole", (GUEST.ip, GUEST.port)).unwrap();
    let (_, frame, _) = next_datagram(&mut nic);
    assert_eq!(frame.header.flags, 0);
    assert_ne!(frame.bytes[40..42], [0, 0]);
    let _ = HOST;
}

#[test]
fn the_link_goes_down_and_comes_up() {
    let backend = Backend::start(1, &[]);
    let mut nic = boot(&backend, 1);
    let status = |nic: &mut Nic, wanted: u16| {
        wait_until(|| nic.config().unwrap().unwrap().status == wanted);
    };
    status(&mut nic, 1);
    ip(&format!("link set {TAP} down"));
    status(&mut nic, 0);
    ip(&format!("link set {TAP} up"));
    // Up, and the driver is to announce itself.
    status(&mut nic, 3);
    assert_eq!(nic.command(3, 0, &[]).unwrap(), OK);
    status(&mut nic, 1);
}
