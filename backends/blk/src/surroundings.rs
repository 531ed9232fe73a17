//! What disks are served in: the machine, and how requests are steered on it.

use crate::paths::MAX_PATHS;
use farlane_daemon::per_node::WorkerNodes;
use farlane_zero_copy::placement::Given;
use farlane_zero_copy::topology::Topology;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes that a part of a request has at least, where nothing else is said.
pub const SPLIT: u64 = 64 << 10;

/// How long requests wait for a path, where nothing else is said.
pub const PATIENCE_SECONDS: u32 = 30;

/// The machine and what is wanted on it; the same for all disks.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// The machine's nodes, as places for threads.
    pub nodes: WorkerNodes,
    /// Where block devices are described.
    pub sysfs: PathBuf,
    /// What is known of the VM's memory.
    pub given: Vec<Given>,
    /// Whether requests go to the node of their data.
    pub steers: bool,
    /// What may change while disks are served.
    pub tuning: Arc<Tuning>,
}

/// What may change while disks are served: a request goes by what is said when it is looked at.
#[derive(Debug)]
pub struct Tuning {
    split: AtomicU64,
    patience_seconds: AtomicU32,
}

impl Default for Tuning {
    fn default() -> Self {
        Self::new(SPLIT, PATIENCE_SECONDS)
    }
}

impl Tuning {
    /// Parts of requests of at least so many bytes, and so long for a path.
    #[must_use]
    pub fn new(split: u64, patience_seconds: u32) -> Self {
        Self {
            split: split.into(),
            patience_seconds: patience_seconds.into(),
        }
    }

    /// Other ones from now on.
    pub fn set(&self, split: u64, patience_seconds: u32) {
        self.split.store(split, Ordering::Relaxed);
        let patience = &self.patience_seconds;
        patience.store(patience_seconds, Ordering::Relaxed);
    }

    /// Bytes that a part of a request has at least.
    #[must_use]
    pub fn split(&self) -> u64 {
        self.split.load(Ordering::Relaxed)
    }

    /// How long requests wait for a path.
    #[must_use]
    pub fn patience(&self) -> Duration {
        let seconds = self.patience_seconds.load(Ordering::Relaxed);
        Duration::from_secs(seconds.into())
    }
}

impl Default for Surroundings {
    /// This machine.
    fn default() -> Self {
        Self {
            nodes: WorkerNodes::new(Topology::default()),
            sysfs: "/sys".into(),
            given: Vec::new(),
            steers: true,
            tuning: Arc::default(),
        }
    }
}

const _: () = assert!(MAX_PATHS <= 32);
