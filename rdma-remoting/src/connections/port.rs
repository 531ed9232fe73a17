//! A port's manager, and which programs have which connections.

use super::Connections;
use super::ids::{Binding, Ids, What};
use super::queue_pairs::QueuePairs;
use super::terms;
use crate::async_ring::EventSink;
use crate::draws::Draws;
use crate::engine::{Admission as _, Engine, PortAddress, RawGid};
use crate::gids::{Gids, PortGids};
use crate::ledger::{CONNECTION_IDS, LISTENING_IDS};
use crate::peers::Reach;
use farlane_abi::Errno;
use farlane_abi::ids::ContextId;
use farlane_abi::rdma::CmEvent;
use farlane_abi::width::{to_u64, to_usize};
use farlane_rdma_cm::{CommId, Event, Guid, Limits, ListenerId, Manager, Ports, Transmit};
use farlane_sys::sync::lock;
use farlane_worker::counters::Sample;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// Messages of a port that wait to be brought; what is beyond that is lost. The manager's answer
/// what is limited, and are sent again where there is no answer.
const MAX_MESSAGES: usize = 8192;
/// Of these, messages of the guest's queue pair 1.
const MAX_GUEST_MESSAGES: usize = 256;
/// Timers that end at a time.
const TIMERS_AT_A_TIME: usize = 64;
/// Ids that are destroyed at a time while a context ends.
const ENDED_AT_A_TIME: usize = 64;

/// Of a port.
pub(crate) struct PortSpec {
    pub address: PortAddress,
    pub reach: Arc<Reach>,
    pub gids: Arc<PortGids>,
}

/// Connection management of a port.
pub(crate) struct PortConnections {
    pub(super) of: PortSpec,
    /// Those of the port.
    pub(super) queue_pairs: QueuePairs,
    connections: Arc<Connections>,
    state: Mutex<State>,
}

pub(super) struct State {
    pub manager: Manager,
    pub contexts: HashMap<ContextId, Ids>,
    /// Where ids are bound, and how many share that.
    pub bound: BTreeMap<(u64, Option<RawGid>), Bound>,
    pub draws: Draws,
    /// Whose connections are.
    owners: HashMap<CommId, (ContextId, u32)>,
    /// Whose listeners are.
    pub listeners: HashMap<ListenerId, (ContextId, u32)>,
    messages: VecDeque<Transmit>,
    /// Of these, those of the guest's.
    guest_messages: usize,
    /// The list knows that messages wait.
    is_noted: bool,
    /// The list knows that a timer ends then.
    timer: Option<Instant>,
    /// The VM is.
    paused: bool,
    /// Events that processes are to be told of.
    raised: Vec<(Arc<dyn EventSink>, u32)>,
}

/// Ids that are bound at one place.
pub(super) struct Bound {
    pub count: usize,
    /// Others may be bound there that say so, too.
    pub is_shared: bool,
}

impl PortConnections {
    pub fn new(of: PortSpec, connections: &Arc<Connections>) -> Arc<Self> {
        let mut guid = [0; 8];
        guid.copy_from_slice(&of.address.gid[8..]);
        // As the device's GUID.
        guid[0] |= 2;
        let mut draws = Draws::default();
        let draw = Box::new(move || draws.next());
        // Programs share their ids fairly before they come to a limit of the port's.
        let limits = Limits {
            connections: to_usize(CONNECTION_IDS),
            listeners: to_usize(LISTENING_IDS),
            ..Limits::default()
        };
        let manager = Manager::new(Guid(u64::from_be_bytes(guid)), limits, draw);
        let port = Arc::new(Self {
            of,
            queue_pairs: QueuePairs::default(),
            connections: Arc::clone(connections),
            state: Mutex::new(State {
                manager,
                contexts: HashMap::new(),
                bound: BTreeMap::new(),
                draws: Draws::default(),
                owners: HashMap::new(),
                listeners: HashMap::new(),
                messages: VecDeque::new(),
                guest_messages: 0,
                is_noted: false,
                timer: None,
                paused: false,
                raised: Vec::new(),
            }),
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
        while let Some(message) = state.manager.poll_transmit() {
            if state.messages.len() < MAX_MESSAGES {
                state.messages.push_back(message);
            }
        }
        if !state.messages.is_empty() && !state.is_noted {
            state.is_noted = true;
            self.connections.note_messages(self.gid());
        }
        if let Some(at) = state.manager.next_timer()
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
        let count = most.min(state.messages.len());
        let messages = state.messages.drain(..count).collect();
        state.guest_messages = state.guest_messages.saturating_sub(count);
        state.is_noted = !state.messages.is_empty();
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
        if state.guest_messages >= MAX_GUEST_MESSAGES || state.messages.len() >= MAX_MESSAGES {
            return;
        }
        state.guest_messages += 1;
        state.messages.push_back(message);
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
        let sample = |name, help, count| Sample {
            name,
            help,
            value: to_u64(count),
        };
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

    /// Does what is to be done for all ports, of a server without a thread for it.
    pub fn turn(&self, now: Instant) {
        self.connections.turn(now);
    }

    /// How many connections and requests there are.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (farlane_rdma_cm::Counts, usize, usize) {
        let state = self.state();
        let ids = state.owners.len() + state.listeners.len();
        (state.manager.counts(), ids, state.bound.len())
    }
}

impl Drop for PortConnections {
    fn drop(&mut self) {
        self.connections.forget(&self.gid());
    }
}

impl State {
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

    /// A connection that a program has asked for.
    pub fn add_own(
        &mut self,
        context: ContextId,
        (comm, is_datagram): (CommId, bool),
        event: u32,
    ) -> Result<u32, Errno> {
        let what = What::Connection {
            comm,
            is_datagram,
            waits_at: None,
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
        let removed = self.ids(context)?.remove(id)?;
        let mut events = removed.waiting();
        match removed.what {
            What::Bound(binding) => self.unbind(binding),
            What::Listening {
                binding,
                listener,
                waiting,
                _share,
            } => {
                self.unbind(binding);
                self.listeners.remove(&listener);
                let _ = self.manager.unlisten(now, listener);
                for id in waiting {
                    let Ok(request) = self.ids(context)?.remove(id) else {
                        continue;
                    };
                    events += request.waiting();
                    if let What::Connection { comm, .. } = request.what {
                        self.owners.remove(&comm);
                        // One that was answered before its event was taken does not end with
                        // the listener.
                        let _ = self.manager.destroy(now, comm);
                    }
                }
            }
            What::Connection { comm, .. } => {
                self.owners.remove(&comm);
                let _ = self.manager.destroy(now, comm);
            }
        }
        Ok(events)
    }

    fn unbind(&mut self, binding: Binding) {
        let place = (binding.service.0, binding.gid.map(|gid| gid.0));
        if let Some(bound) = self.bound.get_mut(&place) {
            bound.count -= 1;
            if bound.count == 0 {
                self.bound.remove(&place);
            }
        }
    }
}
