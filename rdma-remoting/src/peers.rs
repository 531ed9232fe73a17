//! Whom a port may connect to.

use crate::adapter::Lids;
use crate::engine::RawGid;
use farlane_abi::rdma::QpAttr;
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

    /// Whether the port that these attributes name, by GID or by LID, is one of them.
    pub fn includes(&self, attr: &QpAttr) -> bool {
        let Peers::Only(gids) = &self.peers else {
            return true;
        };
        let gid = match attr.is_global {
            0 => self.lids.gid(attr.dlid.get()),
            _ => Some(attr.dgid),
        };
        gid.is_some_and(|gid| gid == self.own || gids.contains(&gid))
    }
}
