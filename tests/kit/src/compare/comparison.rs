//! Rounds of a comparison, and their verdict.

use super::interval::{median, of_median};
use super::machine::{Conditions, Watch};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

/// What the median of a comparison's figures must be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Bar {
    /// At least so much: rates.
    AtLeast(f64),
    /// At most so much: times, costs.
    AtMost(f64),
}

impl Bar {
    fn is_met_by(self, figure: f64) -> bool {
        match self {
            Self::AtLeast(bar) => figure >= bar,
            Self::AtMost(bar) => figure <= bar,
        }
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sign, bar) = match self {
            Self::AtLeast(bar) => (">=", *bar),
            Self::AtMost(bar) => ("<=", *bar),
        };
        write!(f, "{sign} {}", short(bar))
    }
}

/// A figure with as many digits as say something.
pub(crate) fn short(figure: f64) -> String {
    match figure.abs() {
        large if large >= 1e6 => format!("{:.2}e6", figure / 1e6),
        large if large >= 100.0 => format!("{figure:.0}"),
        middle if middle >= 10.0 => format!("{figure:.1}"),
        _ => format!("{figure:.2}"),
    }
}

/// How many rounds are made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Rounds before the first look at the interval.
    pub least: usize,
    /// Rounds between two looks.
    pub step: usize,
    /// Rounds at which the comparison ends in any case.
    pub most: usize,
    /// The time after which it ends, too, once it has [`Plan::least`] rounds: on a busy machine all
    /// takes longer.
    pub patience: Duration,
    /// The probability with which the interval of a look that may find the bar met holds the true
    /// median. It is also the interval that is told.
    pub confidence: f64,
    /// The same for a look that may find it missed, but for the last one: higher, as there are
    /// several looks, and noise must not be called a miss.
    pub confidence_of_miss: f64,
}

impl Plan {
    /// For benches and long scenarios.
    pub const LONG: Self = Self {
        least: 9,
        step: 6,
        most: 33,
        patience: Duration::from_secs(90),
        confidence: 0.95,
        confidence_of_miss: 0.99,
    };
    /// For the small form of a scenario: ends after six rounds where all of them meet the bar.
    pub const SMALL: Self = Self {
        least: 6,
        step: 6,
        most: 30,
        patience: Duration::from_secs(5),
        confidence: 0.95,
        confidence_of_miss: 0.99,
    };
    /// One round, to see that what is measured works: judges nothing.
    pub const SMOKE: Self = Self {
        least: 1,
        step: 1,
        most: 1,
        patience: Duration::from_secs(90),
        confidence: 0.95,
        confidence_of_miss: 0.99,
    };
}

/// What a comparison says of its bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The whole interval of [`Plan::confidence`] is on the bar's good side; or the bar is still
    /// inside of it at the end (after [`Plan::most`] rounds, or [`Plan::patience`]), and the median
    /// is on the good side.
    Met,
    /// The whole interval of [`Plan::confidence_of_miss`] is on the bad side; at the end that of
    /// [`Plan::confidence`].
    Missed,
    /// The bar is still inside of the interval at the end, and the median is on the bad side: not
    /// shown to be missed, and not shown to be met.
    Undecided,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Met => "met",
            Self::Missed => "MISSED",
            Self::Undecided => "UNDECIDED",
        })
    }
}

/// The verdict on some figures; none while there should be more.
#[must_use]
pub fn judge(figures: &[f64], bar: Bar, plan: &Plan) -> Option<Verdict> {
    if figures.len() >= plan.most {
        return Some(judge_last(figures, bar, plan));
    }
    shown(figures, bar, [plan.confidence, plan.confidence_of_miss])
}

/// The verdict where there will be no more figures.
fn judge_last(figures: &[f64], bar: Bar, plan: &Plan) -> Verdict {
    let by_median = if bar.is_met_by(median(figures)) {
        Verdict::Met
    } else {
        Verdict::Undecided
    };
    shown(figures, bar, [plan.confidence; 2]).unwrap_or(by_median)
}

/// What the intervals show, with these confidences that the bar is met, and that it is missed.
fn shown(figures: &[f64], bar: Bar, confidences: [f64; 2]) -> Option<Verdict> {
    let whole = |confidence: f64, met: bool| {
        let interval = of_median(figures, confidence);
        interval.is_some_and(|(low, high)| [low, high].map(|f| bar.is_met_by(f)) == [met; 2])
    };
    if whole(confidences[0], true) {
        return Some(Verdict::Met);
    }
    whole(confidences[1], false).then_some(Verdict::Missed)
}

/// Whose turn it is in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// What is compared.
    Ours,
    /// The reference of this number.
    Theirs(usize),
}

/// What a round has measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// What is compared.
    pub ours: f64,
    /// The references.
    pub theirs: Vec<f64>,
}

/// A judged comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Median of what is compared.
    pub ours: f64,
    /// Median of the reference; none where a figure stands alone.
    pub theirs: Option<f64>,
    /// Median of the rounds' ratios `ours / theirs`; where there is no reference, `ours`.
    pub figure: f64,
    /// Its confidence interval, where there were enough rounds for one.
    pub interval: Option<(f64, f64)>,
    /// What it is judged by.
    pub bar: Bar,
    /// The verdict.
    pub verdict: Verdict,
    /// The figure of each round, in order.
    pub rounds: Vec<f64>,
    /// The machine meanwhile.
    pub conditions: Conditions,
}

impl Comparison {
    /// Judges rounds that were measured otherwise, for example all figures of several comparisons
    /// in each round. Sides without a reference are judged by themselves. There will be no more
    /// rounds.
    #[must_use]
    pub fn of_rounds(
        ours: Vec<f64>,
        theirs: Option<Vec<f64>>,
        (bar, plan): (Bar, &Plan),
        conditions: Conditions,
    ) -> Self {
        let rounds = match &theirs {
            Some(theirs) => ours.iter().zip(theirs).map(|(a, b)| a / b).collect(),
            None => ours.clone(),
        };
        Self {
            ours: median(&ours),
            theirs: theirs.as_deref().map(median),
            figure: median(&rounds),
            interval: of_median(&rounds, plan.confidence),
            bar,
            verdict: judge(&rounds, bar, plan).unwrap_or_else(|| judge_last(&rounds, bar, plan)),
            rounds,
            conditions,
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            figure,
            bar,
            verdict,
            ..
        } = self;
        let unit = if self.theirs.is_some() { "x" } else { "" };
        write!(f, "{}{unit}", short(*figure))?;
        if let Some((low, high)) = self.interval {
            write!(f, " [{}, {}]", short(low), short(high))?;
        }
        let rounds = self.rounds.len();
        write!(f, " in {rounds} rounds (bar {bar}): {verdict}")
    }
}

/// Has a measurement and its references made in rounds until each comparison with one of `bars` is
/// judged, at most [`Plan::most`] rounds. There is a bar for each reference.
///
/// `measure` makes the rounds with these numbers, each with all sides, and returns one [`Round`]
/// for each. It takes care that the sides take turns in being first ([`alternating`] does); where
/// starting a program costs more than measuring, it may make several rounds at once.
///
/// # Errors
/// When a measurement fails, or gives what is no positive number.
pub fn compare(
    plan: &Plan,
    bars: &[Bar],
    mut measure: impl FnMut(Range<usize>) -> Result<Vec<Round>>,
) -> Result<Vec<Comparison>> {
    let (mut ours, mut theirs) = (Vec::new(), vec![Vec::new(); bars.len()]);
    let (mut watch, begin) = (Watch::new(), Instant::now());
    loop {
        let wanted = if ours.is_empty() {
            plan.least
        } else {
            plan.step
        };
        let from = ours.len();
        let to = (from + wanted).min(plan.most);
        watch.look()?;
        let rounds = measure(from..to)?;
        watch.look()?;
        ensure!(
            rounds.len() == to - from,
            "{} rounds were measured, {} were asked for",
            rounds.len(),
            to - from
        );
        for round in rounds {
            ensure!(
                round.theirs.len() == bars.len(),
                "{} references for {} bars",
                round.theirs.len(),
                bars.len()
            );
            check(round.ours)?;
            ours.push(round.ours);
            for (all, figure) in theirs.iter_mut().zip(round.theirs) {
                check(figure)?;
                all.push(figure);
            }
        }
        let is_open = |(theirs, bar): (&Vec<f64>, &Bar)| {
            let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(a, b)| a / b).collect();
            judge(&ratios, *bar, plan).is_none()
        };
        let is_over = ours.len() >= plan.most || begin.elapsed() >= plan.patience;
        if is_over || !theirs.iter().zip(bars).any(is_open) {
            break;
        }
    }
    let conditions = watch.conditions();
    let judged = theirs.into_iter().zip(bars).map(|(theirs, bar)| {
        Comparison::of_rounds(ours.clone(), Some(theirs), (*bar, plan), conditions)
    });
    Ok(judged.collect())
}

/// The same for a figure that stands alone, or contains its reference already: rounds until it is
/// judged.
///
/// # Errors
/// When a measurement fails, or gives what is no number.
pub fn observe(
    plan: &Plan,
    bar: Bar,
    mut measure: impl FnMut(usize) -> Result<f64>,
) -> Result<Comparison> {
    let mut figures = Vec::new();
    let (mut watch, begin) = (Watch::new(), Instant::now());
    loop {
        watch.look()?;
        let figure = measure(figures.len())?;
        ensure!(figure.is_finite(), "{figure} was measured");
        figures.push(figure);
        let looked = figures.len().saturating_sub(plan.least);
        let is_look = figures.len() >= plan.least && looked.is_multiple_of(plan.step);
        let is_over = figures.len() >= plan.most || begin.elapsed() >= plan.patience;
        if is_look && (is_over || judge(&figures, bar, plan).is_some())
            || figures.len() >= plan.most
        {
            break;
        }
    }
    let conditions = watch.conditions();
    Ok(Comparison::of_rounds(
        figures,
        None,
        (bar, plan),
        conditions,
    ))
}

fn check(figure: f64) -> Result<()> {
    ensure!(
        figure.is_finite() && figure > 0.0,
        "{figure} was measured, which no ratio can be made of"
    );
    Ok(())
}

/// Makes rounds out of a measurement of one side: whoever comes first in one round comes last in
/// the next.
pub fn alternating(
    references: usize,
    mut measure: impl FnMut(Side) -> Result<f64>,
) -> impl FnMut(Range<usize>) -> Result<Vec<Round>> {
    move |numbers| {
        let one = |number: usize| {
            let mut figures = vec![f64::NAN; references + 1];
            let mut order: Vec<usize> = (0..=references).collect();
            if number % 2 == 1 {
                order.reverse();
            }
            for at in order {
                let side = at.checked_sub(1).map_or(Side::Ours, Side::Theirs);
                figures[at] = measure(side)?;
            }
            Ok(Round {
                ours: figures[0],
                theirs: figures.split_off(1),
            })
        };
        numbers.map(one).collect()
    }
}

#[cfg(test)]
#[path = "comparison_tests.rs"]
mod tests;
