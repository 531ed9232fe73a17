//! The server: an engine, its ports, and the workers that give every context its turns.

use crate::context::Context;
use crate::counters::{Counters, Live};
use crate::engine::soft::SoftEngine;
use crate::engine::{Engine, PortAddress, RawGid};
use crate::ledger::Ledger;
use crate::limbs::{Moved, Place};
use crate::port::Port;
use crate::worker::Worker;
use farlane_sys::sync::lock;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard};
use thiserror::Error;

/// Most worker threads.
const MAX_WORKERS: usize = 64;

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

/// How a server is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Worker threads; where workers belong to nodes, of each node.
    pub workers: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self { workers: 1 }
    }
}

/// Why a server or a port could not be set up.
#[derive(Debug, Error)]
pub enum ServerError {
    /// None, or too many.
    #[error("{0} workers; between 1 and {MAX_WORKERS} are possible")]
    Workers(usize),
    /// Two ports cannot have the same address.
    #[error("GID {0:02x?} is given twice")]
    DuplicateGid(RawGid),
    /// Each port has one of its own.
    #[error("There are no more than {LAST_LID} ports")]
    Lids,
    /// The system failed.
    #[error("Cannot start a worker")]
    Io(#[from] io::Error),
}

/// What ports and workers share.
pub(crate) struct Core {
    pub engine: Arc<dyn Engine>,
    pub counters: Arc<Live>,
    /// What its ports share, and none may take alone.
    pub ledger: Arc<Ledger>,
    workers: Vec<Worker>,
    /// LIDs of the ports that there are.
    lids: Mutex<HashMap<RawGid, u16>>,
}

impl Core {
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
    pub fn has_limbs(&self) -> bool {
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

    /// Takes contexts from their workers. When it returns, they get no turn any more: at the end of
    /// one turn of each worker, however many there are.
    pub fn discharge_all(&self, contexts: &[Arc<Context>]) {
        let all: HashSet<_> = contexts.iter().map(Arc::as_ptr).collect();
        let workers = self.workers.iter();
        let changed: Vec<_> = workers
            .filter_map(|worker| Some((worker, worker.dismiss(&all)?)))
            .collect();
        for (worker, generation) in changed {
            worker.wait_seen(generation);
        }
    }

    fn lids(&self) -> MutexGuard<'_, HashMap<RawGid, u16>> {
        lock(&self.lids)
    }

    pub fn forget_port(&self, gid: &RawGid) {
        self.lids().remove(gid);
    }
}

/// Serves VMs and processes with one engine.
pub struct Server {
    core: Arc<Core>,
}

impl Server {
    /// A server with the embedded engine; its workers run from now on.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn new(config: ServerConfig) -> Result<Arc<Self>, ServerError> {
        Self::with_engine(config, Arc::new(SoftEngine::new()))
    }

    /// A server with this engine.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn with_engine(
        config: ServerConfig,
        engine: Arc<dyn Engine>,
    ) -> Result<Arc<Self>, ServerError> {
        Self::start(config, engine, &[None], Arc::default())
    }

    /// A server with the embedded engine and as many workers as the configuration says at each of
    /// these places. Tells `moved` of what they move.
    ///
    /// # Errors
    /// See [`ServerError`]; no places are no workers.
    pub fn with_limbs(
        config: ServerConfig,
        places: Vec<Place>,
        moved: Arc<dyn Moved>,
    ) -> Result<Arc<Self>, ServerError> {
        let counters = Arc::new(Live::default());
        counters.moved.get_or_init(|| moved);
        let places: Vec<_> = places.into_iter().map(Some).collect();
        Self::start(config, Arc::new(SoftEngine::new()), &places, counters)
    }

    fn start(
        config: ServerConfig,
        engine: Arc<dyn Engine>,
        places: &[Option<Place>],
        counters: Arc<Live>,
    ) -> Result<Arc<Self>, ServerError> {
        let count = config.workers.saturating_mul(places.len());
        if !(1..=MAX_WORKERS).contains(&count) {
            return Err(ServerError::Workers(count));
        }
        let workers = places
            .iter()
            .flat_map(|place| std::iter::repeat_n(place, config.workers))
            .enumerate()
            .map(|(index, place)| Worker::start(index, place.clone(), Arc::clone(&counters)))
            .collect::<io::Result<_>>()?;
        let ledger = Ledger::of_this_process(engine.device().max_qp.get().into());
        Ok(Self::of(engine, counters, workers, ledger))
    }

    pub(crate) fn of(
        engine: Arc<dyn Engine>,
        counters: Arc<Live>,
        workers: Vec<Worker>,
        ledger: Arc<Ledger>,
    ) -> Arc<Self> {
        // Also where there is one: those who end and pause contexts are other threads.
        let wakers: Vec<_> = workers.iter().map(Worker::waker).collect();
        engine.set_waker(Box::new(move || wakers.iter().for_each(|wake| wake())));
        Arc::new(Self {
            core: Arc::new(Core {
                ledger,
                engine,
                counters,
                workers,
                lids: Mutex::default(),
            }),
        })
    }

    /// A server without workers: its contexts get turns from [`Context::turn_now`] only, so that
    /// the same input always does the same.
    #[doc(hidden)]
    #[must_use]
    pub fn without_workers() -> Arc<Self> {
        let engine = SoftEngine::new();
        let ledger = Ledger::of_this_process(engine.device().max_qp.get().into());
        Self::of(Arc::new(engine), Arc::default(), Vec::new(), ledger)
    }

    /// How often what its workers serve has changed.
    #[cfg(test)]
    pub(crate) fn generation(&self) -> u64 {
        self.core.workers.iter().map(Worker::generation).sum()
    }

    /// A port with address `gid`; `label` names it in the log.
    ///
    /// # Errors
    /// [`ServerError::DuplicateGid`]; there are more ports than LIDs.
    pub fn port(self: &Arc<Self>, gid: RawGid, label: String) -> Result<Arc<Port>, ServerError> {
        let mut lids = self.core.lids();
        if lids.contains_key(&gid) {
            return Err(ServerError::DuplicateGid(gid));
        }
        let lid = free_lid(&gid, |lid| lids.values().any(|taken| *taken == lid));
        let lid = lid.ok_or(ServerError::Lids)?;
        lids.insert(gid, lid);
        let address = PortAddress { gid, lid };
        Ok(Port::new(address, label, Arc::clone(&self.core)))
    }

    /// Has an eventfd wake the workers, as long as the result lives. It is never read.
    ///
    /// # Errors
    /// What `epoll_ctl` says.
    pub fn add_doorbell(&self, fd: OwnedFd) -> io::Result<Doorbell> {
        for worker in &self.core.workers {
            worker.watch(fd.as_fd())?;
        }
        Ok(Doorbell {
            core: Arc::clone(&self.core),
            fd,
        })
    }

    /// The present values of the counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.core.counters.read()
    }

    /// Stops the workers. Contexts get no more turns.
    pub fn shutdown(&self) {
        for worker in &self.core.workers {
            worker.stop();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// An eventfd that wakes the workers.
pub struct Doorbell {
    core: Arc<Core>,
    fd: OwnedFd,
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        for worker in &self.core.workers {
            worker.unwatch(self.fd.as_fd());
        }
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
