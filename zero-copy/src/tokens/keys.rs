//! Random keys.

use rustix::rand::{GetRandomFlags, getrandom};
use std::io;

/// Keys that one system call yields.
const BATCH: usize = 64;

/// A source of keys that nobody can guess.
#[derive(Debug)]
pub struct Keys {
    words: [u64; 2 * BATCH],
    left: usize,
}

impl Keys {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            words: [0; 2 * BATCH],
            left: 0,
        }
    }

    /// A key that was never given before.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn next(&mut self) -> io::Result<[u64; 2]> {
        if self.left == 0 {
            self.fill()?;
        }
        self.left -= 1;
        let at = self.left * 2;
        Ok([self.words[at], self.words[at + 1]])
    }

    fn fill(&mut self) -> io::Result<()> {
        let mut bytes = [0u8; 16 * BATCH];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
        }
        for (word, chunk) in self.words.iter_mut().zip(bytes.chunks_exact(8)) {
            let mut eight = [0; 8];
            eight.copy_from_slice(chunk);
            *word = u64::from_ne_bytes(eight);
        }
        self.left = BATCH;
        Ok(())
    }
}
