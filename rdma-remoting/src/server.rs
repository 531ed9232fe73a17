//! The server: an engine, its ports, and the workers that give every context its turns.

use crate::context::Context;
use crate::counters::{Counters, Live};
use crate::engine::soft::SoftEngine;
use crate::engine::{Engine, RawGid};
use crate::ledger::Ledger;
use crate::limbs::{Moved, Place};
use crate::port::Port;
use crate::worker::Worker;
use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// Most worker threads.
const MAX_WORKERS: usize = 64;

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
    gids: Mutex<HashSet<RawGid>>,
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

    /// Gives a context that is served to a worker of its node, if there is one and it is not served there already. Whoever
    /// ends or pauses the context does not do it meanwhile.
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
            worker.discharge(context);
            self.enlist(context);
            log::debug!("{context:?} is served on node {node}");
        }
    }

    /// Takes a context from its worker. When it returns, it gets no turn any more.
    pub fn discharge(&self, context: &Arc<Context>) {
        for worker in &self.workers {
            worker.discharge(context);
        }
    }

    pub fn forget_port(&self, gid: &RawGid) {
        self.gids
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(gid);
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

    /// A server with the embedded engine and as many workers as the configuration says at each of these places. Tells `moved` of
    /// what they move.
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
        Ok(Self::of(engine, counters, workers))
    }

    fn of(engine: Arc<dyn Engine>, counters: Arc<Live>, workers: Vec<Worker>) -> Arc<Self> {
        // Also where there is one: those who end and pause contexts are other threads.
        let wakers: Vec<_> = workers.iter().map(Worker::waker).collect();
        engine.set_waker(Box::new(move || wakers.iter().for_each(|wake| wake())));
        Arc::new(Self {
            core: Arc::new(Core {
                ledger: Ledger::of_this_process(engine.device().max_qp.get().into()),
                engine,
                counters,
                workers,
                gids: Mutex::default(),
            }),
        })
    }

    /// A server without workers: its contexts get turns from [`Context::turn_now`] only, so that
    /// the same input always does the same.
    #[doc(hidden)]
    #[must_use]
    pub fn without_workers() -> Arc<Self> {
        Self::of(Arc::new(SoftEngine::new()), Arc::default(), Vec::new())
    }

    /// A port with address `gid`; `label` names it in the log.
    ///
    /// # Errors
    /// [`ServerError::DuplicateGid`].
    pub fn port(self: &Arc<Self>, gid: RawGid, label: String) -> Result<Arc<Port>, ServerError> {
        let mut gids = self
            .core
            .gids
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !gids.insert(gid) {
            return Err(ServerError::DuplicateGid(gid));
        }
        Ok(Port::new(gid, label, Arc::clone(&self.core)))
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
