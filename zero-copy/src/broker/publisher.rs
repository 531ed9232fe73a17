//! The end that owns memory.

use super::wire::{self, ToPublisher, ToSubscriber};
use super::{
    ConnectionError, MAX_PUBLICATIONS, MAX_SUBSCRIBERS, PATIENCE, Publication, PublicationError,
};
use crate::{chain, eventfd};
use rustix::event::{EventfdFlags, PollFlags};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long nobody is taken when the system has no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// Publishes memory to whoever subscribes. When it is dropped, all subscribers are disconnected.
#[derive(Debug)]
pub struct Publisher {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// A subscriber has let go of something, or has gone.
    changed: Condvar,
    /// Wakes the thread that accepts.
    wake: OwnedFd,
}

#[derive(Debug, Default)]
struct State {
    last_publication: u64,
    last_peer: u64,
    publications: BTreeMap<u64, Published>,
    peers: BTreeMap<u64, Peer>,
    closed: bool,
}

#[derive(Debug)]
struct Published {
    what: Arc<Publication>,
    /// Nobody is told of it any more.
    revoking: bool,
}

/// A subscriber, who is served by a thread of its own.
#[derive(Debug)]
struct Peer {
    socket: Arc<OwnedFd>,
    wake: Arc<OwnedFd>,
    greeted: bool,
    /// What is to be said. Bounded, for a publication is told once and revoked once.
    queue: VecDeque<Notice>,
    /// What it has been told of and has not let go of.
    held: BTreeSet<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Notice {
    Welcome,
    Published(u64),
    Revoked(u64),
}

impl Peer {
    fn tell(&mut self, notice: Notice) {
        self.queue.push_back(notice);
        eventfd::signal(self.wake.as_fd());
    }
}

impl Publisher {
    /// Serves whoever connects to `listener`, a listening socket of sequential packets.
    ///
    /// # Errors
    /// The system refuses a thread or a descriptor.
    pub fn new(listener: OwnedFd) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&listener)?;
        rustix::fs::fcntl_setfl(&listener, flags | OFlags::NONBLOCK)?;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            wake: wake()?,
        });
        let theirs = Arc::clone(&shared);
        let acceptor = std::thread::Builder::new()
            .name("publisher".to_owned())
            .spawn(move || accept(&theirs, &listener))?;
        Ok(Self {
            shared,
            acceptor: Some(acceptor),
        })
    }

    /// Tells all subscribers of memory, now and those who come later. Returns its number, which no
    /// other publication has or had.
    ///
    /// # Errors
    /// It is not well formed, overlaps another, or there are too many.
    pub fn publish(&self, publication: Publication) -> Result<u64, PublicationError> {
        publication.check()?;
        let mut state = self.shared.state();
        let all = &state.publications;
        if all.len() >= MAX_PUBLICATIONS {
            return Err(PublicationError::Full);
        }
        if all.values().any(|p| p.what.overlaps(&publication)) {
            return Err(PublicationError::Overlap {
                address: publication.address,
                length: publication.length,
            });
        }
        state.last_publication += 1;
        let id = state.last_publication;
        let published = Published {
            what: Arc::new(publication),
            revoking: false,
        };
        state.publications.insert(id, published);
        for peer in state.peers.values_mut().filter(|peer| peer.greeted) {
            peer.tell(Notice::Published(id));
        }
        Ok(id)
    }

    /// Takes memory back. When this returns, no subscriber touches it; those who had it for two
    /// more seconds have been disconnected instead. A number that is not that of a publication is
    /// ignored.
    pub fn revoke(&self, id: u64) {
        let mut state = self.shared.state();
        let Some(published) = state.publications.get_mut(&id) else {
            return;
        };
        published.revoking = true;
        for peer in state.peers.values_mut() {
            peer.queue.retain(|&n| n != Notice::Published(id));
            if peer.held.contains(&id) {
                peer.tell(Notice::Revoked(id));
            }
        }
        let until = Instant::now() + PATIENCE;
        let (mut state, _) = self
            .shared
            .changed
            .wait_timeout_while(
                state,
                until.saturating_duration_since(Instant::now()),
                |state| state.peers.values().any(|peer| peer.held.contains(&id)),
            )
            .unwrap_or_else(PoisonError::into_inner);
        state.peers.retain(|number, peer| {
            let stuck = peer.held.contains(&id);
            if stuck {
                log::warn!("Subscriber {number} does not let go of memory: disconnected");
                let _ = shutdown(&peer.socket, Shutdown::Both);
            }
            !stuck
        });
        state.publications.remove(&id);
    }

    /// How many subscribers there are.
    #[must_use]
    pub fn subscribers(&self) -> usize {
        let state = self.shared.state();
        state.peers.values().filter(|peer| peer.greeted).count()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.closed = true;
        for peer in state.peers.values() {
            let _ = shutdown(&peer.socket, Shutdown::Both);
        }
        drop(state);
        eventfd::signal(self.shared.wake.as_fd());
        if let Some(thread) = self.acceptor.take() {
            let _ = thread.join();
        }
    }
}

fn wake() -> io::Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(rustix::event::eventfd(0, flags)?)
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn accept(shared: &Arc<Shared>, listener: &OwnedFd) {
    while !shared.state().closed {
        match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => {
                if let Err(e) = serve(shared, socket) {
                    log::warn!("Cannot serve a subscriber: {e}");
                }
            }
            Err(Errno::AGAIN) => {
                let listener = Some(listener.as_fd());
                if let Err(e) = wire::wait(listener, PollFlags::IN, &shared.wake, None) {
                    log::error!("Nobody can subscribe any more: {}", chain(&e));
                    return;
                }
            }
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            // No descriptors, no memory.
            Err(_) => {
                let _ = wire::wait(None, PollFlags::empty(), &shared.wake, Some(PAUSE));
            }
        }
    }
}

/// Begins to serve a subscriber.
fn serve(shared: &Arc<Shared>, socket: OwnedFd) -> io::Result<()> {
    let (socket, wake) = (Arc::new(socket), Arc::new(wake()?));
    let mut state = shared.state();
    if state.closed {
        return Ok(());
    }
    if state.peers.len() >= MAX_SUBSCRIBERS {
        return Err(io::Error::other("there are too many"));
    }
    state.last_peer += 1;
    let number = state.last_peer;
    let peer = Peer {
        socket: Arc::clone(&socket),
        wake: Arc::clone(&wake),
        greeted: false,
        queue: VecDeque::from([Notice::Welcome]),
        held: BTreeSet::new(),
    };
    state.peers.insert(number, peer);
    drop(state);
    let theirs = Arc::clone(shared);
    let spawned = std::thread::Builder::new()
        .name(format!("subscriber {number}"))
        .spawn(move || {
            match talk(&theirs, number, &socket, &wake) {
                Ok(()) | Err(ConnectionError::Closed) => {
                    log::debug!("Subscriber {number} has gone");
                }
                Err(e) => log::warn!("Subscriber {number}: {}", chain(&e)),
            }
            // First, so that whoever finds it gone can rely on it.
            let _ = shutdown(&socket, Shutdown::Both);
            theirs.state().peers.remove(&number);
            theirs.changed.notify_all();
        });
    if let Err(e) = spawned {
        shared.state().peers.remove(&number);
        return Err(e);
    }
    Ok(())
}

/// Serves a subscriber until it goes.
fn talk(
    shared: &Shared,
    number: u64,
    socket: &OwnedFd,
    wake: &OwnedFd,
) -> Result<(), ConnectionError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut state = shared.state();
        let State {
            publications,
            peers,
            ..
        } = &mut *state;
        let Some(peer) = peers.get_mut(&number) else {
            return Ok(());
        };
        let has_room = say(publications, peer)?;
        let greeted = peer.greeted;
        drop(state);
        let mut flags = PollFlags::IN;
        if !has_room {
            flags |= PollFlags::OUT;
        }
        let time = (!greeted).then(|| deadline.saturating_duration_since(Instant::now()));
        if time.is_some_and(|time| time.is_zero()) {
            return Err(ConnectionError::Silent);
        }
        let ready = wire::wait(Some(socket.as_fd()), flags, wake, time)?;
        let _ = eventfd::drain(wake.as_fd());
        if ready.is_empty() {
            continue;
        }
        while let Some((message, file)) = wire::receive::<ToPublisher>(socket.as_fd())? {
            if file.is_some() {
                return Err(ConnectionError::Unexpected("A descriptor"));
            }
            hear(shared, number, message)?;
        }
    }
}

/// Says what is to be said, until there is no more room; says whether there was enough.
fn say(publications: &BTreeMap<u64, Published>, peer: &mut Peer) -> Result<bool, ConnectionError> {
    let socket = Arc::clone(&peer.socket);
    while let Some(&notice) = peer.queue.front() {
        let sent = match notice {
            Notice::Welcome => {
                wire::send(socket.as_fd(), &ToSubscriber::Welcome(wire::VERSION), None)?
            }
            Notice::Revoked(id) => wire::send(socket.as_fd(), &ToSubscriber::Revoked(id), None)?,
            Notice::Published(id) => match publications.get(&id) {
                Some(published) => {
                    let message = ToSubscriber::Published {
                        id,
                        range: (&*published.what).into(),
                    };
                    let file = published.what.file.as_ref().map(|(file, _)| file.as_fd());
                    let sent = wire::send(socket.as_fd(), &message, file)?;
                    if sent {
                        peer.held.insert(id);
                    }
                    sent
                }
                None => true,
            },
        };
        if !sent {
            return Ok(false);
        }
        peer.queue.pop_front();
    }
    Ok(true)
}

fn hear(shared: &Shared, number: u64, message: ToPublisher) -> Result<(), ConnectionError> {
    let mut state = shared.state();
    let State {
        publications,
        peers,
        ..
    } = &mut *state;
    let Some(peer) = peers.get_mut(&number) else {
        return Err(ConnectionError::Closed);
    };
    match message {
        ToPublisher::Hello(wire::VERSION) if !peer.greeted => {
            peer.greeted = true;
            let ids = publications.iter().filter(|(_, p)| !p.revoking);
            peer.queue.extend(ids.map(|(&id, _)| Notice::Published(id)));
            log::debug!("Subscriber {number} is there");
            shared.changed.notify_all();
            Ok(())
        }
        ToPublisher::Hello(version) if version != wire::VERSION => {
            Err(ConnectionError::Version(version))
        }
        ToPublisher::Hello(_) => Err(ConnectionError::Unexpected("A second hello")),
        ToPublisher::Released(id) => {
            let revoked = publications.get(&id).is_some_and(|p| p.revoking)
                && !peer.queue.contains(&Notice::Revoked(id));
            if !revoked || !peer.held.remove(&id) {
                return Err(ConnectionError::Unexpected("A release"));
            }
            shared.changed.notify_all();
            Ok(())
        }
    }
}
