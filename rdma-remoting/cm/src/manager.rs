//! The states of all connections of some ports.
//!
//! A manager is told what comes in ([`Manager::receive`]), what its users want, and the time
//! ([`Manager::advance`], at [`Manager::next_timer`]); it says what is to be sent
//! ([`Manager::poll_transmit`]), what has happened ([`Manager::poll_event`]), and which connections
//! without a user have a peer that knows that they end ([`Manager::poll_ended`]), to be asked after
//! each call.
//!
//! Who a datagram is from is what the network says; a message is taken for a connection only where
//! it comes from the connection's peer, and by both names of it. So a peer can only affect its own
//! connections. What it can have a manager hold is in [`Limits`].

mod datagrams;
mod ending;
mod outbox;
mod receive;
mod requester;
mod responder;

mod timers;

pub(crate) use outbox::Unsent;

use self::outbox::Outbox;
use crate::connection::{Connection, State, Timer};
use crate::event::{CallError, Event, ListenerId, Ports};
use crate::fields::{CommId, Gid, Guid, Psn, Qpn};
use crate::message::TransactionId;
use crate::orphans::{Orphan, Orphans};
use crate::policy::{ENDING, Limits};
use crate::service::ServiceId;
use crate::shares::Shares;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

/// Numbers that nobody can tell beforehand: of ids, transactions and first packets.
pub type Draw = Box<dyn FnMut() -> u64 + Send>;

/// By what a port is known that has a GID, where it may have several.
pub type Home = Box<dyn Fn(Gid) -> Gid + Send>;

/// Who waits for requests.
#[derive(Debug)]
struct Listener {
    service_id: ServiceId,
    /// At which port; at any.
    address: Option<Gid>,
    /// Requests that nobody has claimed.
    waiting: Shares,
    /// Which they are.
    unclaimed: BTreeSet<CommId>,
}

/// Connection management of some ports, as the crate describes it.
pub struct Manager {
    guid: Guid,
    limits: Limits,
    draw: Draw,
    home: Home,
    connections: BTreeMap<CommId, Connection>,
    /// By what their peers call them.
    by_remote_id: BTreeMap<(Ports, CommId), CommId>,
    /// By their peers' queue pairs, until they end.
    by_remote_qpn: BTreeMap<(Gid, Qpn), CommId>,
    /// Requests for queue pairs of datagrams, by what their peers call them.
    by_request: BTreeMap<(Ports, CommId), CommId>,
    timers: BTreeSet<(Instant, CommId)>,
    orphans: Orphans,
    /// Those without a user whose peers have not answered that they end.
    ending: Shares,
    /// Those of them that it has, since somebody has asked.
    ended: VecDeque<CommId>,
    listeners: BTreeMap<ListenerId, Listener>,
    by_service: BTreeMap<(ServiceId, Option<Gid>), ListenerId>,
    listened: u64,
    /// Requests of peers that nobody has claimed.
    waiting: Shares,
    /// Connections and requests with a user that peers have begun.
    of_peers: Shares,
    outbox: Outbox,
    events: VecDeque<Event>,
}

impl std::fmt::Debug for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Manager")
            .field("counts", &self.counts())
            .finish_non_exhaustive()
    }
}

/// How much a manager has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections and requests that have a user, or wait for one.
    pub connections: usize,
    /// Of these, those that wait for one.
    pub requests: usize,
    /// Those that have none.
    pub orphans: usize,
    /// Listeners.
    pub listeners: usize,
    /// Those that wait for a time.
    pub timers: usize,
}

impl Manager {
    /// One of ports of this adapter.
    ///
    /// Peers know an adapter by its GUID, and tell its queue pairs and connections apart by their
    /// numbers: Linux takes a queue pair that is there again under the GUID for one whose
    /// connection is stale. So two ports may be in one manager, or have one GUID, only where no
    /// queue pair of theirs has the same number. Where each port has numbers of its own, each needs
    /// a manager, and a GUID, of its own.
    #[must_use]
    pub fn new(guid: Guid, limits: Limits, draw: Draw) -> Self {
        Self {
            guid,
            limits,
            draw,
            home: Box::new(|gid| gid),
            connections: BTreeMap::new(),
            by_remote_id: BTreeMap::new(),
            by_remote_qpn: BTreeMap::new(),
            by_request: BTreeMap::new(),
            timers: BTreeSet::new(),
            orphans: Orphans::new(limits.orphans),
            ending: Shares::new(limits.connections / ENDING),
            ended: VecDeque::new(),
            listeners: BTreeMap::new(),
            by_service: BTreeMap::new(),
            listened: 0,
            waiting: Shares::new(limits.requests),
            of_peers: Shares::new(limits.connections),
            outbox: Outbox::new(limits.answers, limits.connections),
            events: VecDeque::new(),
        }
    }

    /// Has peers that have several GIDs share as one.
    #[must_use]
    pub fn with_homes(self, home: Home) -> Self {
        Self { home, ..self }
    }

    /// Whose shares a peer's are.
    fn peer(&self, ports: Ports) -> Gid {
        (self.home)(ports.remote)
    }

    /// What has happened next. Nothing is said of what has no user any more.
    pub fn poll_event(&mut self) -> Option<Event> {
        loop {
            let event = self.events.pop_front()?;
            if self.of_user(event.id()).is_ok() {
                return Some(event);
            }
        }
    }

    /// Whether a connection without a user has a peer that is not known to know that it ends. It
    /// counts as one of a user until it is [over](Self::poll_ended).
    #[must_use]
    pub fn is_ending(&self, id: CommId) -> bool {
        let connection = self.connections.get(&id);
        connection.is_some_and(|one| one.orphan == Some(Orphan::Ending))
    }

    /// The next one whose peer has answered, or has not in time.
    pub fn poll_ended(&mut self) -> Option<CommId> {
        self.ended.pop_front()
    }

    /// How much there is.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts {
            connections: self.of_users() - self.ending.taken(),
            requests: self.waiting.taken(),
            orphans: self.orphans.count() + self.ending.taken(),
            listeners: self.listeners.len(),
            timers: self.timers.len(),
        }
    }

    /// Listens for a service, at the port of this GID or at all of them. As many requests wait to
    /// be claimed as the backlog says.
    ///
    /// # Errors
    /// [`CallError::InUse`] where somebody else listens there; [`CallError::Limit`].
    pub fn listen(
        &mut self,
        service_id: ServiceId,
        address: Option<Gid>,
        backlog: usize,
    ) -> Result<ListenerId, CallError> {
        let is_taken = match address {
            Some(_) => [None, address]
                .iter()
                .any(|address| self.by_service.contains_key(&(service_id, *address))),
            None => {
                let mut same = self.by_service.range((service_id, None)..);
                same.next().is_some_and(|((id, _), _)| *id == service_id)
            }
        };
        if is_taken {
            return Err(CallError::InUse);
        }
        if self.listeners.len() >= self.limits.listeners {
            return Err(CallError::Limit(self.limits.listeners));
        }
        self.listened += 1;
        let id = ListenerId(self.listened);
        let listener = Listener {
            service_id,
            address,
            waiting: Shares::new(backlog.min(self.limits.backlog).max(1)),
            unclaimed: BTreeSet::new(),
        };
        self.listeners.insert(id, listener);
        self.by_service.insert((service_id, address), id);
        Ok(id)
    }

    /// Ends that. Requests that nobody has claimed are rejected.
    ///
    /// # Errors
    /// [`CallError::NoSuchId`].
    pub fn unlisten(&mut self, now: Instant, id: ListenerId) -> Result<(), CallError> {
        let listener = self.listeners.remove(&id).ok_or(CallError::NoSuchId)?;
        self.by_service
            .remove(&(listener.service_id, listener.address));
        for id in listener.unclaimed {
            self.destroy(now, id)?;
        }
        Ok(())
    }

    /// A program has been told of a request: another one may take its place in the backlog.
    ///
    /// # Errors
    /// [`CallError::NoSuchId`].
    pub fn claim(&mut self, id: CommId) -> Result<(), CallError> {
        let connection = self.of_user_mut(id)?;
        let peer = connection.peer;
        if let Some(listener) = connection.unclaimed_at.take() {
            self.waiting.give_back(peer);
            if let Some(listener) = self.listeners.get_mut(&listener) {
                listener.waiting.give_back(peer);
                listener.unclaimed.remove(&id);
            }
        }
        Ok(())
    }

    /// A peer's request waits at the listener where it has [taken a place](Self::take_place).
    fn add_request(&mut self, listener: ListenerId, id: CommId, connection: Connection) {
        self.connections.insert(id, connection);
        if let Some(listener) = self.listeners.get_mut(&listener) {
            listener.unclaimed.insert(id);
        }
    }

    /// Who listens for a service at a port.
    fn listener(&self, service_id: ServiceId, port: Gid) -> Option<ListenerId> {
        let at = |address| self.by_service.get(&(service_id, address)).copied();
        at(Some(port)).or_else(|| at(None))
    }

    /// Those that have a user, and those that had one and are ending.
    fn of_users(&self) -> usize {
        self.connections.len() - self.orphans.count()
    }

    /// A connection that has a user, or waits for one.
    pub(crate) fn of_user(&self, id: CommId) -> Result<&Connection, CallError> {
        let connection = self.connections.get(&id).ok_or(CallError::NoSuchId)?;
        match connection.orphan {
            None => Ok(connection),
            Some(_) => Err(CallError::NoSuchId),
        }
    }

    fn of_user_mut(&mut self, id: CommId) -> Result<&mut Connection, CallError> {
        let connection = self.connections.get_mut(&id).ok_or(CallError::NoSuchId)?;
        match connection.orphan {
            None => Ok(connection),
            Some(_) => Err(CallError::NoSuchId),
        }
    }

    /// Room for one more of a user's.
    fn make_room(&self) -> Result<(), CallError> {
        if self.of_users() >= self.limits.connections {
            return Err(CallError::Limit(self.limits.connections));
        }
        Ok(())
    }

    /// An id that there is not, and that is not zero, by which messages name none.
    fn draw_id(&mut self) -> CommId {
        loop {
            let drawn = (self.draw)().to_le_bytes();
            let [a, b, c, d, ..] = drawn;
            let id = CommId(u32::from_le_bytes([a, b, c, d]));
            if id != CommId(0) && !self.connections.contains_key(&id) {
                return id;
            }
        }
    }

    fn draw_transaction(&mut self) -> TransactionId {
        TransactionId((self.draw)())
    }

    fn draw_psn(&mut self) -> Psn {
        let [a, b, c, ..] = (self.draw)().to_le_bytes();
        Psn::of(u32::from_le_bytes([a, b, c, 0]))
    }

    /// Says something to whoever has a connection.
    fn tell(&mut self, event: Event) {
        if self.of_user(event.id()).is_ok() {
            self.events.push_back(event);
        }
    }

    fn set_timer(&mut self, id: CommId, timer: Option<Timer>) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        if let Some(timer) = connection.timer {
            self.timers.remove(&(timer.at, id));
        }
        connection.timer = timer;
        if let Some(timer) = timer {
            self.timers.insert((timer.at, id));
        }
    }

    /// Waits for the answer to a message that was sent.
    fn await_answer(&mut self, now: Instant, id: CommId, state: State) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.state = state;
        let timer = Timer {
            at: now + connection.timeout,
            retries: connection.max_retries,
        };
        self.set_timer(id, Some(timer));
    }

    /// Puts a connection under its peer's names.
    fn name(&mut self, id: CommId) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        let ports = connection.ports;
        if let Some(remote_id) = connection.remote_id {
            self.by_remote_id.insert((ports, remote_id), id);
        }
        if let Some(terms) = &connection.terms {
            self.by_remote_qpn
                .insert((ports.remote, terms.remote_qpn), id);
        }
    }

    /// The peer's queue pair may be in another connection.
    fn unname_qpn(&mut self, id: CommId) {
        let connection = self.connections.get(&id);
        if let Some((connection, terms)) = connection.and_then(|c| Some((c, c.terms.as_ref()?))) {
            let name = (connection.ports.remote, terms.remote_qpn);
            if self.by_remote_qpn.get(&name) == Some(&id) {
                self.by_remote_qpn.remove(&name);
            }
        }
    }

    /// The peer may call other things so.
    fn unname(&mut self, id: CommId) {
        self.unname_qpn(id);
        let connection = self.connections.get(&id);
        if let Some((connection, remote)) = connection.and_then(|c| Some((c, c.remote_id?))) {
            let name = (connection.ports, remote);
            for names in [&mut self.by_remote_id, &mut self.by_request] {
                if names.get(&name) == Some(&id) {
                    names.remove(&name);
                }
            }
        }
    }
}
