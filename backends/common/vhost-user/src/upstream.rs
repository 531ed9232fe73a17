//! What the `vhost` crate does not do (yet), in one place. `docs/vhost-user.md` says which change
//! of the crate would delete each function.

use crate::channel::Channel;
use rustix::cmsg_space;
use rustix::io::DupFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recv, recvmsg};
use std::io::{self, IoSliceMut, Write as _};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use vhost::vhost_user::message::VhostUserVirtioFeatures;
use vhost::vhost_user::{BackendReqHandler, VhostUserBackendReqHandler};

/// Bytes of a message's header: request, flags, length of what follows.
const HEADER: usize = 12;
/// VHOST_USER_SET_BACKEND_REQ_FD.
const SET_BACKEND_REQ_FD: u32 = 21;
/// `SET_FEATURES`, the version of the protocol, and the bytes that follow (vhost-user, "Message
/// Specification").
const SET_FEATURES: [u32; 3] = [2, 1, 8];

/// What answers a VMM's messages.
///
/// QEMU's VMM of network interfaces enables vrings before its first `SET_FEATURES`, as soon
/// as it has seen that the protocol features are there; the handler takes that only once it was
/// told of the feature bit. So it is told before it gets the VMM's socket.
pub(crate) fn handler<S: VhostUserBackendReqHandler>(
    stream: &UnixStream,
    session: &Arc<S>,
) -> io::Result<BackendReqHandler<S>> {
    let (first, mut before) = UnixStream::pair()?;
    let place = first.as_raw_fd();
    let mut handler = BackendReqHandler::from_stream(first, Arc::clone(session));
    let mut message: Vec<u8> = SET_FEATURES.iter().flat_map(|w| w.to_ne_bytes()).collect();
    message.extend(
        VhostUserVirtioFeatures::PROTOCOL_FEATURES
            .bits()
            .to_ne_bytes(),
    );
    before.write_all(&message)?;
    handler.handle_request().map_err(io::Error::other)?;
    // SAFETY: `place` is the handler's descriptor: it is open, and stays so, as it is not closed
    // here.
    let mut place = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(place) });
    rustix::io::dup3(stream, &mut place, DupFlags::CLOEXEC)?;
    Ok(handler)
}

/// Waits for the next message of the VMM. If it brings the channel for requests of the backend, the
/// channel finds it; the message stays for the handler to read.
///
/// The handler would hand over something that sends requests and waits for their answers, but not
/// the socket by which such a wait is ended.
pub(crate) fn look_ahead(socket: &UnixStream, channel: &Channel) -> io::Result<()> {
    channel.find(None);
    let mut header = [0; HEADER];
    let flags = RecvFlags::PEEK | RecvFlags::WAITALL;
    let (length, _) = rustix::io::retry_on_intr(|| recv(socket, &mut header, flags))?;
    let [a, b, c, d, ..] = header;
    let request = u32::from_ne_bytes([a, b, c, d]);
    if length < HEADER || request != SET_BACKEND_REQ_FD {
        return Ok(());
    }
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
    recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut header)],
        &mut ancillary,
        flags,
    )?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            for file in files {
                channel.find(Some(file));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::io::{IoSlice, Read as _};
    use std::os::fd::AsFd as _;
    use vhost::vhost_user::VhostUserProtocolFeatures;

    /// Sends a part of a message, with a descriptor.
    fn send(socket: &UnixStream, part: &[u8], file: &UnixStream) {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
        let part = [IoSlice::new(part)];
        sendmsg(socket, &part, &mut ancillary, SendFlags::empty()).unwrap();
    }

    #[test]
    fn the_channel_is_found_with_a_message_in_one_piece_which_stays() {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&SET_BACKEND_REQ_FD.to_ne_bytes());
        for first in [HEADER, 5] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let (_near, far) = UnixStream::pair().unwrap();
            send(&theirs, &header[..first], &far);
            theirs.write_all(&header[first..]).unwrap();
            let channel = Channel::new(Arc::default());
            look_ahead(&ours, &channel).unwrap();
            let is_open = channel.open(VhostUserProtocolFeatures::empty());
            assert_eq!(is_open, first == HEADER);
            let mut again = [0; HEADER];
            (&ours).read_exact(&mut again).unwrap();
            assert_eq!(again, header);
        }
    }
}
