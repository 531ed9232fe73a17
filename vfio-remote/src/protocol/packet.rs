//! Frames as packets of a UNIX socket, descriptors beside them.

use super::connection::ConnectionError;
use super::message::{MAX_DESCRIPTORS, MAX_FRAME_BYTES};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recvmsg, send, sendmsg, shutdown, sockopt,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A peer that takes no frame for this long is given up.
const PATIENCE: Duration = Duration::from_secs(2);

/// A connected sequential-packet UNIX socket.
#[derive(Debug)]
pub(crate) struct PacketSocket {
    socket: OwnedFd,
    /// Wakes the receiver.
    wake: OwnedFd,
    /// This end has hung up.
    ended: AtomicBool,
    /// As which user the other end ran when it connected, or began to listen.
    peer: u32,
}

impl PacketSocket {
    pub fn new(socket: OwnedFd) -> Result<Self, ConnectionError> {
        // A frame must fit; the kernel caps and doubles it.
        sockopt::set_socket_send_buffer_size(&socket, 8 * MAX_FRAME_BYTES)
            .map_err(|e| ConnectionError::Io(e.into()))?;
        let peer = farlane_zero_copy::peer_user(socket.as_fd())?;
        Ok(Self {
            socket,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|e| ConnectionError::Io(e.into()))?,
            ended: AtomicBool::new(false),
            peer,
        })
    }

    /// Another descriptor of the socket.
    pub fn keep_open(&self) -> std::io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    pub fn peer(&self) -> u32 {
        self.peer
    }

    /// Sends a frame. Waits a bounded time for room; a peer that makes none by then is of no use
    /// any more.
    pub fn send(
        &self,
        frame: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ConnectionError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let until = Instant::now() + PATIENCE;
        loop {
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty()
                && !control.push(SendAncillaryMessage::ScmRights(descriptors))
            {
                return Err(ConnectionError::Descriptors(descriptors.len()));
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.socket, &[IoSlice::new(frame)], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !wait(
                        &mut [PollFd::new(&self.socket, PollFlags::OUT)],
                        Some(until),
                    )? {
                        return Err(ConnectionError::Stuck);
                    }
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ConnectionError::Closed),
                Err(e) => return Err(ConnectionError::Io(e.into())),
            }
        }
    }

    /// Sends a frame if there is room. False where there is not.
    pub fn try_send(&self, frame: &[u8]) -> Result<bool, ConnectionError> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match send(&self.socket, frame, flags) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(ConnectionError::Closed),
            Err(e) => Err(ConnectionError::Io(e.into())),
        }
    }

    /// Has the receiver, or the next one, return.
    pub fn nudge(&self) {
        farlane_sys::eventfd::signal(self.wake.as_fd());
    }

    /// The next frame into `buffer`, whose length is its; nothing when the time is over, or there
    /// was a nudge.
    pub fn receive(
        &self,
        buffer: &mut Vec<u8>,
        until: Option<Instant>,
    ) -> Result<Option<Vec<OwnedFd>>, ConnectionError> {
        loop {
            let mut fds = [
                PollFd::new(&self.wake, PollFlags::IN),
                PollFd::new(&self.socket, PollFlags::IN | PollFlags::RDHUP),
            ];
            if !wait(&mut fds, until)? {
                return Ok(None);
            }
            if fds[1].revents().is_empty() {
                let _ = farlane_sys::eventfd::drain(self.wake.as_fd());
                return Ok(None);
            }
            if self.ended.load(Ordering::Acquire) {
                return Err(ConnectionError::Ended);
            }
            let has_hung_up = fds[1]
                .revents()
                .intersects(PollFlags::RDHUP | PollFlags::HUP);
            // One byte more than a frame has shows that one is too long.
            buffer.resize(MAX_FRAME_BYTES + 1, 0);
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let got = match recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(buffer)],
                &mut control,
                flags,
            ) {
                Ok(got) => got,
                // It has ended without reading all, and is told once: what it has said before is
                // still there.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNRESET) => continue,
                Err(e) => return Err(ConnectionError::Io(e.into())),
            };
            let mut descriptors = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    descriptors.extend(fds);
                }
            }
            if got.bytes == 0 && self.ended.load(Ordering::Acquire) {
                return Err(ConnectionError::Ended);
            }
            // Else it is an empty packet, which is no message.
            if got.bytes == 0 && has_hung_up {
                return Err(ConnectionError::Closed);
            }
            if got.bytes > MAX_FRAME_BYTES || got.flags.contains(ReturnFlags::TRUNC) {
                return Err(ConnectionError::TooLong(got.bytes));
            }
            if got.flags.contains(ReturnFlags::CTRUNC) {
                return Err(ConnectionError::Descriptors(descriptors.len()));
            }
            buffer.truncate(got.bytes);
            return Ok(Some(descriptors));
        }
    }

    pub fn stop(&self) {
        self.ended.store(true, Ordering::Release);
        let _ = shutdown(&self.socket, Shutdown::Read);
    }

    pub fn finish(&self) {
        let _ = shutdown(&self.socket, Shutdown::Write);
    }

    pub fn close(&self) {
        self.ended.store(true, Ordering::Release);
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

/// Waits for one of these; false when the time is over.
fn wait(fds: &mut [PollFd<'_>], until: Option<Instant>) -> Result<bool, ConnectionError> {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        match poll(fds, timeout.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(e) => return Err(ConnectionError::Io(e.into())),
        }
    }
}
