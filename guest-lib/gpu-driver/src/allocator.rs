//! Which video memory is free.

use std::collections::BTreeMap;

/// Granularity, in bytes: a page, so that a buffer can be mapped and pinned by itself.
pub const GRANULE: u64 = farlane_abi::PAGE_BYTES;

/// Free ranges, none of which touches another.
#[derive(Debug)]
pub struct Allocator {
    /// Length of each free range in bytes, by its offset.
    free: BTreeMap<u64, u64>,
}

impl Allocator {
    /// All of `bytes` is free, but for what is not a whole page.
    pub fn new(bytes: u64) -> Self {
        let bytes = bytes / GRANULE * GRANULE;
        Self {
            free: (bytes > 0).then_some((0, bytes)).into_iter().collect(),
        }
    }

    /// Takes `bytes`, rounded up to pages, from the first place where they fit. Returns the offset.
    pub fn take(&mut self, bytes: u64) -> Option<u64> {
        let bytes = round(bytes)?;
        let fits = self.free.iter().find(|&(_, &length)| length >= bytes);
        let (offset, length) = fits.map(|(&offset, &length)| (offset, length))?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        Some(offset)
    }

    /// Gives back exactly what was taken.
    pub fn give(&mut self, offset: u64, bytes: u64) {
        let Some(mut bytes) = round(bytes) else {
            return;
        };
        let mut offset = offset;
        if let Some((&before, &length)) = self.free.range(..offset).next_back()
            && before + length == offset
        {
            self.free.remove(&before);
            offset = before;
            bytes += length;
        }
        if let Some(length) = self.free.remove(&(offset + bytes)) {
            bytes += length;
        }
        self.free.insert(offset, bytes);
    }

    /// Bytes that are free.
    pub fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }
}

/// Whole pages, at least one.
fn round(bytes: u64) -> Option<u64> {
    bytes.max(1).checked_next_multiple_of(GRANULE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIZE: u64 = 64 * GRANULE;

    proptest! {
        #[test]
        fn what_is_taken_overlaps_nothing_and_comes_back(
            steps in prop::collection::vec(
                (any::<bool>(), 0_u64..20 * GRANULE, any::<prop::sample::Index>()),
                1..100,
            ),
        ) {
            let mut allocator = Allocator::new(SIZE);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (take, bytes, which) in steps {
                if take {
                    if let Some(offset) = allocator.take(bytes) {
                        let end = offset + round(bytes).unwrap();
                        prop_assert!(offset.is_multiple_of(GRANULE) && end <= SIZE);
                        for &(other, length) in &taken {
                            prop_assert!(end <= other || other + round(length).unwrap() <= offset);
                        }
                        taken.push((offset, bytes));
                    }
                } else if !taken.is_empty() {
                    let (offset, bytes) = taken.swap_remove(which.index(taken.len()));
                    allocator.give(offset, bytes);
                }
                let held: u64 = taken.iter().map(|&(_, bytes)| round(bytes).unwrap()).sum();
                prop_assert_eq!(allocator.free_bytes(), SIZE - held);
            }
            for (offset, bytes) in taken {
                allocator.give(offset, bytes);
            }
            prop_assert_eq!(allocator.take(SIZE), Some(0));
        }
    }

    #[test]
    fn absurd_sizes_are_refused() {
        let mut allocator = Allocator::new(SIZE);
        assert_eq!(allocator.take(u64::MAX), None);
        assert_eq!(allocator.take(SIZE + 1), None);
        assert_eq!(allocator.take(0), Some(0));
    }
}
