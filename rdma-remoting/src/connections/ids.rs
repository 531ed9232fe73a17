//! What one program has of connection management: ids, and the events of them that it has not
//! taken.

use super::queue_pairs::NamedQueuePair;
use crate::async_ring::EventSink;
use crate::ledger::{Account, Resource, Share};
use farlane_abi::Errno;
use farlane_abi::rdma::CmEvent;
use farlane_rdma_cm::{CommId, Gid, ListenerId, ServiceId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Ids of a context.
pub const MAX_IDS: usize = 16_384;

/// What an id is.
#[derive(Debug)]
pub enum What {
    /// It is bound.
    Bound(Binding),
    /// It listens.
    Listening {
        binding: Binding,
        listener: ListenerId,
        /// Requests whose events nobody has taken, by their ids.
        waiting: BTreeSet<u32>,
        _share: Share,
    },
    /// A connection, or a request for a queue pair of datagrams.
    Connection {
        comm: CommId,
        is_datagram: bool,
        /// The id that has it waiting.
        waits_at: Option<u32>,
        /// The name of the queue pair that its program has given it.
        named: Option<NamedQueuePair>,
    },
}

/// Where an id is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    pub service: ServiceId,
    /// All of the port where there is none.
    pub gid: Option<Gid>,
}

/// An id.
pub struct Id {
    pub what: What,
    /// Event index by which its events come.
    pub event: u32,
    /// Those that nobody has taken, each with its place among all.
    events: VecDeque<(u64, Box<CmEvent>)>,
    share: Share,
}

impl Id {
    /// What is given back when it is over.
    pub fn into_kept(self) -> Kept {
        let named = match self.what {
            What::Connection { named, .. } => named,
            What::Bound(_) | What::Listening { .. } => None,
        };
        Kept {
            _share: self.share,
            _named: named,
        }
    }

    /// How many of its events nobody has taken.
    pub fn waiting(&self) -> u32 {
        // A connection has fewer than ten.
        u32::try_from(self.events.len()).unwrap_or(u32::MAX)
    }
}

/// What a connection has without an id: until its peer knows that it ends.
pub struct Kept {
    _share: Share,
    _named: Option<NamedQueuePair>,
}

/// The ids of a context.
pub struct Ids {
    sink: Arc<dyn EventSink>,
    /// Who pays for them.
    account: Arc<Account>,
    ids: BTreeMap<u32, Id>,
    /// The handle that was given last.
    last: u32,
    /// Whose events come by which index, in order.
    events: BTreeMap<(u32, u64), u32>,
    told: u64,
}

impl Ids {
    pub fn new(sink: Arc<dyn EventSink>, account: Arc<Account>) -> Self {
        Self {
            sink,
            account,
            ids: BTreeMap::new(),
            last: 0,
            events: BTreeMap::new(),
            told: 0,
        }
    }

    /// What one that listens takes besides, from whoever pays for them.
    ///
    /// # Errors
    /// `ENOMEM` where that is more than the tenant's limit or share.
    pub fn listening_share(&self) -> Result<Share, Errno> {
        let share = self.account.take(Resource::ListeningIds, 1);
        share.ok_or(Errno::ENOMEM)
    }

    /// Who pays for them.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    pub fn sink(&self) -> &Arc<dyn EventSink> {
        &self.sink
    }

    /// Adds an id, and returns its handle.
    ///
    /// # Errors
    /// `ENOMEM` where the context, or its tenant, has as many as it may have.
    pub fn add(&mut self, what: What, event: u32) -> Result<u32, Errno> {
        if self.ids.len() >= MAX_IDS {
            return Err(Errno::ENOMEM);
        }
        let share = self.account.take(Resource::ConnectionIds, 1);
        let share = share.ok_or(Errno::ENOMEM)?;
        loop {
            self.last = self.last.wrapping_add(1);
            if self.last != 0 && !self.ids.contains_key(&self.last) {
                break;
            }
        }
        let id = Id {
            what,
            event,
            events: VecDeque::new(),
            share,
        };
        self.ids.insert(self.last, id);
        Ok(self.last)
    }

    pub fn get(&self, id: u32) -> Result<&Id, Errno> {
        self.ids.get(&id).ok_or(Errno::EBADF)
    }

    pub fn get_mut(&mut self, id: u32) -> Result<&mut Id, Errno> {
        self.ids.get_mut(&id).ok_or(Errno::EBADF)
    }

    /// The connection that this is, and whether it is of datagrams.
    pub fn connection(&self, id: u32) -> Result<(CommId, bool), Errno> {
        match self.get(id)?.what {
            What::Connection {
                comm, is_datagram, ..
            } => Ok((comm, is_datagram)),
            What::Bound(_) | What::Listening { .. } => Err(Errno::EINVAL),
        }
    }

    /// What a connection's queue pair is called from now on.
    pub fn give_name(&mut self, id: u32, name: NamedQueuePair) -> Result<(), Errno> {
        if let What::Connection { named, .. } = &mut self.get_mut(id)?.what {
            *named = Some(name);
        }
        Ok(())
    }

    /// Takes an id out, and its events.
    pub fn remove(&mut self, id: u32) -> Result<Id, Errno> {
        let removed = self.ids.remove(&id).ok_or(Errno::EBADF)?;
        for (at, _) in &removed.events {
            self.events.remove(&(removed.event, *at));
        }
        if let What::Connection {
            waits_at: Some(listener),
            ..
        } = removed.what
        {
            self.claimed(listener, id);
        }
        Ok(removed)
    }

    /// A request waits no more.
    fn claimed(&mut self, listener: u32, id: u32) {
        if let Some(Id {
            what: What::Listening { waiting, .. },
            ..
        }) = self.ids.get_mut(&listener)
        {
            waiting.remove(&id);
        }
    }

    /// Some id that there is.
    pub fn any(&self) -> Option<u32> {
        self.ids.keys().next().copied()
    }

    /// An event of an id. Returns the index by which it comes.
    pub fn tell(&mut self, id: u32, event: CmEvent) -> Option<u32> {
        let its = self.ids.get_mut(&id)?;
        self.told += 1;
        its.events.push_back((self.told, Box::new(event)));
        self.events.insert((its.event, self.told), id);
        Some(its.event)
    }

    /// The next event that comes by this index, and the connection that is claimed by it.
    pub fn next_event(&mut self, index: u32) -> Option<(Box<CmEvent>, Option<CommId>)> {
        let mut waiting = self.events.range((index, 0)..=(index, u64::MAX));
        let (&place, &id) = waiting.next()?;
        self.events.remove(&place);
        let its = self.ids.get_mut(&id)?;
        let (_, event) = its.events.pop_front()?;
        let What::Connection { comm, waits_at, .. } = &mut its.what else {
            return Some((event, None));
        };
        let (comm, listener) = (*comm, waits_at.take());
        if let Some(listener) = listener {
            self.claimed(listener, id);
        }
        Some((event, listener.map(|_| comm)))
    }

    /// Has the events of an id come by another index, and those of the requests that wait there.
    /// Returns how many wait.
    pub fn migrate(&mut self, id: u32, index: u32) -> Result<u32, Errno> {
        let mut all = vec![id];
        if let What::Listening { waiting, .. } = &self.get(id)?.what {
            all.extend(waiting);
        }
        let mut count = 0;
        for id in all {
            let its = self.ids.get_mut(&id).ok_or(Errno::EBADF)?;
            for (at, _) in &its.events {
                self.events.remove(&(its.event, *at));
                self.events.insert((index, *at), id);
                count += 1;
            }
            its.event = index;
        }
        Ok(count)
    }
}
