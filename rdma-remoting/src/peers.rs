//! Whom a port may connect to, and exchange datagrams with.

use crate::adapter::Lids;
use crate::engine::{Admission, Destination, RawGid};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Ports that an operator lets a port connect to. Its own is always one of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Peers {
    /// All that there are.
    #[default]
    All,
    /// Those with these GIDs.
    Only(BTreeSet<RawGid>),
}

/// The ports that one port may connect to.
#[derive(Debug)]
pub(crate) struct Reach {
    own: RawGid,
    peers: Peers,
    lids: Arc<Lids>,
}

impl Reach {
    pub fn new(own: RawGid, peers: Peers, lids: Arc<Lids>) -> Self {
        Self { own, peers, lids }
    }

    /// Whether the port that this names, by GID or by LID, is one of them.
    pub fn includes(&self, destination: Destination) -> bool {
        if self.peers == Peers::All {
            return true;
        }
        let gid = match destination {
            Destination::Lid(lid) => self.lids.gid(lid),
            Destination::Gid(gid) => Some(gid),
        };
        gid.is_some_and(|gid| self.admits(&gid))
    }

    /// What an engine asks; nothing where all are included.
    pub fn admission(self: &Arc<Self>) -> Option<Arc<dyn Admission>> {
        (self.peers != Peers::All).then(|| Arc::clone(self) as _)
    }
}

impl Admission for Reach {
    fn admits(&self, gid: &RawGid) -> bool {
        match &self.peers {
            Peers::All => true,
            Peers::Only(gids) => *gid == self.own || gids.contains(gid),
        }
    }
}
