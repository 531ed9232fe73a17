//! On which node each part of a VM's memory lies.

use crate::AddressSpace;
use crate::topology::{Node, Topology};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Bytes whose node is found by one sample where memory is not bound.
const GRANULE: u64 = 2 << 20;

/// Guest-physical memory that somebody has said the node of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// Its node.
    pub node: Node,
}

/// The nodes of a VM's memory at one moment: runs of guest-physical addresses, in order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NodeMap {
    /// First address, address after the last, node.
    runs: Vec<(u64, u64, Node)>,
    /// Where nothing is known.
    other: Node,
}

impl NodeMap {
    /// The node of the byte at a guest-physical address. Where nothing is known, the machine's first.
    #[must_use]
    pub fn node_of(&self, address: u64) -> Node {
        self.run_at(address).0
    }

    /// The node at an address, and the address up to which it is the same.
    fn run_at(&self, address: u64) -> (Node, u64) {
        let index = self.runs.partition_point(|&(_, end, _)| end <= address);
        match self.runs.get(index) {
            Some(&(start, end, node)) if start <= address => (node, end),
            Some(&(start, _, _)) => (self.other, start),
            None => (self.other, u64::MAX),
        }
    }

    /// Calls `each(node, address, bytes)` for the longest runs of `[address, address + bytes)` that lie on one node.
    pub fn cut(&self, address: u64, bytes: u64, mut each: impl FnMut(Node, u64, u64)) {
        let end = address.saturating_add(bytes);
        let mut at = address;
        while at < end {
            let (node, mut until) = self.run_at(at);
            while until < end && self.run_at(until).0 == node {
                until = self.run_at(until).1;
            }
            let until = until.min(end);
            each(node, at, until - at);
            at = until;
        }
    }

    /// Whether all of the memory lies on one node.
    #[must_use]
    pub fn is_uniform(&self) -> bool {
        self.runs.iter().all(|&(_, _, node)| node == self.other)
    }
}

/// The nodes of a VM's memory, followed as it moves.
#[derive(Debug)]
pub struct Placement {
    space: Arc<AddressSpace>,
    topology: Topology,
    given: Vec<Given>,
    map: RwLock<Arc<NodeMap>>,
    generation: AtomicU64,
}

impl Placement {
    /// That of the memory of `space`; what is `given` is believed.
    #[must_use]
    pub fn new(space: Arc<AddressSpace>, topology: Topology, given: Vec<Given>) -> Arc<Self> {
        let placement = Arc::new(Self {
            space,
            topology,
            given,
            map: RwLock::default(),
            generation: AtomicU64::new(0),
        });
        placement.refresh();
        placement
    }

    /// The nodes as they are known now. Keep it as long as the [generation](Self::generation) stays the same.
    #[must_use]
    pub fn map(&self) -> Arc<NodeMap> {
        Arc::clone(&self.map.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts changes of the map.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Looks at the memory again: after it has come or gone, and now and then, because pages migrate.
    pub fn refresh(&self) {
        let other = self.topology.nodes().first().copied().unwrap_or_default();
        let mut runs: Vec<(u64, u64, Node)> = Vec::new();
        self.space
            .place(&self.topology, GRANULE, |start, end, node| {
                let node = node.unwrap_or(other);
                match runs.last_mut() {
                    Some((_, last_end, last)) if *last_end == start && *last == node => {
                        *last_end = end
                    }
                    _ => runs.push((start, end, node)),
                }
            });
        for given in &self.given {
            runs = overlaid(&runs, given);
        }
        let map = NodeMap { runs, other };
        let mut current = self.map.write().unwrap_or_else(PoisonError::into_inner);
        if **current != map {
            *current = Arc::new(map);
            self.generation.fetch_add(1, Ordering::Release);
        }
    }
}

/// `runs` with what is given over them.
fn overlaid(runs: &[(u64, u64, Node)], given: &Given) -> Vec<(u64, u64, Node)> {
    let (first, end) = (given.start, given.start.saturating_add(given.length));
    let mut result = Vec::with_capacity(runs.len() + 2);
    for &(start, until, node) in runs {
        for part in [(start, until.min(first)), (start.max(end), until)] {
            if part.0 < part.1 {
                result.push((part.0, part.1, node));
            }
        }
    }
    if first < end {
        result.push((first, end, given.node));
    }
    result.sort_by_key(|&(start, _, _)| start);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_cut_where_the_node_changes() {
        let map = NodeMap {
            runs: vec![
                (0, 0x1000, Node(0)),
                (0x1000, 0x3000, Node(1)),
                (0x4000, 0x5000, Node(1)),
            ],
            other: Node(0),
        };
        let mut parts = Vec::new();
        map.cut(0x800, 0x4000, |node, at, bytes| {
            parts.push((node.0, at, bytes))
        });
        assert_eq!(
            parts,
            [
                (0, 0x800, 0x800),
                (1, 0x1000, 0x2000),
                (0, 0x3000, 0x1000),
                (1, 0x4000, 0x800)
            ]
        );
        assert!(!map.is_uniform());
    }

    #[test]
    fn what_is_given_is_believed() {
        let space = AddressSpace::new();
        let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 0x10_0000).unwrap();
        space
            .map(0, 0x10_0000, std::os::fd::AsFd::as_fd(&fd), 0, true)
            .unwrap();
        let given = Given {
            start: 0x8_0000,
            length: 0x8_0000,
            node: Node(1),
        };
        let placement = Placement::new(space, Topology::default(), vec![given]);
        let map = placement.map();
        assert_eq!(
            (map.node_of(0x7_ffff), map.node_of(0x8_0000)),
            (Node(0), Node(1))
        );
        let generation = placement.generation();
        placement.refresh();
        assert_eq!(placement.generation(), generation);
    }
}
