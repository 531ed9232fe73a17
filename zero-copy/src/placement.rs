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
mod tests {
    use super::*;
    use crate::topology::Described;

    #[test]
    fn requests_are_cut_where_the_node_changes() {
        let runs = vec![
            (0, 0x1000, Node(0)),
            (0x1000, 0x3000, Node(1)),
            (0x4000, 0x5000, Node(1)),
        ];
        let map = NodeMap::new(runs, Node(0));
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

    /// 16 MiB at address 0 and 2 MiB at 16 MiB + 4 KiB, on a machine that is described.
    fn machine() -> (Described, Arc<AddressSpace>, [*const u8; 2]) {
        let space = AddressSpace::new();
        let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 18 << 20).unwrap();
        let fd = std::os::fd::AsFd::as_fd(&fd);
        space.map(0, 16 << 20, fd, 0, true).unwrap();
        let start = (16 << 20) + 0x1000;
        space.map(start, 2 << 20, fd, 16 << 20, true).unwrap();
        let view = space.view();
        let base = |address| {
            let mut base = std::ptr::null();
            let found = view.state().resolve(address, 1, |range, _, _| {
                base = range.mapping.base().cast_const();
            });
            found.unwrap();
            base
        };
        (
            Described::pair(),
            Arc::clone(&space),
            [base(0), base(start)],
        )
    }

    fn nodes(placement: &Placement, addresses: &[u64]) -> Vec<u32> {
        let map = placement.map();
        addresses.iter().map(|at| map.node_of(*at).0).collect()
    }

    #[test]
    fn memory_is_followed_as_it_moves() {
        let (machine, space, [low, _]) = machine();
        machine.move_pages(low, 4 << 20, Some(Node(0)));
        machine.move_pages(low.wrapping_add(4 << 20), 4 << 20, Some(Node(1)));
        let topology = Topology::of(machine.clone());
        let placement = Placement::new(space, topology, Vec::new());
        let at = [0, (4 << 20) - 1, 4 << 20, (8 << 20) - 1];
        assert_eq!(nodes(&placement, &at), [0, 0, 1, 1]);
        let watch = placement
            .watch(Duration::from_micros(100))
            .unwrap()
            .unwrap();
        let before = placement.generation();
        machine.move_pages(low, 4 << 20, Some(Node(1)));
        while placement.generation() == before {
            std::thread::yield_now();
        }
        drop(watch);
        assert_eq!(nodes(&placement, &at), [1, 1, 1, 1]);
        // Nobody looks any more.
        assert_eq!(Arc::strong_count(&placement), 1);
        let (asked, before) = (machine.asked(), placement.generation());
        placement.refresh();
        assert!(machine.asked() > asked && placement.generation() == before);
    }

    #[test]
    fn memory_that_was_not_looked_at_is_looked_at_when_somebody_asks_and_not_by_whoever_asks() {
        let (machine, space, [low, high]) = machine();
        machine.move_pages(low, 16 << 20, Some(Node(1)));
        machine.bind(high, 2 << 20, Some(Node(1)));
        let given = Given {
            start: 0x1000,
            length: 0x1000,
            node: Node(0),
        };
        let topology = Topology::of(machine.clone());
        let placement = Placement::unseen(space, topology, vec![given]);
        let at = [0, 0x1000, 15 << 20, 17 << 20];
        assert_eq!(nodes(&placement, &at), [0, 0, 0, 0]);
        assert_eq!(machine.asked(), 0);
        // One address is.
        let seen =
            [0, 0x1000, 0x2000, 15 << 20, 17 << 20, 40 << 20].map(|at| placement.look_at(at).0);
        assert_eq!(seen, [1, 0, 1, 1, 1, 0]);
        let before = placement.generation();
        let hour = Duration::from_secs(3600);
        let watch = placement.watch(hour).unwrap().unwrap();
        watch.look();
        while placement.generation() == before {
            std::thread::yield_now();
        }
        drop(watch);
        assert_eq!(nodes(&placement, &at), [1, 0, 1, 1]);
    }

    #[test]
    fn memory_without_pages_is_where_its_neighbour_is_or_its_policy_says() {
        let (machine, space, [low, high]) = machine();
        let topology = Topology::of(machine.clone());
        let placement = Placement::new(space, topology, Vec::new());
        let all = [0, 6 << 20, 15 << 20, 17 << 20];
        assert_eq!(nodes(&placement, &all), [0, 0, 0, 0]);
        // Before the first and after the last that is known; not across ranges.
        machine.move_pages(low.wrapping_add(6 << 20), 2 << 20, Some(Node(1)));
        placement.refresh();
        assert_eq!(nodes(&placement, &all), [1, 1, 1, 0]);
        machine.move_pages(low.wrapping_add(8 << 20), 2 << 20, Some(Node(0)));
        placement.refresh();
        assert_eq!(nodes(&placement, &all), [1, 1, 0, 0]);
        machine.bind(high, 2 << 20, Some(Node(1)));
        placement.refresh();
        assert_eq!(nodes(&placement, &all), [1, 1, 0, 1]);
        machine.bind(high, 2 << 20, None);
        let part = |node, preferred| Placed {
            range: 0,
            start: 0,
            end: 1,
            node,
            preferred,
        };
        let first = |node, preferred| runs_of(&[part(node, preferred)], Node(0))[0].2;
        assert_eq!(first(None, Some(Node(1))), Node(1));
        assert_eq!(first(Some(Node(0)), Some(Node(1))), Node(0));
    }

    #[test]
    fn a_machine_with_one_node_is_not_looked_at() {
        let (_, space, _) = machine();
        let machine = Described::new(&[&[0, 1]]);
        let placement = Placement::new(space, Topology::of(machine.clone()), Vec::new());
        assert!(placement.map().is_uniform());
        assert!(placement.watch(Duration::ZERO).unwrap().is_none());
        assert_eq!(machine.asked(), 0);
    }

    #[test]
    fn memory_that_goes_is_forgotten() {
        let (machine, space, [low, _]) = machine();
        machine.bind(low, 16 << 20, Some(Node(1)));
        let topology = Topology::of(machine);
        let placement = Placement::new(Arc::clone(&space), topology, Vec::new());
        assert_eq!(nodes(&placement, &[1 << 20]), [1]);
        space.unmap(0, 16 << 20).unwrap();
        placement.refresh();
        assert_eq!(nodes(&placement, &[1 << 20]), [0]);
    }

    /// Runs in order and disjoint, with gaps or without.
    fn maps() -> impl proptest::strategy::Strategy<Value = NodeMap> {
        use proptest::prelude::*;
        let parts = proptest::collection::vec((0_u64..4, 1_u64..9, 0_u32..3), 0..9);
        (parts, 0_u32..3).prop_map(|(parts, other)| {
            let mut runs = Vec::new();
            let mut at = 0;
            for (gap, bytes, node) in parts {
                runs.push((at + gap, at + gap + bytes, Node(node)));
                at += gap + bytes;
            }
            NodeMap::new(runs, Node(other))
        })
    }

    fn said(map: &NodeMap, address: u64) -> Node {
        let mut runs = map.runs.iter();
        let found = runs.find(|(start, end, _)| (*start..*end).contains(&address));
        found.map_or(map.other, |run| run.2)
    }

    proptest::proptest! {
        #[test]
        fn every_byte_is_where_the_runs_say(map in maps(), address in 0_u64..120) {
            proptest::prop_assert_eq!(map.node_of(address), said(&map, address));
        }

        /// Runs as long as what one entry of the index stands for, and longer and shorter ones.
        #[test]
        fn many_runs_are_found_as_well(
            parts in proptest::collection::vec((0_u64..2, 1_u64..5, 0_u32..2), 9..60),
            unit in proptest::sample::select(
                vec![GRANULE, GRANULE / 2, GRANULE * 3 / 4, GRANULE * 5],
            ),
            addresses in proptest::collection::vec(0_u64..300, 20)
        ) {
            let mut runs = Vec::new();
            let mut at = 0;
            for (gap, length, node) in parts {
                let start = at + gap * unit;
                at = start + length * unit;
                runs.push((start, at, Node(node)));
            }
            let map = NodeMap::new(runs, Node(7));
            proptest::prop_assert!(!map.index.is_empty());
            for address in addresses {
                for address in [address * unit, address * unit + unit - 1] {
                    proptest::prop_assert_eq!(map.node_of(address), said(&map, address));
                }
            }
        }

        #[test]
        fn parts_cover_a_request_are_uniform_and_as_long_as_possible(
            map in maps(), address in 0_u64..100, bytes in 0_u64..120
        ) {
            let mut parts = Vec::new();
            map.cut(address, bytes, |node, at, bytes| parts.push((node, at, bytes)));
            let mut at = address;
            for &(node, start, bytes) in &parts {
                proptest::prop_assert!(start == at && bytes > 0);
                for byte in start..start + bytes {
                    proptest::prop_assert_eq!(said(&map, byte), node);
                }
                at += bytes;
            }
            proptest::prop_assert_eq!(at, address + bytes);
            for pair in parts.windows(2) {
                proptest::prop_assert!(pair[0].0 != pair[1].0);
            }
            if map.is_uniform() && bytes > 0 {
                proptest::prop_assert_eq!(parts.len(), 1);
            }
        }

        #[test]
        fn what_is_given_lies_over_what_is_seen(
            map in maps(),
            start in 0_u64..100,
            length in 0_u64..30,
            node in 0_u32..3,
            address in 0_u64..150,
        ) {
            let given = Given { start, length, node: Node(node) };
            let over = NodeMap::new(overlaid(&map.runs, &given), map.other);
            let expected = match (start..start + length).contains(&address) {
                true => Node(node),
                false => said(&map, address),
            };
            proptest::prop_assert_eq!(over.node_of(address), expected);
        }

        #[test]
        fn the_end_of_all_addresses_is_reached(map in maps(), back in 0_u64..9, more in 0_u64..9) {
            let mut bytes = 0;
            map.cut(u64::MAX - back, more, |_, _, part| bytes += part);
            proptest::prop_assert_eq!(bytes, back.min(more));
        }
    }
}
