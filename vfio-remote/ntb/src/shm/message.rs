//! Packets of the socket between the two ends, and the descriptors beside them.

use crate::{FileRange, NtbError};
use farlane_sys::socket;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::io::IoSlice;
use std::os::fd::{BorrowedFd, OwnedFd};
use zerocopy::{FromBytes, FromZeros as _, Immutable, IntoBytes, KnownLayout};

/// Descriptors that a packet can carry.
const MAX_DESCRIPTORS: usize = 2;
pub(super) const MAGIC: u32 = u32::from_le_bytes(*b"FNTB");
pub(super) const VERSION: u32 = 1;

const HELLO: u32 = 1;
const SET: u32 = 2;
const CLEAR: u32 = 3;
const REPLY: u32 = 4;

/// A packet as it is sent: both ends are processes of one host, so words have its byte order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Packet {
    kind: u32,
    /// Hello: magic number. Set, clear: window. Reply: reason of a refusal, or zero.
    first: u32,
    /// Hello: version. Set: whether it can be written.
    second: u32,
    reserved: u32,
    /// Set, clear, reply: which request.
    sequence: u64,
    offset: u64,
    length: u64,
}

/// Why an end refuses a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Window,
    Taken,
    Range,
    File,
}

impl Refusal {
    const ALL: [Self; 4] = [Self::Window, Self::Taken, Self::Range, Self::File];

    fn code(self) -> u32 {
        match self {
            Self::Window => 1,
            Self::Taken => 2,
            Self::Range => 3,
            Self::File => 4,
        }
    }

    pub fn describe(self) -> &'static str {
        match self {
            Self::Window => "it has no such window",
            Self::Taken => "the window has a translation",
            Self::Range => "its limits do not allow the range",
            Self::File => "it does not accept the file",
        }
    }
}

/// What one end says to the other.
#[derive(Debug)]
pub(super) enum Message {
    /// First message: here is my control page and my doorbell's eventfd.
    Hello { control: OwnedFd, doorbell: OwnedFd },
    /// My window shows this from now on.
    Set {
        sequence: u64,
        window: u32,
        offset: u64,
        length: u64,
        writable: bool,
        file: OwnedFd,
    },
    /// My window shows nothing from now on.
    Clear { sequence: u64, window: u32 },
    /// I have done as you said, or not.
    Reply {
        sequence: u64,
        outcome: Result<(), Refusal>,
    },
}

/// What has come.
#[derive(Debug)]
pub(super) enum Incoming {
    /// Nothing, for now.
    Nothing,
    /// The other end has hung up.
    End,
    /// This.
    Message(Message),
}

pub(super) fn receive(socket: BorrowedFd<'_>) -> Result<Incoming, NtbError> {
    // One byte more than a packet has shows that one is too long.
    let mut bytes = [0; size_of::<Packet>() + 1];
    let flags = RecvFlags::DONTWAIT;
    let got = match socket::receive(socket, &mut bytes, MAX_DESCRIPTORS, flags) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Incoming::Nothing),
        Err(Errno::CONNRESET) => return Ok(Incoming::End),
        Err(e) => return Err(NtbError::io("receive from the other end")(e)),
    };
    if got.bytes == 0 {
        return Ok(Incoming::End);
    }
    if got.has_lost_descriptors {
        return Err(NtbError::Protocol("too many descriptors"));
    }
    let bytes = bytes.get(..got.bytes).unwrap_or_default();
    parse(bytes, got.descriptors).map(Incoming::Message)
}

fn parse(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<Message, NtbError> {
    let packet =
        Packet::read_from_bytes(bytes).map_err(|_| NtbError::Protocol("a packet's length"))?;
    let mut descriptors = descriptors.into_iter();
    let mut next = || {
        let missing = NtbError::Protocol("a descriptor is missing");
        descriptors.next().ok_or(missing)
    };
    let message = match packet.kind {
        HELLO if (packet.first, packet.second) == (MAGIC, VERSION) => Message::Hello {
            control: next()?,
            doorbell: next()?,
        },
        HELLO => return Err(NtbError::Protocol("it has another version")),
        SET => Message::Set {
            sequence: packet.sequence,
            window: packet.first,
            offset: packet.offset,
            length: packet.length,
            writable: match packet.second {
                0 => false,
                1 => true,
                _ => return Err(NtbError::Protocol("a flag")),
            },
            file: next()?,
        },
        CLEAR => Message::Clear {
            sequence: packet.sequence,
            window: packet.first,
        },
        REPLY => Message::Reply {
            sequence: packet.sequence,
            outcome: if packet.first == 0 {
                Ok(())
            } else {
                let known = Refusal::ALL.into_iter().find(|r| r.code() == packet.first);
                Err(known.ok_or(NtbError::Protocol("a reason"))?)
            },
        },
        _ => return Err(NtbError::Protocol("a packet's kind")),
    };
    if descriptors.next().is_some() {
        return Err(NtbError::Protocol("a descriptor too many"));
    }
    Ok(message)
}

fn send(socket: BorrowedFd<'_>, packet: &Packet, fds: &[BorrowedFd<'_>]) -> Result<(), NtbError> {
    // Who leaves so much unread that a packet finds no room is not waited for.
    match socket::send(
        socket,
        &[IoSlice::new(packet.as_bytes())],
        fds,
        SendFlags::DONTWAIT,
    ) {
        Ok(_) => Ok(()),
        Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Err(NtbError::LinkDown),
        Err(e) => Err(NtbError::io("send to the other end")(e)),
    }
}

pub(super) fn send_hello(
    socket: BorrowedFd<'_>,
    control: BorrowedFd<'_>,
    doorbell: BorrowedFd<'_>,
) -> Result<(), NtbError> {
    let packet = Packet {
        kind: HELLO,
        first: MAGIC,
        second: VERSION,
        ..Packet::new_zeroed()
    };
    send(socket, &packet, &[control, doorbell])
}

pub(super) fn send_set(
    socket: BorrowedFd<'_>,
    sequence: u64,
    window: u32,
    shown: FileRange<'_>,
) -> Result<(), NtbError> {
    let packet = Packet {
        kind: SET,
        first: window,
        second: shown.writable.into(),
        reserved: 0,
        sequence,
        offset: shown.offset,
        length: shown.length,
    };
    send(socket, &packet, &[shown.file])
}

pub(super) fn send_clear(
    socket: BorrowedFd<'_>,
    sequence: u64,
    window: u32,
) -> Result<(), NtbError> {
    let packet = Packet {
        kind: CLEAR,
        first: window,
        sequence,
        ..Packet::new_zeroed()
    };
    send(socket, &packet, &[])
}

pub(super) fn send_reply(
    socket: BorrowedFd<'_>,
    sequence: u64,
    outcome: Result<(), Refusal>,
) -> Result<(), NtbError> {
    let packet = Packet {
        kind: REPLY,
        first: outcome.map_or_else(Refusal::code, |()| 0),
        sequence,
        ..Packet::new_zeroed()
    };
    send(socket, &packet, &[])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn descriptors(count: usize) -> Vec<OwnedFd> {
        let null = || std::fs::File::open("/dev/null").unwrap().into();
        std::iter::repeat_with(null).take(count).collect()
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..60),
            kind in 0_u8..6,
            count in 0_usize..3,
        ) {
            let _ = parse(&bytes, descriptors(count));
            // The same, closer to what is valid.
            let mut packet = [0; size_of::<Packet>()];
            for (to, from) in packet.iter_mut().zip(&bytes) {
                *to = *from;
            }
            packet[..4].copy_from_slice(&u32::from(kind).to_ne_bytes());
            let message = parse(&packet, descriptors(count));
            let wanted = match kind {
                1 => 2,
                2 => 1,
                3 | 4 => 0,
                _ => usize::MAX,
            };
            prop_assert!(message.is_err() || count == wanted);
        }
    }

    #[test]
    fn refusals_have_codes_of_their_own() {
        for refusal in Refusal::ALL {
            let packet = Packet {
                kind: REPLY,
                first: refusal.code(),
                ..Packet::new_zeroed()
            };
            let Message::Reply { outcome, .. } = parse(packet.as_bytes(), Vec::new()).unwrap()
            else {
                panic!("not a reply");
            };
            assert_eq!(outcome, Err(refusal));
        }
    }
}
