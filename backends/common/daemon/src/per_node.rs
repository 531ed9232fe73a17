//! Per-node workers: threads of a device that belong to a NUMA node (the limbs of
//! ioctopus-asplos20, section 3.3).
//!
//! A worker runs on its node's processors, and memory that it touches first is the node's. A node
//! without processors has workers, too, which run on those of the nearest node that has some. On a
//! machine with one node nothing is pinned.

use crate::log_limit::LogLimit;
use crate::warn_limited;
use farlane_abi::width::to_usize;
use farlane_zero_copy::topology::{Node, Topology};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

/// What per-node workers, and those who follow a VM's memory for them, ask of the kernel besides
/// what every daemon does.
pub const SYSTEM_CALLS: &[libc::c_long] = &[
    libc::SYS_get_mempolicy,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_set_mempolicy,
];

/// `set_mempolicy` and `mbind`: of this node, where it has room (`MPOL_PREFERRED`).
const PREFERRED: i32 = 1;
/// Nodes of a mask: the most that Linux can be built for.
const MASK_BITS: usize = 1024;

/// A node of the machine, as a place for threads.
#[derive(Clone, Debug)]
pub struct WorkerNode {
    node: Node,
    /// Its processors; empty where nothing is to be pinned.
    cpus: Vec<u32>,
    /// Its log lines: whoever moves memory makes threads enter it again and again.
    limit: Arc<LogLimit>,
}

impl WorkerNode {
    /// Its node.
    #[must_use]
    pub fn node(&self) -> Node {
        self.node
    }

    /// Starts a worker.
    ///
    /// # Errors
    /// There are no more threads.
    pub fn spawn<T: Send + 'static>(
        &self,
        name: String,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let node = self.clone();
        std::thread::Builder::new().name(name).spawn(move || {
            node.enter();
            work()
        })
    }

    /// Makes the calling thread a worker of this node. Where the system says no, as it may in a
    /// container, it runs anywhere: slower, no more.
    pub fn enter(&self) {
        if self.cpus.is_empty() {
            return;
        }
        let mut set = rustix::thread::CpuSet::new();
        for cpu in &self.cpus {
            let cpu = to_usize((*cpu).into());
            if cpu < rustix::thread::CpuSet::MAX_CPU {
                set.set(cpu);
            }
        }
        if let Err(e) = rustix::thread::sched_setaffinity(None, &set) {
            warn_limited!(
                self.limit,
                "Node {}: its threads are not pinned: {e}",
                self.node
            );
        }
        if let Err(e) = prefer(self.node) {
            log::debug!("Node {}: no memory policy: {e}", self.node);
        }
    }
}

/// A node as calls about memory take it: a mask, and its bits, of which the kernel reads one less.
fn mask(node: Node) -> io::Result<([u64; MASK_BITS / 64], usize)> {
    let mut mask = [0_u64; MASK_BITS / 64];
    let word = usize::try_from(node.0 / 64).map_err(io::Error::other)?;
    *mask.get_mut(word).ok_or(io::ErrorKind::InvalidInput)? |= 1 << (node.0 % 64);
    Ok((mask, MASK_BITS + 1))
}

/// What a call about memory has returned.
fn done(result: libc::c_long) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The calling thread's memory comes from `node`, where it has room.
fn prefer(node: Node) -> io::Result<()> {
    let (mask, bits) = mask(node)?;
    // SAFETY: the mask has as many bits as the kernel reads, and is only read.
    done(unsafe { libc::syscall(libc::SYS_set_mempolicy, PREFERRED, mask.as_ptr(), bits) })
}

/// Memory at an address of this process, a multiple of a page, that nobody has touched yet comes
/// from `node`, where it has room. To be called before
/// [`seccomp::confine`](crate::seccomp::confine).
///
/// # Errors
/// There is no such node, or no such memory.
pub fn prefer_for(address: usize, bytes: usize, node: Node) -> io::Result<()> {
    let (mask, mask_bits) = mask(node)?;
    let mask = mask.as_ptr();
    // SAFETY: the mask has as many bits as the kernel reads, and is only read; what the memory
    // holds stays as it is, wherever it is.
    done(unsafe {
        libc::syscall(
            libc::SYS_mbind,
            address,
            bytes,
            PREFERRED,
            mask,
            mask_bits,
            0,
        )
    })
}

/// All nodes of a machine, as places for threads.
#[derive(Clone, Debug)]
pub struct WorkerNodes {
    topology: Topology,
    nodes: Vec<WorkerNode>,
}

impl WorkerNodes {
    /// One a node.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        let nodes = topology.nodes();
        let pins = nodes.len() > 1;
        let places = nodes.iter().map(|&node| WorkerNode {
            node,
            cpus: if pins {
                nearest_cpus(&topology, node)
            } else {
                Vec::new()
            },
            limit: Arc::default(),
        });
        Self {
            nodes: places.collect(),
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
    pub fn all(&self) -> &[WorkerNode] {
        &self.nodes
    }

    /// Their numbers, in the same order.
    #[must_use]
    pub fn numbers(&self) -> Vec<Node> {
        self.nodes.iter().map(WorkerNode::node).collect()
    }

    /// The index of a node's; the first's for a node that is not there.
    #[must_use]
    pub fn index_of(&self, node: Node) -> usize {
        let mut nodes = self.nodes.iter();
        nodes.position(|other| other.node == node).unwrap_or(0)
    }
}

/// The processors of a node, or of the nearest that has some.
fn nearest_cpus(topology: &Topology, node: Node) -> Vec<u32> {
    let mut nodes = topology.nodes();
    // What is as near keeps its order.
    nodes.sort_by_key(|&other| topology.proximity(node, other));
    let mut cpus = nodes.into_iter().map(|node| topology.cpus(node));
    cpus.find(|cpus| !cpus.is_empty()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_zero_copy::topology::Described;

    /// Where the calling thread may run.
    fn affinity() -> Vec<u32> {
        let set = rustix::thread::sched_getaffinity(None).unwrap();
        (0..1024_u32)
            .filter(|cpu| set.is_set(usize::try_from(*cpu).unwrap()))
            .collect()
    }

    fn described(cpus: &[&[u32]]) -> WorkerNodes {
        WorkerNodes::new(Topology::of(Described::new(cpus)))
    }

    #[test]
    fn threads_run_on_the_processors_of_their_node() {
        let here = affinity();
        let (first, last) = (here[0], *here.last().unwrap());
        let nodes = described(&[&[first], &[last]]);
        let threads: Vec<_> = nodes
            .all()
            .iter()
            .map(|node| node.spawn("worker".to_owned(), affinity).unwrap())
            .collect();
        let seen: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        assert_eq!(seen, [[first], [last]]);
        assert_eq!(affinity(), here);
    }

    #[test]
    fn a_machine_with_one_node_pins_nothing() {
        let here = affinity();
        let nodes = described(&[&[here[0]]]);
        let thread = nodes.all()[0].spawn("worker".to_owned(), affinity).unwrap();
        assert_eq!(thread.join().unwrap(), here);
    }

    #[test]
    fn a_node_without_processors_borrows_the_nearest_ones() {
        let nodes = described(&[&[0, 1], &[], &[], &[7]]);
        let cpus: Vec<_> = nodes.all().iter().map(|node| node.cpus.clone()).collect();
        assert_eq!(cpus, [vec![0, 1], vec![0, 1], vec![7], vec![7]]);
        let index = |node| nodes.index_of(Node(node));
        assert_eq!((index(0), index(2), index(9)), (0, 2, 0));
        assert_eq!(nodes.all()[1].node(), Node(1));
    }

    #[test]
    fn processors_that_are_not_there_stop_nobody() {
        let nodes = described(&[&[1_000_000], &[900]]);
        for node in nodes.all() {
            let thread = node.spawn("worker".to_owned(), || 7).unwrap();
            assert_eq!(thread.join().unwrap(), 7);
        }
    }

    /// Says that `child` is to be a daemon whose log can be counted.
    const LOGS: &str = "FARLANE_TEST_NODE_LOGS";

    #[test]
    fn a_thread_that_cannot_be_pinned_says_so_a_few_times_only() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "per_node::tests::child", "--nocapture"])
            .env(LOGS, "1")
            .output()
            .unwrap();
        assert!(output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        let lines = said.matches("its threads are not pinned").count();
        assert!((1..100).contains(&lines), "{lines} lines");
    }

    #[test]
    fn child() {
        if std::env::var(LOGS).is_err() {
            return;
        }
        env_logger::Builder::new()
            .filter_level(log::LevelFilter::Warn)
            .init();
        let nodes = described(&[&[900], &[901]]);
        for _ in 0..1000 {
            nodes.all().iter().for_each(WorkerNode::enter);
        }
    }

    #[test]
    fn memory_of_a_node_that_no_kernel_has_is_refused() {
        assert!(prefer(Node(1 << 20)).is_err());
        assert!(prefer(Node(1023)).is_err());
        assert!(prefer_for(4096, 4096, Node(1023)).is_err());
    }
}
