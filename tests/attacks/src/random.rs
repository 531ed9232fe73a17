//! Numbers that look random and are the same in every run.

use farlane_abi::width::{to_u64, to_usize};

/// The low 32 bits.
#[must_use]
pub fn low32(number: u64) -> u32 {
    let [a, b, c, d, ..] = number.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// The low 16 bits.
#[must_use]
pub fn low16(number: u64) -> u16 {
    let [a, b, ..] = number.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// A generator (Vigna's splitmix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Numbers that belong to `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`, which is not zero.
    pub fn below(&mut self, limit: usize) -> usize {
        to_usize(self.word() % to_u64(limit))
    }

    /// A number of 32 bits below `limit`, which is not zero.
    pub fn below32(&mut self, limit: u32) -> u32 {
        low32(self.word() % u64::from(limit))
    }

    /// One of `choices`, which are not none.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Random bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let words = std::iter::repeat_with(|| self.word().to_le_bytes());
        words.flatten().take(length).collect()
    }
}
