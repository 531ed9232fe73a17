//! The table at the end of a test run: what ran, how long it took, and last of all what failed.

use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use farlane_kit::process::tail;

use crate::jobs::{Outcome, Verdict};

/// How many lines of what a failed job has said stand in the table.
const LINES: usize = 20;

/// Jobs that took less are summed up in one line.
const SHORT: Duration = Duration::from_secs(3);

/// A phase before the jobs, such as building, and how long it took.
pub type Phase = (String, Duration);

/// Prints the table, and says how the run ends.
pub fn print(phases: &[Phase], mut outcomes: Vec<Outcome>, all: Duration) -> ExitCode {
    outcomes.sort_by_key(|outcome| std::cmp::Reverse(outcome.took));
    figures(&outcomes);
    println!(
        "\n  {:44} {:>7}  {:>7}  {:>5}  result",
        "name", "seconds", "CPU s", "boots"
    );
    for (name, took) in phases {
        line(name, *took, None, None, "");
    }
    let is_short = |outcome: &Outcome| {
        let Verdict {
            failed, not_run, ..
        } = &outcome.verdict;
        outcome.took < SHORT && *failed == 0 && not_run.is_none()
    };
    for outcome in outcomes.iter().filter(|outcome| !is_short(outcome)) {
        let Verdict {
            passed,
            failed,
            boots,
            ..
        } = outcome.verdict;
        let result = match (&outcome.verdict.not_run, failed) {
            (Some(reason), _) => format!("NOT RUN: {reason}"),
            (None, 0) => format!("{passed} passed"),
            (None, failed) => format!("{passed} passed, {failed} FAILED"),
        };
        line(
            &outcome.name,
            outcome.took,
            Some(outcome.used),
            Some(boots),
            &result,
        );
    }
    let short: Vec<&Outcome> = outcomes
        .iter()
        .filter(|outcome| is_short(outcome))
        .collect();
    let sum = |count: fn(&Verdict) -> u64| -> u64 {
        outcomes.iter().map(|outcome| count(&outcome.verdict)).sum()
    };
    if !short.is_empty() {
        let passed: u64 = short.iter().map(|outcome| outcome.verdict.passed).sum();
        let name = format!("{} shorter ones, one after the other", short.len());
        let took = short.iter().map(|outcome| outcome.took).sum();
        let used = short.iter().map(|outcome| outcome.used).sum();
        line(&name, took, Some(used), None, &format!("{passed} passed"));
    }
    let used = outcomes.iter().map(|outcome| outcome.used).sum();
    let boots = sum(|verdict| verdict.boots);
    line("all", all, Some(used), Some(boots), "(CPU s: of the jobs)");
    let (passed, failed) = (sum(|verdict| verdict.passed), sum(|verdict| verdict.failed));
    let not_run = sum(|verdict| u64::from(verdict.not_run.is_some()));
    let not_run = match not_run {
        0 => String::new(),
        not_run => format!(", {not_run} not run (see above)"),
    };
    println!("\n{passed} passed, {failed} failed{not_run}");
    if failed == 0 && passed > 0 {
        return ExitCode::SUCCESS;
    }
    if passed + failed == 0 {
        println!("No test ran");
    }
    for outcome in outcomes.iter().filter(|outcome| outcome.verdict.failed > 0) {
        let took = outcome.took.as_secs_f64();
        println!(
            "FAILED: {} after {took:.1} s: see {}",
            outcome.name,
            outcome.log.display()
        );
        // Whoever keeps only the end of a run's output sees why.
        let said = fs::read(&outcome.log).unwrap_or_default();
        for line in why(&String::from_utf8_lossy(&said)).lines() {
            println!("  {line}");
        }
    }
    ExitCode::FAILURE
}

/// The lines of a log that say why a job failed: what its first failed test has said, which test
/// programs repeat at their end; or those from its first panic on; or its last ones.
fn why(said: &str) -> String {
    // A backtrace is in the log.
    let is_frame = |line: &&str| {
        let line = line.trim_start();
        line.starts_with("at ")
            || line
                .split_once(": ")
                .is_some_and(|(n, _)| n.parse::<u32>().is_ok())
    };
    let lines: Vec<&str> = said.lines().filter(|line| !is_frame(line)).collect();
    let begin = |is: fn(&&&str) -> bool| lines.iter().position(|line| is(&line));
    let failed = begin(|line| line.starts_with("---- ") && line.ends_with(" ----"));
    match failed.or_else(|| begin(|line| line.contains("panicked at"))) {
        Some(at) => lines[at..lines.len().min(at + LINES)].join("\n"),
        None => tail(said, LINES),
    }
}

fn line(name: &str, took: Duration, used: Option<Duration>, boots: Option<u64>, result: &str) {
    let used = used.map(|used| format!("{:.1}", used.as_secs_f64()));
    let used = used.unwrap_or_default();
    let boots = boots.filter(|boots| *boots > 0);
    let boots = boots.map(|boots| boots.to_string()).unwrap_or_default();
    println!(
        "  {name:44} {:>7.1}  {used:>7}  {boots:>5}  {result}",
        took.as_secs_f64()
    );
}

/// The figures of the scenarios.
fn figures(outcomes: &[Outcome]) {
    let mut report = farlane_kit::report::Report::new();
    for outcome in outcomes {
        for [place, what, figure] in outcome.verdict.figures.clone() {
            report.add(place, what, figure);
        }
    }
    print!("{report}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_shown_before_what_follows_it() {
        let trace = "\n   1: main\n             at ./src/a.rs:5:9".repeat(40);
        let panic = "thread 'a' panicked at src/a.rs:1:1:\nleft: 1";
        let after = "\nnote".repeat(40);
        let shown = why(&format!("running 1 test\n{panic}{trace}{after}"));
        assert!(shown.starts_with(panic) && shown.lines().count() == LINES);
        assert!(!shown.contains("main"));
        // A panic of a thread that a test expects is not why another one failed.
        let failed = format!("failures:\n\n---- b::c stdout ----\n{panic}{trace}");
        let shown = why(&format!("thread 'meant' panicked at x\n{failed}"));
        assert!(shown.starts_with("---- b::c stdout ----\n"), "{shown}");
        assert_eq!(
            why(&format!("{trace}\nexit status 1")).lines().last(),
            Some("exit status 1")
        );
    }
}
