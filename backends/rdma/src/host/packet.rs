//! Packets of the host socket and the descriptors that travel beside them.

use farlane_abi::control::{Reply, Request};
use farlane_abi::zerocopy::IntoBytes as _;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Descriptors that a packet can carry (`SCM_MAX_FD`): none is left for the kernel to close while
/// others wait.
const MAX_DESCRIPTORS: usize = 253;

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
    let mut bytes = vec![0; size_of::<Request>() + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = match recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        flags,
    ) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Incoming::Nothing,
        Err(_) => return Incoming::End,
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            descriptors.extend(fds);
        }
    }
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
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = descriptor.map(|fd| [fd]);
    if let Some(fds) = &fds
        && !control.push(SendAncillaryMessage::ScmRights(fds))
    {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(
        socket,
        &[IoSlice::new(reply.as_bytes())],
        &mut control,
        flags,
    )
    .map(drop)
}
