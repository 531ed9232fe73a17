//! Both ends without threads, for fuzz targets: they do something only when they are told to, so
//! that the same input always does the same. They are compiled always, so that what is fuzzed is
//! what is shipped; no other crate uses them.

use super::subscriber::Client;
use super::wire::{self, ToPublisher, ToSubscriber};
use super::{Publication, PublicationError, Publisher, Subscriber};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// Two ends of a connection.
///
/// # Errors
/// What the system says.
pub fn connection() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// A publisher whose subscribers are given their turns.
#[derive(Debug)]
pub struct StillPublisher(Publisher);

impl StillPublisher {
    /// Without publications and subscribers.
    ///
    /// # Errors
    /// What the system says.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Publisher::without_threads()?))
    }

    /// Takes a subscriber; returns its number.
    ///
    /// # Errors
    /// There are too many.
    pub fn admit(&self, socket: OwnedFd) -> io::Result<u64> {
        let number = self.0.admit(socket)?;
        number.ok_or_else(|| io::Error::other("the publisher ends"))
    }

    /// Says to a subscriber what there is to say, and hears what it has said. Returns whether it is
    /// still connected.
    pub fn turn(&self, number: u64) -> bool {
        self.0.turn(number)
    }

    /// [`Publisher::publish`].
    ///
    /// # Errors
    /// The same.
    pub fn publish(&self, publication: Publication) -> Result<u64, PublicationError> {
        self.0.publish(publication)
    }

    /// Begins [`Publisher::revoke`]; says whether there is such a publication.
    #[must_use]
    pub fn begin_revoking(&self, id: u64) -> bool {
        self.0.begin_revoking(id)
    }

    /// Ends it: who has not let go by now is disconnected.
    pub fn end_revoking(&self, id: u64) {
        self.0.end_revoking(id);
    }

    /// What a subscriber has been told of and has not let go of.
    #[must_use]
    pub fn held_by(&self, number: u64) -> BTreeSet<u64> {
        self.0.held_by(number)
    }

    /// [`Publisher::subscribers`].
    #[must_use]
    pub fn subscribers(&self) -> usize {
        self.0.subscribers()
    }
}

/// A subscriber that is given its turns.
pub struct StillSubscriber {
    client: Client,
    socket: Option<OwnedFd>,
    greeted: bool,
}

impl std::fmt::Debug for StillSubscriber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StillSubscriber").finish_non_exhaustive()
    }
}

impl StillSubscriber {
    /// Has just connected, and said hello.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(socket: OwnedFd, subscriber: Arc<dyn Subscriber>) -> io::Result<Self> {
        let client = Client::new(Path::new("still"), subscriber)?;
        let hello = ToPublisher::Hello(wire::VERSION);
        if !wire::send(socket.as_fd(), &hello, None).map_err(io::Error::other)? {
            return Err(io::Error::other("there is no room for a hello"));
        }
        Ok(Self {
            client,
            socket: Some(socket),
            greeted: false,
        })
    }

    /// Hears what the publisher has said. Returns whether it is still connected; if not, all has
    /// been revoked.
    pub fn turn(&mut self) -> bool {
        let Some(socket) = self.socket.take() else {
            return false;
        };
        loop {
            let result = match wire::receive::<ToSubscriber>(socket.as_fd()) {
                Ok(None) => {
                    self.socket = Some(socket);
                    return true;
                }
                Ok(Some((message, file))) => {
                    self.client.hear(&socket, message, file, &mut self.greeted)
                }
                Err(e) => Err(e),
            };
            if let Err(e) = result {
                log::debug!("{}", farlane_sys::chain(&e));
                self.client.revoke_all();
                return false;
            }
        }
    }
}

impl Drop for StillSubscriber {
    fn drop(&mut self) {
        self.client.revoke_all();
    }
}

/// A subscriber's hello.
#[must_use]
pub fn hello(version: u32) -> Vec<u8> {
    encode(&ToPublisher::Hello(version))
}

/// A subscriber has let go.
#[must_use]
pub fn released(id: u64) -> Vec<u8> {
    encode(&ToPublisher::Released(id))
}

/// A publisher's welcome.
#[must_use]
pub fn welcome(version: u32) -> Vec<u8> {
    encode(&ToSubscriber::Welcome(version))
}

/// What a publisher says of a publication, whether it is well formed or not.
#[must_use]
pub fn published(id: u64, publication: &Publication) -> Vec<u8> {
    let range = publication.into();
    encode(&ToSubscriber::Published { id, range })
}

/// A publisher's request to let go.
#[must_use]
pub fn revoked(id: u64) -> Vec<u8> {
    encode(&ToSubscriber::Revoked(id))
}

fn encode(message: &impl serde::Serialize) -> Vec<u8> {
    // Numbers and short strings: there is nothing that cannot be encoded.
    postcard::to_stdvec(message).unwrap_or_default()
}
