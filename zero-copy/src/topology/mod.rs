//! Which NUMA nodes a machine has, and what is on which: processors, memory, PCI functions,
//! threads.
//!
//! A [`Machine`] tells; [`Sysfs`] asks the kernel, below any root folder; a [`Described`] one is
//! what somebody says. Whoever steers asks a [`Topology`].

mod described;
mod functions;
mod memory;
mod sysfs;

use std::sync::Arc;

pub use described::Described;
pub use functions::{Class, Function};
pub use sysfs::Sysfs;

/// A NUMA node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node(pub u32);

impl std::fmt::Display for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// How near memory of one node is to processors of another; the nearest is the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proximity {
    /// It is the same node.
    Same,
    /// As far as this ([`Machine::distance`]).
    Distance(u32),
    /// Nobody says.
    Unknown,
}

/// What there is to know of a machine.
pub trait Machine: std::fmt::Debug + Send + Sync {
    /// The nodes that are online, in order; at least one.
    fn nodes(&self) -> Vec<Node>;

    /// The processors of a node, in order.
    fn cpus(&self, node: Node) -> Vec<u32>;

    /// The bytes of memory that a node has; zero where it has none or nobody says.
    fn memory_bytes(&self, node: Node) -> u64;

    /// How far memory of `to` is from processors of `from`, as the firmware has it (10 is near).
    fn distance(&self, from: Node, to: Node) -> Option<u32>;

    /// The node of a PCI function, such as `0000:01:00.0`.
    fn node_of_function(&self, function: &str) -> Option<Node>;

    /// The node of a thread: that of the processors to which it is pinned, else of the one on which
    /// it last ran.
    fn node_of_thread(&self, process: u32, thread: u32) -> Option<Node>;

    /// The nodes of pages of this process; `None` for those that have no memory yet, and they get
    /// none by being asked about.
    fn nodes_of_pages(&self, pages: &[*const u8]) -> Vec<Option<Node>>;

    /// The one node to which the memory at an address of this process is bound by its policy.
    fn binding(&self, address: *const u8) -> Option<Node>;

    /// The one node from which memory at an address of this process will come, as far as its policy
    /// says.
    fn preference(&self, address: *const u8) -> Option<Node> {
        self.binding(address)
    }
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

    /// How near memory of `to` is to processors of `from`.
    #[must_use]
    pub fn proximity(&self, from: Node, to: Node) -> Proximity {
        if from == to {
            return Proximity::Same;
        }
        let distance = self.distance(from, to);
        distance.map_or(Proximity::Unknown, Proximity::Distance)
    }

    /// The one node to which all of `[address, address + length)` of this process is bound, as far
    /// as 16 sampled places tell.
    #[must_use]
    pub fn binding_of_range(&self, address: *const u8, length: usize) -> Option<Node> {
        const SAMPLES: usize = 16;
        let last = length.checked_sub(1)?;
        let node = self.binding(address)?;
        let step = length / SAMPLES;
        let mut others = (1..SAMPLES).map(|n| n * step).chain([last]);
        let is_same = |at| self.binding(address.wrapping_add(at)) == Some(node);
        others.all(is_same).then_some(node)
    }

    /// The node that most of up to 16 sampled pages of `[address, address + length)` of this
    /// process lie on; `None` where no sampled page has memory behind it, or the kernel does not
    /// say.
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
        majority(&self.nodes_of_pages(&sampled))
    }
}

/// The node that most are on, the lowest of several; `None` where none is known.
pub(crate) fn majority(nodes: &[Option<Node>]) -> Option<Node> {
    let count = |node: Node| nodes.iter().filter(|n| **n == Some(node)).count();
    let known = nodes.iter().flatten().copied();
    known.max_by_key(|&node| (count(node), std::cmp::Reverse(node)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_pages_decide() {
        let nodes = |numbers: &[i64]| {
            let node = |n: &i64| u32::try_from(*n).ok().map(Node);
            majority(&numbers.iter().map(node).collect::<Vec<_>>())
        };
        assert_eq!(nodes(&[]), None);
        assert_eq!(nodes(&[-1, -1, 2]), Some(Node(2)));
        assert_eq!(nodes(&[1, 0, 1, -1]), Some(Node(1)));
        assert_eq!(nodes(&[1, 0]), Some(Node(0)));
    }

    #[test]
    fn a_node_of_which_nothing_is_known_is_the_furthest() {
        let topology = Topology::of(Described::pair());
        let from_first = |node| topology.proximity(Node(0), Node(node));
        assert_eq!(from_first(0), Proximity::Same);
        assert_eq!(from_first(1), Proximity::Distance(21));
        assert_eq!(from_first(7), Proximity::Unknown);
        assert!(from_first(0) < from_first(1) && from_first(1) < from_first(7));
    }

    #[test]
    fn a_range_is_bound_where_all_of_it_is() {
        let machine = Described::pair();
        let base = std::ptr::without_provenance::<u8>(64 << 20);
        machine.bind(base, 32 << 20, Some(Node(1)));
        let topology = Topology::of(machine.clone());
        let bound = |length| topology.binding_of_range(base, length);
        assert_eq!(bound(32 << 20), Some(Node(1)));
        assert_eq!((bound(1), bound(0)), (Some(Node(1)), None));
        assert_eq!(bound((32 << 20) + 1), None);
        machine.bind(base.wrapping_add(16 << 20), 4 << 20, Some(Node(0)));
        assert_eq!(bound(32 << 20), None);
        assert_eq!(bound(16 << 20), Some(Node(1)));
    }

    #[test]
    fn a_range_is_where_most_of_it_lies() {
        let machine = Described::pair();
        let memory = vec![0_u8; 64 << 12];
        let base = memory.as_ptr();
        machine.move_pages(base, 64 << 12, Some(Node(1)));
        machine.move_pages(base, 16 << 12, Some(Node(0)));
        let topology = Topology::of(machine);
        assert_eq!(topology.node_of_range(base, 64 << 12), Some(Node(1)));
        assert_eq!(topology.node_of_range(base, 16 << 12), Some(Node(0)));
        assert_eq!(topology.node_of_range(base, 0), None);
    }
}
