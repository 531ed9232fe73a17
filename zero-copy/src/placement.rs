//! On which node each part of a VM's memory lies.

use crate::topology::{Node, Topology};
use crate::{AddressSpace, Placed};
use farlane_abi::width::to_usize;
use farlane_sys::sync::{read, write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes that are taken to lie on one node where memory is not bound.
const GRANULE: u64 = 2 << 20;
/// Runs that are searched rather than indexed.
const SEARCHED_RUNS: usize = 8;
/// Memory up to this address can be indexed: 4 bytes for each 2 MiB.
const INDEXED_BYTES: u64 = 64 << 40;
/// How much longer than it takes to look at the memory is waited at least before the next look.
const SHARE: u32 = 100;

/// First address, address after the last, node.
type Run = (u64, u64, Node);

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
    runs: Vec<Run>,
    /// Where nothing is known.
    other: Node,
    /// For each [`GRANULE`] from address 0 on, the first run that does not end before it; empty
    /// where runs are few and are searched.
    index: Vec<u32>,
}

impl NodeMap {
    fn new(runs: Vec<Run>, other: Node) -> Self {
        let end = runs.last().map_or(0, |run| run.1);
        let mut index = Vec::new();
        if runs.len() > SEARCHED_RUNS && end <= INDEXED_BYTES {
            let mut run = 0_u32;
            let mut ends = runs.iter().map(|run| run.1).peekable();
            for granule in 0..end.div_ceil(GRANULE) {
                while ends.next_if(|end| *end <= granule * GRANULE).is_some() {
                    run += 1;
                }
                index.push(run);
            }
        }
        Self { runs, other, index }
    }

    /// The node of the byte at a guest-physical address. Where nothing is known, the machine's
    /// first.
    #[must_use]
    pub fn node_of(&self, address: u64) -> Node {
        self.run_at(address).0
    }

    /// The node at an address, and the address up to which it is the same.
    fn run_at(&self, address: u64) -> (Node, u64) {
        let ends_before = |run: &&Run| run.1 <= address;
        let run = match self.index.get(to_usize(address / GRANULE)) {
            Some(&first) => {
                let runs = self.runs.get(to_usize(first.into())..);
                runs.and_then(|runs| runs.iter().find(|run| !ends_before(run)))
            }
            None => {
                let at = self.runs.partition_point(|run| ends_before(&run));
                self.runs.get(at)
            }
        };
        match run {
            Some(&(start, end, node)) if start <= address => (node, end),
            Some(&(start, _, _)) => (self.other, start),
            None => (self.other, u64::MAX),
        }
    }

    /// Calls `each(node, address, bytes)` for the longest runs of `[address, address + bytes)` that
    /// lie on one node.
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
///
/// Memory that is bound to a node is on that node. Other memory is on the node of most of its
/// sampled pages, in parts of 2 MiB. Parts that have no pages yet are where their range's policy
/// will take them from; without one, on the node of the part before, of the part after, or the
/// machine's first: the guess matters little, because the device that touches them first decides.
#[derive(Debug)]
pub struct Placement {
    space: Arc<AddressSpace>,
    topology: Topology,
    /// Nodes of the machine, as they were at the beginning.
    nodes: Vec<Node>,
    given: Vec<Given>,
    map: RwLock<Arc<NodeMap>>,
    generation: AtomicU64,
}

impl Placement {
    /// That of the memory of `space`; what is `given` is believed.
    #[must_use]
    pub fn new(space: Arc<AddressSpace>, topology: Topology, given: Vec<Given>) -> Arc<Self> {
        let placement = Self::unseen(space, topology, given);
        placement.refresh();
        placement
    }

    /// The same, of memory that is not looked at yet: of a large VM that takes a second. Until it
    /// is, all but what is `given` is said to lie on the machine's first node.
    #[must_use]
    pub fn unseen(space: Arc<AddressSpace>, topology: Topology, given: Vec<Given>) -> Arc<Self> {
        let placement = Self {
            space,
            nodes: topology.nodes(),
            topology,
            given,
            map: RwLock::default(),
            generation: AtomicU64::new(0),
        };
        placement.set(Vec::new());
        Arc::new(placement)
    }

    /// The nodes as they are known now. Keep it as long as the [generation](Self::generation) stays
    /// the same.
    #[must_use]
    pub fn map(&self) -> Arc<NodeMap> {
        Arc::clone(&read(&self.map))
    }

    /// Counts changes of the map.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Looks at the memory again: after it has come or gone, and now and then, because pages
    /// migrate.
    pub fn refresh(&self) {
        // On a machine with one node there is nothing to look at.
        if self.nodes.len() < 2 {
            return;
        }
        let mut parts = Vec::new();
        self.space
            .place(&self.topology, GRANULE, |part| parts.push(part));
        self.set(runs_of(&parts, self.other()));
    }

    /// Looks where one address lies, and nothing else.
    #[must_use]
    pub fn look_at(&self, address: u64) -> Node {
        let mut given = self.given.iter().rev();
        let given = given.find(|g| (g.start..g.start.saturating_add(g.length)).contains(&address));
        if let Some(given) = given {
            return given.node;
        }
        let several = self.nodes.len() > 1;
        let look = || self.space.place_at(&self.topology, GRANULE, address);
        let part = several.then(look).flatten();
        part.and_then(|part| part.node.or(part.preferred))
            .unwrap_or(self.other())
    }

    /// The node of what nobody knows.
    fn other(&self) -> Node {
        self.nodes.first().copied().unwrap_or_default()
    }

    /// What was seen, under what is given, is known from now on.
    fn set(&self, seen: Vec<Run>) {
        let (mut runs, other) = (seen, self.other());
        for given in &self.given {
            runs = overlaid(&runs, given);
        }
        let map = NodeMap::new(runs, other);
        let mut current = write(&self.map);
        if **current != map {
            *current = Arc::new(map);
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    /// Looks at the memory again every so often from a thread of its own, until what is returned is
    /// dropped; more rarely where that would take more than a hundredth of a processor. None where
    /// there is nothing to follow: the machine has one node.
    ///
    /// # Errors
    /// There are no more threads.
    pub fn watch(self: &Arc<Self>, every: Duration) -> std::io::Result<Option<Watch>> {
        if self.nodes.len() < 2 {
            return Ok(None);
        }
        Watch::start(Arc::clone(self), every).map(Some)
    }
}

/// A thread that follows the memory of a VM; ends when this is dropped.
#[derive(Debug)]
pub struct Watch {
    /// Has it look; it ends with this.
    ask: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(placement: Arc<Placement>, every: Duration) -> std::io::Result<Self> {
        let (ask, asked) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new()
            .name("placement".to_owned())
            .spawn(move || {
                let mut pause = every;
                while asked.recv_timeout(pause) != Err(mpsc::RecvTimeoutError::Disconnected) {
                    // Whoever asks twice before it is looked is answered once.
                    while asked.try_recv().is_ok() {}
                    let begun = Instant::now();
                    placement.refresh();
                    pause = every.max(begun.elapsed().saturating_mul(SHARE));
                }
            })?;
        Ok(Self {
            ask: Some(ask),
            thread: Some(thread),
        })
    }

    /// Has the thread look at once, and does not wait: memory has come or gone.
    pub fn look(&self) {
        if let Some(ask) = &self.ask {
            let _ = ask.send(());
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.ask.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("Who follows a VM's memory has panicked");
        }
    }
}

/// Parts joined to runs; those whose node is not known have been given one.
fn runs_of(parts: &[Placed], other: Node) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for of_range in parts.chunk_by(|a, b| a.range == b.range) {
        let mut known = of_range.iter().find_map(|part| part.node).unwrap_or(other);
        for part in of_range {
            known = part.node.unwrap_or(known);
            let node = part.node.or(part.preferred).unwrap_or(known);
            match runs.last_mut() {
                Some(last) if last.1 == part.start && last.2 == node => last.1 = part.end,
                _ => runs.push((part.start, part.end, node)),
            }
        }
    }
    runs
}

/// `runs` with what is given over them.
fn overlaid(runs: &[Run], given: &Given) -> Vec<Run> {
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
mod tests;
