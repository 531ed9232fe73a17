//! Whom a port may connect to, and exchange datagrams with.

use crate::adapter::Lids;
use crate::engine::{Admission, Destination, PortNames as _, RawGid};
use crate::gids::Gids;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Ports that an operator lets a port connect to. Its own is always one of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Peers {
    /// All that there are.
    #[default]
    All,
    /// Those with one of these GIDs: that of its operator, or one that this has let it set.
    Only(BTreeSet<RawGid>),
}

/// The ports that one port may connect to.
#[derive(Debug)]
pub(crate) struct Reach {
    own: RawGid,
    peers: RwLock<Peers>,
    /// That these are all: mostly nothing else is looked at.
    is_all: AtomicBool,
    lids: Arc<Lids>,
    gids: Arc<Gids>,
}

impl Reach {
    pub fn new(own: RawGid, peers: Peers, lids: Arc<Lids>, gids: Arc<Gids>) -> Self {
        Self {
            own,
            is_all: AtomicBool::new(peers == Peers::All),
            peers: RwLock::new(peers),
            lids,
            gids,
        }
    }

    /// Others may be connected to from now on. Queue pairs that are connected stay so.
    pub fn set(&self, peers: Peers) {
        let mut held = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        self.is_all.store(peers == Peers::All, Ordering::Release);
        *held = peers;
    }

    fn is_all(&self) -> bool {
        self.is_all.load(Ordering::Acquire)
    }

    /// Whether the port that this names, by GID or by LID, is one of them.
    pub fn includes(&self, destination: Destination) -> bool {
        if self.is_all() {
            return true;
        }
        let gid = match destination {
            Destination::Lid(lid) => self.lids.gid(lid),
            // One that nobody has may be that of a port that is not there yet.
            Destination::Gid(gid) => self.gids.home(&gid).or(Some(gid)),
        };
        gid.is_some_and(|gid| self.admits(&gid))
    }

    /// What an engine asks.
    pub fn admission(self: &Arc<Self>) -> Arc<dyn Admission> {
        Arc::clone(self) as _
    }
}

impl Admission for Reach {
    fn admits(&self, gid: &RawGid) -> bool {
        if self.is_all() {
            return true;
        }
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        match &*peers {
            Peers::All => true,
            Peers::Only(gids) => {
                *gid == self.own
                    || gids.contains(gid)
                    || gids.iter().any(|peer| self.gids.is_named(gid, peer))
            }
        }
    }
}
