//! A machine as somebody says that it is.

use super::{Machine, Node};
use farlane_abi::width::to_usize;
use farlane_sys::sync::lock;
use std::sync::{Arc, Mutex, MutexGuard};

/// What is said of memory: first address, address after the last, node.
type Said = Vec<(usize, usize, Option<Node>)>;

#[derive(Debug, Default)]
struct Memory {
    pages: Said,
    bindings: Said,
    /// How often pages were asked about.
    asked: u64,
}

fn last(said: &Said, address: *const u8) -> Option<Node> {
    let at = address.addr();
    let found = said.iter().rev().find(|s| (s.0..s.1).contains(&at));
    found.and_then(|&(_, _, node)| node)
}

/// A machine that exists in words only, and whose pages move when they are told to. Clones are the
/// same machine.
#[derive(Clone, Debug, Default)]
pub struct Described {
    /// Processors and bytes of memory.
    nodes: Vec<(Vec<u32>, u64)>,
    memory: Arc<Mutex<Memory>>,
}

impl Described {
    /// A machine with these processors on nodes 0, 1 and so on; no processors: a node that is only
    /// memory.
    #[must_use]
    pub fn new(cpus: &[&[u32]]) -> Self {
        Self {
            nodes: cpus.iter().map(|cpus| (cpus.to_vec(), 1 << 30)).collect(),
            ..Self::default()
        }
    }

    /// Two nodes with a processor each: 0 and 1.
    #[must_use]
    pub fn pair() -> Self {
        Self::new(&[&[0], &[1]])
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        lock(&self.memory)
    }

    /// From now on the pages of `[address, address + length)` are on `node`; none: they have no
    /// memory.
    pub fn move_pages(&self, address: *const u8, length: usize, node: Option<Node>) {
        let said = (address.addr(), address.addr() + length, node);
        self.memory().pages.push(said);
    }

    /// From now on `[address, address + length)` is bound to `node`; none: it is not bound.
    pub fn bind(&self, address: *const u8, length: usize, node: Option<Node>) {
        let said = (address.addr(), address.addr() + length, node);
        self.memory().bindings.push(said);
    }

    /// How often pages were asked about.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.memory().asked
    }
}

impl Machine for Described {
    fn nodes(&self) -> Vec<Node> {
        (0..).map(Node).take(self.nodes.len()).collect()
    }

    fn cpus(&self, node: Node) -> Vec<u32> {
        let index = to_usize(node.0.into());
        self.nodes
            .get(index)
            .map(|known| known.0.clone())
            .unwrap_or_default()
    }

    fn memory_bytes(&self, node: Node) -> u64 {
        let index = to_usize(node.0.into());
        self.nodes.get(index).map_or(0, |known| known.1)
    }

    fn distance(&self, from: Node, to: Node) -> Option<u32> {
        let nodes = self.nodes();
        (nodes.contains(&from) && nodes.contains(&to)).then(|| 10 + 11 * from.0.abs_diff(to.0))
    }

    fn node_of_function(&self, _function: &str) -> Option<Node> {
        None
    }

    fn node_of_thread(&self, _process: u32, _thread: u32) -> Option<Node> {
        None
    }

    fn nodes_of_pages(&self, pages: &[*const u8]) -> Vec<Option<Node>> {
        let mut memory = self.memory();
        memory.asked += 1;
        pages
            .iter()
            .map(|page| last(&memory.pages, *page))
            .collect()
    }

    fn binding(&self, address: *const u8) -> Option<Node> {
        last(&self.memory().bindings, address)
    }
}
