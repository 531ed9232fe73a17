//! The fuzz targets, each for a minute.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_vmkit::process::{Process, describe};
use farlane_vmkit::progress;
use farlane_vmkit::workspace::Workspace;

use crate::test_run::Counts;

/// How long each target runs.
const SECONDS: u32 = 60;

/// How long building a target and running it may take.
const TIMEOUT: Duration = Duration::from_secs(1800);

/// Runs the targets whose names contain the filter.
pub fn run(workspace: &Workspace, filter: Option<&str>) -> Result<Counts> {
    let sources = workspace.root().join("tests/fuzz");
    let mut counts = Counts::default();
    for target in targets(&sources)? {
        if filter.is_some_and(|filter| !target.contains(filter)) {
            continue;
        }
        match progress::step(&format!("Fuzzing {target}"), || {
            fuzz(workspace, &sources, &target)
        }) {
            Ok(()) => counts.passed += 1,
            Err(error) => {
                eprintln!("Error: {error:#}");
                counts.failed += 1;
            }
        }
    }
    Ok(counts)
}

/// The names of the targets: those of their files.
fn targets(sources: &Path) -> Result<Vec<String>> {
    let folder = sources.join("targets");
    let mut names = Vec::new();
    for entry in
        fs::read_dir(&folder).with_context(|| format!("Cannot read {}", folder.display()))?
    {
        if let Some(name) = entry?.file_name().to_string_lossy().strip_suffix(".rs") {
            names.push(name.to_owned());
        }
    }
    ensure!(
        !names.is_empty(),
        "There is no fuzz target in {}",
        folder.display()
    );
    names.sort();
    Ok(names)
}

fn fuzz(workspace: &Workspace, sources: &Path, target: &str) -> Result<()> {
    // What is found goes to a folder of its own; the checked-in corpus is only read.
    let work = workspace.target().join("fuzz");
    let found = work.join("corpus").join(target);
    fs::create_dir_all(&found).with_context(|| format!("Cannot make {}", found.display()))?;
    let mut command: Command =
        workspace.cargo(&["run", "--release", "--quiet", "--bin", target, "--"]);
    // Their flags are in a configuration file that cargo finds from this folder.
    command
        .current_dir(sources)
        .env("CARGO_TARGET_DIR", &work)
        .stdin(Stdio::null());
    command.arg(&found).arg(sources.join("corpus").join(target));
    command.arg(format!("-max_total_time={SECONDS}"));
    command.arg(format!("-artifact_prefix={}/{target}-", work.display()));
    let mut process = Process::spawn(format!("fuzz target {target}"), command)?;
    match process.wait(TIMEOUT)? {
        Some(status) if status.success() => Ok(()),
        Some(status) => bail!(
            "Fuzz target {target} failed: {}; the input is {}/{target}-*",
            describe(status),
            work.display()
        ),
        None => bail!(
            "Fuzz target {target} did not end within {} s",
            TIMEOUT.as_secs()
        ),
    }
}
