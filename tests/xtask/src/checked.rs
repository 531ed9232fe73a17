//! `cargo xtask asan` and `cargo xtask miri`: tests of the crates with unsafe code, where every
//! access is checked.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::process::{Process, describe};
use farlane_kit::progress;
use farlane_kit::workspace::Workspace;

use crate::unit::parse_result;

/// How long the tests of one call of cargo may take, builds included.
const TIMEOUT: Duration = Duration::from_secs(2 * 3600);

/// Runs `cargo test` or `cargo miri test`, passes its output on, and adds up how many tests passed
/// and failed.
pub fn run_tests(what: &str, mut command: Command) -> Result<Tests> {
    progress::step(what, || {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut cargo = Process::spawn(what, command)?;
        let stdout = cargo.take_stdout().context("cargo has no output")?;
        let mut tests = Tests::default();
        for line in BufReader::new(stdout).lines() {
            let line = line.context("Cannot read what cargo says")?;
            println!("{line}");
            tests.add(&line);
        }
        let status = cargo
            .wait(TIMEOUT)?
            .with_context(|| format!("{what} does not end"))?;
        tests.ended_well = status.success();
        if !tests.ended_well && tests.failed == 0 {
            eprintln!("Error: {what} ended early: {}", describe(status));
        }
        Ok(tests)
    })
}

/// How tests have ended.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Tests {
    /// How many passed.
    pub passed: u64,
    /// How many failed.
    pub failed: u64,
    /// How many programs have said so.
    pub programs: usize,
    /// cargo and all test programs ended as they should.
    pub ended_well: bool,
}

impl Tests {
    fn add(&mut self, line: &str) {
        if let Some((passed, failed)) = parse_result(line) {
            self.passed += passed;
            self.failed += failed;
            self.programs += 1;
        }
    }

    /// Adds those of others.
    pub fn add_all(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.programs += other.programs;
        self.ended_well &= other.ended_well;
    }

    /// Prints the figures; all tests must have passed, and there must be some.
    pub fn conclude(self, what: &str) -> ExitCode {
        println!("{what}: {} passed, {} failed", self.passed, self.failed);
        if self.ended_well && self.failed == 0 && self.passed > 0 {
            return ExitCode::SUCCESS;
        }
        if self.passed + self.failed == 0 {
            eprintln!("Error: {what}: no test ran");
        }
        ExitCode::FAILURE
    }
}

/// Those packages whose names contain the filter, or all.
pub fn chosen<'a>(
    packages: impl Iterator<Item = &'a str>,
    filter: Option<&str>,
) -> Result<Vec<&'a str>> {
    let chosen: Vec<&str> = packages
        .filter(|package| filter.is_none_or(|filter| package.contains(filter)))
        .collect();
    ensure!(
        !chosen.is_empty(),
        "No package of this check has a name that contains {}",
        filter.unwrap_or_default()
    );
    Ok(chosen)
}

/// A toolchain's file, whether it is there.
pub fn in_sysroot(mut rustc: Command, path: &str) -> Result<bool> {
    let output = rustc
        .args(["--print", "sysroot"])
        .stdin(Stdio::null())
        .output()
        .context("Cannot start rustc")?;
    if !output.status.success() {
        bail!(
            "rustc does not name its sysroot: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    let sysroot = String::from_utf8_lossy(&output.stdout);
    Ok(Path::new(sysroot.trim()).join(path).exists())
}

/// A cargo command with a target folder of its own, as its flags are others.
pub fn cargo(workspace: &Workspace, folder: &str) -> Command {
    let mut command = workspace.cargo(&[]);
    command.env("CARGO_TARGET_DIR", workspace.target().join(folder));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_added_up() {
        let mut tests = Tests::default();
        tests.add(
            "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 1 filtered out; \
                   finished in 0.10s",
        );
        tests.add("test result: FAILED. 1 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out");
        tests.add("test a ... ok");
        assert_eq!((tests.passed, tests.failed, tests.programs), (13, 3, 2));
    }

    #[test]
    fn packages_are_chosen_by_a_part_of_their_names() {
        let all = || ["farlane-zero-copy", "farlane-vhost-user"].into_iter();
        assert_eq!(chosen(all(), None).unwrap().len(), 2);
        assert_eq!(
            chosen(all(), Some("vhost")).unwrap(),
            ["farlane-vhost-user"]
        );
        assert!(chosen(all(), Some("nosuch")).is_err());
    }
}
