//! The end that owns memory.

use super::wire::{self, ToPublisher, ToSubscriber};
use super::{
    ConnectionError, MAX_PUBLICATIONS, MAX_SUBSCRIBERS, PATIENCE, Publication, PublicationError,
};
use farlane_sys::sync::{held, lock};
use farlane_sys::{chain, eventfd};
use rustix::event::{EventfdFlags, PollFlags};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
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
        let mut publisher = Self::without_threads()?;
        let theirs = Arc::clone(&publisher.shared);
        let acceptor = std::thread::Builder::new()
            .name("publisher".to_owned())
            .spawn(move || accept(&theirs, &listener))?;
        publisher.acceptor = Some(acceptor);
        Ok(publisher)
    }

    /// A publisher that nobody can connect to, see [`still`](super::still).
    pub(super) fn without_threads() -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            wake: wake()?,
        });
        Ok(Self {
            shared,
            acceptor: None,
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
        self.revoke_all(&[id], Instant::now() + PATIENCE);
    }

    /// The same for several at once. Those who have one of them then are disconnected.
    pub fn revoke_all(&self, ids: &[u64], until: Instant) {
        let mut state = self.shared.state();
        let mut ids = ids.to_vec();
        ids.retain(|&id| state.begin_revoking(id));
        let left = until.saturating_duration_since(Instant::now());
        let (mut state, _) = held(
            self.shared
                .changed
                .wait_timeout_while(state, left, |state| {
                    let mut peers = state.peers.values();
                    peers.any(|peer| ids.iter().any(|id| peer.held.contains(id)))
                }),
        );
        for id in ids {
            state.end_revoking(id);
        }
    }

    /// How many subscribers there are.
    #[must_use]
    pub fn subscribers(&self) -> usize {
        let state = self.shared.state();
        state.peers.values().filter(|peer| peer.greeted).count()
    }
}

impl State {
    /// A subscriber, and what there is to tell it of.
    fn peer(&mut self, number: u64) -> Option<(&BTreeMap<u64, Published>, &mut Peer)> {
        let peer = self.peers.get_mut(&number)?;
        Some((&self.publications, peer))
    }

    /// Tells those who hold a publication that it goes; says whether there is one.
    fn begin_revoking(&mut self, id: u64) -> bool {
        let Some(published) = self.publications.get_mut(&id) else {
            return false;
        };
        if std::mem::replace(&mut published.revoking, true) {
            // Who revokes it a second time waits, too, but nobody is told twice.
            return true;
        }
        for peer in self.peers.values_mut() {
            peer.queue.retain(|&n| n != Notice::Published(id));
            if peer.held.contains(&id) {
                peer.tell(Notice::Revoked(id));
            }
        }
        true
    }

    /// Disconnects those who still hold it, and forgets it.
    fn end_revoking(&mut self, id: u64) {
        self.peers.retain(|number, peer| {
            let stuck = peer.held.contains(&id);
            if stuck {
                log::warn!("Subscriber {number} does not let go of memory: disconnected");
                let _ = shutdown(&peer.socket, Shutdown::Both);
            }
            !stuck
        });
        self.publications.remove(&id);
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
        lock(&self.state)
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
    let Some((number, socket, wake)) = admit(shared, socket)? else {
        return Ok(());
    };
    let theirs = Arc::clone(shared);
    let spawned = std::thread::Builder::new()
        .name(format!("subscriber {number}"))
        .spawn(move || {
            let result = talk(&theirs, number, &socket, &wake);
            end(&theirs, number, &socket, result);
        });
    if let Err(e) = spawned {
        shared.state().peers.remove(&number);
        return Err(e);
    }
    Ok(())
}

/// A subscriber's number, its socket, and what wakes who serves it.
type Admitted = (u64, Arc<OwnedFd>, Arc<OwnedFd>);

/// Takes a subscriber, unless the publisher ends.
fn admit(shared: &Shared, socket: OwnedFd) -> io::Result<Option<Admitted>> {
    let (socket, wake) = (Arc::new(socket), Arc::new(wake()?));
    let mut state = shared.state();
    if state.closed {
        return Ok(None);
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
    Ok(Some((number, socket, wake)))
}

/// A connection ends.
fn end(shared: &Shared, number: u64, socket: &OwnedFd, result: Result<(), ConnectionError>) {
    match result {
        Ok(()) | Err(ConnectionError::Closed) => log::debug!("Subscriber {number} has gone"),
        Err(e) => log::warn!("Subscriber {number}: {}", chain(&e)),
    }
    // First, so that whoever finds it gone can rely on it.
    let _ = shutdown(socket, Shutdown::Both);
    shared.state().peers.remove(&number);
    shared.changed.notify_all();
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
        let Some((has_room, greeted)) = speak(shared, number)? else {
            return Ok(());
        };
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
        if !ready.is_empty() {
            listen(shared, number, socket)?;
        }
    }
}

/// Says what a subscriber is to be told. Returns whether there was room for it, and whether the
/// subscriber has said hello; none where it was disconnected.
fn speak(shared: &Shared, number: u64) -> Result<Option<(bool, bool)>, ConnectionError> {
    let mut state = shared.state();
    let Some((publications, peer)) = state.peer(number) else {
        return Ok(None);
    };
    let has_room = say(publications, peer)?;
    Ok(Some((has_room, peer.greeted)))
}

/// Hears all that a subscriber has said.
fn listen(shared: &Shared, number: u64, socket: &OwnedFd) -> Result<(), ConnectionError> {
    while let Some((message, file)) = wire::receive::<ToPublisher>(socket.as_fd())? {
        if file.is_some() {
            return Err(ConnectionError::Unexpected("A descriptor"));
        }
        hear(shared, number, message)?;
    }
    Ok(())
}

impl Publisher {
    /// Takes a subscriber without a thread; returns its number.
    pub(super) fn admit(&self, socket: OwnedFd) -> io::Result<Option<u64>> {
        Ok(admit(&self.shared, socket)?.map(|(number, ..)| number))
    }

    /// Says to a subscriber what there is to say, and hears what it has said. Returns whether it is
    /// still connected.
    pub(super) fn turn(&self, number: u64) -> bool {
        let socket = match self.shared.state().peers.get(&number) {
            Some(peer) => Arc::clone(&peer.socket),
            None => return false,
        };
        let result = speak(&self.shared, number)
            .and_then(|_| listen(&self.shared, number, &socket))
            .and_then(|()| speak(&self.shared, number));
        match result {
            Ok(Some(_)) => true,
            Ok(None) => {
                end(&self.shared, number, &socket, Ok(()));
                false
            }
            Err(e) => {
                end(&self.shared, number, &socket, Err(e));
                false
            }
        }
    }

    /// The first half of [`revoke`](Self::revoke).
    pub(super) fn begin_revoking(&self, id: u64) -> bool {
        self.shared.state().begin_revoking(id)
    }

    /// The second half: patience is over.
    pub(super) fn end_revoking(&self, id: u64) {
        self.shared.state().end_revoking(id);
    }

    /// What a subscriber has been told of and has not let go of.
    pub(super) fn held_by(&self, number: u64) -> BTreeSet<u64> {
        let state = self.shared.state();
        let peer = state.peers.get(&number);
        peer.map(|peer| peer.held.clone()).unwrap_or_default()
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
    let Some((publications, peer)) = state.peer(number) else {
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
