//! Pages that were phony, and of which nobody knows any more whose they are: a write of them may
//! still be on its way.

use std::collections::BTreeMap;

/// Ranges that are kept. Of more, neighbours become one with what lies between them: these pages
/// are looked at for nothing.
const MAX_RANGES: usize = 4096;

/// Ranges of guest-physical addresses that do not overlap.
#[derive(Debug, Default)]
pub struct Forgotten {
    /// First byte of each, and its end.
    ranges: BTreeMap<u64, u64>,
}

impl Forgotten {
    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Adds the bytes from `start` to before `end`.
    pub fn add(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        while let Some((first, last)) = self.touching(start, end) {
            self.ranges.remove(&first);
            start = start.min(first);
            end = end.max(last);
        }
        if self.ranges.len() >= MAX_RANGES {
            let before = self.ranges.range(..start).next_back();
            let after = self.ranges.range(start..).next();
            if let Some((&first, &last)) = before.or(after) {
                self.ranges.remove(&first);
                start = start.min(first);
                end = end.max(last);
            }
        }
        self.ranges.insert(start, end);
    }

    /// Takes the bytes from `start` to before `end` out, which are known again. Where that would
    /// make too many ranges, they stay.
    pub fn remove(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        while let Some((first, last)) = self.overlapping(start, end) {
            let splits = first < start && last > end;
            if splits && self.ranges.len() >= MAX_RANGES {
                return;
            }
            self.ranges.remove(&first);
            if first < start {
                self.ranges.insert(first, start);
            }
            if last > end {
                self.ranges.insert(end, last);
            }
        }
    }

    /// Whether one of the bytes from `start` to before `end` is among them.
    #[must_use]
    pub fn overlaps(&self, start: u64, end: u64) -> bool {
        self.overlapping(start, end).is_some()
    }

    fn overlapping(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        let (&first, &last) = self.ranges.range(..end).next_back()?;
        (last > start).then_some((first, last))
    }

    /// As [`overlapping`](Self::overlapping), also what ends where these bytes begin, and begins
    /// where they end.
    fn touching(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        let (&first, &last) = self.ranges.range(..=end).next_back()?;
        (last >= start).then_some((first, last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_known_again_is_no_longer_forgotten() {
        let mut forgotten = Forgotten::default();
        forgotten.add(0, u64::MAX);
        forgotten.remove(0x1000, 0x3000);
        assert!(!forgotten.overlaps(0x1000, 0x3000));
        assert!(forgotten.overlaps(0xfff, 0x1001) && forgotten.overlaps(0x3000, 0x3001));
        forgotten.remove(0, u64::MAX);
        assert!(forgotten.is_empty());
    }

    #[test]
    fn however_many_there_are_none_is_missed_and_memory_is_bounded() {
        let mut forgotten = Forgotten::default();
        let page = |at: u64| (at * 0x2000, at * 0x2000 + 0x1000);
        for at in (0..20_000).rev() {
            let (start, end) = page(at);
            forgotten.add(start, end);
        }
        assert!(forgotten.ranges.len() <= MAX_RANGES);
        assert!((0..20_000).all(|at| forgotten.overlaps(page(at).0, page(at).1)));
        let mut forgotten = Forgotten::default();
        forgotten.add(0, u64::MAX);
        for at in 0..20_000 {
            forgotten.remove(page(at).0, page(at).1);
        }
        assert!(forgotten.ranges.len() <= MAX_RANGES);
        assert!((0..20_000).all(|at| forgotten.overlaps(page(at).1, page(at + 1).0)));
    }

    proptest! {
        #[test]
        fn bytes_are_forgotten_that_were_added_last(
            steps in prop::collection::vec((any::<bool>(), 0u64..64, 0u64..64), 0..40),
        ) {
            let mut forgotten = Forgotten::default();
            let mut model = [false; 64];
            for (add, start, end) in steps {
                if add {
                    forgotten.add(start, end);
                } else {
                    forgotten.remove(start, end);
                }
                for at in start..end {
                    model[usize::try_from(at).unwrap()] = add;
                }
                for at in 0..64 {
                    let is_forgotten = model[usize::try_from(at).unwrap()];
                    prop_assert_eq!(forgotten.overlaps(at, at + 1), is_forgotten);
                }
                prop_assert_eq!(forgotten.is_empty(), model.iter().all(|byte| !byte));
            }
        }
    }
}
