//! One request and its reply over the host socket.

use crate::TransportError;
use farlane_abi::Errno;
use farlane_abi::control::{Reply, Request};
use farlane_abi::zerocopy::{FromZeros as _, IntoBytes as _};
use farlane_sys::socket;
use rustix::io::{Errno as Os, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags};
use std::io::IoSlice;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Sends `request` with `extents`, as offsets and lengths in bytes, and `fds`, and waits for the
/// reply. `what` names the operation in errors. Requests on one socket must not overlap.
pub(crate) fn exchange(
    socket: BorrowedFd<'_>,
    what: &'static str,
    request: &Request,
    extents: &[(u64, u64)],
    fds: &[BorrowedFd<'_>],
) -> Result<(Reply, Option<OwnedFd>), TransportError> {
    send(socket, &request.with_extents(extents), fds)
        .map_err(|source| TransportError::os(what, source))?;
    let (reply, fd) = receive(socket, what)?;
    match Errno::from_wire(reply.status.get()) {
        None => Ok((reply, fd)),
        Some(errno) => Err(TransportError::Refused { what, errno }),
    }
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Os> {
    let data = [IoSlice::new(bytes)];
    socket::send(socket, &data, fds, SendFlags::empty()).map(drop)
}

fn receive(
    socket: BorrowedFd<'_>,
    what: &'static str,
) -> Result<(Reply, Option<OwnedFd>), TransportError> {
    let mut reply = Reply::new_zeroed();
    let bytes = reply.as_mut_bytes();
    let got = retry_on_intr(|| socket::receive(socket, bytes, 1, RecvFlags::empty()))
        .map_err(|error| TransportError::os(what, error))?;
    match got.bytes {
        0 => Err(TransportError::Gone),
        bytes if bytes == size_of::<Reply>() => Ok((reply, got.descriptors.into_iter().next())),
        _ => Err(TransportError::Protocol("a reply of the wrong length")),
    }
}
