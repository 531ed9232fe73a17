//! Limbs: the threads of a device that belong to a NUMA node (ioctopus-asplos20, section 3.3).
//!
//! A limb's thread runs on the node's processors, and memory that it touches first is the node's. On a machine with one
//! node nothing is pinned.

use farlane_zero_copy::topology::{Node, Topology};
use std::io;
use std::thread::JoinHandle;

/// What limbs ask of the kernel besides what every daemon does.
pub const SYSTEM_CALLS: &[libc::c_long] = &[
    libc::SYS_get_mempolicy,
    libc::SYS_move_pages,
    libc::SYS_sched_setaffinity,
    libc::SYS_set_mempolicy,
];

/// `set_mempolicy`: of this node, where it has room (`MPOL_PREFERRED`).
const PREFERRED: i32 = 1;

/// A node of the machine, as a place for threads.
#[derive(Clone, Debug)]
pub struct Limb {
    node: Node,
    /// Its processors; empty where nothing is to be pinned.
    cpus: Vec<u32>,
}

impl Limb {
    /// Its node.
    #[must_use]
    pub fn node(&self) -> Node {
        self.node
    }

    /// Starts a thread that belongs to it.
    ///
    /// # Errors
    /// There are no more threads.
    pub fn spawn<T: Send + 'static>(
        &self,
        name: String,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let limb = self.clone();
        std::thread::Builder::new().name(name).spawn(move || {
            limb.enter();
            work()
        })
    }

    /// Makes the calling thread one of this limb. Where the system says no, as it may in a container, it runs anywhere: slower,
    /// no more.
    fn enter(&self) {
        if self.cpus.is_empty() {
            return;
        }
        let mut set = rustix::thread::CpuSet::new();
        for cpu in &self.cpus {
            let cpu = usize::try_from(*cpu).unwrap_or(usize::MAX);
            if cpu < rustix::thread::CpuSet::MAX_CPU {
                set.set(cpu);
            }
        }
        if let Err(e) = rustix::thread::sched_setaffinity(None, &set) {
            log::warn!("Node {}: its threads are not pinned: {e}", self.node);
        }
        let Some(mask) = 1_u64.checked_shl(self.node.0) else {
            return;
        };
        // SAFETY: the mask has 64 bits and is only read.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_set_mempolicy,
                PREFERRED,
                &raw const mask,
                64_usize,
            )
        };
        if rc != 0 {
            log::debug!(
                "Node {}: no memory policy: {}",
                self.node,
                io::Error::last_os_error()
            );
        }
    }
}

/// All limbs of a machine.
#[derive(Clone, Debug)]
pub struct Limbs {
    topology: Topology,
    limbs: Vec<Limb>,
}

impl Limbs {
    /// One a node.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        let nodes = topology.nodes();
        let pins = nodes.len() > 1;
        let limbs = nodes.iter().map(|&node| Limb {
            node,
            cpus: if pins {
                topology.cpus(node)
            } else {
                Vec::new()
            },
        });
        Self {
            limbs: limbs.collect(),
            topology,
        }
    }

    /// The machine.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// All, in order of their nodes; at least one.
    #[must_use]
    pub fn all(&self) -> &[Limb] {
        &self.limbs
    }

    /// That of a node; for a node without processors, or one that is not there, the nearest one's index.
    #[must_use]
    pub fn index_of(&self, node: Node) -> usize {
        let exact = self.limbs.iter().position(|limb| limb.node == node);
        exact.unwrap_or_else(|| {
            let distance =
                |limb: &Limb| self.topology.distance(limb.node, node).unwrap_or(u32::MAX);
            let nearest = self
                .limbs
                .iter()
                .enumerate()
                .min_by_key(|(_, limb)| distance(limb));
            nearest.map_or(0, |(index, _)| index)
        })
    }
}
