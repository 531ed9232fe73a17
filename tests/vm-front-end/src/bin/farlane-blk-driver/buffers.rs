//! A job's buffers: each request's lies in one piece on one node, or in pieces on one node after
//! the other.

use crate::blocks::BLOCK;
use crate::memory::Memory;
use anyhow::{Context as _, Result};
use std::str::FromStr;

/// Blocks of the largest request.
pub const MOST_BLOCKS: usize = 256;
/// Requests under way at a time.
pub const DEPTH: usize = 8;
/// Blocks of the pieces of a buffer that lies on several nodes.
const PIECE_BLOCKS: usize = 32;

const SLOT_BYTES: usize = MOST_BLOCKS * BLOCK;

/// Where buffers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// On one node.
    On(u32),
    /// By 128 KiB on one node and the next.
    Striped,
}

impl FromStr for Placement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "striped" => Ok(Self::Striped),
            _ => match text.parse() {
                Ok(node) => Ok(Self::On(node)),
                Err(_) => Err(format!("{text} is neither a node nor `striped`")),
            },
        }
    }
}

/// A piece of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Its node.
    pub node: u32,
    /// Where it is.
    pub base: *mut u8,
    /// Its length.
    pub bytes: usize,
}

/// The buffers of a job: [`DEPTH`] slots, each with room for the largest request on each node.
pub struct Buffers {
    placement: Placement,
    memories: Vec<Memory>,
}

// SAFETY: plain memory that this value's owner alone uses, apart from the device.
unsafe impl Send for Buffers {}

impl Buffers {
    /// Buffers on `nodes`, as far as `placement` needs them.
    pub fn new(placement: Placement, nodes: &[u32]) -> Result<Self> {
        let on: &[u32] = match &placement {
            Placement::On(node) => std::slice::from_ref(node),
            Placement::Striped => nodes,
        };
        let memories = on.iter().map(|node| Memory::new(*node, DEPTH * SLOT_BYTES));
        Ok(Self {
            placement,
            memories: memories.collect::<Result<_>>()?,
        })
    }

    /// The memory.
    pub fn memories(&self) -> &[Memory] {
        &self.memories
    }

    /// Blocks of which the length of a request must be a multiple: half a piece where there are
    /// several.
    pub fn unit(&self) -> usize {
        match self.placement {
            Placement::On(_) => 1,
            Placement::Striped => PIECE_BLOCKS / 2,
        }
    }

    /// The pieces of a buffer of `count` blocks in a slot; `choice` chooses among those that there
    /// are.
    pub fn pieces(&self, slot: usize, count: usize, choice: usize) -> Result<Vec<Piece>> {
        let most = match self.placement {
            Placement::On(_) => MOST_BLOCKS,
            Placement::Striped => PIECE_BLOCKS,
        };
        // Behind the beginning of the slot by what is left of it.
        let mut at = choice % (MOST_BLOCKS + 1 - count.min(MOST_BLOCKS));
        let mut left = count;
        let mut memories = self
            .memories
            .iter()
            .cycle()
            .skip(choice % self.memories.len());
        let mut pieces = Vec::new();
        while left > 0 {
            let blocks = left.min(most);
            let memory = memories.next().context("No memory")?;
            pieces.push(Piece {
                node: memory.node(),
                base: memory.base().wrapping_add(slot * SLOT_BYTES + at * BLOCK),
                bytes: blocks * BLOCK,
            });
            at += blocks;
            left -= blocks;
        }
        Ok(pieces)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::memory::nodes;

    #[test]
    fn pieces_stay_in_their_slot() {
        let nodes = nodes().unwrap();
        for placement in [Placement::On(nodes[0]), Placement::Striped] {
            let buffers = Buffers::new(placement, &nodes).unwrap();
            for (slot, count, choice) in [(0, 256, 5), (7, 1, 255), (7, 200, 56), (3, 64, 100_000)]
            {
                let pieces = buffers.pieces(slot, count, choice).unwrap();
                let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
                assert_eq!(bytes, count * BLOCK);
                for piece in pieces {
                    let memory = buffers.memories().iter().find(|m| m.node() == piece.node);
                    let offset = piece.base.addr() - memory.unwrap().base().addr();
                    assert!(offset >= slot * SLOT_BYTES);
                    assert!(offset + piece.bytes <= (slot + 1) * SLOT_BYTES);
                }
            }
        }
    }
}
