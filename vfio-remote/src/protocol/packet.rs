//! Frames as packets of a UNIX socket, descriptors beside them.

use super::connection::ConnectionError;
use super::message::{MAX_DESCRIPTORS, MAX_FRAME_BYTES};
use farlane_sys::eventfd;
use farlane_sys::socket;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, send, shutdown, sockopt};
use std::io::IoSlice;
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
            wake: eventfd::new().map_err(|e| ConnectionError::Io(e.into()))?,
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
        if descriptors.len() > MAX_DESCRIPTORS {
            return Err(ConnectionError::Descriptors(descriptors.len()));
        }
        let until = Instant::now() + PATIENCE;
        let frame = [IoSlice::new(frame)];
        loop {
            match socket::send(&self.socket, &frame, descriptors, SendFlags::DONTWAIT) {
                Ok(_) => return Ok(()),
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
        eventfd::signal(self.wake.as_fd());
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
                let _ = eventfd::drain(self.wake.as_fd());
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
            let flags = RecvFlags::DONTWAIT;
            let got = match socket::receive(&self.socket, buffer, MAX_DESCRIPTORS, flags) {
                Ok(got) => got,
                // It has ended without reading all, and is told once: what it has said before is
                // still there.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNRESET) => continue,
                Err(e) => return Err(ConnectionError::Io(e.into())),
            };
            if got.bytes == 0 && self.ended.load(Ordering::Acquire) {
                return Err(ConnectionError::Ended);
            }
            // Else it is an empty packet, which is no message.
            if got.bytes == 0 && has_hung_up {
                return Err(ConnectionError::Closed);
            }
            if got.bytes > MAX_FRAME_BYTES || got.is_truncated {
                return Err(ConnectionError::TooLong(got.bytes));
            }
            if got.has_lost_descriptors {
                return Err(ConnectionError::Descriptors(got.descriptors.len()));
            }
            buffer.truncate(got.bytes);
            return Ok(Some(got.descriptors));
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
    match socket::wait(fds, until) {
        Ok(ready) => Ok(ready > 0),
        Err(e) => Err(ConnectionError::Io(e.into())),
    }
}
