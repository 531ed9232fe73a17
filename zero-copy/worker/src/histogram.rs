//! How long something takes: times that workers add, and others read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The greatest time of each bucket but the last one is twice the one's before it, from this on.
const FIRST: Duration = Duration::from_micros(1);
/// Buckets with a greatest time: 1 us to 8.4 s.
const BOUNDED: usize = 24;

/// Counts of times, by how long they are.
#[derive(Debug, Default)]
pub struct Histogram {
    counts: [AtomicU64; BOUNDED + 1],
    nanoseconds: AtomicU64,
}

/// What a [`Histogram`] holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Distribution {
    /// The greatest time of each bucket in seconds, the last of which is infinite, and how many
    /// times are in it and in none before.
    pub buckets: Vec<(f64, u64)>,
    /// Sum of all times in seconds.
    pub sum: f64,
}

impl Distribution {
    /// How many times there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }
}

impl Histogram {
    /// Adds a time.
    pub fn add(&self, time: Duration) {
        self.add_each(time, 1);
    }

    /// Adds a time that so many things have taken, each of them.
    pub fn add_each(&self, time: Duration, things: u64) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // By an index that the number of buckets bounds.
        if let Some(count) = self.counts.get(bucket(time)) {
            count.fetch_add(things, Ordering::Relaxed);
        }
        let all = nanoseconds.saturating_mul(things);
        self.nanoseconds.fetch_add(all, Ordering::Relaxed);
    }

    /// What it holds now. What is added meanwhile may be in one number and not yet in another.
    #[must_use]
    pub fn distribution(&self) -> Distribution {
        let bounds = (0..BOUNDED).map(|at| (FIRST * (1 << at)).as_secs_f64());
        let bounds = bounds.chain([f64::INFINITY]);
        let counts = self.counts.iter().map(|n| n.load(Ordering::Relaxed));
        Distribution {
            buckets: bounds.zip(counts).collect(),
            sum: Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed)).as_secs_f64(),
        }
    }
}

/// The first bucket whose greatest time is not less.
fn bucket(time: Duration) -> usize {
    let firsts = time.as_nanos().div_ceil(FIRST.as_nanos());
    let doublings = u128::BITS - firsts.saturating_sub(1).leading_zeros();
    usize::try_from(doublings).map_or(BOUNDED, |doublings| doublings.min(BOUNDED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_first_bucket_that_is_not_shorter() {
        let at = |nanos| bucket(Duration::from_nanos(nanos));
        assert_eq!([0, 1, 1000].map(at), [0, 0, 0]);
        assert_eq!([1001, 2000, 2001, 4000].map(at), [1, 1, 2, 2]);
        assert_eq!(bucket(FIRST * (1 << 23)), 23);
        assert_eq!(bucket(FIRST * (1 << 23) + Duration::from_nanos(1)), 24);
        assert_eq!(bucket(Duration::MAX), 24);
    }

    #[test]
    fn all_times_are_told() {
        let histogram = Histogram::default();
        for micros in [1, 3, 4, 60_000_000] {
            histogram.add(Duration::from_micros(micros));
        }
        histogram.add_each(Duration::from_micros(8), 3);
        let told = histogram.distribution();
        let filled: Vec<_> = told.buckets.iter().filter(|(_, n)| *n > 0).collect();
        assert_eq!(
            filled,
            [&(1e-6, 1), &(4e-6, 2), &(8e-6, 3), &(f64::INFINITY, 1)]
        );
        assert_eq!(told.count(), 7);
        assert!((told.sum - 60.000_032).abs() < 1e-9);
    }
}
