//! Packets of the host socket and the descriptors that travel beside them.

use farlane_abi::control::Reply;
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_guest_device::request::MAX_HOST_REQUEST_BYTES;
use farlane_sys::socket::{self, MAX_DESCRIPTORS};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::io::IoSlice;
use std::os::fd::{BorrowedFd, OwnedFd};

/// A received packet, or why there is none.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// No packet has arrived yet.
    Nothing,
    /// The peer has hung up, or the connection is broken.
    End,
    /// A packet. Its descriptors are closed with it.
    Packet {
        /// Its bytes; more than a request's where it is longer than one.
        bytes: Vec<u8>,
        /// Descriptors that were sent with it.
        descriptors: Vec<OwnedFd>,
    },
}

pub(crate) fn receive(socket: BorrowedFd<'_>) -> Incoming {
    // One byte more than a request has shows that a packet is too long.
    let mut bytes = vec![0; MAX_HOST_REQUEST_BYTES + 1];
    // None is left for the kernel to close while others wait.
    let got = match socket::receive(socket, &mut bytes, MAX_DESCRIPTORS, RecvFlags::DONTWAIT) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Incoming::Nothing,
        Err(_) => return Incoming::End,
    };
    let descriptors = got.descriptors;
    if got.bytes == 0 && descriptors.is_empty() {
        return Incoming::End;
    }
    bytes.truncate(got.bytes);
    Incoming::Packet { bytes, descriptors }
}

/// Sends a reply. A peer that does not take its replies is not waited for: that is an error.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    reply: &Reply,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let parts = [IoSlice::new(reply.as_bytes())];
    socket::send(socket, &parts, descriptor.as_slice(), SendFlags::DONTWAIT).map(drop)
}
