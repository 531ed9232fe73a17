//! What a checked part of a region is made of.

use super::{Gates, Memory, Piece};
use crate::Process;

/// A checked part of a region that stays valid while this value lives.
pub(crate) struct Access<'a> {
    gates: Gates<'a>,
    offset: u64,
    length: u64,
}

/// What a part of a region is made of.
pub(crate) enum Runs<'a> {
    Mapped(MappedRuns<'a>),
    Process(&'a Process, u64),
    Null,
}

impl<'a> Access<'a> {
    /// Of `length` bytes at `offset`, which lie inside.
    pub fn new(gates: Gates<'a>, offset: u64, length: u64) -> Self {
        Self {
            gates,
            offset,
            length,
        }
    }

    pub fn runs(&self) -> Runs<'_> {
        match self.gates.memory() {
            Memory::Mapped(pieces) => {
                let index = if pieces.len() == 1 {
                    0
                } else {
                    pieces.partition_point(|p| p.start + p.length <= self.offset)
                };
                // One that begins in a gap is of no byte.
                let begins = pieces.get(index..).and_then(|pieces| {
                    let skip = self.offset.checked_sub(pieces.first()?.start)?;
                    Some((pieces, skip))
                });
                let (pieces, skip) = begins.unwrap_or_default();
                Runs::Mapped(MappedRuns {
                    pieces,
                    skip,
                    left: self.length,
                })
            }
            // No overflow: the whole region was checked when it was made.
            Memory::Process { process, address } => Runs::Process(process, address + self.offset),
            Memory::Null => Runs::Null,
        }
    }
}

/// The mapped runs of a part of a region, in order.
pub(crate) struct MappedRuns<'a> {
    pieces: &'a [Piece],
    skip: u64,
    left: u64,
}

impl MappedRuns<'_> {
    /// The next run, at most `most` bytes long: its first byte and its length.
    pub fn next(&mut self, most: usize) -> Option<(*mut u8, usize)> {
        let piece = self.pieces.first()?;
        let run = (piece.length - self.skip).min(self.left).min(most as u64);
        if run == 0 {
            return None;
        }
        // Lengths inside of a mapping fit usize.
        let skip = usize::try_from(self.skip).ok()?;
        let run_bytes = usize::try_from(run).ok()?;
        let base = piece.mapping.base().wrapping_add(piece.offset + skip);
        self.left -= run;
        self.skip += run;
        if self.skip == piece.length {
            self.pieces = &self.pieces[1..];
            self.skip = 0;
        }
        Some((base, run_bytes))
    }
}
