//! One fault, in a process and a view of the checkout of its own: it is put in and built, and the
//! named test runs.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use farlane_kit::process::{Process, describe};
use farlane_kit::scratch::Scratch;
use farlane_kit::workspace::Workspace;
use serde_json::json;

use super::faults::{Check, Fault};
use super::overlay;
use crate::jobs::RECORD_VARIABLE;

/// How long a named test may take. With some faults it never ends: something waits for what was
/// lost.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a scenario may take, with its build.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(900);

/// What is said of a fault that no test has found.
pub const SURVIVED: &str = "SURVIVED";

/// How a check came out.
struct Outcome {
    /// Whether it passed.
    green: bool,
    /// What it said.
    said: String,
    /// How long building took.
    building: Duration,
    /// How long the test took.
    testing: Duration,
}

/// Puts a fault in, and succeeds when its test fails for the right reason.
///
/// # Errors
/// When it does not, or the fault cannot be put in or built.
pub fn run(workspace: &Workspace, fault: &Fault) -> Result<ExitCode> {
    overlay::cover(workspace)?;
    fault.apply(workspace.root())?;
    let outcome = match &fault.test {
        Check::Test {
            package,
            target,
            name,
        } => run_test(workspace, package, target, name)?,
        Check::Scenario { scenario } => run_scenario(workspace, scenario)?,
    };
    if outcome.green {
        bail!(
            "{SURVIVED}: {} passes with the fault {}: {}",
            fault.test.describe(),
            fault.name,
            fault.about
        );
    }
    if let Some(because) = &fault.because
        && !outcome.said.contains(because)
    {
        bail!(
            "{} fails with the fault {}, but not because of {because:?}",
            fault.test.describe(),
            fault.name
        );
    }
    if let Some(to) = env::var_os(RECORD_VARIABLE) {
        let record = json!({
            "test": fault.test.describe(),
            "building": outcome.building.as_secs_f64(),
            "testing": outcome.testing.as_secs_f64(),
        });
        fs::write(&to, record.to_string())
            .with_context(|| format!("Cannot write {}", Path::new(&to).display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn run_test(workspace: &Workspace, package: &str, target: &str, name: &str) -> Result<Outcome> {
    let begin = Instant::now();
    let program = workspace
        .build_test(package, target)
        .context("With the fault the product does not build")?;
    let building = begin.elapsed();
    let mut command = Command::new(&program.program);
    command
        .current_dir(&program.folder)
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .args(["--exact", name]);
    let begin = Instant::now();
    let (green, said) = perform(name, command, TEST_TIMEOUT)?;
    if !said.contains("running 1 test") {
        bail!("{} has no test {name}", program.name);
    }
    Ok(Outcome {
        green,
        said,
        building,
        testing: begin.elapsed(),
    })
}

fn run_scenario(workspace: &Workspace, scenario: &str) -> Result<Outcome> {
    let mut command = Command::new(env::current_exe().context("Cannot find this program")?);
    command
        .current_dir(workspace.root())
        .args(["scenario", scenario])
        .env_remove(RECORD_VARIABLE);
    let begin = Instant::now();
    let (green, said) = perform(scenario, command, SCENARIO_TIMEOUT)?;
    if said.contains("cargo build of") {
        bail!("With the fault the product does not build");
    }
    Ok(Outcome {
        green,
        said,
        building: Duration::ZERO,
        testing: begin.elapsed(),
    })
}

/// Runs a program to its end. Returns whether it succeeded, and what it said, which is said again
/// here.
fn perform(name: &str, command: Command, timeout: Duration) -> Result<(bool, String)> {
    let scratch = Scratch::new()?;
    let log = scratch.join("log");
    let mut process = Process::spawn_logged(name, command, &log)?;
    let status = process.wait(timeout)?;
    let end = match status {
        Some(status) => describe(status),
        None => format!("not at its end after {} s", timeout.as_secs()),
    };
    drop(process);
    let said = fs::read(&log).with_context(|| format!("Cannot read {}", log.display()))?;
    let said = format!("{}\n{name}: {end}", String::from_utf8_lossy(&said));
    println!("{said}");
    Ok((status.is_some_and(|status| status.success()), said))
}
