//! What disks are served in: the machine, and how requests are steered on it.

use crate::paths::MAX_PATHS;
use farlane_daemon::per_node::WorkerNodes;
use farlane_zero_copy::placement::Given;
use farlane_zero_copy::topology::Topology;
use std::path::PathBuf;
use std::time::Duration;

/// Bytes that a part of a request has at least, where nothing else is said.
pub const SPLIT: u64 = 64 << 10;

/// How long requests wait for a path, where nothing else is said.
pub const PATIENCE: Duration = Duration::from_secs(30);

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
    /// Bytes that a part of a request has at least.
    pub split: u64,
    /// How long requests wait for a path.
    pub patience: Duration,
}

impl Default for Surroundings {
    /// This machine.
    fn default() -> Self {
        Self {
            nodes: WorkerNodes::new(Topology::default()),
            sysfs: "/sys".into(),
            given: Vec::new(),
            steers: true,
            split: SPLIT,
            patience: PATIENCE,
        }
    }
}

const _: () = assert!(MAX_PATHS <= 32);
