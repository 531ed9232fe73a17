//! A port's manager, and which programs have which connections.

use super::Connections;
use super::ids::{Id, Ids, Kept, What};
use super::places::Places;
use super::queue_pairs::{NamedQueuePair, QueuePairs};
use super::terms;
use crate::async_ring::EventSink;
use crate::draws::Draws;
use crate::engine::{Admission as _, Engine, PortAddress, PortNames as _, RawGid};
use crate::gids::{Gids, PortGids};
use crate::ledger::{CONNECTION_IDS, LISTENING_IDS, Resource};
use crate::peers::Reach;
use farlane_abi::Errno;
use farlane_abi::ids::ContextId;
use farlane_abi::rdma::CmEvent;
use farlane_abi::width::{to_u64, to_usize};
use farlane_rdma_cm::{CommId, Event, Gid, Guid, Limits, ListenerId, Manager, Ports, Transmit};
use farlane_sys::sync::lock;
use farlane_worker::counters::Sample;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// Messages of a guest's queue pair 1 that wait to be brought; what is beyond that is lost.
const MESSAGES_OF_GUEST: usize = 256;
/// Timers that end at a time.
const TIMERS_AT_A_TIME: usize = 64;
/// Ids that are destroyed at a time while a context ends.
const ENDED_AT_A_TIME: usize = 64;

/// Of a port.
pub(crate) struct PortSpec {
    pub address: PortAddress,
    pub reach: Arc<Reach>,
    pub gids: Arc<PortGids>,
    /// What the port's users may have together.
    pub limits: crate::Limits,
}

/// Connection management of a port.
pub(crate) struct PortConnections {
    pub(super) of: PortSpec,
    /// Those of the port.
    pub(super) queue_pairs: Arc<QueuePairs>,
    connections: Arc<Connections>,
    state: Mutex<State>,
    /// Held while messages of the port are brought: who has it knows that none is on its way.
    pub(super) bringing: Mutex<()>,
}

pub(super) struct State {
    pub manager: Manager,
    pub contexts: HashMap<ContextId, Ids>,
    /// Where ids are bound.
    pub places: Places,
    /// Whose connections are.
    owners: HashMap<CommId, (ContextId, u32)>,
    /// Whose listeners are.
    pub listeners: HashMap<ListenerId, (ContextId, u32)>,
    /// Those of the guest's queue pair 1.
    of_guest: VecDeque<Transmit>,
    /// One of them is brought next, where messages of the manager wait, too.
    guest_next: bool,
    /// What connections have whose ids are gone, and whose peers have not answered that they end.
    ending: HashMap<CommId, Kept>,
    /// The list knows that messages wait.
    is_noted: bool,
    /// The list knows that a timer ends then.
    timer: Option<Instant>,
    /// The VM is.
    paused: bool,
    /// Events that processes are to be told of.
    raised: Vec<(Arc<dyn EventSink>, u32)>,
}

impl PortConnections {
    pub fn new(of: PortSpec, connections: &Arc<Connections>) -> Arc<Self> {
        let mut guid = [0; 8];
        guid.copy_from_slice(&of.address.gid[8..]);
        // As the device's GUID.
        guid[0] |= 2;
        let mut draws = Draws::default();
        let draw = Box::new(move || draws.next());
        // Programs share their ids fairly before they come to a limit of the port's, which is what
        // peers share.
        let limits = Limits {
            connections: to_usize(of.limits.at_most(Resource::ConnectionIds, CONNECTION_IDS)),
            listeners: to_usize(LISTENING_IDS),
            ..Limits::default()
        };
        let gids = Arc::clone(&connections.gids);
        let home = Box::new(move |gid: Gid| Gid(gids.home(&gid.0).unwrap_or(gid.0)));
        let manager = Manager::new(Guid(u64::from_be_bytes(guid)), limits, draw).with_homes(home);
        let port = Arc::new(Self {
            of,
            queue_pairs: Arc::default(),
            connections: Arc::clone(connections),
            state: Mutex::new(State {
                manager,
                contexts: HashMap::new(),
                places: Places::default(),
                owners: HashMap::new(),
                listeners: HashMap::new(),
                of_guest: VecDeque::new(),
                guest_next: false,
                ending: HashMap::new(),
                is_noted: false,
                timer: None,
                paused: false,
                raised: Vec::new(),
            }),
            bringing: Mutex::default(),
        });
        connections.add(&port);
        port
    }

    /// Name of the port inside.
    pub fn gid(&self) -> RawGid {
        self.of.address.gid
    }

    pub fn address(&self) -> PortAddress {
        self.of.address
    }

    /// Whether its operator lets it have to do with the port of this name.
    pub fn admits(&self, gid: &RawGid) -> bool {
        self.of.reach.admits(gid)
    }

    pub(super) fn engine(&self) -> &Arc<dyn Engine> {
        &self.connections.engine
    }

    pub(super) fn all_gids(&self) -> &Gids {
        &self.connections.gids
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Does something with its state; what that comes to is passed on.
    pub(super) fn with<R>(&self, now: Instant, what: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.state();
        let result = what(&mut state);
        self.settle(&mut state, now);
        let raised = std::mem::take(&mut state.raised);
        drop(state);
        for (sink, index) in raised {
            sink.raise(index);
        }
        result
    }

    /// Passes on what its manager says.
    fn settle(&self, state: &mut State, now: Instant) {
        while let Some(event) = state.manager.poll_event() {
            self.tell(state, now, event);
        }
        while let Some(comm) = state.manager.poll_ended() {
            state.ending.remove(&comm);
        }
        if state.has_messages() && !state.is_noted {
            state.is_noted = true;
            self.connections.note_messages(self.gid());
        }
        // One that is late is after those of other ports that are as late, from when it was noted.
        let at = state.manager.next_timer().map(|at| at.max(now));
        if let Some(at) = at
            && !state.paused
            && state.timer.is_none_or(|noted| at < noted)
        {
            self.connections.note_timer(self.gid(), at, state.timer);
            state.timer = Some(at);
        }
    }

    /// Has whoever it concerns hear of an event.
    fn tell(&self, state: &mut State, now: Instant, event: Event) {
        let comm = event.id();
        let owner = match terms::listener(&event) {
            None => state.owners.get(&comm).copied(),
            Some((listener, is_datagram)) => {
                let added = state.add(listener, comm, is_datagram);
                if added.is_none() {
                    // There is no room for it.
                    let _ = state.manager.destroy(now, comm);
                }
                added
            }
        };
        let Some((context, id)) = owner else {
            return;
        };
        let listens = terms::listener(&event).and_then(|(listener, _)| {
            let owner = state.listeners.get(&listener);
            owner.map(|(_, id)| *id)
        });
        let event = CmEvent {
            id: id.into(),
            listener: listens.unwrap_or_default().into(),
            ..terms::event(&event)
        };
        state.queue(context, id, event);
    }

    /// Takes messages that wait. Returns whether more do.
    pub(super) fn take_messages(&self, most: usize) -> (Vec<Transmit>, bool) {
        let mut state = self.state();
        let messages = std::iter::from_fn(|| state.next_message());
        let messages = messages.take(most).collect();
        state.is_noted = state.has_messages();
        (messages, state.is_noted)
    }

    /// Lets some of the timers end that have ended by then: calls of programs wait meanwhile.
    pub(super) fn advance(&self, now: Instant) {
        self.with(now, |state| {
            state.timer = None;
            if state.paused {
                return;
            }
            for _ in 0..TIMERS_AT_A_TIME {
                // What it sets again counts from now on, however late this one is.
                if !state.manager.expire_one(now) {
                    return;
                }
            }
        });
    }

    /// A message comes.
    pub(super) fn receive(&self, now: Instant, ports: Ports, datagram: &[u8]) {
        self.with(now, |state| {
            if state.paused {
                return;
            }
            if let Err(malformed) = state.manager.receive(now, ports, datagram) {
                log::debug!("A management datagram is no message: {malformed}");
            }
        });
    }

    /// A message of the guest's queue pair 1 waits to be brought.
    pub(super) fn pass_on(&self, message: Transmit) {
        let mut state = self.state();
        if state.of_guest.len() >= MESSAGES_OF_GUEST {
            return;
        }
        state.of_guest.push_back(message);
        if !std::mem::replace(&mut state.is_noted, true) {
            self.connections.note_messages(self.gid());
        }
    }

    /// The VM stops, or goes on: to peers it is a port that does not answer, and no timer of its
    /// ends meanwhile.
    pub fn pause(&self, paused: bool) {
        self.with(Instant::now(), |state| state.paused = paused);
    }

    /// A context ends, and with it all of its ids.
    pub fn close(&self, context: ContextId) {
        let now = Instant::now();
        let mut more = true;
        while more {
            more = self.with(now, |state| {
                for _ in 0..ENDED_AT_A_TIME {
                    let ids = state.contexts.get(&context);
                    let Some(id) = ids.and_then(Ids::any) else {
                        state.contexts.remove(&context);
                        return false;
                    };
                    let _ = state.destroy(now, context, id);
                }
                true
            });
        }
    }

    /// What there is.
    pub fn samples(&self) -> [Sample<'static>; 3] {
        let counts = self.state().manager.counts();
        let sample = |name, help, count| Sample::gauge(name, help, to_u64(count));
        [
            sample(
                "connections",
                "Connections of programs, and requests for some.",
                counts.connections,
            ),
            sample(
                "ended_connections",
                "Connections that no program has any more, and that are not over.",
                counts.orphans,
            ),
            sample(
                "listeners",
                "Services that programs listen for.",
                counts.listeners,
            ),
        ]
    }

    /// How many messages wait, or have some that do.
    pub(super) fn waiting(&self) -> usize {
        let state = self.state();
        state.manager.waiting() + state.of_guest.len()
    }

    /// Brings what waits now: the port is about to have other names, or none.
    pub fn bring_all(&self) {
        self.connections.bring_all(self, Instant::now());
    }

    /// Does what is to be done for all ports, of a server without a thread for it.
    pub fn turn(&self, now: Instant) {
        self.connections.turn(now);
    }

    #[cfg(test)]
    pub(super) fn all(&self) -> &Arc<Connections> {
        &self.connections
    }

    /// How many connections and requests there are.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (farlane_rdma_cm::Counts, usize, usize) {
        let state = self.state();
        let ids = state.owners.len() + state.listeners.len();
        (state.manager.counts(), ids, state.places.count())
    }
}

impl Drop for PortConnections {
    fn drop(&mut self) {
        self.connections.forget(self);
    }
}

impl State {
    fn has_messages(&self) -> bool {
        self.manager.has_transmits() || !self.of_guest.is_empty()
    }

    fn next_message(&mut self) -> Option<Transmit> {
        self.guest_next = !self.guest_next;
        if self.guest_next {
            let of_guest = self.of_guest.pop_front();
            of_guest.or_else(|| self.manager.poll_transmit())
        } else {
            let own = self.manager.poll_transmit();
            own.or_else(|| self.of_guest.pop_front())
        }
    }

    /// The ids of a context.
    pub fn ids(&mut self, context: ContextId) -> Result<&mut Ids, Errno> {
        self.contexts.get_mut(&context).ok_or(Errno::EBADF)
    }

    /// A peer's request is a connection of whoever listens.
    fn add(
        &mut self,
        listener: ListenerId,
        comm: CommId,
        is_datagram: bool,
    ) -> Option<(ContextId, u32)> {
        let (context, at) = *self.listeners.get(&listener)?;
        let ids = self.contexts.get_mut(&context)?;
        let event = ids.get(at).ok()?.event;
        let what = What::Connection {
            comm,
            is_datagram,
            waits_at: Some(at),
            named: None,
        };
        let id = ids.add(what, event).ok()?;
        if let Ok(listening) = ids.get_mut(at)
            && let What::Listening { waiting, .. } = &mut listening.what
        {
            waiting.insert(id);
        }
        self.owners.insert(comm, (context, id));
        Some((context, id))
    }

    /// A connection that a program has asked for, of a queue pair of this name.
    pub fn add_own(
        &mut self,
        context: ContextId,
        (comm, named): (CommId, Option<NamedQueuePair>),
        event: u32,
    ) -> Result<u32, Errno> {
        let what = What::Connection {
            comm,
            is_datagram: named.is_none(),
            waits_at: None,
            named,
        };
        let id = self.ids(context)?.add(what, event)?;
        self.owners.insert(comm, (context, id));
        Ok(id)
    }

    fn queue(&mut self, context: ContextId, id: u32, event: CmEvent) {
        if let Some(ids) = self.contexts.get_mut(&context)
            && let Some(index) = ids.tell(id, event)
        {
            self.raised.push((Arc::clone(ids.sink()), index));
        }
    }

    /// Events of a context are to be told of again.
    pub fn raise(&mut self, context: ContextId, index: u32, count: u32) {
        if let Some(ids) = self.contexts.get(&context) {
            let sink = ids.sink();
            let all = (0..count).map(|_| (Arc::clone(sink), index));
            self.raised.extend(all);
        }
    }

    /// Ends an id, whatever it is. Returns how many events waited, its own and those of requests
    /// that end with it.
    pub fn destroy(&mut self, now: Instant, context: ContextId, id: u32) -> Result<u32, Errno> {
        let ids = self.ids(context)?;
        let (removed, account) = (ids.remove(id)?, Arc::clone(ids.account()));
        let mut events = removed.waiting();
        match removed.what {
            What::Bound(binding) => self.places.unbind(&account, binding),
            What::Listening {
                binding,
                listener,
                waiting,
                _share,
            } => {
                self.places.unbind(&account, binding);
                self.listeners.remove(&listener);
                let _ = self.manager.unlisten(now, listener);
                for id in waiting {
                    let Ok(request) = self.ids(context)?.remove(id) else {
                        continue;
                    };
                    events += request.waiting();
                    // One that was answered before its event was taken does not end with the
                    // listener.
                    self.end(now, request);
                }
            }
            What::Connection { .. } => self.end(now, removed),
        }
        Ok(events)
    }

    /// Ends a connection whose id is gone.
    fn end(&mut self, now: Instant, removed: Id) {
        if let What::Connection { comm, .. } = removed.what {
            self.owners.remove(&comm);
            let _ = self.manager.destroy(now, comm);
            if self.manager.is_ending(comm) {
                self.ending.insert(comm, removed.into_kept());
            }
        }
    }
}
