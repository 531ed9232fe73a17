//! A flow that is to go to another queue pair, and frames that the driver has not taken from the
//! one before, or never takes.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
#[path = "common/feed.rs"]
mod feed;
#[path = "common/vmm.rs"]
mod vmm;

pub use common::PATIENCE;
use common::{GUEST, HOST};
use farlane_vm_front_end::net::frame::udp;
use feed::Feed;
use std::sync::atomic::Ordering;
use vmm::{DATA, SIZE, Vm, WRITE, descriptors, used};

/// Receive and transmit queues of both pairs.
const RX: [usize; 2] = [0, 2];
const TX: [usize; 2] = [1, 3];
const BUFFER_BYTES: u32 = 1024;

/// The guest sends something of the flow.
fn send(vm: &mut Vm, queue: usize, count: u16) {
    let frame = [&[0; 12][..], &udp(&GUEST, &HOST, b"out")].concat();
    vm.put(DATA, &frame);
    let bytes = u32::try_from(frame.len()).unwrap();
    vm.describe(descriptors(queue), 0, (DATA, bytes), 0, 0);
    vm.publish(queue, 0);
    vm.wait_used(queue, count);
}

/// A VM whose receive queues are full of buffers, and has sent something of the flow on the first
/// pair.
fn boot(feed: &Feed) -> Vm {
    let mut vm = Vm::boot(&feed.socket());
    for (half, queue) in (0..).zip(RX) {
        for head in 0..SIZE {
            let number = u64::from(half * SIZE + head);
            let at = DATA + 0x1_0000 + number * u64::from(BUFFER_BYTES);
            vm.describe(descriptors(queue), head, (at, BUFFER_BYTES), WRITE, 0);
            vm.publish(queue, head);
        }
    }
    send(&mut vm, TX[0], 1);
    vm
}

/// Of so many used buffers of the first pair the driver has all but the last. The flow is to go to
/// the second pair: it waits for that one, in vain, and stays.
fn stays(feed: &Feed, vm: &mut Vm, buffers: u16) {
    vm.wait_used(RX[0], buffers);
    for head in 0..buffers - 1 {
        vm.publish(RX[0], head);
    }
    for count in 1..3 {
        send(vm, TX[1], count);
    }
    feed.put(0, udp(&HOST, &GUEST, b"next"));
    vm.wait_used(RX[0], buffers + 1);
    assert_eq!(vm.word(used(RX[1]) + 2), 0);
}

#[test]
fn it_waits_for_the_last_buffer_of_a_frame_that_takes_more_than_were_expected() {
    let feed = Feed::start(2);
    let mut vm = boot(&feed);
    feed.put(0, udp(&HOST, &GUEST, &[7; 4900]));
    stays(&feed, &mut vm, 5);
}

#[test]
fn it_waits_for_the_last_buffer_of_a_frame_that_another_worker_has_read() {
    let feed = Feed::start(2);
    let mut vm = boot(&feed);
    feed.put(0, udp(&HOST, &GUEST, b"first"));
    vm.wait_used(RX[0], 1);
    feed.put(1, udp(&HOST, &GUEST, &[7; 4900]));
    stays(&feed, &mut vm, 6);
}

#[test]
fn frames_that_wait_for_a_pair_that_the_driver_gives_up_are_dropped_and_counted() {
    let feed = Feed::start(2);
    // It has no buffers.
    let vm = Vm::boot(&feed.socket());
    for (queue, count) in [(0, 3), (1, 7)] {
        for _ in 0..count {
            feed.put(queue, udp(&HOST, &GUEST, b"waits"));
        }
    }
    let dropped = || feed.interface.counters.rx_dropped.load(Ordering::Relaxed);
    vm.must_stop(RX[1]);
    assert_eq!(dropped(), 7);
    // It pauses.
    vm.must_stop(RX[0]);
    assert_eq!(dropped(), 7);
}
