//! What publisher and subscriber say to each other: a message a packet, a file's descriptor beside
//! it.

use super::{ConnectionError, Origin, Publication};
use crate::topology::Node;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
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
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    loop {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags) {
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(ConnectionError::Closed),
            Err(e) => return Err(ConnectionError::Io(e.into())),
        }
    }
}

/// Takes a message without waiting; none where there is none.
pub(super) fn receive<M: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> Result<Option<(M, Option<OwnedFd>)>, ConnectionError> {
    let mut bytes = [0; MAX_MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = match recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        flags,
    ) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(Errno::CONNRESET) => return Err(ConnectionError::Closed),
        Err(e) => return Err(ConnectionError::Io(e.into())),
    };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    if got.bytes == 0 {
        return Err(ConnectionError::Closed);
    }
    if files.len() > 1
        || got.bytes > MAX_MESSAGE_BYTES
        || got
            .flags
            .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(ConnectionError::Unexpected("A message that is too long"));
    }
    match postcard::take_from_bytes(&bytes[..got.bytes]) {
        Ok((message, [])) => Ok(Some((message, files.pop()))),
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
    let until = time.map(|time| Instant::now() + time);
    let mut fds = vec![PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)];
    fds.extend(socket.map(|socket| PollFd::from_borrowed_fd(socket, flags)));
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => return Ok(fds.get(1).map_or(PollFlags::empty(), PollFd::revents)),
            Err(Errno::INTR) => {}
            Err(e) => return Err(ConnectionError::Io(e.into())),
        }
    }
}
