//! What each block of a part of a disk should contain: its address, and how often it was written.

use anyhow::{Result, ensure};

/// Bytes of a block.
pub const BLOCK: usize = 4096;
const WORD: usize = 8;

/// The blocks of a part of a disk, of which nobody knows the content at first.
pub struct Blocks {
    /// Number of the first.
    first: u64,
    /// How often each was written; 0: never.
    versions: Vec<u32>,
    /// Whether a request for it is under way.
    busy: Vec<bool>,
}

impl Blocks {
    /// Those of `count` blocks from `first` on.
    pub fn new(first: u64, count: usize) -> Self {
        Self {
            first,
            versions: vec![0; count],
            busy: vec![false; count],
        }
    }

    pub fn len(&self) -> usize {
        self.versions.len()
    }

    /// Takes a run of blocks for a request, if none of them is in one.
    pub fn take(&mut self, at: usize, count: usize) -> bool {
        let Some(run) = self.busy.get_mut(at..at + count) else {
            return false;
        };
        if run.contains(&true) {
            return false;
        }
        run.fill(true);
        true
    }

    /// The request has ended.
    pub fn give(&mut self, at: usize, count: usize) {
        if let Some(run) = self.busy.get_mut(at..at + count) {
            run.fill(false);
        }
    }

    /// Fills a buffer with what the next version of the blocks from `at` on contains, and counts it
    /// as written.
    pub fn fill(&mut self, at: usize, buffer: &mut [u8]) {
        for ((block, version), number) in buffer
            .chunks_exact_mut(BLOCK)
            .zip(self.versions.iter_mut().skip(at))
            .zip(self.first + at as u64..)
        {
            *version += 1;
            for (word, index) in block.chunks_exact_mut(WORD).zip(0..) {
                word.copy_from_slice(&content(number, *version, index).to_le_bytes());
            }
        }
    }

    /// Checks what was read from `at` on.
    pub fn check(&self, at: usize, buffer: &[u8]) -> Result<()> {
        for ((block, version), number) in buffer
            .chunks_exact(BLOCK)
            .zip(self.versions.iter().skip(at))
            .zip(self.first + at as u64..)
        {
            if *version == 0 {
                continue;
            }
            for (word, index) in block.chunks_exact(WORD).zip(0..) {
                let wanted = content(number, *version, index).to_le_bytes();
                ensure!(
                    word == wanted,
                    "Block {number}, word {index}: {word:02x?} where version {version} has \
                     {wanted:02x?}"
                );
            }
        }
        Ok(())
    }
}

/// A word of a block.
fn content(number: u64, version: u32, index: u64) -> u64 {
    (number << 24 ^ u64::from(version)).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index << 48
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_was_written_is_found_and_nothing_else() {
        let mut blocks = Blocks::new(7, 4);
        let mut buffer = vec![0; 2 * BLOCK];
        blocks.check(0, &buffer).unwrap();
        blocks.fill(1, &mut buffer);
        blocks.check(1, &buffer).unwrap();
        assert!(blocks.check(2, &buffer).is_err());
        let old = buffer.clone();
        blocks.fill(1, &mut buffer);
        assert!(blocks.check(1, &old).is_err());
        buffer[BLOCK + 77] ^= 1;
        assert!(blocks.check(1, &buffer).is_err());
    }

    #[test]
    fn requests_do_not_overlap() {
        let mut blocks = Blocks::new(0, 8);
        assert!(blocks.take(2, 3) && !blocks.take(4, 1) && blocks.take(5, 3));
        assert!(!blocks.take(7, 2));
        blocks.give(2, 3);
        assert!(blocks.take(4, 1));
    }
}
