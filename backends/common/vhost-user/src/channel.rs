//! The channel on which a backend asks something of its front-end: here, to look at the
//! configuration space again.
//!
//! The `vhost` crate reads the message that brings the channel, and has no request of this kind:
//! so the channel is taken out of the socket with a look ahead, which leaves the message for the
//! crate to read.

use farlane_sys::sync::lock;
use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send,
};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

/// Bytes of a message's header: request, flags, length of what follows.
const HEADER: usize = 12;
/// VHOST_USER_SET_BACKEND_REQ_FD.
const SET_BACKEND_REQ_FD: u32 = 21;
/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG.
const CONFIG_CHANGE: u32 = 2;
/// Version 1; no answer is asked for.
const FLAGS: u32 = 1;

/// The channel, once there is one.
#[derive(Debug, Default)]
pub struct Channel(Mutex<Option<OwnedFd>>);

impl Channel {
    /// Waits for the next message of the front-end. If it brings a channel, this is it from now on.
    ///
    /// # Errors
    /// What the system says.
    pub fn look_ahead(&self, socket: &UnixStream) -> io::Result<()> {
        let mut header = [0; HEADER];
        let flags = RecvFlags::PEEK | RecvFlags::WAITALL;
        let (length, _) = rustix::io::retry_on_intr(|| recv(socket, &mut header, flags))?;
        let request = header.first_chunk().map_or(0, |r| u32::from_ne_bytes(*r));
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
                    self.set(Some(file));
                }
            }
        }
        Ok(())
    }

    fn set(&self, file: Option<OwnedFd>) {
        *lock(&self.0) = file;
    }

    /// The front-end is gone.
    pub fn close(&self) {
        self.set(None);
    }
}

impl Channel {
    /// Has the front-end look at the configuration space again.
    pub fn config_changed(&self) {
        let channel = lock(&self.0);
        let Some(channel) = &*channel else {
            return;
        };
        let mut message = [0; HEADER];
        message[..4].copy_from_slice(&CONFIG_CHANGE.to_ne_bytes());
        message[4..8].copy_from_slice(&FLAGS.to_ne_bytes());
        // A front-end that does not read does not make anybody wait.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if let Err(e) = send(channel, &message, flags) {
            log::warn!("The front-end cannot be told of a change: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};
    use std::io::{IoSlice, Read as _};
    use std::os::fd::AsFd as _;

    #[test]
    fn the_channel_is_found_and_the_message_stays() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&SET_BACKEND_REQ_FD.to_ne_bytes());
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files = [far.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(
            &theirs,
            &[IoSlice::new(&header)],
            &mut ancillary,
            SendFlags::empty(),
        )
        .unwrap();
        let channel = Channel::default();
        channel.look_ahead(&ours).unwrap();
        channel.config_changed();
        let mut told = [0; HEADER];
        (&near).read_exact(&mut told).unwrap();
        assert_eq!(told[..8], [2, 0, 0, 0, 1, 0, 0, 0]);
        // It is still there for whoever reads messages.
        let mut again = [0; HEADER];
        (&ours).read_exact(&mut again).unwrap();
        assert_eq!(again, header);
        channel.close();
        channel.config_changed();
    }
}
