//! How long to poll before sleeping: the hybrid synchronisation that the paper leaves as future
//! work (section IV-B).

use std::time::{Duration, Instant};

/// Longest time to poll without work.
const LONGEST: Duration = Duration::from_micros(50);
/// Shortest: below it, polling is as good as none.
const SHORTEST: Duration = Duration::from_micros(2);
/// A `sched_yield` that takes longer than this has given the CPU to somebody who needed it.
const TAKEN: Duration = Duration::from_micros(15);
/// Empty polls between two yields.
const POLLS_BETWEEN_YIELDS: u32 = 64;

/// An adaptive bound on polling.
///
/// It grows when work comes soon after going to sleep, since polling a little longer would have
/// found it, and shrinks when polling ends in vain. When yielding shows that others want the CPU,
/// polling is not free any more and the bound drops at once: a thread that sleeps is scheduled
/// sooner when it is woken than one that has used up its share by polling.
#[derive(Debug)]
pub struct Spin {
    bound: Duration,
    since: Option<Instant>,
    polls: u32,
}

impl Default for Spin {
    fn default() -> Self {
        Self {
            bound: LONGEST,
            since: None,
            polls: 0,
        }
    }
}

impl Spin {
    /// There was work.
    pub fn worked(&mut self) {
        self.since = None;
        self.polls = 0;
    }

    /// There was none. Returns true when it is time to sleep; otherwise has given way a little.
    pub fn idle(&mut self) -> bool {
        self.polls += 1;
        if !self.polls.is_multiple_of(POLLS_BETWEEN_YIELDS) {
            std::hint::spin_loop();
            return false;
        }
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        if now - since >= self.bound {
            self.bound = (self.bound - self.bound / 8).max(SHORTEST);
            return true;
        }
        std::thread::yield_now();
        self.yielded(now.elapsed())
    }

    /// Takes note of how long a yield took. Returns true when it is time to sleep.
    fn yielded(&mut self, took: Duration) -> bool {
        if took > TAKEN {
            self.bound = SHORTEST;
            return true;
        }
        false
    }

    /// Slept for `slept`; then there was work.
    pub fn woke(&mut self, slept: Duration) {
        self.worked();
        if slept < LONGEST {
            self.bound = (self.bound * 2).min(LONGEST);
        }
    }

    /// The present bound.
    #[must_use]
    pub fn bound(&self) -> Duration {
        self.bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_cpu_ends_polling_and_quick_work_brings_it_back() {
        let mut spin = Spin::default();
        assert!(!spin.yielded(Duration::from_micros(1)));
        assert_eq!(spin.bound(), LONGEST);
        assert!(spin.yielded(Duration::from_millis(3)));
        assert_eq!(spin.bound(), SHORTEST);
        for _ in 0..10 {
            spin.woke(Duration::from_micros(5));
        }
        assert_eq!(spin.bound(), LONGEST);
        spin.woke(Duration::from_secs(1));
        assert_eq!(spin.bound(), LONGEST);
    }

    #[test]
    fn polling_in_vain_ends() {
        let mut spin = Spin::default();
        while !spin.idle() {}
        assert!(spin.bound() < LONGEST);
    }
}
