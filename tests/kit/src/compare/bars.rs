//! The bars of a run: told as a table, kept as JSON, and enforced.

use super::comparison::{Comparison, Verdict, short};
use super::machine::Conditions;
use anyhow::{Result, bail};
use serde::Serialize;
use std::fmt::Write as _;

/// A figure beside its bar.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// What was measured.
    pub what: String,
    /// The figure, of [`Row::unit`].
    pub measured: f64,
    /// Of the figure and the bar; `x` for ratios.
    pub unit: String,
    /// As text: `>= 0.97`.
    pub bar: String,
    /// Whether it is met. A bar that is undecided is not.
    pub met: bool,
    /// The verdict in full.
    pub verdict: Verdict,
    /// What the figure was compared with.
    pub reference: String,
    /// How it came about, where it was measured in rounds.
    pub comparison: Option<Comparison>,
}

/// All bars of a run.
#[derive(Debug, Default)]
pub struct Bars {
    rows: Vec<Row>,
}

impl Bars {
    /// Adds a comparison. `reference` says what with; the medians of both sides are added to it.
    pub fn add(&mut self, what: &str, unit: &str, reference: &str, comparison: &Comparison) {
        let reference = match comparison.theirs {
            Some(theirs) => format!(
                "{reference} {} {unit}, ours {}",
                short(theirs),
                short(comparison.ours)
            ),
            None => reference.to_owned(),
        };
        let unit = if comparison.theirs.is_some() {
            "x"
        } else {
            unit
        };
        self.rows.push(Row {
            what: what.to_owned(),
            measured: comparison.figure,
            unit: unit.to_owned(),
            bar: comparison.bar.to_string(),
            met: comparison.verdict == Verdict::Met,
            verdict: comparison.verdict,
            reference,
            comparison: Some(comparison.clone()),
        });
    }

    /// Adds a figure that was measured once: a count, or what no noise reaches.
    pub fn add_once(
        &mut self,
        what: &str,
        measured: f64,
        unit: &str,
        bar: (String, bool),
        reference: &str,
    ) {
        let (bar, met) = bar;
        self.rows.push(Row {
            what: what.to_owned(),
            measured,
            unit: unit.to_owned(),
            bar,
            met,
            verdict: if met { Verdict::Met } else { Verdict::Missed },
            reference: reference.to_owned(),
            comparison: None,
        });
    }

    /// All of them.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// How the machine was in all comparisons together: the median wake-up of them, the worst one,
    /// the largest shares.
    #[must_use]
    pub fn conditions(&self) -> Option<Conditions> {
        let all: Vec<Conditions> = self
            .rows
            .iter()
            .filter_map(|row| Some(row.comparison.as_ref()?.conditions))
            .collect();
        let largest = |of: fn(&Conditions) -> f64| all.iter().map(of).fold(0.0, f64::max);
        let wake_ups: Vec<f64> = all.iter().map(|c| c.wake_up_us).collect();
        (!all.is_empty()).then(|| Conditions {
            wake_up_us: super::interval::median(&wake_ups),
            worst_wake_up_us: largest(|c| c.worst_wake_up_us),
            others: largest(|c| c.others),
            steal: largest(|c| c.steal),
        })
    }

    /// The table in Markdown, and a line on the machine.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = String::from(
            "| figure | measured | interval, rounds | bar | | reference \
             |\n|---|---|---|---|---|---|\n",
        );
        for row in &self.rows {
            let spread = row.comparison.as_ref().map_or_else(String::new, |c| {
                let rounds = c.rounds.len();
                c.interval.map_or_else(
                    || format!("{rounds}"),
                    |(low, high)| format!("{} to {}, {rounds}", short(low), short(high)),
                )
            });
            let Row {
                what,
                unit,
                bar,
                verdict,
                reference,
                ..
            } = row;
            let space = if unit == "x" || unit.is_empty() {
                ""
            } else {
                " "
            };
            let measured = short(row.measured);
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "| {what} | {measured}{space}{unit} | {spread} | {bar} | {verdict} | {reference} |"
            );
        }
        if let Some(conditions) = self.conditions() {
            let _ = writeln!(
                text,
                "\nMachine in these rounds: eventfd round trip between two cores {:.0} us \
                 (median), {:.0} us in the worst round; \
                 other processes had up to {:.0} % of the processors, other machines up to {:.1} \
                 %.",
                conditions.wake_up_us,
                conditions.worst_wake_up_us,
                100.0 * conditions.others,
                100.0 * conditions.steal
            );
        }
        text
    }

    /// Fails when a bar is not met, and names those.
    ///
    /// # Errors
    /// When a bar is missed or undecided.
    pub fn enforce(&self) -> Result<()> {
        self.enforce_where(|row| !row.met)
    }

    /// Fails only when a bar is shown to be missed: for small forms, whose bars are far from what
    /// is usual, on machines that are shared.
    ///
    /// # Errors
    /// When a bar is missed.
    pub fn enforce_shown(&self) -> Result<()> {
        self.enforce_where(|row| row.verdict == Verdict::Missed)
    }

    fn enforce_where(&self, is_bad: impl Fn(&Row) -> bool) -> Result<()> {
        let bad: Vec<&Row> = self.rows.iter().filter(|row| is_bad(row)).collect();
        if bad.is_empty() {
            return Ok(());
        }
        let mut text = format!("{} of {} bars are not met:", bad.len(), self.rows.len());
        for row in bad {
            let Row {
                what,
                bar,
                verdict,
                unit,
                reference,
                ..
            } = row;
            let measured = short(row.measured);
            let _ = write!(
                text,
                "\n  {what}: {measured} {unit} (bar {bar}), {verdict}; {reference}"
            );
            if let Some(Comparison {
                interval: Some((low, high)),
                rounds,
                conditions,
                ..
            }) = &row.comparison
            {
                let (low, high, rounds) = (short(*low), short(*high), rounds.len());
                let _ = write!(text, "; {low} to {high} in {rounds} rounds; {conditions}");
            }
        }
        bail!(text)
    }
}

#[cfg(test)]
mod tests {
    use super::super::comparison::{Bar, Plan, observe};
    use super::*;

    fn bars(figure: f64) -> Bars {
        let mut bars = Bars::default();
        let found = observe(&Plan::SMALL, Bar::AtMost(2.0), |_| Ok(figure)).unwrap();
        bars.add("a call", "us", "alone", &found);
        bars
    }

    #[test]
    fn a_missed_bar_is_an_error_that_names_it() {
        assert!(bars(1.0).enforce().is_ok());
        let error = bars(3.0).enforce().unwrap_err().to_string();
        assert!(
            error.contains("1 of 1") && error.contains("a call: 3.00 us (bar <= 2.00)"),
            "{error}"
        );
        assert!(bars(3.0).enforce_shown().is_err());
    }

    #[test]
    fn an_undecided_bar_is_not_met_but_not_shown_to_be_missed() {
        let mut bars = Bars::default();
        let found = observe(&Plan::SMALL, Bar::AtMost(2.0), |round| {
            Ok(if round % 5 < 2 { 1.0 } else { 3.0 })
        });
        bars.add("a call", "us", "alone", &found.unwrap());
        assert_eq!(bars.rows()[0].verdict, Verdict::Undecided);
        assert!(bars.enforce().is_err());
        assert!(bars.enforce_shown().is_ok());
    }

    #[test]
    fn the_json_of_a_row_has_what_measured_bar_and_met() {
        let json = serde_json::to_value(bars(3.0).rows()).unwrap();
        assert_eq!(json[0]["what"], "a call");
        assert_eq!(json[0]["measured"], 3.0);
        assert_eq!(json[0]["bar"], "<= 2.00");
        assert_eq!(json[0]["met"], false);
    }

    #[test]
    fn the_table_is_markdown_with_the_machine_below() {
        let mut bars = bars(1.0);
        bars.add_once("growth", 70.0, "KiB", ("<= 64".into(), false), "before");
        let text = bars.markdown();
        assert!(
            text.contains("| a call | 1.00 us | 1.00 to 1.00, 6 | <= 2.00 | met | alone |"),
            "{text}"
        );
        assert!(
            text.contains("| growth | 70.0 KiB |  | <= 64 | MISSED | before |"),
            "{text}"
        );
        assert!(text.contains("eventfd round trip"), "{text}");
    }
}
