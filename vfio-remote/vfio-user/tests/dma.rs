//! Memory that is reached by messages.

#![allow(clippy::unwrap_used)]

mod common;

use common::{BAR, PAGE, Served};
use farlane_vfio_user::wire::{self, Command, DmaAccess, Header};
use farlane_vfio_user::{Client, ClientError, Errno, MAX_TRANSFER_BYTES};
use farlane_vm_front_end::vfio_user::{ClientError as RawError, Message, RawClient};
use std::sync::{Arc, Barrier};
use std::thread;
use zerocopy::IntoBytes as _;

/// Answers the server's messages about a memory that begins at address 0, until the server goes or
/// one comes that begins at `until`, which is not answered. Returns the sizes of the transfers.
fn answer(peer: &mut RawClient, memory: &mut [u8], until: u64) -> Vec<u64> {
    let mut sizes = Vec::new();
    loop {
        let message = match peer.receive() {
            Ok(message) => message,
            Err(RawError::Closed) => return sizes,
            Err(error) => panic!("{error}"),
        };
        assert!(!message.is_reply() && message.fds.is_empty());
        let (access, data) = message.split::<DmaAccess>().unwrap();
        if access.address == until {
            return sizes;
        }
        sizes.push(access.count);
        let from = usize::try_from(access.address).unwrap();
        let to = from + usize::try_from(access.count).unwrap();
        let target = &mut memory[from..to];
        let read = Command::from_wire(message.header.command).unwrap() == Command::DmaRead;
        if read {
            reply(peer, &message, 0, &[access.as_bytes(), target].concat());
        } else {
            target.copy_from_slice(data);
            reply(peer, &message, 0, access.as_bytes());
        }
    }
}

fn reply(peer: &mut RawClient, to: &Message, error: u32, body: &[u8]) {
    let flags = wire::TYPE_REPLY | if error == 0 { 0 } else { wire::FLAG_ERROR };
    let header = Header {
        size: u32::try_from(16 + body.len()).unwrap(),
        flags,
        error,
        ..to.header
    };
    peer.send(&header, body, &[]).unwrap();
}

const END: u64 = 1 << 40;

/// A server, its client, and what its device reaches the client's memory by.
fn negotiated() -> (Served, RawClient, Client) {
    let served = Served::start();
    let peer = RawClient::negotiated(&served.path).unwrap();
    let client = served.log.client();
    (served, peer, client)
}

/// `count` bytes at `address`.
fn access(address: u64, count: u64) -> DmaAccess {
    DmaAccess { address, count }
}

/// Answers a read of one byte at address 0.
fn reply_byte(peer: &mut RawClient, to: &Message, byte: u8) {
    reply(peer, to, 0, &[access(0, 1).as_bytes(), &[byte]].concat());
}

/// An answer that comes too late is not taken for one to the next question.
fn is_not_taken_late(peer: &mut RawClient, client: Client, late: &Message) {
    let worker = thread::spawn(move || {
        let mut byte = [0];
        client.read(0, &mut byte).unwrap();
        byte
    });
    let question = peer.receive().unwrap();
    reply_byte(peer, late, 1);
    reply_byte(peer, &question, 2);
    assert_eq!(worker.join().unwrap(), [2]);
}

#[test]
fn memory_without_a_file_is_read_and_written_by_messages() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    peer.map(0, 16 << 20, None).unwrap();
    let client = served.log.client();
    let transfer = usize::try_from(MAX_TRANSFER_BYTES).unwrap();
    let worker = thread::spawn(move || {
        let data: Vec<u8> = (0..2 * transfer + 5).map(|i| i.to_le_bytes()[0]).collect();
        client.write(3, &data).unwrap();
        let mut back = vec![0; data.len()];
        client.read(3, &mut back).unwrap();
        assert!(data == back);
        client.read(0, &mut []).unwrap();
        drop(client.read(END, &mut [0]));
    });
    let mut memory = vec![0; 4 << 20];
    let sizes = answer(&mut peer, &mut memory, END);
    let full = u64::from(MAX_TRANSFER_BYTES);
    assert_eq!(sizes, [full, full, 5, full, full, 5]);
    assert_eq!(memory[..6], [0, 0, 0, 0, 1, 2]);
    drop(peer);
    worker.join().unwrap();
    let counters = served.counters();
    assert_eq!((counters.dma_reads, counters.dma_writes), (3, 3));
}

#[test]
fn transfers_are_as_long_as_the_client_takes() {
    let served = Served::start();
    let mut peer = RawClient::connect(&served.path).unwrap();
    peer.negotiate(r#"{"capabilities":{"max_data_xfer_size":100}}"#)
        .unwrap();
    let client = served.log.client();
    let worker = thread::spawn(move || {
        client.write(0, &[7; 250]).unwrap();
        drop(client.read(END, &mut [0]));
    });
    assert_eq!(answer(&mut peer, &mut [0; 250], END), [100, 100, 50]);
    drop(peer);
    worker.join().unwrap();
}

#[test]
fn threads_do_not_get_each_others_answers() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let start = Arc::new(Barrier::new(4));
    let workers: Vec<_> = (0..4_u8)
        .map(|number| {
            let client = served.log.client();
            let start = Arc::clone(&start);
            thread::spawn(move || {
                start.wait();
                let at = u64::from(number) * 1000;
                for round in 0..200 {
                    let data = [number, round, number ^ round];
                    client.write(at, &data).unwrap();
                    let mut back = [0; 3];
                    client.read(at, &mut back).unwrap();
                    assert_eq!(back, data);
                }
            })
        })
        .collect();
    let client = served.log.client();
    let ends = thread::spawn(move || {
        for worker in workers {
            worker.join().unwrap();
        }
        drop(client.read(END, &mut [0]));
    });
    let sizes = answer(&mut peer, &mut [0; 4096], END);
    assert_eq!(sizes.len(), 4 * 200 * 2);
    drop(peer);
    ends.join().unwrap();
}

#[test]
fn commands_are_served_while_an_answer_is_awaited() {
    let (_served, mut peer, client) = negotiated();
    let worker = thread::spawn(move || {
        let mut data = [0; 4];
        client.read(0x1000, &mut data).unwrap();
        data
    });
    let question = peer.receive().unwrap();
    peer.write(BAR, 0, &[1]).unwrap();
    assert_eq!(peer.read(BAR, 0, 1).unwrap(), [1]);
    let (access, _) = question.split::<DmaAccess>().unwrap();
    let body = [access.as_bytes(), b"late"].concat();
    reply(&mut peer, &question, 0, &body);
    assert_eq!(&worker.join().unwrap(), b"late");
}

#[test]
fn who_waits_for_an_answer_is_told_that_the_client_has_gone() {
    let (served, mut peer, client) = negotiated();
    let worker = thread::spawn({
        let client = client.clone();
        move || client.write(0, &[1])
    });
    peer.receive().unwrap();
    drop(peer);
    assert!(matches!(worker.join().unwrap(), Err(ClientError::Gone)));
    served.log.wait_for("disconnected", 1);
    assert!(matches!(client.read(0, &mut [0]), Err(ClientError::Gone)));
}

#[test]
fn the_device_can_end_the_connection() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    served.log.client().disconnect();
    assert!(matches!(peer.receive(), Err(RawError::Closed)));
    served.log.wait_for("disconnected", 1);
    RawClient::negotiated(&served.path).unwrap();
}

#[test]
fn a_call_out_of_the_thread_that_takes_answers_fails_instead_of_waiting_for_itself() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    served.log.with(|seen| seen.read_within = Some(PAGE));
    peer.write(BAR, 0, &[1]).unwrap();
    served.log.wait_for("within: Err(OwnThread)", 1);
}

#[test]
fn while_answers_are_not_taken_nobody_waits_for_one() {
    let (_served, mut peer, client) = negotiated();
    let worker = thread::spawn({
        let client = client.clone();
        move || client.read(0, &mut [0])
    });
    let late = peer.receive().unwrap();
    let held_off = client.pause_access();
    // Also if that is over before it has noticed.
    let other = client.pause_access();
    drop(other);
    for result in [worker.join().unwrap(), client.write(0, &[1])] {
        let pauses = matches!(result, Err(ClientError::AccessPause));
        assert!(pauses, "{result:?}");
    }
    drop(held_off);
    is_not_taken_late(&mut peer, client, &late);
}

#[test]
fn answers_that_are_errors_or_malformed_fail_the_access_and_nothing_else() {
    let (_served, mut peer, client) = negotiated();
    let worker = thread::spawn(move || {
        let mut data = [0; 4];
        let results: Vec<_> = (0..8).map(|_| client.read(0, &mut data)).collect();
        client.write(0, &data).unwrap();
        client.write(0, &data).unwrap();
        assert!(matches!(
            client.write(0, &data),
            Err(ClientError::Malformed)
        ));
        let wrap = client.read(u64::MAX, &mut data);
        assert!(matches!(wrap, Err(ClientError::Range { .. })));
        results
    });
    let (wrong, right) = (access(1, 4), access(0, 4));
    let bodies: [&[&[u8]]; 6] = [
        &[],
        &[&[0; 15]],
        &[right.as_bytes()],
        &[right.as_bytes(), &[0; 3]],
        &[right.as_bytes(), &[0; 5]],
        &[wrong.as_bytes(), &[0; 4]],
    ];
    for body in bodies {
        let question = peer.receive().unwrap();
        reply(&mut peer, &question, 0, &body.concat());
    }
    let efault = u32::try_from(Errno::FAULT.raw_os_error()).unwrap();
    for (error, body) in [
        (efault, &[][..]),
        (u32::MAX, &[]),
        // QEMU's answer to a write has no body, the protocol's text has 12 bytes.
        (0, &[]),
        (0, &right.as_bytes()[..12]),
        (0, wrong.as_bytes()),
    ] {
        let question = peer.receive().unwrap();
        reply(&mut peer, &question, error, body);
    }
    let results = worker.join().unwrap();
    for result in &results[..6] {
        assert!(matches!(result, Err(ClientError::Malformed)), "{result:?}");
    }
    assert!(matches!(
        results[6],
        Err(ClientError::Refused(Errno::FAULT))
    ));
    assert!(matches!(results[7], Err(ClientError::Refused(Errno::IO))));
    // Replies to nothing are dropped.
    for id in [0, 1, 77, u16::MAX] {
        let header = Header {
            id,
            command: Command::DmaRead.to_wire(),
            size: 20,
            flags: wire::TYPE_REPLY,
            error: 0,
        };
        peer.send(&header, &[1; 4], &[]).unwrap();
    }
    assert_eq!(peer.device_info().unwrap().num_regions, 9);
}

#[test]
fn a_client_that_does_not_answer_is_not_waited_for_for_ever() {
    let (_served, mut peer, client) = negotiated();
    let result = thread::spawn({
        let client = client.clone();
        move || client.read(0, &mut [0])
    });
    let late = peer.receive().unwrap();
    let result = result.join().unwrap();
    assert!(matches!(result, Err(ClientError::Timeout)), "{result:?}");
    is_not_taken_late(&mut peer, client, &late);
}
