//! Which request, or which part of one, goes to which node: where its data lies (ioctopus-asplos20,
//! sections 3.3 and 5.4).

use farlane_vhost_user::segment::Segment;
use farlane_zero_copy::placement::{NodeMap, Placement};
use farlane_zero_copy::topology::Node;
use std::sync::Arc;

/// Most parts of a request.
pub const MAX_PARTS: usize = 64;
/// Requests of more bytes are not looked through: they go where their first byte is.
const MAX_BYTES: u64 = 1 << 30;

/// The NUMA nodes that the bytes of a part lie on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NumaSpan {
    /// One node.
    Single(Node),
    /// Several: the bytes of each, of which the first has most.
    Split(Vec<(Node, u64)>),
}

impl NumaSpan {
    /// The node that has most of it.
    #[must_use]
    pub fn node(&self) -> Node {
        match self {
            Self::Single(node) => *node,
            Self::Split(all) => all.first().map(|(node, _)| *node).unwrap_or_default(),
        }
    }
}

/// A part of a request: so many bytes after those of the parts before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Bytes, not zero.
    pub bytes: u64,
    /// The nodes that they lie on.
    pub span: NumaSpan,
}

/// The nodes of the VM's memory, as a queue's worker knows them.
#[derive(Debug)]
pub struct Steering {
    placement: Arc<Placement>,
    generation: u64,
    map: Arc<NodeMap>,
}

impl Steering {
    /// By this placement.
    #[must_use]
    pub fn new(placement: Arc<Placement>) -> Self {
        Self {
            generation: placement.generation(),
            map: placement.map(),
            placement,
        }
    }

    /// The nodes as they are now.
    pub fn map(&mut self) -> &NodeMap {
        let generation = self.placement.generation();
        if generation != self.generation {
            self.map = self.placement.map();
            self.generation = generation;
        }
        &self.map
    }
}

/// The node of all segments, if it is one.
#[must_use]
pub fn single_node(map: &NodeMap, segments: &[Segment]) -> Option<Node> {
    let mut found = None;
    for segment in segments {
        let mut several = false;
        map.cut(
            segment.address,
            segment.bytes.min(MAX_BYTES),
            |node, _, _| {
                several |= *found.get_or_insert(node) != node;
            },
        );
        if several {
            return None;
        }
    }
    found
}

/// Cuts the data in `segments` into parts, where its node changes. Each part but the only one has
/// at least `least` bytes (before it is rounded) and begins at a multiple of `align` bytes, which
/// is a power of two; smaller pieces go with their neighbours.
#[must_use]
pub fn cut(map: &NodeMap, segments: &[Segment], align: u64, least: u64) -> Vec<Part> {
    let total = segments
        .iter()
        .fold(0_u64, |sum, s| sum.saturating_add(s.bytes));
    let first = segments
        .first()
        .map(|s| map.node_of(s.address))
        .unwrap_or_default();
    let whole = |span| vec![Part { bytes: total, span }];
    if total > MAX_BYTES {
        return whole(NumaSpan::Single(first));
    }
    let runs = runs(map, segments);
    let mut least = least.max(align);
    loop {
        let borders = borders(&runs, align, least);
        if borders.len() < MAX_PARTS {
            return parts(&runs, &borders, total);
        }
        least *= 2;
    }
}

/// Where the data in `segments` lies.
#[must_use]
pub fn span(map: &NodeMap, segments: &[Segment]) -> NumaSpan {
    // No part is as large.
    let mut parts = cut(map, segments, 1, MAX_BYTES);
    match parts.pop() {
        Some(part) if parts.is_empty() => part.span,
        _ => NumaSpan::Single(Node::default()),
    }
}

/// Runs of one node: where each ends, counted in bytes of data.
fn runs(map: &NodeMap, segments: &[Segment]) -> Vec<(Node, u64)> {
    let mut runs: Vec<(Node, u64)> = Vec::new();
    let mut at = 0;
    for segment in segments {
        map.cut(segment.address, segment.bytes, |node, _, bytes| {
            at += bytes;
            match runs.last_mut() {
                Some((last, end)) if *last == node => *end = at,
                _ => runs.push((node, at)),
            }
        });
    }
    runs
}

/// Where new parts begin.
fn borders(runs: &[(Node, u64)], align: u64, least: u64) -> Vec<u64> {
    let mut borders = Vec::new();
    let (mut part_from, mut from) = (0, 0);
    for &(_, end) in runs {
        // A part that is large enough ends where a large enough run begins.
        let border = from & !(align - 1);
        if from - part_from >= least && end - from >= least && border > part_from {
            borders.push(border);
            part_from = border;
        }
        from = end;
    }
    borders
}

/// The parts between borders; neighbours that have most of their bytes on one node are one part.
fn parts(runs: &[(Node, u64)], borders: &[u64], total: u64) -> Vec<Part> {
    let mut shares: Vec<(u64, Vec<(Node, u64)>)> = Vec::new();
    let mut runs = runs.iter().peekable();
    let mut from = 0;
    for end in borders.iter().copied().chain([total]) {
        let mut share: Vec<(Node, u64)> = Vec::new();
        let mut at = from;
        while at < end {
            let Some(&&(node, run_end)) = runs.peek() else {
                break;
            };
            let until = run_end.min(end);
            add(&mut share, node, until - at);
            at = until;
            if run_end <= end {
                runs.next();
            }
        }
        match shares.last_mut() {
            Some((bytes, before)) if before.first().map(|b| b.0) == share.first().map(|s| s.0) => {
                *bytes += end - from;
                for (node, bytes) in share {
                    add(before, node, bytes);
                }
            }
            _ => shares.push((end - from, share)),
        }
        from = end;
    }
    let parts = shares.into_iter().map(|(bytes, share)| Part {
        bytes,
        span: match share[..] {
            [(node, _)] => NumaSpan::Single(node),
            _ => NumaSpan::Split(share),
        },
    });
    parts.collect()
}

/// Adds bytes of a node; who has most comes first.
fn add(share: &mut Vec<(Node, u64)>, node: Node, bytes: u64) {
    match share.iter_mut().find(|(n, _)| *n == node) {
        Some((_, sum)) => *sum += bytes,
        None => share.push((node, bytes)),
    }
    share.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
}

#[cfg(test)]
mod tests;
