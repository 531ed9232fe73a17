//! A VMM that connects again after its backend was killed.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
#[path = "common/vmm.rs"]
mod vmm;

pub use common::PATIENCE;
use common::{Backend, GUEST, HOST, datagram, host_socket, wait_until};
use std::net::UdpSocket;
use vmm::{DATA, Vm, WRITE, descriptors, used};

/// Receive queues of both pairs, and the first's transmit queue.
const RX: [usize; 2] = [0, 2];
const TX: usize = 1;
/// Receive buffers that are posted.
const POSTED: u16 = 200;
const BUFFER_BYTES: u32 = 2048;

/// Received frames so far, by queue. Buffers were used in the order in which they were posted, each
/// once.
fn received(vm: &Vm) -> [u16; 2] {
    RX.map(|queue| {
        let count = vm.word(used(queue) + 2);
        for number in 0..count {
            assert_eq!(vm.word(used(queue) + 4 + 8 * u64::from(number)), number);
        }
        count
    })
}

/// Both receive queues get something. Flows are spread over them.
fn both_receive(vm: &Vm) {
    let before = received(vm);
    wait_until(|| {
        let socket = UdpSocket::bind((HOST.ip, 0)).unwrap();
        socket.send_to(b"in", (GUEST.ip, GUEST.port)).unwrap();
        let now = received(vm);
        now[0] > before[0] && now[1] > before[1]
    });
}

#[test]
fn queues_go_on_where_a_vmm_names_the_available_index_as_their_base() {
    let mut backend = Backend::start(2, &[]);
    let socket = host_socket();
    let mut vm = Vm::boot(&backend.socket());
    for (queue, half) in RX.into_iter().zip(0..) {
        for head in 0..POSTED {
            let number = u64::from(half * POSTED + head);
            let at = DATA + 0x10_0000 + number * u64::from(BUFFER_BYTES);
            vm.describe(descriptors(queue), head, (at, BUFFER_BYTES), WRITE, 0);
            vm.publish(queue, head);
        }
    }
    both_receive(&vm);
    for round in 0..3_u16 {
        backend.kill_and_start();
        // The driver knows nothing of it, and sends.
        for head in [0, 1] {
            let frame = [&[0; 12][..], &datagram(&[head, 7])].concat();
            let at = DATA + u64::from(head) * 4096;
            vm.put(at, &frame);
            let bytes = u32::try_from(frame.len()).unwrap();
            vm.describe(descriptors(TX), head.into(), (at, bytes), 0, 0);
            vm.publish(TX, head.into());
        }
        vm.reconnect_as_cloud_hypervisor(&backend.socket());
        vm.wait_used(TX, 2 * (round + 1));
        for head in [0, 1] {
            let mut got = [0; 10];
            let length = socket.recv(&mut got).unwrap();
            assert_eq!(got[..length], [head, 7]);
        }
        both_receive(&vm);
    }
    assert_eq!(backend.metric("broken_queues"), 0);
}
