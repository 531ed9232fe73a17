//! `cargo xtask check`: what says in a few minutes whether a change is worth a whole run.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use farlane_kit::process::{Process, describe};
use farlane_kit::workspace::Workspace;

use crate::scenarios::{self, Scenario};
use crate::test_run::{build_all, perform, scenario_jobs, timed};
use crate::unit;

/// One scenario of each backend, and the driver: those that take seconds.
const SMOKE: &[&str] = &[
    "rdma-pingpong",
    "lend-vfio",
    "gpu-scan",
    "driver-device",
    "blk",
    "octo-restart",
];

/// The checks before tests, as `.ci/run` has them.
const CHECKS: &[(&str, &str)] = &[
    ("cargo fmt", "fmt --all --check"),
    (
        "cargo clippy",
        "clippy --quiet --workspace --all-targets -- -D warnings",
    ),
];

/// How long one of them may take.
const TIMEOUT: Duration = Duration::from_secs(1800);

/// Runs fmt, clippy, all unit tests, the replay of the fuzz corpus, and a few scenarios.
pub fn run(workspace: &Workspace) -> Result<ExitCode> {
    let begin = Instant::now();
    let mut phases = Vec::new();
    for (what, words) in CHECKS {
        timed(&mut phases, what, || {
            let words: Vec<&str> = words.split(' ').collect();
            let command = workspace.cargo(&words);
            let status = Process::spawn(*what, command)?.wait(TIMEOUT)?;
            let status = status.with_context(|| format!("{what} does not come to an end"))?;
            if !status.success() {
                bail!("{what} {}", describe(status));
            }
            Ok(())
        })?;
    }
    let programs = build_all(workspace, &mut phases)?;
    let find = |name: &&str| {
        let found = scenarios::ALL
            .iter()
            .find(|scenario| scenario.name == *name);
        found.with_context(|| format!("There is no scenario {name}"))
    };
    let smoke: Vec<&Scenario> = SMOKE.iter().map(find).collect::<Result<_>>()?;
    let mut jobs = scenario_jobs(&smoke, true)?;
    jobs.extend(unit::jobs(programs, None));
    perform(workspace, jobs, &phases, begin)
}
