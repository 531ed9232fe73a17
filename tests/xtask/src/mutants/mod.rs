//! `cargo xtask mutants`: deliberate faults in the product, each of which must turn a named test or
//! scenario red.
//!
//! A test that cannot fail says nothing. The list names what a user would suffer from most, and the
//! test that stands against it.

mod faults;
mod inside;
mod overlay;
mod pure;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use farlane_kit::workspace::Workspace;
use serde_json::Value;

use crate::jobs::{self, Ended, Job, Outcome, Verdict, Weight};
use crate::scenarios::{self, Scenario};
use crate::table;
use crate::test_run::{self, timed};
use crate::unit;
use faults::{Check, Fault};

/// How long one fault may take on a busy machine, with building.
const TIMEOUT: Duration = Duration::from_secs(1200);

/// What to do.
#[derive(clap::Args)]
pub struct Arguments {
    /// Only faults whose name contains this
    filter: Option<String>,
    /// Only those that cost seconds, which `cargo xtask test` has too; their tests are taken to
    /// pass without a fault
    #[arg(long)]
    small: bool,
    /// Lists the faults
    #[arg(long)]
    list: bool,
    /// Has cargo-mutants change the pure parts of the product wherever it can: hours
    #[arg(long, conflicts_with_all = ["small", "list"])]
    pure: bool,
    /// Puts one fault in, here
    #[arg(long, hide = true)]
    inside: bool,
}

/// Runs them.
///
/// # Errors
/// When the list or a build without a fault fails.
pub fn run(workspace: &Workspace, arguments: &Arguments) -> Result<ExitCode> {
    let filter = arguments.filter.as_deref();
    if arguments.pure {
        return pure::run(workspace, filter);
    }
    let faults = faults::all(workspace.root())?;
    if arguments.inside {
        let fault = faults
            .iter()
            .find(|fault| Some(fault.name.as_str()) == filter);
        return inside::run(workspace, fault.context("There is no such fault")?);
    }
    let is_meant = |fault: &Fault| {
        filter.is_none_or(|filter| fault.name.contains(filter)) && (fault.small || !arguments.small)
    };
    let faults: Vec<Fault> = faults.into_iter().filter(is_meant).collect();
    ensure!(
        !faults.is_empty(),
        "No fault has {:?} in its name",
        filter.unwrap_or_default()
    );
    if arguments.list {
        for fault in &faults {
            println!(
                "{:28} {}\n{:28} {}",
                fault.name,
                fault.about,
                "",
                fault.test.describe()
            );
        }
        return Ok(ExitCode::SUCCESS);
    }
    gate(workspace, &faults, arguments.small)
}

/// Runs the tests without a fault, unless they are known to pass, and then with.
fn gate(workspace: &Workspace, faults: &[Fault], known_to_pass: bool) -> Result<ExitCode> {
    overlay::ensure_possible()?;
    let begin = Instant::now();
    let mut phases = Vec::new();
    let logs = workspace.log_folder("mutants")?;
    if !known_to_pass {
        let jobs = timed(&mut phases, "building without a fault", || {
            without_fault(workspace, faults)
        })?;
        let outcomes = timed(&mut phases, "the tests without a fault", || {
            jobs::run_all(jobs, &logs)
        })?;
        let red = outcomes.iter().any(|outcome| {
            let Verdict { passed, failed, .. } = outcome.verdict;
            failed > 0 || passed != 1
        });
        if red {
            let _ = table::print(&phases, outcomes, begin.elapsed());
            println!("What fails without a fault, or is not there, cannot stand against one");
            return Ok(ExitCode::FAILURE);
        }
    }
    let outcomes = jobs::run_all(jobs_of(faults)?, &logs)?;
    println!("\nEach fault, what a user would suffer from it, and the test that must fail:");
    for fault in faults {
        let outcome = outcomes
            .iter()
            .find(|outcome| outcome.name == job_name(fault));
        let outcome = outcome.context("A job was lost")?;
        let Fault { name, about, .. } = fault;
        let result = result(outcome);
        let took = outcome.took.as_secs_f64();
        let test = fault.test.describe();
        println!(
            "  {result:8} {took:6.1} s  {name}: {about}\n  {:20}{test}",
            ""
        );
    }
    let code = table::print(&phases, outcomes, begin.elapsed());
    if code == ExitCode::SUCCESS {
        fs::remove_dir_all(&logs).with_context(|| format!("Cannot remove {}", logs.display()))?;
    }
    Ok(code)
}

/// How a fault came out: whether its test has failed, has passed, or could not say.
fn result(outcome: &Outcome) -> &'static str {
    let said = || fs::read(&outcome.log).unwrap_or_default();
    match outcome.verdict.failed {
        0 => "red",
        _ if String::from_utf8_lossy(&said()).contains(inside::SURVIVED) => inside::SURVIVED,
        _ => "ERROR",
    }
}

/// The faults that cost seconds, as jobs of a test run, which runs their tests without a fault,
/// too.
///
/// # Errors
/// When this process is not root's, or the list cannot be read.
pub fn small_jobs(workspace: &Workspace) -> Result<Vec<Job>> {
    overlay::ensure_possible()?;
    let mut faults = faults::all(workspace.root())?;
    faults.retain(|fault| fault.small);
    jobs_of(&faults)
}

fn job_name(fault: &Fault) -> String {
    format!("mutant {}", fault.name)
}

/// One job a fault, in a mount namespace of its own.
fn jobs_of(faults: &[Fault]) -> Result<Vec<Job>> {
    let program = env::current_exe().context("Cannot find this program")?;
    let job = |fault: &Fault| {
        let [unshare, words @ ..] = overlay::NAMESPACE;
        let mut command = Command::new(unshare);
        command
            .args(words)
            .arg(&program)
            .args(["mutants", "--inside", &fault.name]);
        Job {
            name: job_name(fault),
            command,
            weight: Weight::One,
            timeout: TIMEOUT,
            judge,
        }
    };
    Ok(faults.iter().map(job).collect())
}

fn judge(ended: &Ended<'_>) -> Verdict {
    let record: Option<Value> = ended
        .record
        .and_then(|text| serde_json::from_str(text).ok());
    // A process that ends well without a word of what failed has shown nothing.
    let red = ended.success && record.is_some();
    let figures = record.map(|record| {
        let seconds = |what: &str| record[what].as_f64().unwrap_or_default();
        [
            "faults".to_owned(),
            record["test"].as_str().unwrap_or_default().to_owned(),
            format!(
                "red in {:.1} s, after building for {:.1} s",
                seconds("testing"),
                seconds("building")
            ),
        ]
    });
    Verdict {
        passed: u64::from(red),
        failed: u64::from(!red),
        boots: 0,
        not_run: None,
        figures: figures.into_iter().collect(),
    }
}

/// Each named test once, without a fault. What they need is built.
fn without_fault(workspace: &Workspace, faults: &[Fault]) -> Result<Vec<Job>> {
    let mut tests = BTreeSet::new();
    let mut names = BTreeSet::new();
    for fault in faults {
        match &fault.test {
            Check::Test {
                package,
                target,
                name,
            } => tests.insert((package.as_str(), target.as_str(), name.as_str())),
            Check::Scenario { scenario } => {
                names.insert(scenario.as_str());
                continue;
            }
        };
    }
    let mut jobs = Vec::new();
    for (package, target, name) in tests {
        let program = workspace.build_test(package, target)?;
        for mut job in unit::jobs(vec![program], None) {
            job.command.args(["--exact", name]);
            job.name = format!("{} {name}", job.name);
            jobs.push(job);
        }
    }
    let chosen: Vec<&Scenario> = scenarios::ALL
        .iter()
        .filter(|scenario| names.contains(scenario.name))
        .collect();
    ensure!(
        chosen.len() == names.len(),
        "A fault names a scenario that is not there"
    );
    jobs.extend(test_run::scenario_jobs(&chosen, false)?);
    Ok(jobs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_found_only_when_its_test_is_recorded_as_red() {
        let ended = |success, record| {
            judge(&Ended {
                success,
                said: "",
                record,
            })
        };
        let record = r#"{"test": "blk: t", "building": 2.0, "testing": 0.5}"#;
        let verdict = ended(true, Some(record));
        assert_eq!((verdict.passed, verdict.failed), (1, 0));
        assert_eq!(
            verdict.figures[0][2],
            "red in 0.5 s, after building for 2.0 s"
        );
        assert_eq!(ended(true, None).failed, 1);
        assert_eq!(ended(false, Some(record)).failed, 1);
    }
}
