//! The server: an engine, its ports, and the workers that give every context its turns.

use crate::context::Context;
use crate::counters::{Counters, Live};
use crate::engine::soft::SoftEngine;
use crate::engine::{Engine, RawGid};
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
    /// Worker threads.
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
    workers: Vec<Worker>,
    gids: Mutex<HashSet<RawGid>>,
}

impl Core {
    /// Gives a context to the worker that has the fewest.
    pub fn enlist(&self, context: &Arc<Context>) {
        if let Some(worker) = self.workers.iter().min_by_key(|w| w.load()) {
            worker.enlist(context);
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
        if !(1..=MAX_WORKERS).contains(&config.workers) {
            return Err(ServerError::Workers(config.workers));
        }
        let counters = Arc::new(Live::default());
        let workers = (0..config.workers)
            .map(|index| Worker::start(index, Arc::clone(&counters)))
            .collect::<io::Result<_>>()?;
        Ok(Self::of(engine, counters, workers))
    }

    fn of(engine: Arc<dyn Engine>, counters: Arc<Live>, workers: Vec<Worker>) -> Arc<Self> {
        Arc::new(Self {
            core: Arc::new(Core {
                engine,
                counters,
                workers,
                gids: Mutex::default(),
            }),
        })
    }

    /// A server without workers: its contexts get turns from [`Context::turn_now`] only, so that
    /// the same input always does the same.
    #[cfg(fuzzing)]
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
