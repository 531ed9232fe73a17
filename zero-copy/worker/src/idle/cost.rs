//! What being woken costs, and what may be polled in vain to spare it.

use crate::policy::{LONGEST_SPIN, PROBE, PROBE_EVERY, SPIN_BURST, SPIN_SHARE};
use std::time::{Duration, Instant};

/// The time from what ends a wait to when the thread runs, as measured by waits that their own time
/// limit has ended.
#[derive(Debug, Default)]
pub(super) struct WakeCost {
    average: Duration,
    /// When it was measured.
    measured: Option<Instant>,
    /// Since when it waits, and for how long at most.
    wait: Option<(Instant, Duration)>,
}

impl WakeCost {
    /// The cost; zero as long as nothing was measured.
    pub fn cost(&self) -> Duration {
        self.average
    }

    /// A wait begins that ends after `limit`, if there is one.
    pub fn wait(&mut self, now: Instant, limit: Option<Duration>) {
        self.wait = limit.map(|limit| (now, limit));
    }

    /// A time limit for a wait, if it is time to measure.
    pub fn probe(&self, now: Instant) -> Option<Duration> {
        let is_fresh = |then| now.saturating_duration_since(then) < PROBE_EVERY;
        (!self.measured.is_some_and(is_fresh)).then_some(PROBE)
    }

    /// The wait that was said to begin begins only now.
    pub fn begins(&mut self, now: Instant) {
        if let Some((since, _)) = &mut self.wait {
            *since = now;
        }
    }

    /// The wait is over. Before its limit something else has ended it.
    pub fn woke(&mut self, now: Instant) {
        let Some((since, limit)) = self.wait.take() else {
            return;
        };
        if let Some(late) = now.saturating_duration_since(since).checked_sub(limit) {
            let late = late.min(LONGEST_SPIN);
            self.average = match self.measured {
                Some(_) => (3 * self.average + late) / 4,
                None => late,
            };
            self.measured = Some(now);
        }
    }
}

/// Time that may be polled in vain, which comes back with time.
#[derive(Debug)]
pub(super) struct SpinBudget {
    left: Duration,
    filled: Option<Instant>,
}

impl Default for SpinBudget {
    fn default() -> Self {
        Self {
            left: SPIN_BURST,
            filled: None,
        }
    }
}

impl SpinBudget {
    /// What is left.
    pub fn left(&mut self, now: Instant) -> Duration {
        let filled = self.filled.replace(now).unwrap_or(now);
        let back = now.saturating_duration_since(filled) / SPIN_SHARE;
        self.left = self.left.saturating_add(back).min(SPIN_BURST);
        self.left
    }

    /// So much was polled in vain.
    pub fn spend(&mut self, now: Instant, time: Duration) {
        self.left = self.left(now).saturating_sub(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_its_limit_ends_tells_the_cost() {
        let mut wake = WakeCost::default();
        let start = Instant::now();
        let cost = Duration::from_micros(600);
        let begin = |wake: &mut WakeCost, now| {
            let limit = wake.probe(now);
            wake.wait(now, limit);
            limit
        };
        assert_eq!(begin(&mut wake, start), Some(PROBE));
        // Something else has ended it.
        wake.woke(start + PROBE / 2);
        assert_eq!(wake.cost(), Duration::ZERO);
        assert_eq!(begin(&mut wake, start), Some(PROBE));
        wake.woke(start + PROBE + cost);
        assert_eq!(wake.cost(), cost);
        // Not again at once, but after a while; and one that took very long is not all.
        assert_eq!(begin(&mut wake, start + 2 * PROBE), None);
        wake.woke(start + 50 * PROBE);
        let later = start + 2 * PROBE_EVERY;
        assert_eq!(begin(&mut wake, later), Some(PROBE));
        wake.woke(later + Duration::from_secs(1));
        assert_eq!(wake.cost(), (3 * cost + LONGEST_SPIN) / 4);
    }

    #[test]
    fn what_is_done_before_the_wait_begins_is_no_cost_of_the_wake_up() {
        let mut wake = WakeCost::default();
        let start = Instant::now();
        let (look, cost) = (2 * PROBE, Duration::from_micros(7));
        wake.wait(start, Some(PROBE));
        wake.begins(start + look);
        wake.woke(start + look + PROBE + cost);
        assert_eq!(wake.cost(), cost);
    }

    #[test]
    fn the_budget_is_a_share_of_the_time() {
        let mut budget = SpinBudget::default();
        let start = Instant::now();
        assert_eq!(budget.left(start), SPIN_BURST);
        budget.spend(start, 2 * SPIN_BURST);
        assert_eq!(budget.left(start), Duration::ZERO);
        let second = Duration::from_secs(1);
        let mut spent = Duration::ZERO;
        for millisecond in 0..1000 {
            let now = start + Duration::from_millis(millisecond);
            let left = budget.left(now);
            budget.spend(now, left);
            spent += left;
        }
        assert!(spent <= second / SPIN_SHARE, "{spent:?}");
        assert_eq!(budget.left(start + 2 * second), SPIN_BURST);
    }
}
