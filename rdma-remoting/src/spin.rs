//! How long to poll before sleeping: the hybrid synchronisation that the paper leaves as future
//! work (section IV-B).

use std::time::{Duration, Instant};

/// Time to poll without work while nobody else wants the CPU.
const BOUND: Duration = Duration::from_micros(50);
/// A `sched_yield` that took longer than this: somebody else had the CPU. It may be the very
/// program that polls for the answer; a thread that sleeps is woken on a CPU of its own where there
/// is one.
const YIELD_TAKEN: Duration = Duration::from_micros(4);
/// A group of polls that took longer than this: likewise.
const POLLS_TAKEN: Duration = Duration::from_micros(40);
/// Polls in vain between two looks at the clock.
const POLLS_BETWEEN_LOOKS: u32 = 64;
/// Time to poll without work, and without a yield, while others want the CPU.
const CONTENDED_BOUND: Duration = Duration::from_micros(5);
/// Sleeps before polling is tried again after others wanted the CPU: at first, and at most.
const FIRST_TRUST: u32 = 64;
const LAST_TRUST: u32 = 4096;

/// A bound on polling that follows what polling costs.
///
/// While nobody else wants the CPU polling is free, and finds work in a fraction of the time that
/// being woken takes. When somebody does (a yield, or a poll, that takes long shows it), a thread
/// that polls is set back behind those that it kept waiting, by milliseconds, while one that
/// sleeps is scheduled at once when it is woken. Polling then stops, and is tried again after a
/// number of sleeps that doubles each time it was still wrong.
#[derive(Debug)]
pub struct Spin {
    since: Option<Instant>,
    looked: Option<Instant>,
    polls: u32,
    /// Sleeps to go before polling is tried again; zero while polling is free.
    contended: u32,
    trust: u32,
}

impl Default for Spin {
    fn default() -> Self {
        Self {
            since: None,
            looked: None,
            polls: 0,
            contended: 0,
            trust: FIRST_TRUST,
        }
    }
}

impl Spin {
    /// A poll has found work.
    pub fn worked(&mut self) {
        self.since = None;
        self.looked = None;
        self.polls = 0;
    }

    /// There was none. Returns true when it is time to sleep; otherwise has given way a little.
    pub fn idle(&mut self) -> bool {
        self.polls += 1;
        if self.contended > 0 {
            let now = Instant::now();
            return now - *self.since.get_or_insert(now) >= CONTENDED_BOUND;
        }
        if !self.polls.is_multiple_of(POLLS_BETWEEN_LOOKS) {
            std::hint::spin_loop();
            return false;
        }
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        if self.looked.is_some_and(|then| now - then > POLLS_TAKEN) {
            self.taken();
            return true;
        }
        if now - since >= BOUND {
            self.trust = FIRST_TRUST;
            return true;
        }
        std::thread::yield_now();
        let after = Instant::now();
        self.looked = Some(after);
        if after - now > YIELD_TAKEN {
            self.taken();
            return true;
        }
        false
    }

    /// Somebody else had the CPU.
    fn taken(&mut self) {
        self.contended = self.trust;
        self.trust = (self.trust * 2).min(LAST_TRUST);
    }

    /// The thread was woken from sleep.
    pub fn woke(&mut self) {
        self.worked();
        self.contended = self.contended.saturating_sub(1);
    }

    /// Whether others are known to want the CPU.
    #[must_use]
    pub fn is_contended(&self) -> bool {
        self.contended > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_cpu_ends_polling_for_a_number_of_sleeps_that_doubles() {
        let mut spin = Spin::default();
        for trust in [FIRST_TRUST, 2 * FIRST_TRUST] {
            spin.taken();
            for _ in 0..trust {
                assert!(spin.is_contended());
                while !spin.idle() {}
                spin.woke();
            }
            assert!(!spin.is_contended());
        }
    }

    #[test]
    fn polling_in_vain_ends() {
        let mut spin = Spin::default();
        let mut polls = 1;
        while !spin.idle() {
            polls += 1;
        }
        assert!(polls >= POLLS_BETWEEN_LOOKS);
    }
}
