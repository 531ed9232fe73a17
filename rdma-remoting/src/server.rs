//! The server: an engine, its ports, and the workers that give every context its turns.

use crate::adapter::{Adapter, PortError};
use crate::counters::Counters;
use crate::engine::soft::SoftEngine;
use crate::engine::{Engine, RawGid};
use crate::ledger::Ledger;
use crate::nodes::{TransferObserver, WorkerNode};
use crate::port::{Port, PortConfig};
use crate::worker::Worker;
use farlane_worker::counters::Sample;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use thiserror::Error;

/// Limit of worker threads.
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
    /// There can be no such port.
    #[error(transparent)]
    Port(#[from] PortError),
    /// A thread or a descriptor could not be made.
    #[error("Cannot start a worker")]
    Io(#[from] io::Error),
}

/// Serves VMs and processes with one engine.
pub struct Server {
    adapter: Arc<Adapter>,
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
        Self::start(config, engine, &[None])
    }

    /// A server with the embedded engine and as many workers as the configuration says on each of
    /// these nodes. What they move is told to `transfers`.
    ///
    /// # Errors
    /// See [`ServerError`]; no nodes are no workers.
    pub fn with_nodes(
        config: ServerConfig,
        nodes: Vec<WorkerNode>,
        transfers: Arc<dyn TransferObserver>,
    ) -> Result<Arc<Self>, ServerError> {
        let nodes: Vec<_> = nodes.into_iter().map(Some).collect();
        Self::start(config, Arc::new(SoftEngine::observed_by(transfers)), &nodes)
    }

    fn start(
        config: ServerConfig,
        engine: Arc<dyn Engine>,
        nodes: &[Option<WorkerNode>],
    ) -> Result<Arc<Self>, ServerError> {
        let count = config.workers.saturating_mul(nodes.len());
        if !(1..=MAX_WORKERS).contains(&count) {
            return Err(ServerError::Workers(count));
        }
        let counters = Arc::<Counters>::default();
        let sources = engine.sources();
        let workers = nodes
            .iter()
            .flat_map(|node| std::iter::repeat_n(node, config.workers))
            .enumerate()
            .map(|(index, node)| {
                let its = sources.iter().skip(index).step_by(count).cloned();
                Worker::start(index, node.clone(), its.collect(), Arc::clone(&counters))
            })
            .collect::<io::Result<_>>()?;
        let ledger = Ledger::of_this_process(engine.device().max_qp.get().into());
        let server = Self::of(engine, counters, workers, ledger);
        server.adapter.connections.start()?;
        Ok(server)
    }

    pub(crate) fn of(
        engine: Arc<dyn Engine>,
        counters: Arc<Counters>,
        workers: Vec<Worker>,
        ledger: Arc<Ledger>,
    ) -> Arc<Self> {
        Arc::new(Self {
            adapter: Arc::new(Adapter::new(engine, counters, workers, ledger)),
        })
    }

    /// A server without workers: its contexts get turns from
    /// [`Context::turn_now`](crate::Context::turn_now) only, so that the same input always does the
    /// same.
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
        self.adapter.workers.iter().map(Worker::generation).sum()
    }

    /// A port with address `gid`; `label` names it in the log.
    ///
    /// # Errors
    /// [`ServerError::Port`].
    pub fn port(self: &Arc<Self>, gid: RawGid, label: String) -> Result<Arc<Port>, ServerError> {
        self.port_with(gid, label, PortConfig::default())
    }

    /// As [`port`](Self::port), one that may do no more than `config` says.
    ///
    /// # Errors
    /// [`ServerError::Port`].
    pub fn port_with(
        self: &Arc<Self>,
        gid: RawGid,
        label: String,
        config: PortConfig,
    ) -> Result<Arc<Port>, ServerError> {
        let address = self.adapter.add_port(gid)?;
        let adapter = Arc::clone(&self.adapter);
        Ok(Port::new(address, label, config, adapter))
    }

    /// Has an eventfd wake the workers, as long as the result lives. It is never read.
    ///
    /// # Errors
    /// The eventfd cannot be watched: `ENOSPC`, `ENOMEM`, or it is watched already (`EEXIST`).
    pub fn add_doorbell(&self, fd: OwnedFd) -> io::Result<Doorbell> {
        for worker in &self.adapter.workers {
            worker.watch(fd.as_fd())?;
        }
        Ok(Doorbell {
            adapter: Arc::clone(&self.adapter),
            fd,
        })
    }

    /// What it counts.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.adapter.counters
    }

    /// The same for metrics, with what its ports have carried out together.
    #[must_use]
    pub fn samples(&self) -> Vec<Sample<'static>> {
        let mut samples = self.adapter.traffic.samples();
        samples.extend(self.adapter.counters.samples());
        samples
    }

    /// Stops the workers, and what carries messages of connections. Contexts get no more turns.
    pub fn shutdown(&self) {
        self.adapter.connections.stop();
        for worker in &self.adapter.workers {
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
    adapter: Arc<Adapter>,
    fd: OwnedFd,
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        for worker in &self.adapter.workers {
            worker.unwatch(self.fd.as_fd());
        }
    }
}
