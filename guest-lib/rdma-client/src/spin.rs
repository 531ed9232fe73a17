//! How long to spin before sleeping, and when to give way.
//!
//! The paper (section IV-B) names the mixture of spinning and sleeping as future work: spinning
//! is the fast way when the other side answers at once on a CPU of its own, and starves it when
//! it has none.

#[cfg(test)]
use std::cell::Cell;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Yields, and says whether somebody else ran meanwhile.
fn give_way() -> bool {
    let before = Instant::now();
    rustix::thread::sched_yield();
    #[cfg(test)]
    others_run();
    before.elapsed() > *YIELD_ALONE
}

#[cfg(test)]
thread_local! {
    /// What others do when this thread gives way next.
    static MEANWHILE: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
}

/// Has others do something when this thread gives way next.
#[cfg(test)]
pub(crate) fn meanwhile(act: impl FnOnce() + 'static) {
    MEANWHILE.set(Some(Box::new(act)));
}

#[cfg(test)]
fn others_run() {
    if let Some(act) = MEANWHILE.take() {
        act();
    }
}

/// A `sched_yield` that takes longer than this has let somebody else run. A yield that finds
/// nobody costs about four trivial system calls, and those cost twenty times more in an emulated
/// machine than in a real one, so it is measured.
static YIELD_ALONE: LazyLock<Duration> = LazyLock::new(|| {
    let trivial = (0..16).map(|_| {
        let before = Instant::now();
        let _ = rustix::process::getppid();
        before.elapsed()
    });
    trivial.min().unwrap_or_default() * 6 + Duration::from_nanos(500)
});

/// Decides how long a caller spins for an answer.
#[derive(Debug)]
pub(crate) struct SpinPolicy {
    /// How long answers take: exponentially weighted mean.
    answer: Duration,
    /// Binary orders of magnitude by which others' need of the CPU shortens the spinning.
    contention: u32,
    waits: u32,
}

impl SpinPolicy {
    /// The shortest time to spin. Costs less than going to sleep.
    const SHORTEST: Duration = Duration::from_micros(3);
    /// The longest time to spin: about what being woken takes.
    const LONGEST: Duration = Duration::from_micros(100);
    /// Where answers are slower than [`LONGEST`](Self::LONGEST), one wait in this many spins long
    /// all the same, to see whether they still are.
    const PROBE: u32 = 32;

    pub(crate) fn new() -> Self {
        Self {
            answer: Duration::from_micros(12),
            contention: 0,
            waits: 0,
        }
    }

    /// How long to spin this time.
    fn budget(&mut self) -> Duration {
        self.waits = self.waits.wrapping_add(1);
        let budget = if self.answer <= Self::LONGEST {
            (self.answer * 4).min(Self::LONGEST) / (1 << self.contention)
        } else if self.waits.is_multiple_of(Self::PROBE) {
            Self::LONGEST
        } else {
            Duration::ZERO
        };
        budget.max(Self::SHORTEST)
    }

    /// Notes that the answer took `answer`, and whether others wanted the CPU meanwhile.
    pub(crate) fn record(&mut self, answer: Duration, contended: bool) {
        // Bounded, so that one stall is forgotten after a few answers.
        let answer = answer.min(Self::LONGEST * 8);
        self.answer = (self.answer * 7 + answer) / 8;
        self.contention = if contended {
            (self.contention + 1).min(4)
        } else {
            self.contention.saturating_sub(1)
        };
    }

    /// Spins until `done`, or until it is time to sleep. Says which, and whether others wanted
    /// the CPU.
    pub(crate) fn spin(&mut self, mut done: impl FnMut() -> bool) -> Spun {
        // The first microseconds: no look at the clock, no system call. Where others wait for the
        // CPU, the one who answers may be among them.
        for _ in 0..64 >> (2 * self.contention) {
            if done() {
                return Spun::done(false);
            }
            std::hint::spin_loop();
        }
        let budget = self.budget();
        let start = Instant::now();
        let mut contended = false;
        loop {
            for _ in 0..16 {
                if done() {
                    return Spun::done(contended);
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= budget {
                return Spun {
                    done: false,
                    contended,
                };
            }
            contended |= give_way();
        }
    }
}

/// Outcome of a spin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spun {
    /// What was waited for has happened.
    pub(crate) done: bool,
    /// Others wanted the CPU.
    pub(crate) contended: bool,
}

impl Spun {
    fn done(contended: bool) -> Self {
        Self {
            done: true,
            contended,
        }
    }
}

/// Makes a program that polls in a loop give way: never while it finds something, rarely while
/// it has the CPU to itself, often while others wait for it (the backend, on a busy host).
///
/// The counters are hints: threads that race on them lose a count, nothing else.
#[derive(Debug)]
pub(crate) struct Courtesy {
    /// Polls in vain in a row, or [`JUST_YIELDED`](Self::JUST_YIELDED).
    empty: AtomicU32,
    /// Polls in vain before and between yields.
    patience: AtomicU32,
}

impl Default for Courtesy {
    fn default() -> Self {
        Self {
            empty: AtomicU32::new(0),
            patience: AtomicU32::new(Self::MOST),
        }
    }
}

impl Courtesy {
    const LEAST: u32 = 16;
    const MOST: u32 = 1024;
    /// The last poll found nothing and yielded, and nobody else seemed to run.
    const JUST_YIELDED: u32 = u32::MAX;

    /// The poll found something.
    #[inline]
    pub(crate) fn found(&self) {
        if self.empty.load(Ordering::Relaxed) == Self::JUST_YIELDED {
            // Many polls in vain, one yield, and there it is: the backend was waiting for this
            // CPU, however quick it was.
            self.learn(true);
        }
        self.empty.store(0, Ordering::Relaxed);
    }

    /// The poll found nothing: perhaps yields, and says whether it has.
    #[inline]
    pub(crate) fn found_nothing(&self) -> bool {
        let mut empty = self.empty.load(Ordering::Relaxed);
        if empty == Self::JUST_YIELDED {
            self.learn(false);
            empty = 0;
        }
        if empty < self.patience.load(Ordering::Relaxed) {
            self.empty.store(empty + 1, Ordering::Relaxed);
            // The backend's worker may run on the other thread of this core.
            if empty > Self::LEAST {
                std::hint::spin_loop();
            }
            return false;
        }
        if give_way() {
            self.learn(true);
            self.empty.store(0, Ordering::Relaxed);
        } else {
            self.empty.store(Self::JUST_YIELDED, Ordering::Relaxed);
        }
        true
    }

    /// Adapts to whether a yield was worth it.
    #[cold]
    fn learn(&self, contended: bool) {
        let patience = self.patience.load(Ordering::Relaxed);
        let next = if contended {
            (patience / 2).max(Self::LEAST)
        } else {
            (patience * 2).min(Self::MOST)
        };
        self.patience.store(next, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_micros(2);
    const SLOW: Duration = Duration::from_millis(5);

    #[test]
    fn a_new_policy_spins_for_about_fifty_microseconds() {
        assert_eq!(SpinPolicy::new().budget(), Duration::from_micros(48));
    }

    #[test]
    fn slow_answers_end_the_spinning_and_quick_ones_bring_it_back() {
        let mut policy = SpinPolicy::new();
        for _ in 0..8 {
            policy.record(SLOW, false);
        }
        let budgets: Vec<_> = (0..SpinPolicy::PROBE).map(|_| policy.budget()).collect();
        let probes = budgets.iter().filter(|&&b| b == SpinPolicy::LONGEST);
        assert_eq!(probes.count(), 1);
        assert!(
            budgets
                .iter()
                .filter(|&&b| b == SpinPolicy::SHORTEST)
                .count()
                > 30
        );
        for _ in 0..64 {
            policy.record(QUICK, false);
        }
        assert!(policy.budget() >= QUICK * 3 && policy.budget() < Duration::from_micros(30));
    }

    #[test]
    fn others_on_the_cpu_shorten_the_spinning() {
        let mut policy = SpinPolicy::new();
        let alone = policy.budget();
        for _ in 0..6 {
            policy.record(Duration::from_micros(12), true);
        }
        assert!(policy.budget() <= alone / 8);
        for _ in 0..4 {
            policy.record(Duration::from_micros(12), false);
        }
        assert_eq!(policy.budget(), alone);
    }

    #[test]
    fn spinning_ends_with_the_answer_or_with_the_budget() {
        let mut policy = SpinPolicy::new();
        let mut looks = 0;
        let spun = policy.spin(|| {
            looks += 1;
            looks == 3
        });
        assert!(spun.done && looks == 3);
        let start = Instant::now();
        assert!(!policy.spin(|| false).done);
        assert!(start.elapsed() >= SpinPolicy::SHORTEST);
    }

    #[test]
    fn courtesy_yields_sooner_when_others_wait_and_later_when_not() {
        let courtesy = Courtesy::default();
        let patience = || courtesy.patience.load(Ordering::Relaxed);
        for _ in 0..12 {
            courtesy.learn(true);
        }
        assert_eq!(patience(), Courtesy::LEAST);
        for _ in 0..12 {
            courtesy.learn(false);
        }
        assert_eq!(patience(), Courtesy::MOST);
    }
    #[test]
    fn a_completion_right_after_a_yield_is_taken_as_contention() {
        let courtesy = Courtesy::default();
        courtesy
            .empty
            .store(Courtesy::JUST_YIELDED, Ordering::Relaxed);
        courtesy.found();
        assert_eq!(
            courtesy.patience.load(Ordering::Relaxed),
            Courtesy::MOST / 2
        );
        courtesy
            .empty
            .store(Courtesy::JUST_YIELDED, Ordering::Relaxed);
        courtesy.found_nothing();
        assert_eq!(courtesy.patience.load(Ordering::Relaxed), Courtesy::MOST);
    }
}
