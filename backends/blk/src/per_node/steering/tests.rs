//! Every byte in exactly one part, parts where they may begin, and each on the node that has most
//! of it.

use super::*;
use farlane_zero_copy::AddressSpace;
use farlane_zero_copy::placement::Given;
use farlane_zero_copy::topology::Topology;
use proptest::prelude::*;

const GIVEN: u64 = 1 << 14;

/// Memory whose node changes every 16 KiB: 0, 1, 0, 1...
fn striped() -> Arc<NodeMap> {
    let given = (0..64).map(|n| Given {
        start: n * GIVEN,
        length: GIVEN,
        node: Node(u32::try_from(n % 2).unwrap()),
    });
    let space = AddressSpace::new();
    Placement::new(space, Topology::default(), given.collect()).map()
}

fn segment(address: u64, bytes: u64) -> Segment {
    Segment { address, bytes }
}

fn shape(parts: &[Part]) -> Vec<(u32, u64)> {
    parts
        .iter()
        .map(|part| (part.span.node().0, part.bytes))
        .collect()
}

#[test]
fn data_is_cut_where_its_node_changes() {
    let map = striped();
    let whole = [segment(0, 3 * GIVEN)];
    let parts = cut(&map, &whole, 512, 4096);
    assert_eq!(shape(&parts), [(0, GIVEN), (1, GIVEN), (0, GIVEN)]);
    // Segments that follow each other on one node are one part.
    let scattered = [
        segment(0, 4096),
        segment(2 * GIVEN, 8192),
        segment(GIVEN, 4096),
    ];
    assert_eq!(
        shape(&cut(&map, &scattered, 512, 4096)),
        [(0, 12288), (1, 4096)]
    );
    assert_eq!(single_node(&map, &scattered), None);
    assert_eq!(single_node(&map, &scattered[..2]), Some(Node(0)));
}

#[test]
fn small_pieces_go_with_their_neighbours() {
    let map = striped();
    // 4 KiB of node 1 between 16 KiB of node 0 each.
    let segments = [
        segment(0, GIVEN),
        segment(GIVEN, 4096),
        segment(2 * GIVEN, GIVEN),
    ];
    let parts = cut(&map, &segments, 512, 8192);
    assert_eq!(shape(&parts), [(0, 2 * GIVEN + 4096)]);
    assert_eq!(
        parts[0].span,
        NumaSpan::Split(vec![(Node(0), 2 * GIVEN), (Node(1), 4096)])
    );
    // A small piece at the front goes with what follows.
    let front = [segment(0, 512), segment(GIVEN, GIVEN)];
    assert_eq!(shape(&cut(&map, &front, 512, 8192)), [(1, GIVEN + 512)]);
}

#[test]
fn a_border_inside_a_block_is_moved_to_its_beginning() {
    let map = striped();
    let segments = [segment(GIVEN - 4096 - 512, 8192 + 512)];
    let parts = cut(&map, &segments, 4096, 4096);
    assert_eq!(shape(&parts), [(0, 4096), (1, 4608)]);
    assert_eq!(
        parts[1].span,
        NumaSpan::Split(vec![(Node(1), 4096), (Node(0), 512)])
    );
}

proptest! {
    #[test]
    fn every_byte_is_in_one_part(
        segments in prop::collection::vec((0..50 * GIVEN, 1..200_u64), 1..200),
        align in prop::sample::select(vec![512_u64, 4096]),
        least in prop::sample::select(vec![512_u64, 4096, 65536, 1 << 20]),
    ) {
        let map = striped();
        let segments = segments.iter().map(|&(at, n)| segment(at / 512 * 512, n * 512));
        let segments: Vec<_> = segments.collect();
        let mut flat: Vec<(Node, u64)> = Vec::new();
        for s in &segments {
            map.cut(s.address, s.bytes, |node, _, bytes| flat.push((node, bytes)));
        }
        let total: u64 = segments.iter().map(|s| s.bytes).sum();
        let parts = cut(&map, &segments, align, least);
        prop_assert_eq!(parts.iter().map(|p| p.bytes).sum::<u64>(), total);
        prop_assert!(parts.len() <= MAX_PARTS && parts.iter().all(|p| p.bytes > 0));
        let mut at = 0;
        let mut left = flat.into_iter();
        let mut run = left.next();
        for part in &parts {
            prop_assert!(at % align == 0);
            // Parts are at least as large as is asked, but for what rounding takes.
            prop_assert!(parts.len() == 1 || part.bytes + align > least);
            let mut share = std::collections::BTreeMap::new();
            let mut rest = part.bytes;
            while rest > 0 {
                let (node, bytes) = run.unwrap();
                let n = bytes.min(rest);
                *share.entry(node).or_insert(0) += n;
                rest -= n;
                run = if n == bytes { left.next() } else { Some((node, bytes - n)) };
            }
            let told = match &part.span {
                NumaSpan::Single(node) => std::collections::BTreeMap::from([(*node, part.bytes)]),
                NumaSpan::Split(all) => all.iter().copied().collect(),
            };
            prop_assert_eq!(&told, &share);
            prop_assert_eq!(share[&part.span.node()], *share.values().max().unwrap());
            at += part.bytes;
        }
        prop_assert!(parts.windows(2).all(|p| p[0].span.node() != p[1].span.node()));
    }
}
