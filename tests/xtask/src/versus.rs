//! What the scenarios share that compare Farlane with something else in a guest.

use std::time::Duration;

use anyhow::Result;
use farlane_kit::compare::{Bar, Bars, Comparison, Plan, Round, compare};
use farlane_kit::guest::Guest;
use farlane_kit::report::Report;

use crate::fio::{Figures, Turns};

/// How much is measured, and what is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// For the test run on a machine that does other things, too: short rounds of a few measures,
    /// and bars that only a regression of the data path misses. Fails where a bar is shown to be
    /// missed.
    Small,
    /// All measures with the bars that are claimed. Fails where a bar is not shown to be met.
    Long,
}

impl Form {
    /// How many rounds there are.
    pub fn plan(self) -> Plan {
        match self {
            Form::Small => Plan::SMALL,
            Form::Long => Plan::LONG,
        }
    }

    /// How long one job of fio takes.
    pub fn fio_time(self) -> Duration {
        match self {
            Form::Small => Duration::from_millis(150),
            Form::Long => Duration::from_millis(500),
        }
    }

    /// The size of the files behind disks.
    pub fn disk_mib(self) -> u32 {
        match self {
            Form::Small => 64,
            Form::Long => 256,
        }
    }

    /// The bar of a measure that has one for each form; the small form leaves some measures out.
    pub fn choose<T>(self, small: Option<T>, long: T) -> Option<T> {
        match self {
            Form::Small => small,
            Form::Long => Some(long),
        }
    }

    /// Tells all bars, and fails where one is not met as this form demands.
    pub fn enforce(self, bars: &Bars) -> Result<()> {
        if self == Form::Long {
            println!("{}", bars.markdown());
        }
        match self {
            Form::Small => bars.enforce_shown(),
            Form::Long => bars.enforce(),
        }
    }
}

/// Adds a comparison to the bars, and says it. `other` is what the reference is called.
pub fn tell(
    bars: &mut Bars,
    report: &mut Report,
    (place, name): (&str, &str),
    (unit, other): (&str, &str),
    comparison: &Comparison,
) {
    let theirs = comparison.theirs.unwrap_or(f64::NAN);
    let figure = format!(
        "{:.0} {unit}, {other} {theirs:.0}: {comparison}; {}",
        comparison.ours, comparison.conditions
    );
    report.tell(place, name, &figure);
    bars.add(name, unit, other, comparison);
}

/// What fio does with a disk, and which of its figures is compared.
pub struct Workload {
    /// What it is called in tables.
    pub name: &'static str,
    /// fio's options.
    pub words: &'static str,
    /// Of the figure.
    pub unit: &'static str,
    /// The figure.
    pub figure: fn(&Figures) -> f64,
}

impl Workload {
    /// Random reads of 4 KiB, one at a time.
    pub const RANDOM_READS_1: Self = Self {
        name: "4 KiB random reads, depth 1",
        words: "--rw=randread --norandommap --bs=4k --iodepth=1",
        unit: "IOPS",
        figure: |figures| figures.read.iops,
    };

    /// Random reads of 4 KiB, 32 at a time.
    pub const RANDOM_READS_32: Self = Self {
        name: "4 KiB random reads, depth 32",
        words: "--rw=randread --norandommap --bs=4k --iodepth=32",
        unit: "IOPS",
        figure: |figures| figures.read.iops,
    };
}

/// fio in one guest, in turns on a disk and on its references.
pub struct Contest<'a> {
    form: Form,
    guest: &'a Guest,
    files: &'a [String],
    references: &'a [&'a str],
    bars: Bars,
    report: &'a mut Report,
}

impl<'a> Contest<'a> {
    /// `files` are the disk and its references, which are called `references`.
    pub fn new(
        form: Form,
        guest: &'a Guest,
        files: &'a [String],
        references: &'a [&'a str],
        report: &'a mut Report,
    ) -> Self {
        Self {
            form,
            guest,
            files,
            references,
            bars: Bars::default(),
            report,
        }
    }

    /// Compares the disk with each of its references, of whose figure it has to give these
    /// multiples at least.
    pub fn compare(&mut self, workload: &Workload, multiples: &[f64]) -> Result<()> {
        let turns = Turns {
            files: self.files,
            words: workload.words,
            time: self.form.fio_time(),
        };
        let wanted: Vec<Bar> = multiples.iter().copied().map(Bar::AtLeast).collect();
        let found = compare(&self.form.plan(), &wanted, |numbers| {
            Ok(rounds(turns.run(self.guest, numbers)?, workload.figure))
        })?;
        for (other, comparison) in self.references.iter().zip(&found) {
            tell(
                &mut self.bars,
                self.report,
                ("one VM", workload.name),
                (workload.unit, other),
                comparison,
            );
        }
        Ok(())
    }

    /// Tells all bars, and fails where one is not met as the form demands.
    pub fn end(self) -> Result<()> {
        self.form.enforce(&self.bars)
    }
}

/// Rounds of a comparison out of rounds of fio; the first file is what is compared, the others are
/// its references.
fn rounds(of: Vec<Vec<Figures>>, figure: impl Fn(&Figures) -> f64) -> Vec<Round> {
    of.into_iter()
        .map(|round| {
            let mut figures: Vec<f64> = round.iter().map(&figure).collect();
            let theirs = figures.split_off(1);
            Round {
                ours: figures[0],
                theirs,
            }
        })
        .collect()
}
