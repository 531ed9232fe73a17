//! Log lines that somebody else can cause.

use crate::sync::lock;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A token bucket: a burst of lines at once, then one an interval.
///
/// Each VM and each socket has one of its own, so that one cannot silence another.
#[derive(Debug)]
pub struct LogLimit {
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    tokens: u64,
    filled: Instant,
    suppressed: u64,
}

impl LogLimit {
    /// Lines that may come at once.
    const BURST: u64 = 10;
    /// Time after which one more may come: whole seconds.
    const INTERVAL: Duration = Duration::from_secs(2);

    /// A full bucket.
    #[must_use]
    pub fn new() -> Self {
        Self {
            bucket: Mutex::new(Bucket {
                tokens: Self::BURST,
                filled: Instant::now(),
                suppressed: 0,
            }),
        }
    }

    /// Asks for a line. `Some(n)`: write it, `n` lines before it were not written.
    #[must_use]
    pub fn admit(&self) -> Option<u64> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> Option<u64> {
        let mut bucket = lock(&self.bucket);
        let passed = now.saturating_duration_since(bucket.filled);
        let earned = passed.as_secs() / Self::INTERVAL.as_secs();
        if earned > 0 {
            bucket.tokens = bucket.tokens.saturating_add(earned).min(Self::BURST);
            bucket.filled = now;
        }
        if bucket.tokens == 0 {
            bucket.suppressed = bucket.suppressed.saturating_add(1);
            return None;
        }
        bucket.tokens -= 1;
        Some(std::mem::take(&mut bucket.suppressed))
    }
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::new()
    }
}

/// A log line at a [`log::Level`], as often as a [`LogLimit`] admits.
#[macro_export]
macro_rules! log_limited {
    ($level:expr, $limit:expr, $($message:tt)+) => {
        if let Some(suppressed) = $limit.admit() {
            if suppressed > 0 {
                log::log!($level, "{suppressed} messages like the next one were not logged");
            }
            log::log!($level, $($message)+);
        }
    };
}

/// `warn!`, as often as a [`LogLimit`] admits.
#[macro_export]
macro_rules! warn_limited {
    ($limit:expr, $($message:tt)+) => {
        $crate::log_limited!(log::Level::Warn, $limit, $($message)+)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_counted() {
        let limit = LogLimit::new();
        let start = Instant::now();
        let written = (0..1000)
            .filter(|_| limit.admit_at(start).is_some())
            .count();
        assert_eq!(written, 10);
        assert_eq!(limit.admit_at(start + LogLimit::INTERVAL), Some(990));
        assert_eq!(limit.admit_at(start + LogLimit::INTERVAL), None);
        // A long silence earns a burst and no more.
        let later = start + Duration::from_secs(1 << 20);
        let written = (0..1000)
            .filter(|_| limit.admit_at(later).is_some())
            .count();
        assert_eq!(written, 10);
    }
}
