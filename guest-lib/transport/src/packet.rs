//! One request and its reply over the host socket.

use crate::TransportError;
use farlane_abi::Errno;
use farlane_abi::control::{Reply, Request};
use farlane_abi::zerocopy::{FromZeros as _, IntoBytes as _};
use rustix::io::Errno as Os;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Descriptors that a request can carry.
const MAX_FDS: usize = 2;

/// Sends `request` with `fds` and waits for the reply. `what` names the operation in errors.
/// Requests on one socket must not overlap.
pub(crate) fn exchange(
    socket: BorrowedFd<'_>,
    what: &'static str,
    request: &Request,
    fds: &[BorrowedFd<'_>],
) -> Result<(Reply, Option<OwnedFd>), TransportError> {
    send(socket, request, fds).map_err(|source| TransportError::os(what, source))?;
    let (reply, fd) = receive(socket, what)?;
    match Errno::from_wire(reply.status.get()) {
        None => Ok((reply, fd)),
        Some(errno) => Err(TransportError::Refused { what, errno }),
    }
}

fn send(socket: BorrowedFd<'_>, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), Os> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    loop {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Os::INVAL);
        }
        let data = [IoSlice::new(request.as_bytes())];
        match sendmsg(socket, &data, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Os::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

fn receive(
    socket: BorrowedFd<'_>,
    what: &'static str,
) -> Result<(Reply, Option<OwnedFd>), TransportError> {
    let mut reply = Reply::new_zeroed();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut data = [IoSliceMut::new(reply.as_mut_bytes())];
        let got = match recvmsg(socket, &mut data, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => got,
            Err(Os::INTR) => continue,
            Err(error) => return Err(TransportError::os(what, error)),
        };
        let fd = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
                _ => None,
            })
            .next();
        return match got.bytes {
            0 => Err(TransportError::Gone),
            bytes if bytes == size_of::<Reply>() => Ok((reply, fd)),
            _ => Err(TransportError::Protocol("a reply of the wrong length")),
        };
    }
}
