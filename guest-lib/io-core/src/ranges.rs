//! Which addresses are device memory: a sorted table that readers search without writing anything.
//!
//! Readers and writers are joined by a sequence number: a writer makes it odd, changes the table,
//! and makes it even again; a reader that has seen it change looks once more. The table is never
//! freed, so there is nothing to reclaim. Writers are serialised by their caller, who also keeps
//! signals off: a handler that looked for a buffer over an unfinished change in its own thread
//! would look forever.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

/// Most ranges that can be registered.
pub const CAPACITY: usize = 8192;

#[derive(Debug)]
struct Entry {
    start: AtomicUsize,
    end: AtomicUsize,
    value: AtomicU64,
}

impl Entry {
    const fn new() -> Self {
        Self {
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            value: AtomicU64::new(0),
        }
    }

    fn copy(&self, from: &Self) {
        for (to, from) in [(&self.start, &from.start), (&self.end, &from.end)] {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        let value = from.value.load(Ordering::Relaxed);
        self.value.store(value, Ordering::Relaxed);
    }
}

/// Ranges of addresses that do not overlap, each with a value.
#[derive(Debug)]
pub struct Ranges {
    /// No range begins below.
    low: AtomicUsize,
    /// No range ends above.
    high: AtomicUsize,
    sequence: AtomicUsize,
    count: AtomicUsize,
    entries: [Entry; CAPACITY],
}

impl Ranges {
    /// An empty table.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            low: AtomicUsize::new(usize::MAX),
            high: AtomicUsize::new(0),
            sequence: AtomicUsize::new(0),
            count: AtomicUsize::new(0),
            entries: [const { Entry::new() }; CAPACITY],
        }
    }

    /// Whether `address` lies between the lowest and the highest byte of all ranges: what most
    /// buffers do not.
    #[inline]
    #[must_use]
    pub fn may_hold(&self, address: usize) -> bool {
        address >= self.low.load(Ordering::Relaxed) && address < self.high.load(Ordering::Relaxed)
    }

    /// Whether any byte of `start..end` does.
    #[inline]
    #[must_use]
    pub fn may_overlap(&self, start: usize, end: usize) -> bool {
        start < self.high.load(Ordering::Relaxed) && end > self.low.load(Ordering::Relaxed)
    }

    /// The value of the range that holds all of `length` bytes at `address`.
    #[inline]
    #[must_use]
    pub fn find(&self, address: usize, length: usize) -> Option<u64> {
        if !self.may_hold(address) {
            return None;
        }
        let end = address.checked_add(length.max(1))?;
        self.search(address, end)
    }

    fn search(&self, address: usize, end: usize) -> Option<u64> {
        loop {
            let before = self.sequence.load(Ordering::Acquire);
            if !before.is_multiple_of(2) {
                std::thread::yield_now();
                continue;
            }
            let found = self.search_once(address, end);
            fence(Ordering::Acquire);
            if self.sequence.load(Ordering::Relaxed) == before {
                return found;
            }
        }
    }

    fn search_once(&self, address: usize, end: usize) -> Option<u64> {
        let count = self.count.load(Ordering::Relaxed).min(CAPACITY);
        let entries = self.entries.get(..count)?;
        let after = entries.partition_point(|entry| entry.start.load(Ordering::Relaxed) <= address);
        let entry = entries.get(after.checked_sub(1)?)?;
        (end <= entry.end.load(Ordering::Relaxed)).then(|| entry.value.load(Ordering::Relaxed))
    }

    /// The ranges that overlap `start..end`: first byte, end, value. For writers: nothing changes
    /// meanwhile.
    pub fn overlapping(&self, start: usize, end: usize) -> Vec<(usize, usize, u64)> {
        let count = self.count.load(Ordering::Relaxed).min(CAPACITY);
        self.entries[..count]
            .iter()
            .map(|entry| {
                let value = entry.value.load(Ordering::Relaxed);
                let start = entry.start.load(Ordering::Relaxed);
                (start, entry.end.load(Ordering::Relaxed), value)
            })
            .filter(|(from, to, _)| *from < end && start < *to)
            .collect()
    }

    /// Adds `start..end`, which is not empty and overlaps no other range. False when the table is
    /// full. For one writer at a time, with signals blocked.
    pub fn insert(&self, start: usize, end: usize, value: u64) -> bool {
        let count = self.count.load(Ordering::Relaxed);
        if count >= CAPACITY {
            return false;
        }
        let at = self.entries[..count]
            .partition_point(|entry| entry.start.load(Ordering::Relaxed) < start);
        self.change(|| {
            for index in (at..count).rev() {
                self.entries[index + 1].copy(&self.entries[index]);
            }
            self.entries[at].start.store(start, Ordering::Relaxed);
            self.entries[at].end.store(end, Ordering::Relaxed);
            self.entries[at].value.store(value, Ordering::Relaxed);
            self.count.store(count + 1, Ordering::Relaxed);
        });
        true
    }

    /// Takes away the range that begins at `start`; with `only`, if it has that value. As
    /// [`insert`](Self::insert).
    pub fn remove(&self, start: usize, only: Option<u64>) -> Option<u64> {
        let count = self.count.load(Ordering::Relaxed);
        let entries = &self.entries[..count];
        let at = entries.partition_point(|entry| entry.start.load(Ordering::Relaxed) < start);
        let entry = entries.get(at)?;
        if entry.start.load(Ordering::Relaxed) != start {
            return None;
        }
        let value = entry.value.load(Ordering::Relaxed);
        if only.is_some_and(|only| only != value) {
            return None;
        }
        self.change(|| {
            for index in at + 1..count {
                self.entries[index - 1].copy(&self.entries[index]);
            }
            self.count.store(count - 1, Ordering::Relaxed);
        });
        Some(value)
    }

    fn change(&self, change: impl FnOnce()) {
        let before = self.sequence.load(Ordering::Relaxed);
        self.sequence
            .store(before.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        change();
        let count = self.count.load(Ordering::Relaxed);
        let bound = |index: Option<usize>| index.and_then(|index| self.entries.get(index));
        let first = bound((count > 0).then_some(0));
        let last = bound(count.checked_sub(1));
        let low = first.map_or(usize::MAX, |entry| entry.start.load(Ordering::Relaxed));
        let high = last.map_or(0, |entry| entry.end.load(Ordering::Relaxed));
        self.low.store(low, Ordering::Relaxed);
        self.high.store(high, Ordering::Relaxed);
        self.sequence
            .store(before.wrapping_add(2), Ordering::Release);
    }
}

impl Default for Ranges {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::sync::atomic::AtomicBool;

    fn table() -> Box<Ranges> {
        Box::new(Ranges::new())
    }

    /// What the table must say, from a map of ranges by first byte.
    fn expected(model: &BTreeMap<usize, usize>, address: usize, length: usize) -> Option<u64> {
        let (start, end) = model.range(..=address).next_back()?;
        (address + length.max(1) <= *end).then_some(*start as u64)
    }

    proptest! {
        #[test]
        fn a_buffer_is_found_exactly_when_one_range_holds_all_of_it(
            steps in prop::collection::vec((any::<bool>(), 0_usize..64, 1_usize..5), 1..80),
            looks in prop::collection::vec((0_usize..70, 0_usize..6), 40),
        ) {
            let (table, mut model) = (table(), BTreeMap::new());
            for (add, start, length) in steps {
                if !add {
                    let removed = model.remove(&start).map(|_| start as u64);
                    prop_assert_eq!(table.remove(start, None), removed);
                    continue;
                }
                let end = start + length;
                let free = !model.iter().any(|(from, to)| *from < end && start < *to);
                prop_assert_eq!(table.overlapping(start, end).is_empty(), free);
                if free {
                    prop_assert!(table.insert(start, end, start as u64));
                    model.insert(start, end);
                }
            }
            for (address, length) in looks {
                prop_assert_eq!(table.find(address, length), expected(&model, address, length));
            }
        }
    }

    #[test]
    fn a_full_table_refuses_and_still_answers() {
        let table = table();
        for index in 0..CAPACITY {
            assert!(table.insert(index * 2, index * 2 + 1, index as u64));
        }
        assert!(!table.insert(CAPACITY * 2, CAPACITY * 2 + 1, 0));
        assert_eq!(table.find(CAPACITY * 2 - 2, 1), Some(CAPACITY as u64 - 1));
        assert_eq!(table.find(1, 1), None);
        assert_eq!(table.find(usize::MAX, 5), None);
    }

    #[test]
    fn readers_always_find_what_stays_while_others_come_and_go() {
        let (table, done) = (table(), AtomicBool::new(false));
        assert!(table.insert(1000, 2000, 7));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..300_000 {
                    assert_eq!(table.find(1500, 500), Some(7));
                    let other = table.find(500, 10);
                    assert!(matches!(other, None | Some(9)), "{other:?}");
                }
                done.store(true, Ordering::Relaxed);
            });
            let mut round = 0;
            while !done.load(Ordering::Relaxed) && round < 50_000_000 {
                assert!(table.insert(400, 600, 9));
                assert!(table.insert(3000 + round, 3001 + round, 1));
                assert_eq!(table.remove(400, Some(9)), Some(9));
                assert_eq!(table.remove(3000 + round, None), Some(1));
                round += 1;
            }
        });
    }
}
