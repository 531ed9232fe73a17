//! Memory keys: which slot of a table a key is of.
//!
//! The upper 24 bits of a key say which slot, in which generation; the low 8 bits are a tag, which
//! `ibv_inc_rkey` counts. The 24 bits are a keyed permutation of slot and generation, so that a key
//! leads to its slot without a search, and those that a peer has been given do not tell the next.
//! The tag of a memory region is random. The key of one that is gone is an error until its slot has
//! been used 128 times more, and then in 255 of 256 cases; before a slot is used again a thousand
//! others are, so that who is given the keys of one region after the other does not see them come
//! round for 131,072 of them.

use crate::draws::Draws;
use crate::table::Naming;
use farlane_abi::width::halves;

/// Bits of a key beside the rest: the tag.
const TAG_BITS: u32 = 8;
const TAG_MASK: u32 = (1 << TAG_BITS) - 1;
/// Bits of a slot's number. Those of its generation are the rest of a block.
const SLOT_BITS: u32 = 17;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;
/// Bits of half a block.
const HALF_BITS: u32 = 12;
const HALF_MASK: u32 = (1 << HALF_BITS) - 1;
const BLOCK_MASK: u32 = (1 << (2 * HALF_BITS)) - 1;

/// Function of half a block: multiply-shift hashing (Dietzfelbinger et al., A Reliable Randomized
/// Algorithm for the Closest-Pair Problem, 1997). Its values at any two places are independent.
#[derive(Clone, Copy)]
struct Round {
    factor: u32,
    addend: u32,
}

impl Round {
    fn of(self, half: u32) -> u32 {
        let product = self.factor.wrapping_mul(half);
        product.wrapping_add(self.addend) >> (u32::BITS - HALF_BITS)
    }
}

/// A keyed permutation of blocks of 24 bits: a Feistel network of four rounds. It is no cipher, and
/// need not be: a wrong guess of a key ends the connection. A better one costs each request more:
/// with squares in the rounds, an 8-byte write takes 15 ns more of 210, with these 5.
struct Permutation([Round; 4]);

impl Permutation {
    fn apply(&self, block: u32) -> u32 {
        let halves = (block >> HALF_BITS & HALF_MASK, block & HALF_MASK);
        let (left, right) = self.0.iter().fold(halves, |(left, right), round| {
            (right, left ^ round.of(right))
        });
        left << HALF_BITS | right
    }

    fn invert(&self, block: u32) -> u32 {
        let halves = (block >> HALF_BITS & HALF_MASK, block & HALF_MASK);
        let (left, right) = self.0.iter().rev().fold(halves, |(left, right), round| {
            (right ^ round.of(left), left)
        });
        left << HALF_BITS | right
    }
}

/// The keys of one table.
pub struct Keys {
    permutation: Permutation,
    tags: Draws,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A key of the permutation is in no log.
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

impl Default for Keys {
    /// Keys that are like no other table's.
    fn default() -> Self {
        let mut draws = Draws::default();
        let permutation = Permutation(std::array::from_fn(|_| {
            let [factor, addend] = halves(draws.next());
            Round { factor, addend }
        }));
        Self {
            permutation,
            tags: draws,
        }
    }
}

impl Naming for Keys {
    const SLOTS: u32 = 1 << SLOT_BITS;
    const RESTING: usize = 1024;

    fn name(&mut self, slot: u32, generation: u32) -> u32 {
        let block = (generation << SLOT_BITS | slot) & BLOCK_MASK;
        let place = self.permutation.apply(block) << TAG_BITS;
        loop {
            let [tag, _] = halves(self.tags.next());
            let key = place | (tag & TAG_MASK);
            // Values that programs have where they have set none.
            if key != 0 && key != u32::MAX {
                return key;
            }
        }
    }

    fn slot(&self, key: u32) -> Option<u32> {
        Some(self.permutation.invert(key >> TAG_BITS) & SLOT_MASK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Table;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn permutation(rounds: [(u32, u32); 4]) -> Permutation {
        Permutation(rounds.map(|(factor, addend)| Round { factor, addend }))
    }

    #[test]
    fn one_region_after_the_other_has_a_new_place_for_long() {
        let mut table = Table::named_by(Keys::default(), 65_536);
        let mut places = HashSet::new();
        for round in 0..131_072 {
            let key = table.insert(()).unwrap();
            assert!(places.insert(key >> TAG_BITS), "registration {round}");
            table.remove(key).unwrap();
        }
    }

    proptest! {
        #[test]
        fn a_block_comes_back_whatever_the_rounds(
            rounds: [(u32, u32); 4],
            block in 0..=BLOCK_MASK,
        ) {
            let permutation = permutation(rounds);
            let there = permutation.apply(block);
            prop_assert!(there <= BLOCK_MASK);
            prop_assert_eq!(permutation.invert(there), block);
            prop_assert_eq!(permutation.apply(permutation.invert(block)), block);
        }

        #[test]
        fn a_key_leads_to_its_slot_with_any_tag(
            slot in 0..Keys::SLOTS, generation: u32, tag in 0..=TAG_MASK,
        ) {
            let mut keys = Keys::default();
            let key = keys.name(slot, generation);
            prop_assert!(key != 0 && key != u32::MAX);
            prop_assert_eq!(keys.slot(key), Some(slot));
            prop_assert_eq!(keys.slot((key & !TAG_MASK) | tag), Some(slot));
        }

        #[test]
        fn keys_of_different_places_differ(
            places in prop::collection::hash_set((0..Keys::SLOTS, 0u32..128), 0..200),
        ) {
            let mut keys = Keys::default();
            let named: HashSet<_> = places
                .iter()
                .map(|&(slot, generation)| keys.name(slot, generation) >> TAG_BITS)
                .collect();
            prop_assert_eq!(named.len(), places.len());
        }
    }

    #[test]
    fn nobody_can_tell_the_next_key() {
        const TABLES: usize = 16;
        for (slots, generations) in [(1u32, 0u32), (0, 1)] {
            let (mut near, mut again) = (0, 0);
            for _ in 0..TABLES {
                let mut keys = Keys::default();
                let place = |n| keys.name(slots * n, generations * n) >> TAG_BITS;
                let places: Vec<_> = (0..64).map(place).collect();
                let steps = places
                    .windows(2)
                    .map(|p| p[1].wrapping_sub(p[0]) & BLOCK_MASK);
                let steps: Vec<_> = steps.collect();
                let is_near = |step: &&u32| **step < 256 || BLOCK_MASK - **step < 256;
                near += steps.iter().filter(is_near).count();
                again += steps.len() - steps.iter().collect::<HashSet<_>>().len();
            }
            // One in 30,000 is near the one before; one table in 100 has a step twice.
            assert!(near < TABLES, "{near} keys are near the one before");
            assert!(again < 8 * TABLES, "{again} keys come of the steps before");
        }
    }

    #[test]
    fn tables_have_keys_of_their_own() {
        let first = || Keys::default().name(0, 0) >> TAG_BITS;
        let firsts: HashSet<_> = (0..64).map(|_| first()).collect();
        assert!(firsts.len() > 60, "{firsts:x?}");
    }
}
