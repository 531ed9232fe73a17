//! What publisher and subscriber say to each other: a message a packet, a file's descriptor beside
//! it.

use super::{ConnectionError, Origin, Publication};
use crate::topology::Node;
use farlane_sys::socket;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::IoSlice;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Version of the protocol; both ends must have the same.
pub(super) const VERSION: u32 = 1;
/// No message is longer.
const MAX_MESSAGE_BYTES: usize = 1024;

/// From publisher to subscriber.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ToSubscriber {
    /// The first message: [`VERSION`].
    Welcome(u32),
    /// There is memory. With a file, its descriptor is beside the message.
    Published {
        /// Greater than all numbers before it.
        id: u64,
        /// Which.
        range: Range,
    },
    /// It goes: to be answered with [`ToPublisher::Released`].
    Revoked(u64),
}

/// From subscriber to publisher.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ToPublisher {
    /// The first message: [`VERSION`].
    Hello(u32),
    /// Nothing touches what was revoked.
    Released(u64),
}

/// A [`Publication`] without its descriptor.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Range {
    address: u64,
    length: u64,
    writable: bool,
    node: Option<u32>,
    file_offset: Option<u64>,
    origin: Option<Origin>,
}

impl From<&Publication> for Range {
    fn from(publication: &Publication) -> Self {
        Self {
            address: publication.address,
            length: publication.length,
            writable: publication.writable,
            node: publication.node.map(|node| node.0),
            file_offset: publication.file.as_ref().map(|&(_, offset)| offset),
            origin: publication.origin.clone(),
        }
    }
}

impl Range {
    /// What was published, if it is well formed.
    pub fn check(self, file: Option<OwnedFd>) -> Result<Publication, ConnectionError> {
        let file = match (self.file_offset, file) {
            (Some(offset), Some(file)) => Some((Arc::new(file), offset)),
            (None, None) => None,
            _ => return Err(ConnectionError::Unexpected("A descriptor, or none,")),
        };
        let publication = Publication {
            address: self.address,
            length: self.length,
            writable: self.writable,
            node: self.node.map(Node),
            file,
            origin: self.origin,
        };
        publication.check()?;
        Ok(publication)
    }
}

/// Sends a message without waiting; says whether there was room for it.
pub(super) fn send<M: Serialize>(
    socket: BorrowedFd<'_>,
    message: &M,
    file: Option<BorrowedFd<'_>>,
) -> Result<bool, ConnectionError> {
    let bytes = postcard::to_stdvec(message)
        .map_err(|_| ConnectionError::Unexpected("A message without encoding"))?;
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    match socket::send(socket, &[IoSlice::new(&bytes)], &files, SendFlags::DONTWAIT) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(ConnectionError::Closed),
        Err(e) => Err(ConnectionError::Io(e.into())),
    }
}

/// Takes a message without waiting; none where there is none.
pub(super) fn receive<M: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> Result<Option<(M, Option<OwnedFd>)>, ConnectionError> {
    let mut bytes = [0; MAX_MESSAGE_BYTES];
    let mut got = match socket::receive(socket, &mut bytes, 2, RecvFlags::DONTWAIT) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(Errno::CONNRESET) => return Err(ConnectionError::Closed),
        Err(e) => return Err(ConnectionError::Io(e.into())),
    };
    if got.bytes == 0 {
        return Err(ConnectionError::Closed);
    }
    if got.descriptors.len() > 1
        || got.bytes > MAX_MESSAGE_BYTES
        || got.is_truncated
        || got.has_lost_descriptors
    {
        return Err(ConnectionError::Unexpected("A message that is too long"));
    }
    match postcard::take_from_bytes(&bytes[..got.bytes]) {
        Ok((message, [])) => Ok(Some((message, got.descriptors.pop()))),
        _ => Err(ConnectionError::Unexpected("A message without meaning")),
    }
}

/// Waits until the socket is ready for one of `flags`, `wake` has something, or the time is over.
/// Says what the socket is ready for.
pub(super) fn wait(
    socket: Option<BorrowedFd<'_>>,
    flags: PollFlags,
    wake: &OwnedFd,
    time: Option<Duration>,
) -> Result<PollFlags, ConnectionError> {
    let mut fds = vec![PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)];
    fds.extend(socket.map(|socket| PollFd::from_borrowed_fd(socket, flags)));
    let until = time.map(|time| Instant::now() + time);
    socket::wait(&mut fds, until).map_err(|e| ConnectionError::Io(e.into()))?;
    Ok(fds.get(1).map_or(PollFlags::empty(), PollFd::revents))
}
