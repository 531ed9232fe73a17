//! Frames of a flow that come from another queue of the port than the ones before them.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
#[path = "common/feed.rs"]
mod feed;

use common::{GUEST, HOST, PATIENCE, next_datagram};
use farlane_vm_front_end::net::frame::{End, udp};
use farlane_vm_front_end::net::{Nic, feature};
use feed::Feed;
use std::time::Instant;

/// Somebody of whom no frame is waited for.
const NOISE: End = End { port: 9, ..HOST };

/// An interface with a flow whose process is on pair 0, from whose queue of the port it has come so
/// far. That queue is never empty again.
fn busy() -> (Feed, Nic) {
    let feed = Feed::start(2);
    let mut nic = feed.connect(feature::PLAIN);
    nic.send(0, &udp(&GUEST, &HOST, b"out")).unwrap();
    nic.drain().unwrap();
    feed.put(0, udp(&HOST, &GUEST, b"first"));
    let (queue, _, payload) = next_datagram(&mut nic);
    assert_eq!((queue, &payload[..]), (0, &b"first"[..]));
    feed.never_empty(0, udp(&NOISE, &GUEST, b"noise"));
    (feed, nic)
}

#[test]
fn they_do_not_wait_for_ever_for_a_queue_that_is_never_empty() {
    let (feed, mut nic) = busy();
    feed.put(1, udp(&HOST, &GUEST, b"second"));
    let end = Instant::now() + PATIENCE;
    while next_datagram(&mut nic).2 != b"second" {
        assert!(Instant::now() < end, "it waits for ever");
    }
}

#[test]
fn those_that_wait_let_frames_of_other_flows_pass() {
    let (feed, mut nic) = busy();
    let other = End { port: 7777, ..HOST };
    nic.send(0, &udp(&GUEST, &other, b"out")).unwrap();
    nic.drain().unwrap();
    for _ in 0..3000 {
        feed.put(1, udp(&HOST, &GUEST, b"waits"));
    }
    let end = Instant::now() + PATIENCE;
    'passed: loop {
        assert!(Instant::now() < end, "nothing passes");
        feed.put(1, udp(&other, &GUEST, b"passes"));
        for _ in 0..200 {
            if next_datagram(&mut nic).2 == b"passes" {
                break 'passed;
            }
        }
    }
}
