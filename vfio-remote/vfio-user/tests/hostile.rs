//! Clients that mean harm. Counts the descriptors of the whole process, so everything is one test.

#![allow(clippy::unwrap_used)]

mod common;

use common::{BAR, PAGE, PATIENCE, Served, memfd, say_a_part};
use farlane_attacks::vfio_user::attack;
use farlane_vfio_user::wire::Command;
use farlane_vm_front_end::vfio_user::{CAPABILITIES, ClientError, RawClient};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;
use zerocopy::IntoBytes as _;

const MESSAGES: u64 = 10_000;

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// All that a good client does.
fn use_as_usual(served: &Served) {
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let ram = memfd(4 * PAGE);
    peer.map(0, 4 * PAGE, Some((ram.as_fd(), 0))).unwrap();
    peer.write(BAR, 8, b"good").unwrap();
    assert_eq!(peer.read(BAR, 8, 4).unwrap(), b"good");
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    peer.set_irqs(4 | 32, (2, 0, 1), &[], &[event.as_fd()])
        .unwrap();
    peer.unmap(0, 0, 4 * PAGE).unwrap();
    peer.call(Command::DeviceReset, &[], &[]).unwrap();
    drop(peer);
    served.log.wait_for("disconnected", 1);
    served.log.with(|seen| {
        seen.events.clear();
        seen.files.clear();
    });
}

/// Uses a device all the time; nothing that others do to theirs may be seen.
fn work(served: &Served, stop: &AtomicBool) -> u64 {
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let mut rounds = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        let value = rounds.to_le_bytes();
        peer.write(BAR, 0, &value).unwrap();
        assert_eq!(peer.read(BAR, 0, 8).unwrap(), value);
        rounds += 1;
        thread::yield_now();
    }
    rounds
}

/// Also where the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn hostile_clients_harm_nobody_but_themselves() {
    let attacked = Served::start();
    let neighbour = Served::start();
    let before = open_descriptors();
    use_as_usual(&attacked);

    let stop = AtomicBool::new(false);
    let worked = thread::scope(|scope| {
        let worker = scope.spawn(|| work(&neighbour, &stop));
        let stopped = StopOnDrop(&stop);
        let attacks: Vec<_> = (0..3)
            .map(|seed| attack(&attacked.path, seed, MESSAGES / 3 + 1).unwrap())
            .collect();
        stuck_clients(&attacked);
        drop(stopped);
        for outcome in attacks {
            let each = outcome.by_command.values().copied().min().unwrap();
            assert!(
                outcome.refused > 1000 && outcome.accepted > 100,
                "{outcome:?}"
            );
            assert!(
                outcome.ended > 20 && outcome.by_command.len() >= 20,
                "{outcome:?}"
            );
            assert!(each >= 1, "{outcome:?}");
        }
        worker.join().unwrap()
    });
    assert!(worked > 0);
    neighbour.log.wait_for("disconnected", 1);

    // The last connection of the attack has been taken apart when the next client is there.
    drop(RawClient::negotiated(&attacked.path).unwrap());
    attacked.log.wait_for("disconnected", 2);
    attacked.log.with(|seen| {
        seen.events.clear();
        seen.files.clear();
    });
    use_as_usual(&attacked);
    // The server closes the last connection after it has told the device.
    let deadline = Instant::now() + PATIENCE;
    while open_descriptors() != before {
        assert!(
            Instant::now() < deadline,
            "{} descriptors, not {before}",
            open_descriptors()
        );
        thread::yield_now();
    }
}

/// Clients that stop in the middle of something, or send descriptors and no message.
fn stuck_clients(served: &Served) {
    let file = memfd(PAGE);
    let many = vec![file.as_fd(); 253];
    for length in [1, 15, 16, 20] {
        let mut peer = RawClient::negotiated(&served.path).unwrap();
        say_a_part(&mut peer, length, &many);
    }
    // As many descriptors as there are bytes of a header, and more than a message can have.
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    for _ in 0..16 {
        if peer.send_bytes(&[0], &many).is_err() {
            break;
        }
    }
    assert!(matches!(peer.receive(), Err(ClientError::Closed)));

    // One that never takes its replies: it goes on until the server has had enough of it.
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let ask = [16_u32, 0, 0, 0];
    let end = loop {
        if let Err(error) = peer.command(Command::DeviceGetInfo, 0, ask.as_bytes(), &[]) {
            break error;
        }
    };
    assert!(matches!(end, ClientError::Closed), "{end}");

    // One that waits for its turn while another is there: it does not disturb.
    let mut first = RawClient::negotiated(&served.path).unwrap();
    let mut second = RawClient::connect(&served.path).unwrap();
    second.command(Command::DeviceReset, 0, &[], &[]).unwrap();
    drop(second);
    let third = thread::scope(|scope| {
        let third = scope.spawn(|| {
            let mut third = RawClient::connect(&served.path).unwrap();
            third.negotiate(CAPABILITIES).unwrap();
            third
        });
        first.write(BAR, 0, &[1]).unwrap();
        assert_eq!(first.read(BAR, 0, 1).unwrap(), [1]);
        drop(first);
        third.join().unwrap()
    });
    drop(third);
}
