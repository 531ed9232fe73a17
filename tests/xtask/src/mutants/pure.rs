//! cargo-mutants over the pure parts of the product: code without system calls, whose unit tests
//! take seconds.
//!
//! Beside the list of deliberate faults it finds what nobody thought of. It takes hours, and is for
//! nights.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::packages;
use farlane_kit::process::{Process, describe};
use farlane_kit::progress;
use farlane_kit::workspace::Workspace;

use crate::cargo_tool;

/// A part of the product: its package, and which of its files, as globs from the root of the
/// checkout.
struct Part {
    package: &'static str,
    files: &'static [&'static str],
}

/// The pure parts.
const PARTS: &[Part] = &[
    part("farlane-abi", &["zero-copy/abi/src/**"]),
    part("farlane-io-core", &["guest-lib/io-core/src/plan/**"]),
    part("farlane-pci", &["vfio-remote/pci/src/**"]),
    part("farlane-net", &["backends/net/src/flow/**"]),
    part("farlane-vfio-remote", &["vfio-remote/src/lender/lease.rs"]),
    part(
        "farlane-vhost-user",
        &["backends/common/vhost-user/src/chain.rs"],
    ),
    part("farlane-nvme", &["vfio-remote/nvme/src/cmds.rs"]),
    part("farlane-vfio-user", &["vfio-remote/vfio-user/src/wire.rs"]),
];

const fn part(package: &'static str, files: &'static [&'static str]) -> Part {
    Part { package, files }
}

/// What starts it: a process namespace of its own, with which tests end that a fault keeps from
/// ending.
const NAMESPACE: [&str; 4] = ["unshare", "--pid", "--fork", "--kill-child"];

/// How long the tests may take with one fault.
const SECONDS: &str = "60";

/// How long one part may take.
const TIMEOUT: Duration = Duration::from_secs(6 * 3600);

/// Runs cargo-mutants over the parts whose packages' names contain the filter.
///
/// # Errors
/// When it cannot be had or started.
pub fn run(workspace: &Workspace, filter: Option<&str>) -> Result<ExitCode> {
    let is_meant = |part: &&Part| filter.is_none_or(|filter| part.package.contains(filter));
    let parts: Vec<&Part> = PARTS.iter().filter(is_meant).collect();
    ensure!(
        !parts.is_empty(),
        "No pure part of the product has {:?} in its package's name",
        filter.unwrap_or_default()
    );
    let program = cargo_tool::ensure(workspace, "cargo-mutants", &[])?;
    let mut survived = Vec::new();
    for part in parts {
        let package = part.package;
        let found = progress::step(&format!("cargo-mutants of {package}"), || {
            change(workspace, &program, part)
        })?;
        survived.extend(found.into_iter().map(|fault| format!("{package}: {fault}")));
    }
    for fault in &survived {
        println!("SURVIVED: {fault}");
    }
    println!("{} faults survived", survived.len());
    Ok(match survived.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Runs it over one part, and returns which faults no test has found.
fn change(workspace: &Workspace, program: &PathBuf, part: &Part) -> Result<Vec<String>> {
    let output = workspace.target().join("mutants-pure").join(part.package);
    // The copy of the sources that it works in; one that was killed has left its own.
    let copies = output.join("copies");
    if copies.exists() {
        fs::remove_dir_all(&copies)
            .with_context(|| format!("Cannot remove {}", copies.display()))?;
    }
    fs::create_dir_all(&copies).with_context(|| format!("Cannot make {}", copies.display()))?;
    let [unshare, words @ ..] = NAMESPACE;
    let mut command = Command::new(unshare);
    command.args(words);
    if !packages::is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command
        .arg(program)
        .current_dir(workspace.root())
        .env("TMPDIR", &copies)
        .args(["mutants", "--no-shuffle", "--colors=never"])
        .args(["--timeout", SECONDS, "--package", part.package])
        .arg("--output")
        .arg(&output);
    for files in part.files {
        command.args(["--file", files]);
    }
    let mut process = Process::spawn("cargo-mutants", command)?;
    let status = process.wait(TIMEOUT)?;
    let status = status.context("cargo-mutants does not come to an end")?;
    // 2: some were missed; 3: some timed out (cargo-mutants, Exit codes).
    if !matches!(status.code(), Some(0 | 2 | 3)) {
        bail!(
            "cargo-mutants of {} failed: {}",
            part.package,
            describe(status)
        );
    }
    let missed = output.join("mutants.out/missed.txt");
    let missed =
        fs::read_to_string(&missed).with_context(|| format!("Cannot read {}", missed.display()))?;
    Ok(missed.lines().map(str::to_owned).collect())
}
