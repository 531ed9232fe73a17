//! Rounds: every mechanism does the same, one after the other, again and again.

use crate::disk::Disk;
use crate::job::{Job, Mechanism, Outcome};
use crate::team::Team;
use anyhow::Result;
use farlane_io_core::plan::oracle::Random;
use farlane_kit::compare::interval::median;
use farlane_kit::compare::{Bar, Comparison, Conditions, Plan, Watch, judge};
use serde::Serialize;
use std::collections::BTreeMap;

/// What the mechanisms took in each round.
#[derive(Debug, Default)]
pub struct Rounds {
    outcomes: BTreeMap<&'static str, Vec<Outcome>>,
    changed: Vec<f64>,
    conditions: Conditions,
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

impl Rounds {
    /// Has `mechanisms` do the rounds of a plan and one before that does not count: until the
    /// router beside each of the others is judged by `bar`. `round` says what is done in one, and
    /// `arrange` brings the page cache into the state before it.
    pub fn take(
        team: &mut Team,
        disk: &Disk,
        mechanisms: &[Mechanism],
        plan: &Plan,
        bar: Option<Bar>,
        mut round: impl FnMut(usize) -> Round,
        arrange: impl Fn(usize) -> Result<()>,
    ) -> Result<Self> {
        let mut rounds = Self::default();
        let mut mechanisms = mechanisms.to_vec();
        let mut random = Random::new(6);
        let mut watch = Watch::new();
        for number in 0..=plan.most {
            watch.look()?;
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
            if number >= plan.least && rounds.is_judged(bar, plan) {
                break;
            }
        }
        rounds.conditions = watch.conditions();
        Ok(rounds)
    }

    /// Pages by which the router's reads changed the page cache: the median, as the system may take
    /// pages back at any time.
    pub fn changed(&self) -> f64 {
        median(&self.changed)
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
        let cpu = own.iter().map(|o| o.cpu_seconds / o.seconds);
        Some(Measured {
            rate: median(&own.iter().map(rate).collect::<Vec<_>>()),
            relative: median(&relative.collect::<Vec<_>>()),
            cpu: median(&cpu.collect::<Vec<_>>()),
        })
    }

    /// The router beside a mechanism, judged by a bar.
    fn beside(&self, mechanism: Mechanism, bar: Bar, plan: &Plan) -> Option<Comparison> {
        let rates = |mechanism: Mechanism| -> Option<Vec<f64>> {
            let all = self.outcomes.get(mechanism.name())?;
            Some(
                all.iter()
                    .map(|o| o.bytes as f64 / o.seconds / 1e6)
                    .collect(),
            )
        };
        Some(Comparison::of_rounds(
            rates(Mechanism::Router)?,
            Some(rates(mechanism)?),
            (bar, plan),
            self.conditions,
        ))
    }

    fn is_judged(&self, bar: Option<Bar>, plan: &Plan) -> bool {
        let Some(bar) = bar else { return true };
        let mut all = Mechanism::ALL
            .into_iter()
            .filter(|mechanism| *mechanism != Mechanism::Router)
            .filter_map(|mechanism| self.beside(mechanism, bar, plan));
        all.all(|found| judge(&found.rounds, bar, plan).is_some())
    }

    /// The router beside the best of some mechanisms: that beside which it is worst.
    pub fn beside_best(
        &self,
        of: &[Mechanism],
        bar: Bar,
        plan: &Plan,
    ) -> Option<(Mechanism, Comparison)> {
        of.iter()
            .filter(|mechanism| **mechanism != Mechanism::Router)
            .filter_map(|mechanism| Some((*mechanism, self.beside(*mechanism, bar, plan)?)))
            .min_by(|a, b| a.1.figure.total_cmp(&b.1.figure))
    }
}
