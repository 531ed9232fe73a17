//! The channel adapter (IBTA 11.1) behind all ports: the engine, the workers and who serves which
//! context, and the ports' addresses.

use crate::clock::DeviceClock;
use crate::connections::Connections;
use crate::context::Context;
use crate::counters::Counters;
use crate::engine::{Engine, PortAddress, RawGid};
use crate::gids::Gids;
use crate::ledger::Ledger;
use crate::traffic::AllTraffic;
use crate::worker::Worker;
use farlane_sys::sync::lock;
use std::collections::{HashMap, HashSet};
use std::slice;
use std::sync::{Arc, Mutex};
use thiserror::Error;

/// Unicast LIDs are 1 to this one (IBTA 4.1.3).
const LAST_LID: u16 = 0xbfff;

/// The LID of a port with this GID: the GID's last two bytes, where that is one and none that
/// `is_taken`, else the next one.
fn free_lid(gid: &RawGid, is_taken: impl Fn(u16) -> bool) -> Option<u16> {
    let first = u16::from_be_bytes([gid[14], gid[15]]);
    let first = if (1..=LAST_LID).contains(&first) {
        first
    } else {
        1
    };
    (first..=LAST_LID)
        .chain(1..first)
        .find(|&lid| !is_taken(lid))
}

/// Why there is no further port.
#[derive(Debug, Error)]
pub enum PortError {
    /// Two ports cannot have the same address.
    #[error("GID {0:02x?} is given twice")]
    DuplicateGid(RawGid),
    /// Each port has one of its own.
    #[error("There are no more than {LAST_LID} ports")]
    Lids,
}

/// LIDs of the ports that there are.
#[derive(Debug, Default)]
pub(crate) struct Lids(Mutex<HashMap<RawGid, u16>>);

impl Lids {
    /// The GID of the port with this LID.
    pub fn gid(&self, lid: u16) -> Option<RawGid> {
        let lids = lock(&self.0);
        lids.iter()
            .find(|(_, its)| **its == lid)
            .map(|(gid, _)| *gid)
    }
}

/// The channel adapter that the ports belong to.
pub(crate) struct Adapter {
    pub engine: Arc<dyn Engine>,
    pub counters: Arc<Counters>,
    pub traffic: AllTraffic,
    /// What its ports share, and none may take alone.
    pub ledger: Arc<Ledger>,
    pub workers: Vec<Worker>,
    pub lids: Arc<Lids>,
    pub gids: Arc<Gids>,
    pub clock: DeviceClock,
    pub connections: Arc<Connections>,
}

impl Adapter {
    pub fn new(
        engine: Arc<dyn Engine>,
        counters: Arc<Counters>,
        workers: Vec<Worker>,
        ledger: Arc<Ledger>,
    ) -> Self {
        let gids = Arc::<Gids>::default();
        engine.name_ports(Arc::clone(&gids) as _);
        let connections = Connections::new(Arc::clone(&engine), Arc::clone(&gids));
        Self {
            engine,
            counters,
            traffic: AllTraffic::default(),
            ledger,
            workers,
            lids: Arc::default(),
            gids,
            clock: DeviceClock::default(),
            connections,
        }
    }

    /// How many completion vectors there are: one for each worker, and one where there is none.
    pub fn comp_vectors(&self) -> u32 {
        u32::try_from(self.workers.len()).map_or(u32::MAX, |count| count.max(1))
    }

    /// Gives a context to the worker that has the fewest, on its node if there is one.
    pub fn enlist(&self, context: &Arc<Context>) {
        let node = context.node();
        let is_far = |worker: &Worker| node.is_some() && worker.node() != node;
        let workers = self.workers.iter();
        if let Some(worker) = workers.min_by_key(|w| (is_far(w), w.load())) {
            worker.enlist(context);
        }
    }

    /// Whether workers belong to nodes.
    pub fn has_nodes(&self) -> bool {
        self.workers.iter().any(|worker| worker.node().is_some())
    }

    /// Gives a context that is served to a worker of its node, if there is one and it is not served
    /// there already. Whoever ends or pauses the context does not do it meanwhile.
    pub fn settle(&self, context: &Arc<Context>) {
        let Some(node) = context.node() else {
            return;
        };
        let there = |worker: &&Worker| worker.node() == Some(node);
        let served = self.workers.iter().find(|worker| worker.serves(context));
        if let Some(worker) = served
            && !there(&worker)
            && self.workers.iter().any(|worker| there(&worker))
        {
            self.discharge_all(slice::from_ref(context));
            self.enlist(context);
            log::debug!("{context:?} is served on node {node}");
        }
    }

    /// Takes contexts from their workers. When it returns, they get no turn any more: where one has
    /// its turn just now, after that.
    pub fn discharge_all(&self, contexts: &[Arc<Context>]) {
        let all: HashSet<_> = contexts.iter().map(Arc::as_ptr).collect();
        let workers = self.workers.iter();
        let changed: Vec<_> = workers
            .filter_map(|worker| Some((worker, worker.dismiss(&all)?)))
            .collect();
        for (worker, generation) in changed {
            worker.wait_left(&all, generation);
        }
    }

    /// Gives a port with this GID a LID, until [`forget_port`](Self::forget_port).
    ///
    /// # Errors
    /// There is such a port, or there are no more LIDs.
    pub fn add_port(&self, gid: RawGid) -> Result<PortAddress, PortError> {
        let mut lids = lock(&self.lids.0);
        let lid = free_lid(&gid, |lid| lids.values().any(|taken| *taken == lid));
        let lid = lid.ok_or(PortError::Lids)?;
        if !self.gids.add_port(gid) {
            return Err(PortError::DuplicateGid(gid));
        }
        lids.insert(gid, lid);
        Ok(PortAddress { gid, lid })
    }

    pub fn forget_port(&self, gid: &RawGid) {
        lock(&self.lids.0).remove(gid);
        self.gids.release(gid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_port_has_a_unicast_lid_of_its_own() {
        let gid = |last: u16| {
            let mut gid = [7; 16];
            gid[14..].copy_from_slice(&last.to_be_bytes());
            gid
        };
        assert_eq!(free_lid(&gid(0x1234), |_| false), Some(0x1234));
        assert_eq!(free_lid(&gid(0x1234), |lid| lid == 0x1234), Some(0x1235));
        assert_eq!(free_lid(&gid(LAST_LID), |lid| lid == LAST_LID), Some(1));
        for multicast in [0, LAST_LID + 1, u16::MAX] {
            assert_eq!(free_lid(&gid(multicast), |lid| lid < 3), Some(3));
        }
        assert_eq!(free_lid(&gid(5), |_| true), None);
    }
}
