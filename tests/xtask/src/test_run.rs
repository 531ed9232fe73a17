//! `cargo xtask test`: every test there is, side by side, and a table of what ran.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use farlane_kit::kit::{self, Kit};
use farlane_kit::progress;
use farlane_kit::report::Report;
use farlane_kit::workspace::{TestProgram, Workspace};
use serde_json::Value;

use crate::jobs::{self, Ended, Job, Verdict, Weight};
use crate::mutants;
use crate::scenarios::{self, Scenario};
use crate::table::{self, Phase};
use crate::unit::{self, Package};

/// This program, also when a build has put another one in its place.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// How long one scenario may take on a busy machine.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(600);

/// Runs all tests, or those whose names contain the filter.
pub fn run(workspace: &Workspace, filter: Option<&str>) -> Result<ExitCode> {
    let begin = Instant::now();
    let is_meant = |scenario: &&Scenario| {
        scenario.is_test && filter.is_none_or(|filter| scenario.name.contains(filter))
    };
    let scenarios: Vec<&Scenario> = scenarios::ALL.iter().filter(is_meant).collect();
    // A scenario's name means it alone.
    let is_scenario = scenarios
        .iter()
        .any(|scenario| Some(scenario.name) == filter);
    let mut phases = Vec::new();
    let mut jobs = Vec::new();
    match filter {
        None => {
            let programs = build_all(workspace, &mut phases)?;
            jobs.extend(scenario_jobs(&scenarios, true)?);
            jobs.push(unit::doc_job(workspace));
            jobs.push(bench_job()?);
            jobs.extend(mutants::small_jobs(workspace)?);
            // The shortest last: none of them holds up the end.
            jobs.extend(unit::jobs(programs, None));
        }
        Some(filter) => {
            if !is_scenario {
                let packages = Package::all(workspace)?;
                let meant = unit::packages_meant(&packages, filter);
                if !meant.is_empty() {
                    let programs = timed(&mut phases, "building tests", || {
                        workspace.build_tests_of(&meant)
                    })?;
                    jobs.extend(unit::jobs(programs, Some(filter)));
                }
            }
            jobs.extend(scenario_jobs(&scenarios, false)?);
        }
    }
    ensure!(
        !jobs.is_empty(),
        "No test and no scenario has {:?} in its name",
        filter.unwrap_or_default()
    );
    perform(workspace, jobs, &phases, begin)
}

/// Runs jobs and prints the table.
pub fn perform(
    workspace: &Workspace,
    jobs: Vec<Job>,
    phases: &[Phase],
    begin: Instant,
) -> Result<ExitCode> {
    let logs = workspace.log_folder("test")?;
    let outcomes = jobs::run_all(jobs, &logs)?;
    let code = table::print(phases, outcomes, begin.elapsed());
    if code == ExitCode::SUCCESS {
        fs::remove_dir_all(&logs).with_context(|| format!("Cannot remove {}", logs.display()))?;
    }
    Ok(code)
}

/// Builds the whole workspace, and meanwhile makes what guests are booted from and finds out what
/// runs them: both are kept.
pub fn build_all(workspace: &Workspace, phases: &mut Vec<Phase>) -> Result<Vec<TestProgram>> {
    Kit::build_own(workspace)?;
    thread::scope(|scope| {
        let prepared = scope.spawn(|| -> Result<_> {
            let mut phases = Vec::new();
            timed(&mut phases, "the Debian trees, while building", || {
                kit::prepare_trees(workspace)
            })?;
            timed(&mut phases, "trying KVM, while building", || {
                Kit::of_built(workspace).map(drop)
            })?;
            Ok(phases)
        });
        let programs = timed(phases, "building", || workspace.build_all())?;
        let prepared = timed(phases, "waiting for the Debian trees", || {
            let prepared = prepared.join();
            prepared
                .ok()
                .context("What makes the Debian trees has panicked")?
        })?;
        phases.extend(prepared);
        Ok(programs)
    })
}

/// Does something, and notes how long it took.
pub fn timed<T>(phases: &mut Vec<Phase>, what: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let begin = Instant::now();
    let result = progress::step(what, run);
    phases.push((what.to_owned(), begin.elapsed()));
    result
}

/// The jobs that run scenarios, each in a process of its own.
pub fn scenario_jobs(scenarios: &[&Scenario], all_is_built: bool) -> Result<Vec<Job>> {
    let job = |scenario: &&Scenario| {
        let mut command = Command::new(THIS_PROGRAM);
        command.arg("scenario").arg(scenario.name);
        if all_is_built {
            command.arg("--built");
        }
        Job {
            name: scenario.name.to_owned(),
            command,
            weight: match scenario.name {
                name if scenarios::MEASURING.contains(&name) => Weight::All,
                name if scenarios::NEEDING_TWO.contains(&name) => Weight::Two,
                _ => Weight::One,
            },
            timeout: SCENARIO_TIMEOUT,
            judge: judge_scenario,
        }
    };
    Ok(scenarios.iter().map(job).collect())
}

/// The job that makes a tiny round of every measurement of the benches, so that they do not rot.
fn bench_job() -> Result<Job> {
    let mut command = Command::new(THIS_PROGRAM);
    command.args(["bench", "--smoke", "--built"]);
    Ok(Job {
        name: "benches, a tiny round each".into(),
        command,
        weight: Weight::One,
        timeout: SCENARIO_TIMEOUT,
        judge: judge_scenario,
    })
}

fn judge_scenario(ended: &Ended<'_>) -> Verdict {
    let record: Option<Value> = ended
        .record
        .and_then(|text| serde_json::from_str(text).ok());
    let mut verdict = Verdict {
        passed: u64::from(ended.success),
        failed: u64::from(!ended.success),
        ..Verdict::default()
    };
    if let Some(record) = record {
        if let Some(reason) = record["not_run"].as_str() {
            verdict.passed = 0;
            verdict.failed = 0;
            verdict.not_run = Some(reason.to_owned());
        }
        verdict.boots = record["boots"].as_u64().unwrap_or_default();
        let rows = record["figures"].as_array();
        for row in rows.into_iter().flatten() {
            let cell = |at: usize| row[at].as_str().unwrap_or_default().to_owned();
            verdict.figures.push([cell(0), cell(1), cell(2)]);
        }
    }
    verdict
}

/// Writes what scenarios of this process did, for the run that started it.
pub fn record(report: &Report, not_run: &[String], to: &Path) -> Result<()> {
    let rows: Vec<[&str; 3]> = report.rows().collect();
    let record = serde_json::json!({
        "boots": farlane_kit::guest::boots(),
        "figures": rows,
        "not_run": (!not_run.is_empty()).then(|| not_run.join("; ")),
    });
    fs::write(to, record.to_string()).with_context(|| format!("Cannot write {}", to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scenario_tells_its_boots_and_figures() {
        let record = r#"{"boots": 2, "figures": [["one VM", "reads", "5 IOPS"]]}"#;
        let verdict = judge_scenario(&Ended {
            success: true,
            said: "",
            record: Some(record),
        });
        assert_eq!((verdict.passed, verdict.failed, verdict.boots), (1, 0, 2));
        assert_eq!(verdict.figures[0][2], "5 IOPS");
        let verdict = judge_scenario(&Ended {
            success: false,
            said: "",
            record: None,
        });
        assert_eq!((verdict.passed, verdict.failed), (0, 1));
    }

    #[test]
    fn a_scenario_that_could_not_be_run_has_neither_passed_nor_failed() {
        for (not_run, expected) in [
            (vec!["no KVM".to_owned()], (0, 0, Some("no KVM".to_owned()))),
            (vec![], (0, 1, None)),
        ] {
            let file = tempfile::NamedTempFile::new().unwrap();
            record(&Report::new(), &not_run, file.path()).unwrap();
            let verdict = judge_scenario(&Ended {
                success: false,
                said: "",
                record: Some(&fs::read_to_string(file.path()).unwrap()),
            });
            assert_eq!((verdict.passed, verdict.failed, verdict.not_run), expected);
        }
    }
}
