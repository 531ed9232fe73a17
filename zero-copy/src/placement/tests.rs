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
    let seen = [0, 0x1000, 0x2000, 15 << 20, 17 << 20, 40 << 20].map(|at| placement.look_at(at).0);
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
