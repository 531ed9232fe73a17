//! The stream of a connection: the version that is agreed on, messages in pieces, and how it ends.

#![allow(clippy::unwrap_used)]

mod common;

use common::{INTX, PAGE, Served, memfd, refused, say_a_part};
use farlane_vfio_user::wire::{self, Command, HEADER_BYTES, Header};
use farlane_vfio_user::{Errno, MAX_TRANSFER_BYTES};
use farlane_vm_front_end::vfio_user::{CAPABILITIES, ClientError, RawClient};
use rustix::event::{EventfdFlags, eventfd};
use std::io::Read as _;
use std::os::fd::AsFd as _;
use zerocopy::IntoBytes as _;

#[test]
fn the_version_is_agreed_before_anything_else() {
    let served = Served::start();
    let mut peer = RawClient::connect(&served.path).unwrap();
    refused(peer.device_info(), Errno::INVAL);
    assert!(matches!(peer.receive(), Err(ClientError::Closed)));
    assert!(served.log.take().is_empty());

    for body in [
        &[1, 0, 0, 0][..],
        &[0, 0, 0],
        &[0, 0, 0, 0, b'{', b'}'],
        &[0, 0, 0, 0, b'{', 0],
    ] {
        let mut peer = RawClient::connect(&served.path).unwrap();
        refused(peer.call(Command::Version, body, &[]), Errno::INVAL);
        assert!(matches!(peer.receive(), Err(ClientError::Closed)));
    }
    assert!(served.log.take().is_empty());

    let mut peer = RawClient::connect(&served.path).unwrap();
    let said = peer.negotiate(CAPABILITIES).unwrap();
    let expected = concat!(
        r#"{"capabilities":{"max_msg_fds":16,"max_data_xfer_size":1048576,"#,
        r#""max_dma_maps":4096,"pgsizes":4096,"write_multiple":true}}"#
    );
    assert_eq!(said, expected);
    refused(
        peer.call(Command::Version, &[0, 0, 0, 0], &[]),
        Errno::INVAL,
    );
    assert_eq!(peer.device_info().unwrap().num_regions, 9);
    assert_eq!(served.log.take(), ["connected"]);
}

#[test]
fn the_answer_has_the_lower_minor_version() {
    let served = Served::start();
    for (asked, answered) in [(0, 0), (1, 1), (2, 1), (u16::MAX, 1)] {
        let mut peer = RawClient::connect(&served.path).unwrap();
        let version = wire::Version {
            major: 0,
            minor: asked,
        };
        let reply = peer
            .call(Command::Version, version.as_bytes(), &[])
            .unwrap();
        let (version, _) = reply.split::<wire::Version>().unwrap();
        assert_eq!((version.major, version.minor), (0, answered));
    }
}

#[test]
fn what_is_not_there_is_refused_and_the_stream_stays_in_step() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    for command in [
        Command::DirtyPages,
        Command::DeviceFeature,
        Command::MigDataRead,
        Command::MigDataWrite,
    ] {
        for length in [0, 8, 5000] {
            refused(peer.call(command, &vec![1; length], &[]), Errno::OPNOTSUPP);
        }
    }
    for command in [Command::DmaRead, Command::DmaWrite] {
        refused(peer.call(command, &[0; 16], &[]), Errno::INVAL);
    }
    for (command, flags, errno) in [
        (0, 0, Errno::NOSYS),
        (19, 0, Errno::NOSYS),
        (u16::MAX, 0, Errno::NOSYS),
        (4, 2, Errno::INVAL),
        (4, wire::FLAG_ERROR, Errno::INVAL),
        (4, 0x8000_0000, Errno::INVAL),
    ] {
        let header = Header {
            id: 0xbeef,
            command,
            size: 16 + 777,
            flags,
            error: 0,
        };
        peer.send(&header, &[3; 777], &[]).unwrap();
        let reply = peer.receive().unwrap();
        assert_eq!((reply.header.id, reply.header.command), (0xbeef, command));
        assert_eq!(reply.error(), Some(errno));
    }
    // Descriptors that do not belong there.
    let file = memfd(PAGE);
    refused(
        peer.call(Command::DeviceReset, &[], &[file.as_fd()]),
        Errno::INVAL,
    );
    let ask = [16_u32, 0, 0, 0];
    let fds = [file.as_fd(); 253];
    refused(
        peer.call(Command::DeviceGetInfo, ask.as_bytes(), &fds),
        Errno::INVAL,
    );
    assert_eq!(peer.device_info().unwrap().num_regions, 9);
}

#[test]
fn a_header_that_cannot_be_right_ends_the_connection_and_nothing_else() {
    let served = Served::start();
    for size in [0, 1, 15, 16 + 16 + MAX_TRANSFER_BYTES + 1, u32::MAX] {
        let mut peer = RawClient::negotiated(&served.path).unwrap();
        let header = Header {
            id: 1,
            command: Command::DeviceGetInfo.to_wire(),
            size,
            ..Header::default()
        };
        peer.send(&header, &[], &[]).unwrap();
        assert!(matches!(peer.receive(), Err(ClientError::Closed)), "{size}");
    }
    // One that ends within its message.
    for length in [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3] {
        let mut peer = RawClient::negotiated(&served.path).unwrap();
        say_a_part(&mut peer, length, &[]);
        drop(peer);
    }
    RawClient::negotiated(&served.path)
        .unwrap()
        .device_info()
        .unwrap();
}

#[test]
fn a_message_may_come_in_pieces_and_several_at_once() {
    let served = Served::start();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let set = [
        20_u32,
        wire::IRQ_SET_DATA_EVENTFD | wire::IRQ_SET_ACTION_TRIGGER,
        INTX,
        0,
        1,
    ];
    let header = Header {
        id: 9,
        command: Command::DeviceSetIrqs.to_wire(),
        size: 36,
        ..Header::default()
    };
    served.log.take();
    let bytes = [header.as_bytes(), set.as_bytes()].concat();
    peer.send_bytes(&bytes[..1], &[event.as_fd()]).unwrap();
    for byte in &bytes[1..] {
        peer.send_bytes(&[*byte], &[]).unwrap();
    }
    assert_eq!(peer.reply(Command::DeviceSetIrqs, 9).unwrap().header.id, 9);
    assert_eq!(served.log.take(), ["bind 0 0 Trigger [true]"]);

    let reset = |id| Header {
        id,
        command: Command::DeviceReset.to_wire(),
        size: 16,
        ..Header::default()
    };
    let many: Vec<u8> = (0..500)
        .flat_map(|id| reset(id).as_bytes().to_vec())
        .collect();
    peer.send_bytes(&many, &[]).unwrap();
    for id in 0..500 {
        assert_eq!(peer.receive().unwrap().header.id, id);
    }
}

#[test]
fn a_client_that_says_nothing_does_not_keep_the_device_from_others() {
    let served = Served::start();
    let mut silent = RawClient::connect(&served.path).unwrap();
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    assert!(matches!(silent.receive(), Err(ClientError::Closed)));
    peer.device_info().unwrap();
}

#[test]
fn a_client_that_answers_before_it_is_asked_does_not_keep_the_device_from_others() {
    let served = Served::start();
    let mut odd = RawClient::connect(&served.path).unwrap();
    let header = Header {
        id: 1,
        command: 11,
        size: 16,
        flags: wire::TYPE_REPLY,
        error: 0,
    };
    odd.send(&header, &[], &[]).unwrap();
    assert!(matches!(odd.receive(), Err(ClientError::Closed)));
    RawClient::negotiated(&served.path).unwrap();
}

/// QEMU 11.1 does not survive an error where it reads a header.
#[test]
fn who_is_dropped_with_messages_unread_finds_the_end_of_the_stream() {
    let served = Served::start();
    let finds_the_end = |peer: &RawClient| {
        let mut socket = peer.socket();
        assert_eq!(socket.read(&mut [0; 64]).unwrap(), 0);
    };
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    peer.send_bytes(&[0xff; 4096], &[]).unwrap();
    served.log.wait_for("disconnected", 1);
    finds_the_end(&peer);

    // It has begun a message, and the server is told to end: so it would at SIGTERM.
    let mut peer = RawClient::negotiated(&served.path).unwrap();
    peer.send_bytes(&[0; 4], &[]).unwrap();
    served.end.stop();
    served.log.wait_for("disconnected", 2);
    finds_the_end(&peer);
    let peer = RawClient::connect(&served.path).unwrap();
    finds_the_end(&peer);
}
