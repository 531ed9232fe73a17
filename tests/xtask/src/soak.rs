//! `cargo xtask soak`: the long scenarios and the fuzz targets, over and over again until the time
//! is over.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use farlane_kit::report::Report;
use farlane_kit::workspace::Workspace;

use crate::fuzz::Fuzzer;
use crate::run::Context;
use crate::scenarios::{self, Ending, Scenario};

/// How long a fuzz target runs in one round.
const FUZZ_SECONDS: u32 = 120;

/// Scenarios that tests run, too, and whose races differ from run to run.
const RACES: &[&str] = &["-crash", "-hostile", "-restart", "-failover"];

/// What one round does, one after the other.
enum Item<'a> {
    Scenario(&'a Scenario),
    Fuzz(&'a Fuzzer, &'a str),
}

impl Item<'_> {
    fn name(&self) -> String {
        match self {
            Item::Scenario(scenario) => scenario.name.to_owned(),
            Item::Fuzz(_, target) => format!("fuzz {target}"),
        }
    }

    fn run(&self, context: &Context, report: &mut Report) -> Result<Ending> {
        match self {
            Item::Scenario(scenario) => scenario.run(context, report),
            Item::Fuzz(fuzzer, target) => {
                fuzzer.run(target, FUZZ_SECONDS, false)?;
                Ok(Ending::Passed)
            }
        }
    }
}

/// How often something ran, how often it failed, and how long it took in all.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Row {
    runs: u32,
    failed: u32,
    time: Duration,
}

/// What ran.
#[derive(Debug, Default)]
struct Table(BTreeMap<String, Row>);

impl Table {
    fn add(&mut self, name: String, failed: bool, time: Duration) {
        let row = self.0.entry(name).or_default();
        row.runs += 1;
        row.failed += u32::from(failed);
        row.time += time;
    }

    fn failed(&self) -> u32 {
        self.0.values().map(|row| row.failed).sum()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:24} {:>6} {:>6} {:>9}",
            "", "runs", "failed", "seconds"
        )?;
        for (name, row) in &self.0 {
            let seconds = row.time.as_secs();
            writeln!(
                f,
                "{name:24} {:>6} {:>6} {seconds:>9}",
                row.runs, row.failed
            )?;
        }
        Ok(())
    }
}

/// Whether it is for a soak: too long for a test, or a race.
fn is_long(scenario: &Scenario) -> bool {
    !scenario.is_test || RACES.iter().any(|race| scenario.name.contains(race))
}

/// Runs what has a name that contains the filter, without one all that takes long, until so many
/// minutes are over. What runs then is not cut short, and a failure does not end it.
pub fn run(workspace: &Workspace, filter: Option<&str>, minutes: u32) -> Result<ExitCode> {
    let start = Instant::now();
    let time = Duration::from_secs(u64::from(minutes) * 60);
    let has_fuzz = filter.is_none_or(|filter| filter.starts_with("fuzz"));
    let fuzzer = match has_fuzz {
        true => {
            let target = filter.and_then(|filter| filter.strip_prefix("fuzz"));
            let target = target.map(str::trim).filter(|target| !target.is_empty());
            Some(Fuzzer::build(workspace, target)?)
        }
        false => None,
    };
    let mut items: Vec<Item<'_>> = scenarios::ALL
        .iter()
        .filter(|scenario| match filter {
            Some(filter) => scenario.name.contains(filter),
            None => is_long(scenario),
        })
        .map(Item::Scenario)
        .collect();
    if let Some(fuzzer) = &fuzzer {
        let targets = fuzzer.targets().iter();
        items.extend(targets.map(|target| Item::Fuzz(fuzzer, target)));
    }
    ensure!(
        !items.is_empty(),
        "There is no scenario whose name contains {}",
        filter.unwrap_or_default()
    );
    let context = Context::new(workspace);
    let mut table = Table::default();
    let mut items = VecDeque::from(items);
    while let Some(item) = items.pop_front() {
        let begin = Instant::now();
        let result = item.run(&context, &mut Report::new());
        // It has said why, and could not be run in the next round either.
        if matches!(result, Ok(Ending::NotRun(_))) {
            continue;
        }
        if let Err(error) = &result {
            eprintln!("Error: {error:#}");
        }
        table.add(item.name(), result.is_err(), begin.elapsed());
        items.push_back(item);
        if start.elapsed() >= time {
            break;
        }
    }
    ensure!(!table.0.is_empty(), "Nothing of it can be run here");
    print!("{table}");
    println!("{} s, {} failed", start.elapsed().as_secs(), table.failed());
    Ok(match table.failed() {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_what_ran_how_often_and_what_failed() {
        let mut table = Table::default();
        table.add("a".into(), false, Duration::from_secs(2));
        table.add("a".into(), true, Duration::from_secs(3));
        table.add("b".into(), false, Duration::ZERO);
        assert_eq!(table.failed(), 1);
        let shown = table.to_string();
        let words = |line: &str| {
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(words(shown.lines().nth(1).unwrap()), ["a", "2", "1", "5"]);
        assert_eq!(words(shown.lines().nth(2).unwrap()), ["b", "1", "0", "0"]);
    }

    #[test]
    fn every_kind_of_race_is_a_scenario() {
        for race in RACES {
            let mut all = scenarios::ALL.iter();
            assert!(all.any(|scenario| scenario.name.contains(race)), "{race}");
        }
    }
}
