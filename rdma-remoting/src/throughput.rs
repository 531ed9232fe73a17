//! What a tenant carries out, and how much of it an operator lets it carry out in a second: token
//! buckets of bytes and of operations (RFC 2697, section 3, one bucket), at the top of the
//! deficit round robin.
//!
//! A tenant without tokens carries nothing out until there are some for about a millisecond; its
//! calls are answered meanwhile. What it uses beyond its tokens, where several workers serve it, it
//! owes.

use crate::engine::{Budget, Usage};
use farlane_sys::sync::lock;
use farlane_worker::counters::{Sample, count};
use std::num::NonZeroU64;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A bucket holds what comes in so long: a tenant has so much at once after a rest.
const DEPTH: Duration = Duration::from_millis(20);
/// The same where its requests have waited all the time: then it had no rest, but its worker did
/// not have the CPU, and it catches up.
const WAITING_DEPTH: Duration = Duration::from_secs(1);
/// A tenant waits until it has the tokens of so long, or a single one where that takes longer: with
/// less at a time, looking whether there are some would cost more than what is carried out.
const CHUNK: Duration = Duration::from_millis(1);
const NANOSECONDS_A_SECOND: u64 = 1_000_000_000;

/// How much an operator lets a tenant carry out; nothing is limited by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Payload bytes per second: what its requests send, write and read.
    pub bytes: Option<NonZeroU64>,
    /// Requests per second.
    pub operations: Option<NonZeroU64>,
}

/// Tokens of one kind.
#[derive(Debug)]
struct Bucket {
    /// Tokens per second.
    rate: NonZeroU64,
    /// Negative where more were used than there were.
    tokens: i128,
    /// When the last of them came.
    filled: Instant,
}

impl Bucket {
    /// With what comes in a [`DEPTH`], but a debt of the one `before` stays.
    fn new(rate: NonZeroU64, before: Option<&Self>, now: Instant) -> Self {
        let tokens = tokens_in(rate, DEPTH);
        Self {
            rate,
            tokens: before.map_or(tokens, |before| before.tokens.min(tokens)),
            filled: now,
        }
    }

    /// What there is now, of what comes in so long at most.
    fn fill(&mut self, now: Instant, depth: Duration) -> i128 {
        let came = tokens_in(self.rate, now.saturating_duration_since(self.filled));
        let depth = tokens_in(self.rate, depth).max(1);
        if self.tokens + came >= depth {
            self.tokens = depth;
            self.filled = self.filled.max(now);
        } else if came > 0 {
            self.tokens += came;
            // The part of a token that has come is not lost.
            self.filled += time_of(self.rate, came);
        }
        self.tokens
    }

    /// When there are enough for a [`CHUNK`], where there are fewer now.
    fn wait(&self) -> Option<Instant> {
        let lacks = tokens_in(self.rate, CHUNK).max(1) - self.tokens;
        (lacks > 0).then(|| self.filled + time_of(self.rate, lacks))
    }
}

fn tokens_in(rate: NonZeroU64, time: Duration) -> i128 {
    let time = time.min(FOREVER);
    let nanoseconds = i128::from(time.as_secs()) * i128::from(NANOSECONDS_A_SECOND)
        + i128::from(time.subsec_nanos());
    nanoseconds * i128::from(rate.get()) / i128::from(NANOSECONDS_A_SECOND)
}

/// The time in which so many come, rounded up.
fn time_of(rate: NonZeroU64, tokens: i128) -> Duration {
    let tokens = tokens
        .unsigned_abs()
        .saturating_mul(NANOSECONDS_A_SECOND.into());
    let nanoseconds = tokens.div_ceil(rate.get().into());
    u64::try_from(nanoseconds).map_or(FOREVER, Duration::from_nanos)
}

/// More than a bucket and a debt take to fill: a century.
const FOREVER: Duration = Duration::from_secs(1 << 32);

#[derive(Debug, Default)]
struct Buckets {
    rates: Rates,
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
    /// Since when it waits for tokens, and until when.
    waits: Option<(Instant, Instant)>,
    /// Workers for which it waits.
    waiting: usize,
}

/// One tenant's.
#[derive(Debug, Default)]
pub struct Throughput {
    /// Held for a few instructions, while no other lock is taken.
    buckets: Mutex<Buckets>,
    /// Whether it is: where not, the buckets are not looked at.
    is_limited: AtomicBool,
    bytes: AtomicU64,
    operations: AtomicU64,
    throttled_us: AtomicU64,
}

impl Throughput {
    /// Of a tenant that has carried nothing out.
    #[must_use]
    pub fn new(rates: Rates, now: Instant) -> Self {
        let throughput = Self::default();
        throughput.set_rates(rates, now);
        throughput
    }

    /// It may carry out so much from now on, and waits no longer than for that.
    pub fn set_rates(&self, rates: Rates, now: Instant) {
        let mut buckets = lock(&self.buckets);
        let bucket = |rate: Option<NonZeroU64>, before: &Option<Bucket>| {
            rate.map(|rate| Bucket::new(rate, before.as_ref(), now))
        };
        *buckets = Buckets {
            bytes: bucket(rates.bytes, &buckets.bytes),
            operations: bucket(rates.operations, &buckets.operations),
            waits: None,
            // Those of one that was not limited have not been counted.
            waiting: match self.is_limited() {
                true => buckets.waiting,
                false => 0,
            },
            rates,
        };
        let is_limited = rates != Rates::default();
        self.is_limited.store(is_limited, Ordering::Release);
    }

    fn is_limited(&self) -> bool {
        self.is_limited.load(Ordering::Acquire)
    }

    /// What it may carry out now.
    ///
    /// # Errors
    /// Nothing, until then.
    pub(crate) fn allowance(&self, now: Instant) -> Result<Budget, Instant> {
        if !self.is_limited() {
            return Ok(Budget::UNBOUNDED);
        }
        let mut buckets = lock(&self.buckets);
        if let Some((_, until)) = buckets.waits
            && now < until
        {
            return Err(until);
        }
        let mut left = [u64::MAX; 2];
        let mut wait = None;
        let depth = match buckets.waiting > 0 {
            true => WAITING_DEPTH,
            false => DEPTH,
        };
        let waited = std::mem::take(&mut buckets.waits);
        let Buckets {
            bytes, operations, ..
        } = &mut *buckets;
        for (bucket, left) in [bytes, operations].into_iter().zip(&mut left) {
            if let Some(bucket) = bucket {
                // While it waited for tokens of one kind it had a rest from the other.
                if let Some((_, until)) = waited {
                    bucket.fill(until, DEPTH);
                }
                let tokens = bucket.fill(now, depth);
                if let Ok(tokens) = u64::try_from(tokens.max(0)) {
                    *left = tokens;
                }
                wait = wait.max(bucket.wait());
            }
        }
        if let Some((since, until)) = waited {
            let waited = until.saturating_duration_since(since);
            let us = waited.as_secs().saturating_mul(1_000_000);
            count(&self.throttled_us, us + u64::from(waited.subsec_micros()));
        }
        if let Some(until) = wait {
            buckets.waits = Some((now, until));
            return Err(until);
        }
        let [bytes, operations] = left;
        Ok(Budget::UNBOUNDED.within(bytes, operations))
    }

    /// It has carried so much out at a worker; whether it waited for that one before, and does now:
    /// it has more to do than its turn, which went to what has limits.
    pub(crate) fn carried(&self, used: Usage, (waited, waits): (bool, bool)) {
        if used.bytes > 0 || used.operations > 0 {
            count(&self.bytes, used.bytes);
            count(&self.operations, used.operations);
        }
        if self.is_limited() {
            let mut buckets = lock(&self.buckets);
            let waiting = buckets.waiting + usize::from(waits);
            buckets.waiting = waiting.saturating_sub(waited.into());
            if let Some(bytes) = &mut buckets.bytes {
                bytes.tokens -= i128::from(used.bytes);
            }
            if let Some(operations) = &mut buckets.operations {
                operations.tokens -= i128::from(used.operations);
            }
        }
    }

    /// What it has carried out, and its limits.
    #[must_use]
    pub fn samples(&self) -> Vec<Sample<'static>> {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let carried = [
            Sample::counter(
                "bytes",
                "Payload bytes that its requests have moved.",
                value(&self.bytes),
            ),
            Sample::counter(
                "operations",
                "Requests that it has begun.",
                value(&self.operations),
            ),
            Sample::counter(
                "throttled_us",
                "Microseconds for which its requests have waited because of its limits.",
                value(&self.throttled_us),
            ),
        ];
        let rates = lock(&self.buckets).rates;
        let limits = [
            (
                "rate_limit",
                "Payload bytes per second that its requests may move.",
                rates.bytes,
            ),
            (
                "operations_limit",
                "Requests per second that it may begin.",
                rates.operations,
            ),
        ];
        let limit = |(name, help, most): (_, _, Option<NonZeroU64>)| {
            most.map(|most| Sample::gauge(name, help, most.get()))
        };
        let limits = limits.into_iter().filter_map(limit);
        carried.into_iter().chain(limits).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::QUANTUM;
    use proptest::prelude::*;

    impl Throughput {
        /// The only worker has carried so much out.
        fn carries(&self, used: Usage, more: bool) {
            let was = lock(&self.buckets).waiting > 0;
            self.carried(used, (was, more));
        }
    }

    fn limited(bytes: u64, operations: u64, now: Instant) -> Throughput {
        let rates = Rates {
            bytes: NonZeroU64::new(bytes),
            operations: NonZeroU64::new(operations),
        };
        Throughput::new(rates, now)
    }

    /// Uses all that it may, at turns that come so long after each other, in a quantum each.
    /// Returns what it has carried out.
    fn run(tenant: &Throughput, mut now: Instant, turns: &[u64], bytes: u64) -> (Usage, Duration) {
        let (start, mut sum, mut left) = (now, Usage::default(), 0);
        for turn in turns {
            now += Duration::from_micros(*turn);
            let Ok(budget) = tenant.allowance(now) else {
                continue;
            };
            let mut budget = budget.at_most(QUANTUM).spend();
            while budget.has_operation() {
                if left == 0 {
                    budget.begin();
                    left = bytes;
                }
                left -= budget.take(left);
            }
            tenant.carries(budget.used(), true);
            sum = sum.and(budget.used());
        }
        (sum, now - start)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Never more than the limit and what the bucket holds; and not less by more than 2 % where
        /// turns come often enough.
        #[test]
        fn a_limit_is_kept_within_two_percent(
            bytes in 20_000_000..4_000_000_000_u64,
            operations in 20_000..400_000_u64,
            message in prop_oneof![Just(8_u64), 1..100_000_u64, Just(1 << 20)],
            turns in prop::collection::vec(1..40_u64, 200..400),
        ) {
            let now = Instant::now();
            let tenant = limited(bytes, operations, now);
            // Three seconds.
            let sum: u64 = turns.iter().sum();
            let times = usize::try_from(3_000_000 / sum).unwrap();
            let (used, time) = run(&tenant, now, &turns.repeat(times), message);
            #[allow(clippy::cast_precision_loss)]
            let ratio = |used: u64, rate: u64| used as f64 / (rate as f64 * time.as_secs_f64());
            let ratios = [ratio(used.bytes, bytes), ratio(used.operations, operations)];
            prop_assert!(ratios.iter().all(|ratio| *ratio < 1.02), "{:?}", ratios);
            // One of the two is the limit, unless turns of a quantum are no more than it.
            let capacity = QUANTUM as f64 * (turns.len() * times) as f64;
            let cost = used.cost as f64;
            prop_assert!(
                ratios.iter().any(|ratio| *ratio > 0.98) || cost > capacity * 0.97,
                "{:?} {}", ratios, cost / capacity
            );
        }
    }

    #[test]
    fn who_has_no_tokens_waits_for_some_and_has_its_time_counted() {
        let now = Instant::now();
        let tenant = limited(1_000_000, 0, now);
        let all = tenant.allowance(now).unwrap();
        // Twenty milliseconds' at once, and no more.
        assert_eq!(all, Budget::UNBOUNDED.within(20_000, u64::MAX));
        let used = |bytes| Usage {
            bytes,
            operations: 1,
            cost: bytes,
        };
        tenant.carries(used(20_000), true);
        let until = tenant.allowance(now).unwrap_err();
        assert_eq!(until, now + CHUNK);
        assert_eq!(tenant.allowance(until - CHUNK / 2), Err(until));
        let some = Budget::UNBOUNDED.within(1000, u64::MAX);
        assert_eq!(tenant.allowance(until), Ok(some));
        // Two workers have used it: one of them is paid later.
        tenant.carries(used(1000), true);
        tenant.carries(used(1000), true);
        assert_eq!(tenant.allowance(until), Err(until + 2 * CHUNK));
        // A few tokens that have come are not enough.
        let until = until + 2 * CHUNK;
        tenant.carries(used(1), true);
        let soon = until + CHUNK / 2;
        assert!(
            tenant.allowance(soon).is_ok(),
            "half of it is there already"
        );
        tenant.carries(used(1400), false);
        assert!(tenant.allowance(soon).unwrap_err() > soon);
        // After a rest there is no more than the bucket holds.
        let later = until + Duration::from_secs(9);
        let all = Budget::UNBOUNDED.within(20_000, u64::MAX);
        assert_eq!(tenant.allowance(later), Ok(all));
        let samples = tenant.samples();
        let value = |name| samples.iter().find(|s| s.name == name).map(|s| s.value);
        assert_eq!(value("throttled_us"), Some(3901));
        assert_eq!(value("bytes"), Some(23_401));
        assert_eq!(value("operations"), Some(5));
        assert_eq!(value("rate_limit"), Some(1_000_000));
        assert_eq!(value("operations_limit"), None);
    }

    /// Requests that wait while the worker does not have the CPU are no rest.
    #[test]
    fn who_waited_for_the_cpu_catches_up_and_who_rested_does_not() {
        let turns = [10; 1000];
        let pauses = [turns.as_slice(), &[50_000], &turns, &[900_000], &turns].concat();
        let begin = Instant::now();
        let tenant = limited(0, 100_000, begin);
        let (used, time) = run(&tenant, begin, &pauses.repeat(3), 8);
        let wanted = u64::try_from(tokens_in(NonZeroU64::new(100_000).unwrap(), time)).unwrap();
        // The bucket was full.
        assert!(
            (wanted..=wanted + 2000).contains(&used.operations),
            "{used:?}"
        );
        let now = begin + time;
        tenant.carries(Usage::default(), false);
        let later = now + Duration::from_millis(500);
        let some = Budget::UNBOUNDED.within(u64::MAX, 2000);
        assert_eq!(tenant.allowance(later), Ok(some));
        // There is a bound to it.
        tenant.carries(Usage::default(), true);
        let later = now + Duration::from_secs(5);
        let second = Budget::UNBOUNDED.within(u64::MAX, 100_000);
        assert_eq!(tenant.allowance(later), Ok(second));
    }

    /// A worker that has nothing to do for it does not say that another one has not.
    #[test]
    fn who_waits_for_one_worker_waits_whatever_the_others_have() {
        let begin = Instant::now();
        let tenant = limited(0, 100_000, begin);
        let none = Usage::default();
        tenant.carried(none, (false, true));
        tenant.carried(none, (false, false));
        let mut now = begin;
        for _ in 0..5 {
            now += Duration::from_millis(10);
            tenant.allowance(now).unwrap();
            tenant.carried(none, (false, false));
        }
        let allowance = |most| Ok(Budget::UNBOUNDED.within(u64::MAX, most));
        assert_eq!(tenant.allowance(now), allowance(7000));
        tenant.carried(none, (true, false));
        assert_eq!(tenant.allowance(now), allowance(2000));
    }

    /// Who waits because of one limit has a rest from the other.
    #[test]
    fn who_waits_for_one_kind_of_tokens_does_not_save_the_other() {
        for (rates, message) in [((100_000_000, 10_000), 8), ((20_000_000, 100_000), 100_000)] {
            let begin = Instant::now();
            let tenant = limited(rates.0, rates.1, begin);
            let (_, time) = run(&tenant, begin, &[10; 50_000], message);
            let mut now = begin + time;
            let budget = loop {
                match tenant.allowance(now) {
                    Ok(budget) => break budget,
                    Err(until) => now = until,
                }
            };
            // What comes in some more than 20 ms.
            let within = budget.within(rates.0 / 40, rates.1 / 40);
            assert_eq!(budget, within, "{message}");
        }
    }

    #[test]
    fn another_rate_counts_at_once_and_a_debt_stays() {
        let begin = Instant::now();
        let rates = |operations| Rates {
            bytes: None,
            operations: NonZeroU64::new(operations),
        };
        let tenant = limited(0, 1, begin);
        let second = begin + Duration::from_secs(1);
        assert_eq!(tenant.allowance(begin), Err(second));
        // It waits no longer for the old rate.
        tenant.set_rates(rates(1000), begin);
        let [all, one] = [u64::MAX, 1].map(|most| Budget::UNBOUNDED.within(u64::MAX, most));
        let then = begin + Duration::from_millis(1);
        assert_eq!(tenant.allowance(begin), Err(then));
        assert_eq!(tenant.allowance(then), Ok(one));
        let used = Usage {
            operations: 101,
            ..Usage::default()
        };
        tenant.carries(used, false);
        tenant.set_rates(rates(100), then);
        assert_eq!(
            tenant.allowance(then),
            Err(then + Duration::from_millis(1010))
        );
        tenant.set_rates(Rates::default(), then);
        assert_eq!(tenant.allowance(then), Ok(all));
        tenant.set_rates(rates(100), then);
        assert!(tenant.allowance(then).is_ok());
    }

    #[test]
    fn the_lowest_and_the_highest_limits_are_kept() {
        let now = Instant::now();
        let slow = limited(0, 1, now);
        assert_eq!(slow.allowance(now), Err(now + Duration::from_secs(1)));
        let then = now + Duration::from_secs(1);
        let one = Budget::UNBOUNDED.within(u64::MAX, 1);
        assert_eq!(slow.allowance(then), Ok(one));
        let fast = limited(u64::MAX, u64::MAX, now);
        assert!(fast.allowance(now).unwrap().spend().has_operation());
        let century = now + Duration::from_secs(100 * 365 * 86400);
        assert!(fast.allowance(century).unwrap().spend().has_operation());
        assert!(limited(0, 0, now).allowance(now) == Ok(Budget::UNBOUNDED));
    }
}
