//! `cargo xtask test`: every test there is, and their counts.

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use farlane_vmkit::process::{Process, describe};
use farlane_vmkit::progress;
use farlane_vmkit::report::Report;
use farlane_vmkit::workspace::Workspace;

use crate::fuzz;
use crate::run::Context;
use crate::scenarios;

/// The packages with tests under loom, in modules whose names contain the word.
const LOOM_PACKAGES: &[&str] = &["farlane-rdma-remoting", "farlane-daemon"];

/// How long all tests of one call of cargo may take, builds included.
const CARGO_TIMEOUT: Duration = Duration::from_secs(3600);

/// How many tests passed and failed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// How many passed.
    pub passed: u64,
    /// How many failed.
    pub failed: u64,
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

/// Runs all tests whose names contain the filter; fuzz targets only where asked for.
pub fn run(workspace: &Workspace, filter: Option<&str>, with_fuzz: bool) -> Result<ExitCode> {
    let chosen = |name: &str| filter.is_none_or(|filter| name.contains(filter));
    let mut counts = Counts::default();
    let is_scenario = scenarios::ALL
        .iter()
        .any(|scenario| Some(scenario.name) == filter);
    if !is_scenario {
        counts.add(unit_tests(workspace, filter)?);
        counts.add(loom_tests(workspace, filter)?);
    }
    if with_fuzz {
        counts.add(fuzz::run(workspace, filter)?);
    }
    let context = Context::new(workspace);
    let mut report = Report::new();
    for scenario in scenarios::ALL
        .iter()
        .filter(|scenario| scenario.is_test && chosen(scenario.name))
    {
        match scenario.run(&context, &mut report) {
            Ok(()) => counts.passed += 1,
            Err(error) => {
                eprintln!("Error: {error:#}");
                counts.failed += 1;
            }
        }
    }
    print!("{report}");
    println!("{} passed, {} failed", counts.passed, counts.failed);
    Ok(if counts.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn unit_tests(workspace: &Workspace, filter: Option<&str>) -> Result<Counts> {
    let mut command = workspace.cargo(&["test", "--workspace", "--no-fail-fast"]);
    command.args(filter.map(|filter| ["--", filter]).into_iter().flatten());
    cargo_test("Unit and property tests", command)
}

fn loom_tests(workspace: &Workspace, filter: Option<&str>) -> Result<Counts> {
    // cargo runs a test that matches any of several filters: a filter of ours that names no loom test means none.
    let filter = match filter {
        None => "loom",
        Some(filter) if filter.contains("loom") => filter,
        Some(_) => return Ok(Counts::default()),
    };
    let mut command = workspace.cargo(&["test", "--release", "--lib", "--no-fail-fast"]);
    for package in LOOM_PACKAGES {
        command.args(["--package", package]);
    }
    command.args(["--", filter]);
    command
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_PROFILE_RELEASE_LTO", "off");
    command.env("CARGO_TARGET_DIR", workspace.target().join("loom"));
    let counts = cargo_test("Tests under loom", command)?;
    if counts == Counts::default() {
        eprintln!("Error: No test under loom was found");
        return Ok(Counts {
            passed: 0,
            failed: 1,
        });
    }
    Ok(counts)
}

/// Runs `cargo test`, passes its output on, and adds its results up.
fn cargo_test(what: &str, mut command: Command) -> Result<Counts> {
    progress::step(what, || {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut cargo = Process::spawn("cargo test", command)?;
        let stdout = cargo.take_stdout().context("cargo test has no output")?;
        let mut counts = Counts::default();
        for line in BufReader::new(stdout).lines() {
            let line = line.context("Cannot read what cargo test says")?;
            println!("{line}");
            if let Some(result) = parse_result(&line) {
                counts.add(result);
            }
        }
        let status = cargo
            .wait(CARGO_TIMEOUT)?
            .context("cargo test takes over an hour")?;
        if !status.success() && counts.failed == 0 {
            eprintln!(
                "Error: cargo test failed before its tests ran: {}",
                describe(status)
            );
            counts.failed = 1;
        }
        Ok(counts)
    })
}

/// Reads "test result: ok. 5 passed; 0 failed; ...".
fn parse_result(line: &str) -> Option<Counts> {
    let (_, figures) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |word: &str| {
        let part = figures
            .split(';')
            .find_map(|part| part.trim().strip_suffix(word))?;
        part.trim().parse().ok()
    };
    Some(Counts {
        passed: count("passed")?,
        failed: count("failed")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_cargo_are_read() {
        let line = "test result: FAILED. 12 passed; 3 failed; 0 ignored; 0 measured; 1 filtered out; finished in 0.10s";
        assert_eq!(
            parse_result(line),
            Some(Counts {
                passed: 12,
                failed: 3
            })
        );
        assert_eq!(
            parse_result("test tests::results_of_cargo_are_read ... ok"),
            None
        );
    }
}
