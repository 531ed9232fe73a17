//! Drivers and VMMs that do what they must not.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
#[path = "common/vmm.rs"]
mod vmm;

pub use common::PATIENCE;
use common::{Backend, GUEST, HOST, datagram, echo, host_socket, wait_until};
use farlane_vm_front_end::net::feature;
use std::io::{Read as _, Write as _};
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use vmm::{DATA, INDIRECT, NEXT, RAM, SIZE, Vm, WRITE, descriptors};

/// The transmit queues of both pairs, and the receive queue of the first.
const TX: usize = 1;
const OTHER_TX: usize = 3;
const RX: usize = 0;

/// Sends a frame on a queue, and takes it at the other end.
fn sends(vm: &mut Vm, queue: usize, count: u16, socket: &UdpSocket) {
    let frame = [&[0; 12][..], &datagram(b"fine")].concat();
    vm.put(DATA, &frame);
    let bytes = u32::try_from(frame.len()).unwrap();
    vm.describe(descriptors(queue), 0, (DATA, bytes), 0, 0);
    vm.publish(queue, 0);
    vm.wait_used(queue, count);
    let mut got = [0; 10];
    let length = socket.recv(&mut got).unwrap();
    assert_eq!(&got[..length], b"fine");
}

#[test]
fn a_chain_that_makes_no_sense_stops_its_queue_and_no_other() {
    let backend = Backend::start(2, &[]);
    let socket = host_socket();
    let mut vm = Vm::boot(&backend.socket());
    let table = descriptors(TX);
    let mut others = 0;
    let bad: [&dyn Fn(&mut Vm); 10] = [
        // A circle.
        &|vm| {
            vm.describe(table, 0, (DATA, 8), NEXT, 1);
            vm.describe(table, 1, (DATA, 8), NEXT, 0);
            vm.publish(TX, 0);
        },
        // Beyond the table.
        &|vm| {
            vm.describe(table, 0, (DATA, 8), NEXT, SIZE);
            vm.publish(TX, 0);
        },
        &|vm| vm.publish(TX, SIZE),
        &|vm| vm.set_available(TX, SIZE + 1),
        // Not in memory.
        &|vm| {
            vm.describe(table, 0, (RAM - 10, 100), 0, 0);
            vm.publish(TX, 0);
        },
        &|vm| {
            vm.describe(table, 0, (u64::MAX - 5, 100), 0, 0);
            vm.publish(TX, 0);
        },
        // The wrong way around.
        &|vm| {
            vm.describe(table, 0, (DATA, 100), WRITE | NEXT, 1);
            vm.describe(table, 1, (DATA, 100), 0, 0);
            vm.publish(TX, 0);
        },
        // Tables that are none.
        &|vm| {
            vm.describe(table, 0, (DATA, 17), INDIRECT, 0);
            vm.publish(TX, 0);
        },
        &|vm| {
            vm.describe(table, 0, (RAM, 160), INDIRECT, 0);
            vm.publish(TX, 0);
        },
        &|vm| {
            vm.describe(DATA, 0, (DATA, 16), INDIRECT, 0);
            vm.describe(table, 0, (DATA, 16), INDIRECT, 0);
            vm.publish(TX, 0);
        },
    ];
    for (round, bad) in (1..).zip(bad) {
        bad(&mut vm);
        vm.wait_error(TX);
        assert!(!vm.has_error(OTHER_TX));
        others += 1;
        sends(&mut vm, OTHER_TX, others, &socket);
        wait_until(|| backend.metric("broken_queues") == round);
        vm.restart(TX);
        assert!(!vm.has_error(TX), "a queue that has just begun");
        sends(&mut vm, TX, 1, &socket);
        vm.restart(TX);
    }
}

#[test]
fn a_kick_that_blocks_who_reads_it_stops_nobody() {
    let backend = Backend::start(2, &[]);
    let socket = host_socket();
    let mut vm = Vm::boot(&backend.socket());
    sends(&mut vm, TX, 1, &socket);
    // The backend has made it one that does not.
    vm.let_kick_block(TX);
    wait_until(|| backend.process.sleeps());
    vm.must_stop(TX);
    sends(&mut vm, OTHER_TX, 1, &socket);
}

#[test]
fn whoever_listens_late_is_told_of_a_queue_that_cannot_go_on() {
    let backend = Backend::start(2, &[]);
    let socket = host_socket();
    let mut vm = Vm::boot_without_errors(&backend.socket());
    for queue in [TX, OTHER_TX] {
        vm.publish(queue, SIZE);
    }
    wait_until(|| backend.metric("broken_queues") == 2);
    vm.listen(TX);
    vm.wait_error(TX);
    // Once, and not of one that has begun anew.
    vm.listen(TX);
    assert!(!vm.has_error(TX));
    vm.restart(OTHER_TX);
    vm.listen(OTHER_TX);
    assert!(!vm.has_error(OTHER_TX));
    sends(&mut vm, OTHER_TX, 1, &socket);
}

#[test]
fn receive_buffers_without_room_stop_their_queue_and_no_other() {
    let backend = Backend::start(2, &[]);
    let socket = host_socket();
    let mut vm = Vm::boot(&backend.socket());
    let table = descriptors(RX);
    let bad: [&dyn Fn(&mut Vm); 3] = [
        &|vm| {
            vm.describe(table, 0, (DATA, 2000), 0, 0);
            vm.publish(RX, 0);
        },
        &|vm| {
            vm.describe(table, 0, (RAM - 100, 2000), WRITE, 0);
            vm.publish(RX, 0);
        },
        &|vm| {
            vm.describe(table, 0, (DATA, 0), WRITE, 0);
            vm.publish(RX, 0);
        },
    ];
    for (round, bad) in (1..).zip(bad) {
        bad(&mut vm);
        // Flows are spread over both pairs.
        wait_until(|| {
            let socket = UdpSocket::bind((HOST.ip, 0)).unwrap();
            socket.send_to(b"in", (GUEST.ip, GUEST.port)).unwrap();
            backend.metric("broken_queues") == u64::from(round)
        });
        vm.wait_error(RX);
        sends(&mut vm, OTHER_TX, round, &socket);
        vm.restart(RX);
    }
}

#[test]
fn frames_that_fit_into_no_buffers_are_dropped_and_the_next_go_in() {
    let backend = Backend::start(2, &["--mtu", "9000"]);
    let mut vm = Vm::boot(&backend.socket());
    // Each buffer is all descriptors, of a byte each: no frame can be in more than a few of them.
    for index in 0..SIZE {
        let at = (DATA + u64::from(index), 1);
        let flags = if index + 1 == SIZE {
            WRITE
        } else {
            WRITE | NEXT
        };
        vm.describe(descriptors(RX), index, at, flags, index + 1);
    }
    for _ in 0..SIZE {
        vm.publish(RX, 0);
    }
    let before = backend.metric("rx_too_large");
    // Flows are spread over both pairs; the second has no buffers.
    let send = |bytes: &[u8]| {
        let socket = UdpSocket::bind((HOST.ip, 0)).unwrap();
        socket.send_to(bytes, (GUEST.ip, GUEST.port)).unwrap();
    };
    wait_until(|| {
        send(&[1; 8000]);
        backend.metric("rx_too_large") > before
    });
    let before = vm.word(vmm::used(RX) + 2);
    wait_until(|| {
        send(b"small");
        vm.word(vmm::used(RX) + 2) > before
    });
    assert_eq!(backend.metric("broken_queues"), 0);
}

#[test]
fn frames_in_many_pieces_go() {
    let backend = Backend::start(2, &[]);
    let socket = host_socket();
    let mut vm = Vm::boot(&backend.socket());
    let frame = [&[0; 12][..], &datagram(&[5; 150])].concat();
    // A byte each, with empty ones between.
    let pieces = u16::try_from(frame.len()).unwrap();
    for (index, byte) in (0..pieces).zip(&frame) {
        let at = DATA + u64::from(index) * 4096;
        vm.put(at, &[*byte]);
        let more = if index + 1 == pieces { 0 } else { NEXT };
        vm.describe(descriptors(TX), index, (at, 1), more, index + 1);
    }
    vm.publish(TX, 0);
    vm.wait_used(TX, 1);
    let mut got = [0; 200];
    assert_eq!(socket.recv(&mut got).unwrap(), 150);
    assert_eq!(got[..150], [5; 150]);
    // More bytes than any frame has, in one buffer that is there again and again.
    let huge = u32::try_from(RAM / 2).unwrap();
    for index in 0..200 {
        let more = if index == 199 { 0 } else { NEXT };
        vm.describe(descriptors(TX), index, (DATA, huge), more, index + 1);
    }
    vm.publish(TX, 0);
    vm.wait_used(TX, 2);
    wait_until(|| backend.metric("tx_invalid") == 1);
    assert_eq!(backend.metric("broken_queues"), 0);
}

#[test]
fn a_vmm_that_talks_nonsense_is_disconnected_and_the_next_is_served() {
    let backend = Backend::start(1, &[]);
    let socket = host_socket();
    for nonsense in [&[0xff; 64][..], &[0; 12], b"GET / HTTP/1.0\r\n\r\n"] {
        let mut stream = UnixStream::connect(backend.socket()).unwrap();
        stream.write_all(nonsense).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        // Closed, with or without an answer.
        let _ = stream.read_to_end(&mut rest);
    }
    let mut nic = backend.connect(1, feature::PLAIN);
    echo(&mut nic, &socket, 0, b"still here");
}
