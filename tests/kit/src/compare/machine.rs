//! The machine while something is measured: what a wake-up takes, and who has its processors.

use super::cpu::own_tree_ticks;
use super::interval::median;
use anyhow::{Context as _, Result, anyhow};
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::thread;
use std::time::Instant;

/// Round trips of one look at the wake-up time.
const TRIPS: usize = 16;

/// How the machine was while something was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Median round trip of two eventfds between two threads on two cores, in microseconds: two
    /// wake-ups. On a machine with one core, between two threads on it.
    pub wake_up_us: f64,
    /// The slowest of the medians of single rounds.
    pub worst_wake_up_us: f64,
    /// The part of the time of all processors that processes had which this one has not started.
    pub others: f64,
    /// The part that the hypervisor gave to other machines (`steal` of proc_stat(5)).
    pub steal: f64,
}

impl fmt::Display for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "wake-up {:.0} us (worst round {:.0}), others {:.0} %, steal {:.1} %",
            self.wake_up_us,
            self.worst_wake_up_us,
            100.0 * self.others,
            100.0 * self.steal
        )
    }
}

/// Looks at the machine from its making until [`Watch::conditions`].
#[derive(Debug)]
pub struct Watch {
    begin: Option<Usage>,
    own_begin: u64,
    wake_ups: Vec<f64>,
}

impl Watch {
    /// Begins.
    #[must_use]
    pub fn new() -> Self {
        Self {
            begin: Usage::now(),
            own_begin: own_tree_ticks(),
            wake_ups: Vec::new(),
        }
    }

    /// Measures the wake-up time: to be called between rounds. It takes some milliseconds.
    ///
    /// # Errors
    /// When there are no eventfds.
    pub fn look(&mut self) -> Result<()> {
        self.wake_ups.push(wake_up(TRIPS)?);
        Ok(())
    }

    /// What was seen so far.
    #[must_use]
    pub fn conditions(&self) -> Conditions {
        let own = own_tree_ticks().saturating_sub(self.own_begin);
        let shares = self.begin.zip(Usage::now());
        let (others, steal) =
            shares.map_or((0.0, 0.0), |(begin, end)| end.shares_since(begin, own));
        Conditions {
            wake_up_us: median(&self.wake_ups),
            worst_wake_up_us: self.wake_ups.iter().copied().fold(0.0, f64::max),
            others,
            steal,
        }
    }
}

impl Default for Watch {
    fn default() -> Self {
        Self::new()
    }
}

/// The processors' time so far, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Usage {
    all: u64,
    busy: u64,
    steal: u64,
}

impl Usage {
    fn now() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/stat").ok()?)
    }

    /// The first line: user, nice, system, idle, iowait, irq, softirq, steal, and two that `user`
    /// and `nice` contain.
    fn parse(text: &str) -> Option<Self> {
        let words = text.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Option<Vec<u64>> = words
            .split_whitespace()
            .take(8)
            .map(|word| word.parse().ok())
            .collect();
        let ticks = ticks?;
        let [user, nice, system, idle, iowait, irq, softirq, steal] = ticks.try_into().ok()?;
        let busy = user + nice + system + irq + softirq;
        Some(Self {
            all: busy + idle + iowait + steal,
            busy,
            steal,
        })
    }

    /// The shares of others and of other machines since then, with what this process and its
    /// descendants had meanwhile.
    fn shares_since(self, begin: Self, own: u64) -> (f64, f64) {
        let all = self.all.saturating_sub(begin.all).max(1);
        let others = self.busy.saturating_sub(begin.busy).saturating_sub(own);
        let share = |ticks: u64| {
            let [ticks, all] =
                [ticks, all].map(|t| f64::from(u32::try_from(t).unwrap_or(u32::MAX)));
            ticks / all
        };
        (share(others), share(self.steal.saturating_sub(begin.steal)))
    }
}

/// The median round trip of two eventfds between two threads that sleep, each on a core of its own,
/// in microseconds.
///
/// # Errors
/// When there are no eventfds.
pub fn wake_up(trips: usize) -> Result<f64> {
    let make = || eventfd(0, EventfdFlags::CLOEXEC).context("No eventfd");
    let (there, back) = (make()?, make()?);
    let one = 1_u64.to_ne_bytes();
    let cores = cores()?;
    let times = thread::scope(|scope| -> Result<Vec<f64>> {
        let echo = scope.spawn(|| -> Result<()> {
            pin(cores[1])?;
            for _ in 0..=trips {
                rustix::io::read(&there, &mut [0; 8])?;
                rustix::io::write(&back, &one)?;
            }
            Ok(())
        });
        // A thread of its own, as the caller keeps its cores.
        let ask = scope.spawn(|| -> Result<Vec<f64>> {
            pin(cores[0])?;
            let mut times = Vec::with_capacity(trips);
            for trip in 0..=trips {
                let begin = Instant::now();
                rustix::io::write(&there, &one)?;
                rustix::io::read(&back, &mut [0; 8])?;
                // The first one has waited for the other thread to start.
                if trip > 0 {
                    times.push(begin.elapsed().as_secs_f64() * 1e6);
                }
            }
            Ok(times)
        });
        let failed = |_| anyhow!("A measuring thread panicked");
        let times = ask.join().map_err(failed)??;
        echo.join().map_err(failed)??;
        Ok(times)
    })?;
    Ok(median(&times))
}

/// Two cores that this thread may run on; the same twice where there is one.
fn cores() -> Result<[usize; 2]> {
    let set = rustix::thread::sched_getaffinity(None)?;
    let mut cores = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu));
    let first = cores.next().context("No processor")?;
    Ok([first, cores.next().unwrap_or(first)])
}

fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_all_processors() {
        let begin = Usage::parse("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1").unwrap();
        let end = Usage::parse("cpu  150 0 120 1000 10 0 0 20 7 0\ncpu0 1").unwrap();
        // 300 ticks: 70 busy, of which 40 are one's own, and 20 stolen.
        let (others, steal) = end.shares_since(begin, 40);
        assert!((others - 0.1).abs() < 1e-12, "{others}");
        assert!((steal - 20.0 / 300.0).abs() < 1e-12, "{steal}");
        assert_eq!(Usage::parse("cpux 1 2"), None);
    }

    #[test]
    fn a_wake_up_takes_some_time_and_leaves_the_callers_cores_alone() {
        let before = rustix::thread::sched_getaffinity(None).unwrap();
        let mut watch = Watch::new();
        watch.look().unwrap();
        let seen = watch.conditions();
        assert!(seen.wake_up_us > 0.0 && seen.worst_wake_up_us >= seen.wake_up_us);
        let after = rustix::thread::sched_getaffinity(None).unwrap();
        assert_eq!(before, after);
    }
}
