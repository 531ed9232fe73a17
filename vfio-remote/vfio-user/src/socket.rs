//! Messages on a UNIX stream socket.

use crate::MAX_RECEIVED_FDS;
use crate::wire::{HEADER_BYTES, Header};
use farlane_abi::width::to_usize;
use farlane_sys::socket;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, shutdown};
use std::io::IoSlice;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use thiserror::Error;
use zerocopy::FromBytes as _;

/// How long the other side may take for the rest of a message that it has begun, or to make room
/// for one that is sent to it.
pub const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why there is no next message.
#[derive(Debug, Error)]
pub enum SocketError {
    /// The other side has closed the connection.
    #[error("The connection was closed")]
    Closed,
    /// It closed it within a message.
    #[error("The connection was closed within a message")]
    Torn,
    /// The client and the server have not agreed on a version.
    #[error("No version has been agreed on")]
    NoVersion,
    /// A header that says that it is shorter than itself, or longer than a message can be. Where
    /// the next message begins cannot be known.
    #[error("A message of {0} bytes cannot be")]
    Size(u32),
    /// More descriptors than one message can have.
    #[error("A message with more than {MAX_RECEIVED_FDS} descriptors")]
    Descriptors,
    /// The other side stopped in the middle of a message.
    #[error("The other side is stuck")]
    Stuck,
    /// The system failed.
    #[error("The socket failed")]
    Io(#[from] Errno),
}

/// A message that has arrived; its body lies in the buffer that was given.
#[derive(Debug)]
pub struct Received {
    /// The header.
    pub header: Header,
    /// All descriptors that came with it.
    pub fds: Vec<OwnedFd>,
    /// Some more have been lost because this process cannot have more open.
    pub fds_lost: bool,
}

/// One end of a connection. It blocks.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Drop for Socket {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Socket {
    /// Takes a connected stream.
    #[must_use]
    pub fn new(stream: OwnedFd) -> Self {
        Self(stream)
    }

    /// Ends the connection, for whoever waits on it too: the other side finds the end of the
    /// stream. What has arrived is lost; where it stayed in the socket, the other side would find
    /// an error instead (`ECONNRESET`).
    pub fn shutdown(&self) {
        // It fails where the connection has ended already.
        let _ = shutdown(&self.0, Shutdown::Both);
        // Nothing more arrives now.
        let mut lost = [0; 4096];
        while let Ok((1.., _)) | Err(Errno::INTR) =
            rustix::net::recv(&self.0, &mut lost, RecvFlags::DONTWAIT)
        {}
    }

    /// Waits for a message, whose body of at most `max_body` bytes replaces what is in `body`:
    /// until `deadline` where there is one, else for as long as none begins, and then
    /// [`MESSAGE_TIMEOUT`] for all of it.
    ///
    /// Descriptors are taken where the header is: senders send them with the first byte. Those that
    /// come later are closed by the kernel.
    ///
    /// # Errors
    /// See [`SocketError`]; the connection is of no more use then.
    pub fn receive(
        &self,
        body: &mut Vec<u8>,
        max_body: usize,
        mut deadline: Option<Instant>,
    ) -> Result<Received, SocketError> {
        let mut bytes = [0; HEADER_BYTES];
        let mut have = 0;
        let mut fds = Vec::new();
        let mut fds_lost = false;
        while have < HEADER_BYTES {
            if let Some(deadline) = deadline {
                self.wait(PollFlags::IN, deadline)?;
            }
            let rest = &mut bytes[have..];
            let count = match socket::receive(&self.0, rest, MAX_RECEIVED_FDS, RecvFlags::empty()) {
                Ok(received) => {
                    fds.extend(received.descriptors);
                    fds_lost |= received.has_lost_descriptors;
                    received.bytes
                }
                Err(Errno::INTR | Errno::AGAIN) => continue,
                Err(Errno::CONNRESET) => 0,
                Err(error) => return Err(error.into()),
            };
            if fds.len() > MAX_RECEIVED_FDS {
                return Err(SocketError::Descriptors);
            }
            match (count, have) {
                (0, 0) => return Err(SocketError::Closed),
                (0, _) => return Err(SocketError::Torn),
                _ => have += count,
            }
            deadline.get_or_insert_with(|| Instant::now() + MESSAGE_TIMEOUT);
        }
        let deadline = deadline.unwrap_or_else(Instant::now);
        let header = Header::read_from_bytes(&bytes).map_err(|_| SocketError::Torn)?;
        let length = to_usize(header.size.into());
        let length = length
            .checked_sub(HEADER_BYTES)
            .filter(|&length| length <= max_body)
            .ok_or(SocketError::Size(header.size))?;
        body.resize(length, 0);
        self.receive_body(body, deadline)?;
        Ok(Received {
            header,
            fds,
            fds_lost,
        })
    }

    fn receive_body(&self, body: &mut [u8], deadline: Instant) -> Result<(), SocketError> {
        let mut have = 0;
        while have < body.len() {
            match rustix::net::recv(&self.0, &mut body[have..], RecvFlags::DONTWAIT) {
                Ok((0, _)) | Err(Errno::CONNRESET) => return Err(SocketError::Torn),
                Ok((count, _)) => have += count,
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends a message of two parts, with descriptors.
    ///
    /// # Errors
    /// See [`SocketError`]. Where a part has been sent, the connection is of no more use.
    pub fn send(
        &self,
        first: &[u8],
        second: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), SocketError> {
        if fds.len() > MAX_RECEIVED_FDS {
            return Err(SocketError::Descriptors);
        }
        let deadline = Instant::now() + MESSAGE_TIMEOUT;
        let total = first.len() + second.len();
        let mut sent = 0;
        while sent < total {
            let rest = [
                IoSlice::new(first.get(sent..).unwrap_or_default()),
                IoSlice::new(&second[sent.saturating_sub(first.len())..]),
            ];
            // With the first byte, and only then.
            let fds = if sent == 0 { fds } else { &[] };
            match socket::send(&self.0, &rest, fds, SendFlags::DONTWAIT) {
                Ok(count) => sent += count,
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(SocketError::Closed),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn wait(&self, events: PollFlags, deadline: Instant) -> Result<(), SocketError> {
        match socket::wait(&mut [PollFd::new(&self.0, events)], Some(deadline))? {
            0 => Err(SocketError::Stuck),
            _ => Ok(()),
        }
    }
}
