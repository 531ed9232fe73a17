//! Which NUMA nodes a machine has, and what is on which: processors, memory, PCI functions, threads.
//!
//! A [`Machine`] tells; [`Sysfs`] asks the kernel, below any root folder. Whoever steers asks a [`Topology`].

mod sysfs;

use std::sync::Arc;

pub use sysfs::Sysfs;

/// A NUMA node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node(pub u32);

impl std::fmt::Display for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// What there is to know of a machine.
pub trait Machine: std::fmt::Debug + Send + Sync {
    /// The nodes that are online, in order; at least one.
    fn nodes(&self) -> Vec<Node>;

    /// The processors of a node, in order.
    fn cpus(&self, node: Node) -> Vec<u32>;

    /// How far memory of `to` is from processors of `from`, as the firmware has it (10 is near).
    fn distance(&self, from: Node, to: Node) -> Option<u32>;

    /// The node of a PCI function, such as `0000:01:00.0`.
    fn node_of_function(&self, function: &str) -> Option<Node>;

    /// The node of the processor on which a thread last ran.
    fn node_of_thread(&self, process: u32, thread: u32) -> Option<Node>;

    /// The nodes of pages of this process; `None` for those that have no memory yet.
    fn nodes_of_pages(&self, pages: &[*const u8]) -> Vec<Option<Node>>;

    /// The one node to which the memory at an address of this process is bound by its policy.
    fn binding(&self, address: *const u8) -> Option<Node>;
}

/// A machine, shared.
#[derive(Clone, Debug)]
pub struct Topology(Arc<dyn Machine>);

impl Default for Topology {
    /// This machine.
    fn default() -> Self {
        Self::of(Sysfs::default())
    }
}

impl std::ops::Deref for Topology {
    type Target = dyn Machine;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl Topology {
    /// That of `machine`.
    #[must_use]
    pub fn of(machine: impl Machine + 'static) -> Self {
        Self(Arc::new(machine))
    }

    /// The node that most of up to 16 sampled pages of `[address, address + length)` of this process lie on; `None` where no
    /// sampled page has memory behind it, or the kernel does not say.
    #[must_use]
    pub fn node_of_range(&self, address: *const u8, length: usize) -> Option<Node> {
        const SAMPLES: usize = 16;
        let pages = length.div_ceil(4096);
        let count = pages.min(SAMPLES);
        if count == 0 {
            return None;
        }
        let sampled: Vec<_> = (0..count)
            .map(|i| address.wrapping_add(i * (pages / count) * 4096))
            .collect();
        let mut votes = std::collections::BTreeMap::new();
        for node in self.nodes_of_pages(&sampled).into_iter().flatten() {
            *votes.entry(node).or_insert(0_u32) += 1;
        }
        votes
            .into_iter()
            .max_by_key(|&(_, count)| count)
            .map(|(node, _)| node)
    }
}
