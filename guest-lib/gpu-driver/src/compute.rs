//! The compute engine.

use crate::{Buffer, Gpu, GpuError};
use farlane_abi::gpu as abi;
use farlane_abi::width::{to_u64, to_usize};
use farlane_abi::zerocopy::FromBytes as _;
use std::ops::Range;

/// Patterns that the device can search for, and where it puts what it finds.
#[derive(Debug)]
pub struct Search {
    table: Buffer,
    found: Buffer,
    patterns: u32,
    longest: usize,
    capacity: u32,
}

/// An occurrence of a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Match {
    /// Where it begins, from the begin of the range, in bytes.
    pub offset: u64,
    /// Which pattern, from 0.
    pub pattern: u32,
}

/// What a search has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matches {
    /// How many occurrences there are, also those that overlap.
    pub total: u64,
    /// The first of them, in the order of their ends: all, unless there are more than there was
    /// room for.
    pub found: Vec<Match>,
}

/// A tile of a raster: rows that lie at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Offset of its first byte in the buffer.
    pub offset: usize,
    /// Bytes from the begin of a row to that of the next.
    pub pitch: usize,
    /// Bytes of a row.
    pub width: usize,
    /// Number of rows.
    pub rows: u32,
}

impl Gpu {
    /// Prepares a search: uploads the patterns, and makes room for `capacity` occurrences.
    ///
    /// # Errors
    /// No patterns, too many (1024), one that is empty or too long (256 bytes), or no memory.
    pub fn prepare<P: AsRef<[u8]>>(
        &self,
        patterns: &[P],
        capacity: u32,
    ) -> Result<Search, GpuError> {
        let count = u32::try_from(patterns.len())
            .ok()
            .filter(|count| (1..=abi::MAX_PATTERNS).contains(count))
            .ok_or(GpuError::Patterns(
                "There are no patterns, or more than 1024",
            ))?;
        let mut head = Vec::new();
        let mut bytes = Vec::new();
        let mut longest = 0;
        for pattern in patterns {
            let pattern = pattern.as_ref();
            longest = longest.max(pattern.len());
            let length = u32::try_from(pattern.len())
                .ok()
                .filter(|length| (1..=abi::MAX_PATTERN_BYTES).contains(length))
                .ok_or(GpuError::Patterns(
                    "A pattern is empty, or longer than 256 bytes",
                ))?;
            head.extend(length.to_le_bytes());
            bytes.extend_from_slice(pattern);
        }
        if u32::try_from(bytes.len()).map_or(true, |bytes| bytes > abi::MAX_PATTERNS_BYTES) {
            return Err(GpuError::Patterns("The patterns have more than 64 KiB"));
        }
        head.extend(bytes);
        let mut table = self.allocate(head.len())?;
        table.as_mut_slice().copy_from_slice(&head);
        let room = to_usize(capacity.into());
        Ok(Search {
            table,
            found: self.allocate(room.saturating_mul(size_of::<abi::Found>()))?,
            patterns: count,
            longest,
            capacity,
        })
    }
}

impl Search {
    /// Bytes of the longest pattern.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Finds all occurrences in a range of a buffer.
    ///
    /// # Errors
    /// Not a range of it, a buffer of another device, or the device fails.
    pub fn run(&mut self, buffer: &Buffer, range: Range<usize>) -> Result<Matches, GpuError> {
        buffer.check(self.table.device())?;
        let (source, length) = buffer.place(&range)?;
        let (table, table_bytes) = self.table.place(&(0..self.table.len()))?;
        let (target, _) = self.found.place(&(0..0))?;
        let command = abi::Command {
            operation: abi::OP_SEARCH.into(),
            count: self.patterns.into(),
            source: source.into(),
            target: target.into(),
            length: length.into(),
            parameter: table_bytes.into(),
            table: table.into(),
            capacity: self.capacity.into(),
            ..Default::default()
        };
        let completion = buffer.device().queue.execute("a search", &command)?;
        let written = to_usize(completion.written.get());
        let entries = self
            .found
            .as_slice()
            .chunks_exact(size_of::<abi::Found>())
            .take(written);
        let found = entries
            .filter_map(|bytes| abi::Found::read_from_bytes(bytes).ok())
            .map(|found| Match {
                offset: found.offset.get(),
                pattern: found.pattern.get(),
            })
            .collect();
        Ok(Matches {
            total: completion.result.get(),
            found,
        })
    }
}

impl Buffer {
    /// Copies a tile of another buffer, without the gaps between its rows, to byte `at` of this
    /// one, by the device.
    ///
    /// # Errors
    /// Not in range, rows that overlap, a buffer of another device, or the device fails.
    pub fn gather_from(&mut self, at: usize, source: &Self, tile: Tile) -> Result<(), GpuError> {
        source.check(self.device())?;
        let rows = to_usize(tile.rows.into());
        let footprint = match rows {
            0 => 0,
            _ => (rows - 1)
                .saturating_mul(tile.pitch)
                .saturating_add(tile.width),
        };
        let (from, _) = source.place(&(tile.offset..tile.offset.saturating_add(footprint)))?;
        let dense = rows.saturating_mul(tile.width);
        let (target, _) = self.place(&(at..at.saturating_add(dense)))?;
        let wide = |bytes: usize| to_u64(bytes);
        let command = abi::Command {
            operation: abi::OP_GATHER.into(),
            count: tile.rows.into(),
            source: from.into(),
            target: target.into(),
            length: wide(tile.width).into(),
            parameter: wide(tile.pitch).into(),
            ..Default::default()
        };
        self.device()
            .queue
            .execute("a gather", &command)
            .map(|_| ())
    }
}
