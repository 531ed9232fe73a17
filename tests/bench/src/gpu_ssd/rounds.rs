//! Rounds: every mechanism does the same, one after the other, again and again.

use crate::disk::Disk;
use crate::job::{Job, Mechanism, Outcome};
use crate::team::Team;
use anyhow::Result;
use farlane_io_plan::oracle::Random;
use serde::Serialize;
use std::collections::BTreeMap;

/// What the mechanisms took in each round.
#[derive(Debug, Default)]
pub struct Rounds {
    outcomes: BTreeMap<&'static str, Vec<Outcome>>,
    changed: Vec<f64>,
}

/// A mechanism in a set of rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Measured {
    /// Median of bytes per second.
    pub rate: f64,
    /// Median over the rounds of its rate, the router's being 1.
    pub relative: f64,
    /// Median of CPU seconds per second.
    pub cpu: f64,
}

/// What is done in a round.
pub struct Round {
    /// The reads.
    pub reads: Vec<(u64, u32)>,
    /// Threads that share them.
    pub threads: u32,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Rounds {
    /// Has `mechanisms` do `count` rounds and one before that does not count. `round` says what is done
    /// in one, and `arrange` brings the page cache into the state before it.
    pub fn take(
        team: &mut Team,
        disk: &Disk,
        mechanisms: &[Mechanism],
        count: usize,
        mut round: impl FnMut(usize) -> Round,
        arrange: impl Fn(usize) -> Result<()>,
    ) -> Result<Self> {
        let mut rounds = Self::default();
        let mut mechanisms = mechanisms.to_vec();
        let mut random = Random::new(6);
        for number in 0..=count {
            let what = round(number);
            // In another order in each round, as what one does may be felt by the next.
            random.shuffle(&mut mechanisms);
            for mechanism in mechanisms.iter().copied() {
                arrange(number)?;
                let before = disk.resident()?;
                let outcome = team.perform(Job {
                    mechanism,
                    file: disk.path(),
                    reads: what.reads.clone(),
                    threads: what.threads,
                    verify: false,
                })?;
                if mechanism == Mechanism::Router {
                    let changed = disk.resident()?.abs_diff(before);
                    rounds.changed.push(changed as f64);
                }
                if number > 0 {
                    rounds
                        .outcomes
                        .entry(mechanism.name())
                        .or_default()
                        .push(outcome);
                }
            }
        }
        Ok(rounds)
    }

    /// Pages by which the router's reads changed the page cache: the median, as the system may take
    /// pages back at any time.
    pub fn changed(&self) -> f64 {
        median(self.changed.clone())
    }

    /// The figures of a mechanism.
    pub fn of(&self, mechanism: Mechanism) -> Option<Measured> {
        let rate = |outcome: &Outcome| outcome.bytes as f64 / outcome.seconds;
        let own = self.outcomes.get(mechanism.name())?;
        let router = self.outcomes.get(Mechanism::Router.name())?;
        let relative = own
            .iter()
            .zip(router)
            .map(|(own, router)| rate(own) / rate(router));
        Some(Measured {
            rate: median(own.iter().map(rate).collect()),
            relative: median(relative.collect()),
            cpu: median(own.iter().map(|o| o.cpu_seconds / o.seconds).collect()),
        })
    }

    /// The best of some mechanisms, beside the router: its name and figures.
    pub fn best(&self, of: &[Mechanism]) -> Option<(Mechanism, Measured)> {
        of.iter()
            .filter(|mechanism| **mechanism != Mechanism::Router)
            .filter_map(|mechanism| Some((*mechanism, self.of(*mechanism)?)))
            .max_by(|a, b| a.1.relative.total_cmp(&b.1.relative))
    }
}
