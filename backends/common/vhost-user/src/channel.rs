//! The channel on which a backend asks something of its VMM: to look at the configuration space
//! again, or to map memory of the backend's into the VM.

use crate::socket::Socket;
use farlane_daemon::log_limit::LogLimit;
use farlane_daemon::warn_limited;
use farlane_sys::sync::lock;
use rustix::net::{SendFlags, send};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};
use vhost::vhost_user::message::VhostUserMMap;
use vhost::vhost_user::{Backend, VhostUserFrontendReqHandler as _, VhostUserProtocolFeatures};

/// Bytes of a message's header: request, flags, length of what follows.
const HEADER: usize = 12;
/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG.
const CONFIG_CHANGE: u32 = 2;
/// Version 1; no answer is asked for.
const FLAGS: u32 = 1;

/// The channel to one VMM, once there is one.
#[derive(Debug)]
pub struct Channel {
    socket: Arc<Socket>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What comes with the next message, which has not been read.
    found: Option<OwnedFd>,
    open: Option<Open>,
}

/// Both ends of requests: what sends them and waits, and what ends the wait.
struct Open {
    requests: Backend,
    stream: UnixStream,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("is_open", &self.open.is_some())
            .finish_non_exhaustive()
    }
}

impl Channel {
    /// None yet, of a VMM that has come to `socket`.
    #[must_use]
    pub fn new(socket: Arc<Socket>) -> Arc<Self> {
        Arc::new(Self {
            socket,
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The socket that the VMM has come to.
    #[must_use]
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// How much the VMM can have logged.
    #[must_use]
    pub fn limit(&self) -> &LogLimit {
        &self.socket.limit
    }

    /// What comes with the next message is this.
    pub(crate) fn find(&self, file: Option<OwnedFd>) {
        let before = std::mem::replace(&mut self.state().found, file);
        if let Some(file) = before {
            self.socket.discard(file);
        }
    }

    /// Takes requests on what was [found](Self::find), of which the `vhost` crate has made sure
    /// that it is a socket. Says whether it does: nothing was found where the message came in
    /// pieces, and what cannot be ended when the VMM goes is not begun.
    pub(crate) fn open(&self, protocol: VhostUserProtocolFeatures) -> bool {
        let mut state = self.state();
        let Some(stream) = state.found.take().map(UnixStream::from) else {
            return false;
        };
        let Ok(sender) = stream.try_clone() else {
            drop(state);
            self.socket.discard(stream.into());
            return false;
        };
        let requests = Backend::from_stream(sender);
        requests.set_reply_ack_flag(protocol.contains(VhostUserProtocolFeatures::REPLY_ACK));
        requests.set_shmem_flag(protocol.contains(VhostUserProtocolFeatures::SHMEM));
        let before = state.open.replace(Open { requests, stream });
        drop(state);
        self.end(before);
        true
    }

    fn end(&self, open: Option<Open>) {
        if let Some(Open { requests, stream }) = open {
            let _ = stream.shutdown(Shutdown::Both);
            drop(requests);
            self.socket.discard(stream.into());
        }
    }

    /// The VMM is gone: requests that wait for it fail, and so do all after them.
    pub fn close(&self) {
        self.find(None);
        let open = self.state().open.take();
        self.end(open);
    }

    /// Whether the VMM takes requests.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.state().open.is_some()
    }

    /// Has the VMM look at the configuration space again.
    pub fn config_changed(&self) {
        let state = self.state();
        let Some(open) = &state.open else {
            return;
        };
        let mut message = [0; HEADER];
        message[..4].copy_from_slice(&CONFIG_CHANGE.to_ne_bytes());
        message[4..8].copy_from_slice(&FLAGS.to_ne_bytes());
        // A VMM that does not read does not make anybody wait.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if let Err(e) = send(&open.stream, &message, flags) {
            warn_limited!(self.limit(), "The VMM cannot be told of a change: {e}");
        }
    }

    /// Has the VMM map memory of `file` into a shared-memory region, and waits for its answer, if
    /// it gives any.
    ///
    /// # Errors
    /// There is no channel (any more), or what the VMM says.
    pub fn map_shared_memory(
        &self,
        mapping: &VhostUserMMap,
        file: BorrowedFd<'_>,
    ) -> io::Result<()> {
        // Not locked while the VMM is waited for.
        let requests = self.state().open.as_ref().map(|open| open.requests.clone());
        let requests = requests.ok_or(io::ErrorKind::NotConnected)?;
        requests.shmem_map(mapping, &file.as_raw_fd()).map(drop)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::fd::AsFd as _;
    use std::time::Duration;

    fn opened() -> (Arc<Channel>, UnixStream) {
        let channel = Channel::new(Arc::default());
        let (near, far) = UnixStream::pair().unwrap();
        assert!(!channel.open(VhostUserProtocolFeatures::all()));
        channel.find(Some(near.into()));
        assert!(channel.open(VhostUserProtocolFeatures::all()));
        (channel, far)
    }

    #[test]
    fn a_change_is_told() {
        let (channel, mut vmm) = opened();
        channel.config_changed();
        let mut told = [0; HEADER];
        vmm.read_exact(&mut told).unwrap();
        assert_eq!(told[..8], [2, 0, 0, 0, 1, 0, 0, 0]);
        channel.close();
        channel.config_changed();
    }

    #[test]
    fn a_request_that_waits_ends_with_the_connection_whoever_holds_the_channel() {
        let (channel, mut vmm) = opened();
        let waits = std::thread::spawn({
            let channel = Arc::clone(&channel);
            move || {
                let file = UnixStream::pair().unwrap().0;
                channel.map_shared_memory(&VhostUserMMap::default(), file.as_fd())
            }
        });
        // It was asked.
        vmm.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        vmm.read_exact(&mut [0; HEADER]).unwrap();
        channel.close();
        waits.join().unwrap().unwrap_err();
        assert!(!channel.is_open());
    }
}
