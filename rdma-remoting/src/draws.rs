//! Numbers that nobody can tell beforehand.

use std::hash::{BuildHasher as _, RandomState};

/// Numbers of which those that somebody has seen tell no other: they come of a keyed function. Who
/// gives one back does not get it again by asking often, nor does anybody who knows one from an
/// earlier life of this backend meet another's in its place.
#[derive(Debug, Default)]
pub struct Draws {
    /// Keys of a pseudorandom function.
    keys: RandomState,
    drawn: u64,
}

impl Draws {
    /// The next number. It may be one that was there before.
    pub fn next(&mut self) -> u64 {
        self.drawn += 1;
        self.keys.hash_one(self.drawn)
    }
}
