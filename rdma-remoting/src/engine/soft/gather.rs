//! Moving a message between two lists of memory parts.

use crate::counters::{Counters, count};
use crate::memory::Part;
use farlane_abi::width::to_usize;
use farlane_zero_copy::{CopyError, CopyWay, RegionError, copy, copy_from_slice, copy_to_slice};

/// Where a message comes from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Inline data of the request.
    Inline(&'a [u8]),
    /// Gather list in memory regions.
    Parts(&'a [Part]),
}

/// The side whose memory could not be accessed.
#[derive(Debug)]
pub enum Failed {
    Source(RegionError),
    Destination(RegionError),
}

impl From<CopyError> for Failed {
    fn from(e: CopyError) -> Self {
        match e {
            CopyError::Source(e) => Self::Source(e),
            CopyError::Destination(e) => Self::Destination(e),
        }
    }
}

/// A position in a list of parts.
struct Cursor<'a> {
    parts: &'a [Part],
    skip: u64,
}

impl<'a> Cursor<'a> {
    fn at(parts: &'a [Part], mut offset: u64) -> Self {
        let mut first = 0;
        for part in parts {
            if offset < part.length {
                break;
            }
            offset -= part.length;
            first += 1;
        }
        Self {
            parts: &parts[first..],
            skip: offset,
        }
    }

    /// The next run, at most `most` bytes.
    fn peek(&self, most: u64) -> Option<(&'a Part, u64, u64)> {
        let part = self.parts.first()?;
        let run = (part.length - self.skip).min(most);
        Some((part, part.offset + self.skip, run))
    }

    fn advance(&mut self, n: u64) {
        self.skip += n;
        while self.parts.first().is_some_and(|p| self.skip >= p.length) {
            self.skip -= self.parts[0].length;
            self.parts = &self.parts[1..];
        }
    }
}

/// Moves `length` bytes of a message from its byte `offset` on, and counts those that were not
/// copied between mapped memory.
pub fn move_message(
    counters: &Counters,
    destination: &[Part],
    source: Source<'_>,
    offset: u64,
    length: u64,
) -> Result<(), Failed> {
    move_behind(counters, 0, destination, source, offset, length)
}

/// The same behind so many bytes of the destination.
pub fn move_behind(
    counters: &Counters,
    header: u64,
    destination: &[Part],
    source: Source<'_>,
    offset: u64,
    length: u64,
) -> Result<(), Failed> {
    let mut to = Cursor::at(destination, header + offset);
    let mut left = length;
    match source {
        Source::Inline(bytes) => {
            let mut bytes = bytes.get(to_usize(offset)..).unwrap_or_default();
            while left > 0
                && let Some((part, at, run)) = to.peek(left.min(bytes.len() as u64))
                && run > 0
            {
                let (now, rest) = bytes.split_at(to_usize(run));
                copy_from_slice(&part.region, at, now).map_err(Failed::Destination)?;
                bytes = rest;
                to.advance(run);
                left -= run;
            }
        }
        Source::Parts(parts) => {
            let mut from = Cursor::at(parts, offset);
            while left > 0
                && let (Some((to_part, to_at, to_run)), Some((from_part, from_at, from_run))) =
                    (to.peek(left), from.peek(left))
            {
                let run = to_run.min(from_run);
                match copy(&to_part.region, to_at, &from_part.region, from_at, run)? {
                    CopyWay::Mapped => {}
                    CopyWay::SystemCall => count(&counters.bytes_by_system_call, run),
                    CopyWay::Buffer => count(&counters.bytes_copied_twice, run),
                }
                to.advance(run);
                from.advance(run);
                left -= run;
            }
        }
    }
    Ok(())
}

/// Reads the first bytes of a message, as many as there are of it and of `into`.
pub fn read_message(source: Source<'_>, into: &mut [u8]) -> Result<(), RegionError> {
    let parts = match source {
        Source::Inline(bytes) => {
            for (to, from) in into.iter_mut().zip(bytes) {
                *to = *from;
            }
            return Ok(());
        }
        Source::Parts(parts) => parts,
    };
    let mut rest = into;
    for part in parts {
        let length = to_usize(part.length).min(rest.len());
        let (now, later) = rest.split_at_mut(length);
        copy_to_slice(&part.region, part.offset, now)?;
        rest = later;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_zero_copy::{Pool, Region};
    use proptest::prelude::*;

    fn parts(region: &Region, lengths: &[u64]) -> Vec<Part> {
        // Spread over the region with a gap of 3 bytes after each.
        let mut offset = 1;
        lengths
            .iter()
            .map(|&length| {
                let part = Part {
                    region: region.clone(),
                    offset,
                    length,
                };
                offset += length + 3;
                part
            })
            .collect()
    }

    fn contents(parts: &[Part]) -> Vec<u8> {
        let mut all = Vec::new();
        for part in parts {
            let mut bytes = vec![0; usize::try_from(part.length).unwrap()];
            copy_to_slice(&part.region, part.offset, &mut bytes).unwrap();
            all.extend(bytes);
        }
        all
    }

    proptest! {
        #[test]
        fn a_message_arrives_whole_however_it_is_cut(
            from in prop::collection::vec(0u64..300, 1..6),
            to in prop::collection::vec(0u64..300, 1..6),
            inline: bool,
            chunk in 1u64..500,
        ) {
            let pool = Pool::separate_files(1 << 20);
            let (a, b) = (pool.allocate(8192).unwrap(), pool.allocate(8192).unwrap());
            let (a, b) = (Region::from_buffer(&a), Region::from_buffer(&b));
            let bytes: Vec<u8> = (0..8192u32).map(|i| u8::try_from(i * 7 % 251).unwrap()).collect();
            copy_from_slice(&a, 0, &bytes).unwrap();
            let (from, to) = (parts(&a, &from), parts(&b, &to));
            let message = contents(&from);
            let room: u64 = to.iter().map(|p| p.length).sum();
            let length = (message.len() as u64).min(room);
            let source = if inline { Source::Inline(&message) } else { Source::Parts(&from) };
            let mut offset = 0;
            while offset < length {
                let n = chunk.min(length - offset);
                move_message(&Counters::default(), &to, source, offset, n).unwrap();
                offset += n;
            }
            let n = usize::try_from(length).unwrap();
            prop_assert_eq!(&contents(&to)[..n], &message[..n]);
        }

        #[test]
        fn the_first_bytes_of_a_message_are_read_however_it_lies(
            lengths in prop::collection::vec(0u64..20, 1..6),
            wanted in 0usize..40,
            inline: bool,
        ) {
            let buffer = Pool::separate_files(1 << 20).allocate(8192).unwrap();
            let region = Region::from_buffer(&buffer);
            let bytes: Vec<u8> = (1..=200).collect();
            copy_from_slice(&region, 0, &bytes).unwrap();
            let parts = parts(&region, &lengths);
            let message = contents(&parts);
            let source = if inline { Source::Inline(&message) } else { Source::Parts(&parts) };
            let mut read = vec![0; wanted];
            read_message(source, &mut read).unwrap();
            let n = wanted.min(message.len());
            prop_assert_eq!(&read[..n], &message[..n]);
            prop_assert!(read[n..].iter().all(|byte| *byte == 0));
        }
    }
}
