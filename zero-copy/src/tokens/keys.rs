//! Random keys, each of which shows whose it is to those who have the secret that it was made with.

use rustix::rand::{GetRandomFlags, getrandom};
use std::hash::Hasher as _;
use std::io;

/// Keys that one system call yields.
const BATCH: usize = 64;

/// What the keys of a VM's tokens are made with. The guest does not have it; a backend leaves it to
/// its successor, who tells the envelopes of the one before by it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret([u64; 2]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl From<[u64; 2]> for Secret {
    fn from(words: [u64; 2]) -> Self {
        Self(words)
    }
}

impl From<Secret> for [u64; 2] {
    fn from(secret: Secret) -> Self {
        secret.0
    }
}

impl Secret {
    /// One that nobody can guess.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn random() -> io::Result<Self> {
        let mut words = [0; 2];
        fill(&mut words)?;
        Ok(Self(words))
    }

    /// The second word of a key, for its first: a message authentication code (SipHash-2-4).
    fn tag(self, nonce: u64) -> u64 {
        #[expect(deprecated, reason = "the standard library's only keyed one")]
        let mut hasher = std::hash::SipHasher::new_with_keys(self.0[0], self.0[1]);
        hasher.write_u64(nonce.to_le());
        hasher.finish()
    }

    /// Whether a key was made with this.
    #[must_use]
    pub fn has_made(self, key: [u64; 2]) -> bool {
        self.tag(key[0]) == key[1]
    }
}

/// A source of keys that nobody can guess.
#[derive(Debug)]
pub struct Keys {
    secret: Secret,
    nonces: [u64; BATCH],
    left: usize,
}

impl Keys {
    /// None yet.
    #[must_use]
    pub fn new(secret: Secret) -> Self {
        Self {
            secret,
            nonces: [0; BATCH],
            left: 0,
        }
    }

    /// A key that was never given before.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn next(&mut self) -> io::Result<[u64; 2]> {
        if self.left == 0 {
            fill(&mut self.nonces)?;
            self.left = BATCH;
        }
        self.left -= 1;
        let nonce = self.nonces[self.left];
        Ok([nonce, self.secret.tag(nonce)])
    }
}

/// Fills words, at most as many as a batch has, with random bits.
fn fill(words: &mut [u64]) -> io::Result<()> {
    let mut bytes = [0; size_of::<[u64; BATCH]>()];
    let length = size_of_val(words).min(bytes.len());
    let mut filled = 0;
    while filled < length {
        filled += getrandom(&mut bytes[filled..length], GetRandomFlags::empty())?;
    }
    for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut eight = [0; 8];
        eight.copy_from_slice(chunk);
        *word = u64::from_ne_bytes(eight);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_and_show_what_they_were_made_with() {
        let secret = Secret::random().unwrap();
        let other = Secret::random().unwrap();
        let mut keys = Keys::new(secret);
        let made: Vec<_> = (0..3 * BATCH).map(|_| keys.next().unwrap()).collect();
        for key in &made {
            assert!(secret.has_made(*key) && !other.has_made(*key));
            assert!(!secret.has_made([key[0], key[1] ^ 1]));
            assert_eq!(made.iter().filter(|other| *other == key).count(), 1);
        }
        assert_eq!(Secret::from(<[u64; 2]>::from(secret)), secret);
    }

    #[test]
    fn the_code_is_that_of_its_authors() {
        // The test vector for eight bytes of the reference implementation (vectors_sip64).
        let secret = Secret([0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908]);
        assert_eq!(secret.tag(0x0706_0504_0302_0100), 0x93f5_f579_9a93_2462);
    }
}
