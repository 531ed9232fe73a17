//! A borrower's end of a link that sends whatever it is told to.

use anyhow::{Context as _, Result, bail, ensure};
use farlane_vfio_remote::protocol::message::{
    MAX_DESCRIPTORS, MAX_FRAME_BYTES, Refusal, Reply, Request, ToBorrower, ToLender, VERSION,
};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with,
    sockopt,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// How long a lender may take for a message.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a lender has done with a request.
#[derive(Debug)]
pub enum Answer {
    /// It has answered.
    Reply(Result<Reply, Refusal>),
    /// It has ended the link.
    Ended,
}

/// An answer, and the number of its request.
pub type Numbered = (u32, Result<Reply, Refusal>);

/// One end of a link over a UNIX socket.
pub struct Peer {
    socket: OwnedFd,
    buffer: Vec<u8>,
    next_id: u32,
}

impl Peer {
    /// Connects, and says nothing.
    ///
    /// # Errors
    /// Nobody listens there.
    pub fn connect(path: &Path) -> Result<Self> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        sockopt::set_socket_send_buffer_size(&socket, 8 * MAX_FRAME_BYTES)?;
        for timeout in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
            sockopt::set_socket_timeout(&socket, timeout, Some(PATIENCE))?;
        }
        connect(&socket, &SocketAddrUnix::new(path)?).context("Cannot connect to the lender")?;
        Ok(Self {
            socket,
            buffer: vec![0; MAX_FRAME_BYTES],
            // Other than numbers that attacks take.
            next_id: 1 << 31,
        })
    }

    /// Connects and is greeted.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), or the lender does not greet.
    pub fn greeted(path: &Path) -> Result<Self> {
        let mut peer = Self::connect(path)?;
        let hello = ToLender::Hello {
            version: VERSION,
            name: "hostile".into(),
        };
        ensure!(
            peer.send(&postcard::to_stdvec(&hello)?, &[])?,
            "The lender hung up"
        );
        match peer.receive()? {
            Some(ToBorrower::Welcome { version, .. }) if version == VERSION => Ok(peer),
            other => bail!("The lender greets by {other:?}"),
        }
    }

    /// Sends a frame; whether the lender is still there.
    ///
    /// # Errors
    /// It does not take the frame.
    pub fn send(&mut self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ensure!(
                control.push(SendAncillaryMessage::ScmRights(fds)),
                "Too many descriptors"
            );
        }
        let frame = [IoSlice::new(frame)];
        match sendmsg(&self.socket, &frame, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => Ok(true),
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(false),
            Err(error) => Err(error).context("The lender does not take a message"),
        }
    }

    /// The next message; none where the lender has hung up.
    ///
    /// # Errors
    /// There is none in time, or it cannot be read.
    pub fn receive(&mut self) -> Result<Option<ToBorrower>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        // Descriptors that come are closed when this goes.
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let mut parts = [IoSliceMut::new(&mut self.buffer)];
        let count = match recvmsg(&self.socket, &mut parts, &mut control, flags) {
            Ok(received) => received.bytes,
            Err(Errno::CONNRESET) => 0,
            Err(error) => return Err(error).context("The lender does not answer"),
        };
        if count == 0 {
            return Ok(None);
        }
        let message = postcard::from_bytes(&self.buffer[..count]);
        Ok(Some(
            message.context("The lender's message cannot be read")?,
        ))
    }

    /// Asks something that is right, and waits for the answer. Other messages are dropped.
    ///
    /// # Errors
    /// There is no answer.
    pub fn ask(&mut self, request: Request) -> Result<Answer> {
        self.ask_after(request, &mut Vec::new())
    }

    /// Asks something that is right, and waits for the answer. Answers to other requests that come
    /// before it are appended to `before`, with their numbers.
    ///
    /// # Errors
    /// There is no answer.
    pub fn ask_after(&mut self, request: Request, before: &mut Vec<Numbered>) -> Result<Answer> {
        let id = self.next_id;
        self.next_id += 1;
        let frame = postcard::to_stdvec(&ToLender::Request { id, request })?;
        if !self.send(&frame, &[])? {
            return Ok(Answer::Ended);
        }
        loop {
            match self.receive()? {
                Some(ToBorrower::Reply { id: to, result }) if to == id => {
                    return Ok(Answer::Reply(result));
                }
                Some(ToBorrower::Reply { id: to, result }) => before.push((to, result)),
                Some(_) => {}
                None => return Ok(Answer::Ended),
            }
        }
    }
}
