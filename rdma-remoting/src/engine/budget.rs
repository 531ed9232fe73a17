//! How much a turn may carry out, and how much it did: bytes and operations, what both together
//! cost, and until when it may last.

use std::time::Instant;

/// Cost of an operation besides its bytes, in bytes: an 8-byte write takes as long as it takes to
/// copy so many (some 0.2 us, at the 40 GiB/s of memory in the cache; `cargo xtask bench rdma`).
pub const OPERATION_COST: u64 = 8 << 10;
/// Cost of a flushed request, in bytes.
pub const FLUSH_COST: u64 = OPERATION_COST / 4;
/// Cost of a look at a queue pair or a context that has nothing to do, or at one that a request is
/// not for, in bytes.
pub const LOOK_COST: u64 = OPERATION_COST / 4;
/// What one has in a round: a message of 1 MiB. That is some 25 us of work, and 100 us where memory
/// is slow; others wait so long for their turn, and a longer message goes on in the next round.
/// With a quarter of it, messages of 1 MiB between a process and a VM came to 0.7 of their rate.
pub const QUANTUM: u64 = (1 << 20) + OPERATION_COST;

/// Bytes of a message that move before the first look at the clock, where a turn ends with its
/// time. How many move before the next one depends on how long these have taken: to open the keys
/// anew for so few would take a tenth of the time of a copy between mapped memory. In memory that
/// is touched for the first time, which is a page fault a page, so many take some 60 us; with
/// 256 KiB an 8-byte write beside such messages took 0.6 to 2.1 ms (p99), not 0.25.
const PORTION: u64 = 64 << 10;

/// What was carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Payload bytes moved.
    pub bytes: u64,
    /// Requests begun.
    pub operations: u64,
    /// Of all that, in bytes.
    pub cost: u64,
}

impl Usage {
    /// Both together.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            operations: self.operations.saturating_add(other.operations),
            cost: self.cost.saturating_add(other.cost),
        }
    }

    /// Whether half of its cost at least is that of bytes and requests, for which there are limits.
    #[must_use]
    pub(crate) fn is_mostly_limited(&self) -> bool {
        let operations = self.operations.saturating_mul(OPERATION_COST);
        self.bytes.saturating_add(operations) >= self.cost / 2
    }

    /// At least so much.
    #[must_use]
    pub(crate) fn at_least(self, cost: u64) -> Self {
        Self {
            cost: self.cost.max(cost),
            ..self
        }
    }
}

/// How much may be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    cost: u64,
    bytes: u64,
    operations: u64,
}

impl Budget {
    /// No bound.
    pub const UNBOUNDED: Self = Self::new(u64::MAX);
    /// One for whom nothing is carried out: it answers, looks and flushes.
    pub const NO_OPERATION: Self = Self {
        cost: u64::MAX,
        bytes: 0,
        operations: 0,
    };

    /// What costs so much.
    #[must_use]
    pub const fn new(cost: u64) -> Self {
        Self {
            cost,
            bytes: u64::MAX,
            operations: u64::MAX,
        }
    }

    /// The same, but no more bytes and operations than these.
    #[must_use]
    pub fn within(self, bytes: u64, operations: u64) -> Self {
        Self {
            bytes: self.bytes.min(bytes),
            operations: self.operations.min(operations),
            ..self
        }
    }

    /// The same, but no more cost than this.
    #[must_use]
    pub(crate) fn at_most(self, cost: u64) -> Self {
        Self {
            cost: self.cost.min(cost),
            ..self
        }
    }

    /// What is left when this was used of it.
    #[must_use]
    pub(crate) fn rest(&self, used: Usage) -> Self {
        Self {
            cost: self.cost.saturating_sub(used.cost),
            bytes: self.bytes.saturating_sub(used.bytes),
            operations: self.operations.saturating_sub(used.operations),
        }
    }

    /// Its cost is spent.
    #[must_use]
    pub(crate) fn is_paid_out(&self) -> bool {
        self.cost < OPERATION_COST
    }

    /// No further operation is worth a turn.
    #[must_use]
    pub(crate) fn is_spent(&self) -> bool {
        self.is_paid_out() || self.bytes == 0 || self.operations == 0
    }

    /// The same, but worth an operation at least, where one is left.
    #[must_use]
    pub(crate) fn at_least_one(self) -> Self {
        Self {
            cost: self.cost.max(OPERATION_COST),
            ..self
        }
    }

    /// Begins to spend it.
    #[must_use]
    pub fn spend(self) -> Spending {
        self.spend_until(None)
    }

    /// Begins to spend it, in a turn that ends then.
    #[must_use]
    pub fn spend_until(self, until: Option<Instant>) -> Spending {
        Spending {
            left: self,
            until,
            used: Usage::default(),
            watch: Watch::default(),
            portion: Portion::default(),
        }
    }
}

/// Whether the time of a turn is over, where it ends.
#[must_use]
pub(crate) fn is_past(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

/// What is left of a budget. Bytes are bounded exactly; the last operation may cost more than is
/// left.
#[derive(Clone, Copy, Debug)]
pub struct Spending {
    left: Budget,
    until: Option<Instant>,
    used: Usage,
    watch: Watch,
    portion: Portion,
}

/// What of a long message moves before the next look at the clock.
#[derive(Clone, Copy, Debug, Default)]
struct Portion {
    /// When the one at hand began, and its bytes.
    began: Option<(Instant, u64)>,
    /// At most so many bytes are in the next one.
    next: u64,
}

impl Portion {
    /// The one at hand has moved: in half of the time until `end`, so many bytes move.
    fn moved(&mut self, now: Instant, end: Instant) {
        if let Some((began, bytes)) = self.began.take() {
            let took = now.saturating_duration_since(began).as_nanos().max(1);
            let half = end.saturating_duration_since(now).as_nanos() / 2;
            let next = u128::from(bytes).saturating_mul(half) / took;
            self.next = u64::try_from(next).unwrap_or(u64::MAX);
        }
    }
}

/// When to look at the clock: before each request but the first where they take long, and seldom
/// where they do not, as that takes a tenth of the time of a small one.
#[derive(Clone, Copy, Debug, Default)]
struct Watch {
    /// Requests until the next look, and between the last one and that.
    left: u32,
    gap: u32,
    last: Option<Instant>,
}

impl Watch {
    /// A request begins: whether the time until `end` is over. The first one has time.
    fn is_over(&mut self, end: Instant, now: impl FnOnce() -> Instant) -> bool {
        if self.left > 0 {
            self.left -= 1;
            return false;
        }
        if self.gap == 0 {
            self.gap = 1;
            return false;
        }
        let now = now();
        let rest = end.saturating_duration_since(now);
        if let Some(last) = self.last.replace(now) {
            // Twice as many would be over before the end.
            let is_slow = now.saturating_duration_since(last) >= rest / 4;
            self.gap = if is_slow { 1 } else { 2 * self.gap };
        }
        self.left = self.gap - 1;
        rest.is_zero()
    }
}

impl Spending {
    /// What was used.
    #[must_use]
    pub fn used(&self) -> Usage {
        self.used
    }

    /// Nothing more of a message moves.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.left.cost == 0 || self.left.bytes == 0
    }

    /// Whether one that a request may not be for may be looked at, which is no operation.
    #[must_use]
    pub fn has_look(&self) -> bool {
        self.looks() > 0
    }

    /// How many may be looked at.
    #[must_use]
    pub(crate) fn looks(&self) -> u64 {
        self.left.cost.div_ceil(LOOK_COST)
    }

    /// Whether a request may begin.
    #[must_use]
    pub fn has_operation(&self) -> bool {
        !self.is_over() && self.left.operations > 0
    }

    /// A request has begun.
    pub fn begin(&mut self) {
        if let Some(end) = self.until
            && self.watch.is_over(end, Instant::now)
        {
            self.left.cost = 0;
        }
        self.left.operations = self.left.operations.saturating_sub(1);
        self.used.operations += 1;
        self.pay(OPERATION_COST);
    }

    /// A word has been looked at that is in use for long, which takes some 10 us.
    pub fn looked_in_vain(&mut self) {
        self.pay(64 * OPERATION_COST);
    }

    /// One that a request is not for has been looked at.
    pub fn passed_over(&mut self) {
        self.pay(LOOK_COST);
    }

    /// Leaves at most so many bytes, and returns how many it has [kept](Self::give_back).
    pub(crate) fn keep_back(&mut self, most: u64) -> u64 {
        let kept = self.left.bytes.saturating_sub(most);
        self.left.bytes -= kept;
        kept
    }

    /// Leaves what was [kept back](Self::keep_back), too.
    pub(crate) fn give_back(&mut self, kept: u64) {
        self.left.bytes = self.left.bytes.saturating_add(kept);
    }

    /// Takes at most so many bytes, and returns how many there were.
    pub fn take(&mut self, bytes: u64) -> u64 {
        let bytes = bytes.min(self.left.bytes).min(self.left.cost);
        self.left.bytes -= bytes;
        self.used.bytes += bytes;
        self.pay(bytes);
        bytes
    }

    /// Takes at most so many bytes, and no more than move before the next look at the clock.
    pub fn take_portion(&mut self, bytes: u64) -> u64 {
        let most = PORTION.max(self.portion.next);
        if self.until.is_none() || bytes <= most {
            return self.take(bytes);
        }
        let taken = self.take(most);
        self.portion.began = Some((Instant::now(), taken));
        taken
    }

    /// Whether there is a further portion of a message, in this turn.
    pub fn goes_on(&mut self) -> bool {
        if let Some(end) = self.until {
            let now = Instant::now();
            self.portion.moved(now, end);
            if now >= end {
                self.left.cost = 0;
            }
        }
        !self.is_over()
    }

    /// Takes so many bytes, which move at once, also where there are not so many.
    pub fn take_whole(&mut self, bytes: u64) {
        self.left.bytes = self.left.bytes.saturating_sub(bytes);
        self.used.bytes = self.used.bytes.saturating_add(bytes);
        self.pay(bytes);
    }

    /// How many requests may be flushed, at most so many.
    #[must_use]
    pub fn flushes(&self, most: u32) -> u32 {
        let flushes = self.left.cost.div_ceil(FLUSH_COST);
        u32::try_from(flushes).map_or(most, |flushes| flushes.min(most))
    }

    /// So many were flushed.
    pub fn flushed(&mut self, requests: u32) {
        self.pay(FLUSH_COST.saturating_mul(requests.into()));
    }

    fn pay(&mut self, cost: u64) {
        self.left.cost = self.left.cost.saturating_sub(cost);
        self.used.cost = self.used.cost.saturating_add(cost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn bytes_are_bounded_exactly_and_the_last_operation_is_not() {
        let mut budget = Budget::new(OPERATION_COST + 100).spend();
        budget.begin();
        assert_eq!(budget.take(60), 60);
        assert!(budget.has_operation());
        budget.begin();
        assert!(budget.is_over() && budget.take(9) == 0);
        assert_eq!(
            budget.used(),
            Usage {
                bytes: 60,
                operations: 2,
                cost: 2 * OPERATION_COST + 60
            }
        );
    }

    /// Begins requests that take so long each; returns how many had begun when the time was over,
    /// and how often the clock was looked at.
    fn begun(time: Duration, each: Duration) -> (u32, u32) {
        let (mut watch, begin) = (Watch::default(), Instant::now());
        let (mut count, mut looks) = (0, 0);
        loop {
            let now = || {
                looks += 1;
                begin + count * each
            };
            if watch.is_over(begin + time, now) {
                return (count, looks);
            }
            count += 1;
        }
    }

    #[test]
    fn requests_that_take_long_end_with_their_time() {
        let time = Duration::from_micros(100);
        let us = |us: u64| begun(time, Duration::from_micros(us));
        // The first one has time in any case, and those that are short are seldom interrupted.
        assert_eq!(us(1000), (1, 1));
        assert_eq!(us(100), (1, 1));
        assert_eq!(us(60), (2, 2));
        assert_eq!(us(10).0, 10);
        let (count, looks) = us(1);
        assert!(
            (100..=125).contains(&count) && looks < 25,
            "{count} {looks}"
        );
        let (count, looks) = begun(time, Duration::from_nanos(100));
        assert!(
            (1000..=1250).contains(&count) && looks < 60,
            "{count} {looks}"
        );
        let mut budget = Budget::new(QUANTUM).spend_until(Some(Instant::now()));
        budget.begin();
        assert!(budget.has_operation());
        budget.begin();
        assert!(!budget.has_operation() && budget.is_over());
    }

    #[test]
    fn what_moves_fast_moves_in_few_portions() {
        let begin = Instant::now();
        let next = |took: u64| {
            let mut portion = Portion {
                began: Some((begin, PORTION)),
                next: 0,
            };
            let end = begin + Duration::from_micros(100);
            portion.moved(begin + Duration::from_micros(took), end);
            portion.next
        };
        assert_eq!(next(5), PORTION * 95 / 2 / 5);
        assert_eq!(next(50), PORTION / 2);
        assert_eq!([next(100), next(1000)], [0, 0]);
        let mut over = Budget::new(QUANTUM).spend_until(Some(begin));
        assert_eq!(over.take_portion(3 * PORTION), PORTION);
        assert!(!over.goes_on());
        assert_eq!(
            Budget::new(QUANTUM).spend().take_portion(3 * PORTION),
            3 * PORTION
        );
    }

    #[test]
    fn a_limit_of_operations_lets_what_has_begun_go_on() {
        let mut budget = Budget::new(QUANTUM).within(100, 1).spend();
        budget.begin();
        assert!(!budget.has_operation() && !budget.is_over());
        assert_eq!(budget.take(150), 100);
        assert!(budget.is_over());
        let rest = Budget::new(QUANTUM).within(100, 2);
        assert!(rest.rest(budget.used()).is_spent());
    }

    #[test]
    fn a_turn_flushes_what_it_can_pay() {
        assert_eq!(Budget::new(0).spend().flushes(9), 0);
        assert_eq!(Budget::NO_OPERATION.spend().flushes(9), 9);
        assert_eq!(Budget::new(1).spend().flushes(9), 1);
        assert_eq!(Budget::UNBOUNDED.spend().flushes(9), 9);
        let mut budget = Budget::new(3 * FLUSH_COST).spend();
        budget.flushed(budget.flushes(9));
        assert!(budget.is_over() && budget.used().cost == 3 * FLUSH_COST);
    }
}
