//! The fuzz targets, each for a minute.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_vmkit::packages;
use farlane_vmkit::process::{Process, describe, tail};
use farlane_vmkit::progress;
use farlane_vmkit::scratch::Scratch;
use farlane_vmkit::workspace::Workspace;

/// How long each target runs.
const SECONDS: u32 = 60;

/// What libFuzzer takes for a hang, and for too much memory.
const LIMITS: [&str; 2] = ["-timeout=10", "-rss_limit_mb=2048"];

/// How long building the targets may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(3600);

/// How long running one may take: its minute, what it has in its corpus, and an input that hangs.
const RUN_TIMEOUT: Duration = Duration::from_secs(300);

/// libFuzzer is built from source.
const PACKAGES: &[&str] = &["g++"];

/// Where the flags of tests/fuzz/.cargo/config.toml have cargo put programs.
const PROGRAMS: &str = "x86_64-unknown-linux-gnu/release";

/// Runs the targets whose names contain the filter.
pub fn run(workspace: &Workspace, filter: Option<&str>) -> Result<ExitCode> {
    let sources = workspace.root().join("tests/fuzz");
    let mut chosen = targets(&sources)?;
    chosen.retain(|target| filter.is_none_or(|filter| target.contains(filter)));
    ensure!(
        !chosen.is_empty(),
        "No fuzz target has {:?} in its name",
        filter.unwrap_or_default()
    );
    let mut code = ExitCode::SUCCESS;
    packages::ensure(PACKAGES)?;
    let work = workspace.target().join("fuzz");
    progress::step("Building fuzz targets", || {
        build(workspace, &sources, &work)
    })?;
    for target in chosen {
        match progress::step(&format!("Fuzzing {target}"), || {
            fuzz(&sources, &work, &target)
        }) {
            Ok(inputs) => {
                println!("Fuzz target {target}: {inputs} inputs, nothing found");
            }
            Err(error) => {
                eprintln!("Error: {error:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
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

fn build(workspace: &Workspace, sources: &Path, work: &Path) -> Result<()> {
    let mut command = workspace.cargo(&["build", "--release", "--quiet"]);
    // The flags are in a configuration file that cargo finds from this folder, and the environment overrides it.
    command
        .current_dir(sources)
        .env("CARGO_TARGET_DIR", work)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET");
    let mut process = Process::spawn("cargo build of the fuzz targets", command)?;
    match process.wait(BUILD_TIMEOUT)? {
        Some(status) if status.success() => Ok(()),
        Some(status) => bail!("The fuzz targets cannot be built: {}", describe(status)),
        None => bail!("cargo build of the fuzz targets takes over an hour"),
    }
}

/// Runs a target. Returns how many inputs it took.
fn fuzz(sources: &Path, work: &Path, target: &str) -> Result<u64> {
    let artifacts = work.join("artifacts").join(target);
    fs::create_dir_all(&artifacts)
        .with_context(|| format!("Cannot make {}", artifacts.display()))?;
    // libFuzzer adds to the first corpus only: the checked-in one stays as it is.
    let scratch = Scratch::new()?;
    let log = scratch.join("log");
    let mut command = Command::new(work.join(PROGRAMS).join(target));
    command
        .current_dir(sources)
        .arg(format!("-max_total_time={SECONDS}"))
        .args(LIMITS)
        .arg("-print_final_stats=1")
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(folder(scratch.join("found"))?)
        .arg(sources.join("corpus").join(target));
    let mut process = Process::spawn_logged(format!("fuzz target {target}"), command, &log)?;
    let status = process.wait(RUN_TIMEOUT)?;
    let said = fs::read(&log).with_context(|| format!("Cannot read {}", log.display()))?;
    let said = String::from_utf8_lossy(&said);
    let Some(status) = status else {
        bail!("Fuzz target {target} does not end:\n{}", tail(&said, 20));
    };
    if !status.success() {
        bail!(
            "Fuzz target {target} failed ({}):\n{}\nThe input is {}",
            describe(status),
            tail(&said, 60),
            crash(&said).unwrap_or("not known: it did not get that far")
        );
    }
    inputs(&said).with_context(|| format!("Fuzz target {target} does not say what it did"))
}

fn folder(path: PathBuf) -> Result<PathBuf> {
    fs::create_dir(&path).with_context(|| format!("Cannot make {}", path.display()))?;
    Ok(path)
}

/// Reads "stat::number_of_executed_units: 1234".
fn inputs(said: &str) -> Option<u64> {
    let figure = said
        .lines()
        .find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))?;
    figure.trim().parse().ok()
}

/// Reads "...; Test unit written to PATH".
fn crash(said: &str) -> Option<&str> {
    let (_, path) = said.split_once("Test unit written to ")?;
    path.lines().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_input_of_a_crash_is_read() {
        let said = "MS: 0 ;\nartifact_prefix='a/'; Test unit written to a/crash-1\nBase64: AA==\n";
        assert_eq!(crash(said), Some("a/crash-1"));
        assert_eq!(crash("Done"), None);
    }

    #[test]
    fn the_number_of_inputs_is_read() {
        let said = "#8\tDONE   cov: 3\nstat::number_of_executed_units: 1234\nstat::average: 5\n";
        assert_eq!(inputs(said), Some(1234));
        assert_eq!(inputs("stat::average: 5\n"), None);
    }
}
