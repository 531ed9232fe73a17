//! UNIX sockets: messages with descriptors beside them (`SCM_RIGHTS`), and waiting with a deadline;
//! what of sockets of TCP has no function elsewhere.

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socket_with, socketpair,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::Instant;

/// Descriptors that one message can have (the kernel's `SCM_MAX_FD`).
pub const MAX_DESCRIPTORS: usize = 253;
const MAX_SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));

/// What a call has received.
#[derive(Debug)]
pub struct Received {
    /// How many bytes: zero also at the end of a connection.
    pub bytes: usize,
    /// All descriptors, close-on-exec. They may be more than were asked for.
    pub descriptors: Vec<OwnedFd>,
    /// The packet was longer than the buffer (`MSG_TRUNC`).
    pub is_truncated: bool,
    /// The kernel has closed descriptors that found no room, or could not be opened here
    /// (`MSG_CTRUNC`).
    pub has_lost_descriptors: bool,
}

/// A UNIX socket of sequential packets.
///
/// # Errors
/// Out of descriptors.
pub fn packet_socket() -> Result<OwnedFd, Errno> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    socket_with(family, kind, SocketFlags::CLOEXEC, None)
}

/// Has a listener of TCP accept a connection only when it has bytes, or after about so many seconds
/// (`TCP_DEFER_ACCEPT` of tcp(7)).
///
/// # Errors
/// It is no socket of TCP.
pub fn defer_accept(listener: impl AsFd, seconds: u8) -> Result<(), Errno> {
    let seconds = libc::c_int::from(seconds);
    // SAFETY: the option is a number, which lives throughout the call, and its length is told.
    let rc = unsafe {
        libc::setsockopt(
            listener.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_DEFER_ACCEPT,
            (&raw const seconds).cast(),
            4,
        )
    };
    match rc {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()
            .raw_os_error()
            .map_or(Errno::INVAL, Errno::from_raw_os_error)),
    }
}

/// Two that are connected to each other.
///
/// # Errors
/// Out of descriptors.
pub fn packet_pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    socketpair(family, kind, SocketFlags::CLOEXEC, None)
}

/// Sends the bytes of `parts`, one after the other, and `descriptors` with the first of them. Says
/// how many bytes were sent: of a stream these may be some only. A peer that is gone raises no
/// signal.
///
/// # Errors
/// `EINVAL` for too many descriptors; what `sendmsg` says, except `EINTR`.
pub fn send(
    socket: impl AsFd,
    parts: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); MAX_SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if descriptors.len() > MAX_DESCRIPTORS
        || !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors))
    {
        return Err(Errno::INVAL);
    }
    let flags = flags | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| sendmsg(&socket, parts, &mut control, flags))
}

/// Receives into `buffer`, with room for `limit` descriptors.
///
/// # Errors
/// What `recvmsg` says; `EINTR` too, for those who look at something else then.
pub fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    limit: usize,
    flags: RecvFlags,
) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); MAX_SPACE];
    let room = rustix::cmsg_space!(ScmRights(limit.min(MAX_DESCRIPTORS)));
    let mut control = RecvAncillaryBuffer::new(&mut space[..room]);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    Ok(Received {
        bytes: got.bytes,
        descriptors,
        is_truncated: got.flags.contains(ReturnFlags::TRUNC),
        has_lost_descriptors: got.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// Waits until one of these is ready, or `deadline`. How many are: none when the time is over.
///
/// # Errors
/// What `ppoll` says, except `EINTR`.
pub fn wait(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<usize, Errno> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // What no timespec holds is for ever.
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(fds, timeout.as_ref()) {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::PollFlags;
    use std::time::Duration;

    fn pair(kind: SocketType) -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn descriptors_travel_with_the_first_byte() {
        for kind in [SocketType::STREAM, SocketType::SEQPACKET, SocketType::DGRAM] {
            let (near, far) = pair(kind);
            let files = [near.as_fd(), far.as_fd()];
            let parts = [IoSlice::new(b"ab"), IoSlice::new(b"cde")];
            assert_eq!(send(&near, &parts, &files, SendFlags::empty()), Ok(5));
            let mut buffer = [0; 8];
            let got = receive(&far, &mut buffer, 2, RecvFlags::empty()).unwrap();
            assert_eq!((got.bytes, &buffer[..5]), (5, &b"abcde"[..]));
            assert_eq!(got.descriptors.len(), 2);
            assert!(!got.is_truncated && !got.has_lost_descriptors);
            for descriptor in &got.descriptors {
                let flags = rustix::io::fcntl_getfd(descriptor).unwrap();
                assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            }
            let again = receive(&far, &mut buffer, 2, RecvFlags::DONTWAIT);
            assert_eq!(again.unwrap_err(), Errno::AGAIN);
        }
    }

    #[test]
    fn what_finds_no_room_is_lost_and_said_to_be() {
        let (near, far) = pair(SocketType::SEQPACKET);
        let files = vec![near.as_fd(); MAX_DESCRIPTORS];
        send(&near, &[IoSlice::new(b"abc")], &files, SendFlags::empty()).unwrap();
        let mut buffer = [0; 2];
        let got = receive(&far, &mut buffer, 1, RecvFlags::empty()).unwrap();
        assert!(got.is_truncated && got.has_lost_descriptors);
        assert_eq!(got.bytes, 2);
        assert!((1..MAX_DESCRIPTORS).contains(&got.descriptors.len()));
        send(&near, &[IoSlice::new(b"a")], &files, SendFlags::empty()).unwrap();
        let got = receive(&far, &mut buffer, MAX_DESCRIPTORS, RecvFlags::empty()).unwrap();
        assert_eq!(got.descriptors.len(), MAX_DESCRIPTORS);
        let files = vec![near.as_fd(); MAX_DESCRIPTORS + 1];
        let sent = send(&near, &[IoSlice::new(b"a")], &files, SendFlags::empty());
        assert_eq!(sent, Err(Errno::INVAL));
    }

    #[test]
    fn a_wait_ends_with_its_time_or_with_what_is_ready() {
        let (near, far) = pair(SocketType::STREAM);
        let mut fds = [PollFd::new(&far, PollFlags::IN)];
        let soon = Instant::now() + Duration::from_millis(1);
        assert_eq!(wait(&mut fds, Some(soon)), Ok(0));
        send(&near, &[IoSlice::new(b"a")], &[], SendFlags::empty()).unwrap();
        assert_eq!(wait(&mut fds, None), Ok(1));
        assert!(fds[0].revents().contains(PollFlags::IN));
    }
}
