//! Numbers from samples.

use serde::Serialize;
use std::time::{Duration, Instant};

/// Percentiles of a set of times, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Times {
    /// Number of samples.
    pub samples: usize,
    /// The fastest.
    pub min_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
}

impl Times {
    /// Sorts the samples out.
    pub fn of(mut samples: Vec<Duration>) -> Self {
        samples.sort_unstable();
        let at = |per_mille: usize| {
            let index = (samples.len() * per_mille / 1000).min(samples.len().saturating_sub(1));
            samples
                .get(index)
                .map_or(f64::NAN, |d| d.as_secs_f64() * 1e6)
        };
        Self {
            samples: samples.len(),
            min_us: at(0),
            p50_us: at(500),
            p90_us: at(900),
            p99_us: at(990),
        }
    }

    /// Takes `n` samples of `what`, after a tenth as many that do not count.
    pub fn take(n: usize, mut what: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Self> {
        Self::timed(n, || {
            let start = Instant::now();
            what()?;
            Ok(start.elapsed())
        })
    }

    /// The same where `what` measures its own time.
    pub fn timed(
        n: usize,
        mut what: impl FnMut() -> anyhow::Result<Duration>,
    ) -> anyhow::Result<Self> {
        let n = crate::scale::count(n);
        for _ in 0..n / 10 {
            what()?;
        }
        let samples = (0..n).map(|_| what()).collect::<anyhow::Result<_>>()?;
        Ok(Self::of(samples))
    }
}

/// GiB/s of `bytes` moved in `us` microseconds.
pub fn gib_per_s(bytes: usize, us: f64) -> f64 {
    #[allow(clippy::cast_precision_loss)] // A size far below 2^53.
    let bytes = bytes as f64;
    bytes / us * 1e6 / f64::from(1 << 30)
}
