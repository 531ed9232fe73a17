//! The end that uses memory of another backend.

use super::wire::{self, ToPublisher, ToSubscriber};
use super::{ConnectionError, MAX_PUBLICATIONS, PATIENCE, Publication, PublicationError};
use farlane_sys::{chain, eventfd};
use rustix::event::{EventfdFlags, PollFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long after a failure a connection is tried again: at first, and at last.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Whoever uses what is published. Both are called from one thread, in order.
pub trait Subscriber: Send + Sync {
    /// There is memory, which does not overlap other memory of this subscription. Its number is
    /// not that of another publication that is still there.
    fn published(&self, id: u64, publication: Publication);

    /// It goes. When this returns, nothing of this subscriber touches it.
    fn revoked(&self, id: u64);
}

/// A subscription, which ends when it is dropped: all that is published is revoked then.
#[derive(Debug)]
pub struct Subscription {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Stop {
    asked: AtomicBool,
    wake: OwnedFd,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.stop.asked.store(true, Ordering::Release);
        eventfd::signal(self.stop.wake.as_fd());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Tells `subscriber` what the publisher at `path` publishes. Connects again and again: the
/// publisher may come later, go, and come again.
///
/// # Errors
/// The path is too long; or the system refuses a thread or a descriptor.
pub fn subscribe(path: &Path, subscriber: Arc<dyn Subscriber>) -> io::Result<Subscription> {
    let client = Client::new(path, subscriber)?;
    let stop = Arc::clone(&client.stop);
    let thread = std::thread::Builder::new()
        .name("subscription".to_owned())
        .spawn(move || client.run())?;
    Ok(Subscription {
        stop,
        thread: Some(thread),
    })
}

pub(super) struct Client {
    path: PathBuf,
    address: SocketAddrUnix,
    subscriber: Arc<dyn Subscriber>,
    stop: Arc<Stop>,
    /// What is published now: address and length.
    held: BTreeMap<u64, (u64, u64)>,
}

impl Client {
    pub(super) fn new(path: &Path, subscriber: Arc<dyn Subscriber>) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let stop = Arc::new(Stop {
            asked: AtomicBool::new(false),
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        Ok(Self {
            path: path.to_owned(),
            address,
            subscriber,
            stop,
            held: BTreeMap::new(),
        })
    }

    /// All that was published is revoked.
    pub(super) fn revoke_all(&mut self) {
        for id in std::mem::take(&mut self.held).into_keys() {
            self.subscriber.revoked(id);
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.asked.load(Ordering::Acquire)
    }

    fn run(mut self) {
        let mut pause = BACK_OFF.0;
        let mut told = false;
        while !self.is_stopped() {
            let mut greeted = false;
            let result = self.talk(&mut greeted);
            self.revoke_all();
            if self.is_stopped() {
                return;
            }
            if greeted {
                (pause, told) = (BACK_OFF.0, false);
            }
            if let Err(e) = result
                && !told
            {
                // Once, until it is there.
                log::warn!("No device memory at {}: {}", self.path.display(), chain(&e));
                told = true;
            }
            let _ = wire::wait(None, PollFlags::empty(), &self.stop.wake, Some(pause));
            pause = (pause * 2).min(BACK_OFF.1);
        }
    }

    /// One connection, from its beginning to its end.
    fn talk(&mut self, greeted: &mut bool) -> Result<(), ConnectionError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(io::Error::from)?;
        connect(&socket, &self.address).map_err(io::Error::from)?;
        let until = Instant::now() + PATIENCE;
        // A connection has room for one message.
        if !wire::send(socket.as_fd(), &ToPublisher::Hello(wire::VERSION), None)? {
            return Err(ConnectionError::Silent);
        }
        loop {
            if self.is_stopped() {
                return Ok(());
            }
            if let Some((message, file)) = wire::receive(socket.as_fd())? {
                self.hear(&socket, message, file, greeted)?;
                continue;
            }
            let time = (!*greeted).then(|| until.saturating_duration_since(Instant::now()));
            if time.is_some_and(|time| time.is_zero()) {
                return Err(ConnectionError::Silent);
            }
            wire::wait(Some(socket.as_fd()), PollFlags::IN, &self.stop.wake, time)?;
        }
    }

    pub(super) fn hear(
        &mut self,
        socket: &OwnedFd,
        message: ToSubscriber,
        file: Option<OwnedFd>,
        greeted: &mut bool,
    ) -> Result<(), ConnectionError> {
        match message {
            ToSubscriber::Welcome(wire::VERSION) if !*greeted => {
                log::info!("Device memory is published at {}", self.path.display());
                *greeted = true;
            }
            ToSubscriber::Welcome(version) if version != wire::VERSION => {
                return Err(ConnectionError::Version(version));
            }
            ToSubscriber::Published { id, range } if *greeted => {
                let publication = range.check(file)?;
                if self.held.contains_key(&id) {
                    return Err(ConnectionError::Unexpected("A second publication"));
                }
                if self.held.len() >= MAX_PUBLICATIONS {
                    return Err(PublicationError::Full.into());
                }
                let (address, length) = (publication.address, publication.length);
                let mut others = self.held.values();
                if others.any(|&(start, bytes)| address < start + bytes && start < address + length)
                {
                    return Err(PublicationError::Overlap { address, length }.into());
                }
                self.held.insert(id, (address, length));
                self.subscriber.published(id, publication);
            }
            ToSubscriber::Revoked(id) if *greeted => {
                if self.held.remove(&id).is_none() {
                    return Err(ConnectionError::Unexpected("A revocation"));
                }
                self.subscriber.revoked(id);
                self.release(socket, id)?;
            }
            _ => return Err(ConnectionError::Unexpected("A message at this time")),
        }
        Ok(())
    }

    /// Says that nothing touches what was revoked. Waits a bounded time for room.
    fn release(&self, socket: &OwnedFd, id: u64) -> Result<(), ConnectionError> {
        let until = Instant::now() + PATIENCE;
        while !wire::send(socket.as_fd(), &ToPublisher::Released(id), None)? {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ConnectionError::Silent);
            }
            if self.is_stopped() {
                return Ok(());
            }
            let socket = Some(socket.as_fd());
            wire::wait(socket, PollFlags::OUT, &self.stop.wake, Some(left))?;
        }
        Ok(())
    }
}
