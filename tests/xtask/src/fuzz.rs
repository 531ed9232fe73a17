//! `cargo xtask fuzz`: the fuzz targets under libFuzzer.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::packages;
use farlane_kit::process::{Process, describe, tail};
use farlane_kit::progress;
use farlane_kit::scratch::Scratch;
use farlane_kit::workspace::Workspace;

/// What libFuzzer takes for a hang, and for too much memory.
const LIMITS: [&str; 2] = ["-timeout=10", "-rss_limit_mb=2048"];

/// How long building the targets may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(3600);

/// How long a target may take besides the time that it is given: what it has in its corpus, and an
/// input that hangs.
const RUN_GRACE: Duration = Duration::from_secs(240);

/// How long merging finds into a corpus may take.
const MERGE_TIMEOUT: Duration = Duration::from_secs(600);

/// libFuzzer is built from source.
const PACKAGES: &[&str] = &["g++"];

/// The targets, their programs and their corpus.
const FOLDER: &str = "tests/fuzz-targets";

/// Where the flags of tests/fuzz-targets/.cargo/config.toml have cargo put programs.
const PROGRAMS: &str = "x86_64-unknown-linux-gnu/fuzz";

/// Runs the targets whose names contain the filter, each for so many seconds. With `keep`, inputs
/// that reach more code are added to the corpus.
pub fn run(
    workspace: &Workspace,
    filter: Option<&str>,
    seconds: u32,
    keep: bool,
) -> Result<ExitCode> {
    let fuzzer = Fuzzer::build(workspace, filter)?;
    let mut failed = 0;
    for target in fuzzer.targets() {
        let what = format!("Fuzzing {target}");
        match progress::step(&what, || fuzzer.run(target, seconds, keep)) {
            Ok(done) => println!("Fuzz target {target}: {done}"),
            Err(error) => {
                eprintln!("Error: {error:#}");
                failed += 1;
            }
        }
    }
    println!("{} targets, {failed} failed", fuzzer.targets().len());
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// What a target has done without finding anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// How many inputs it was given.
    pub inputs: u64,
    /// How many of them were added to the corpus.
    pub kept: usize,
}

impl std::fmt::Display for Done {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} inputs, nothing found", self.inputs)?;
        match self.kept {
            0 => Ok(()),
            kept => write!(f, "; {kept} added to the corpus"),
        }
    }
}

/// The targets as programs.
#[derive(Debug)]
pub struct Fuzzer {
    sources: PathBuf,
    work: PathBuf,
    targets: Vec<String>,
}

impl Fuzzer {
    /// Builds the targets and chooses those whose names contain the filter.
    ///
    /// # Errors
    /// When there is none, or they cannot be built.
    pub fn build(workspace: &Workspace, filter: Option<&str>) -> Result<Self> {
        let sources = workspace.root().join(FOLDER);
        let mut targets = targets(&sources)?;
        targets.retain(|target| filter.is_none_or(|filter| target.contains(filter)));
        ensure!(
            !targets.is_empty(),
            "There is no fuzz target whose name contains {}",
            filter.unwrap_or_default()
        );
        packages::ensure(PACKAGES)?;
        let work = workspace.target().join("fuzz");
        progress::step("Building fuzz targets", || {
            build(workspace, &sources, &work)
        })?;
        Ok(Self {
            sources,
            work,
            targets,
        })
    }

    /// The names of the chosen targets.
    pub fn targets(&self) -> &[String] {
        &self.targets
    }

    /// Runs a target for so many seconds.
    ///
    /// # Errors
    /// When it has found something; the message names the input.
    pub fn run(&self, target: &str, seconds: u32, keep: bool) -> Result<Done> {
        let artifacts = self.work.join("artifacts").join(target);
        fs::create_dir_all(&artifacts)
            .with_context(|| format!("Cannot make {}", artifacts.display()))?;
        // libFuzzer adds to the first corpus only: the checked-in one stays as it is.
        let scratch = Scratch::new()?;
        let found = folder(scratch.join("found"))?;
        let log = scratch.join("log");
        let mut command = self.command(target);
        command
            .arg(format!("-max_total_time={seconds}"))
            .arg("-print_final_stats=1")
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            .arg(&found)
            .arg(self.corpus(target));
        let mut process = Process::spawn_logged(format!("fuzz target {target}"), command, &log)?;
        let time = Duration::from_secs(seconds.into()) + RUN_GRACE;
        let status = process.wait(time)?;
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
        let inputs = inputs(&said)
            .with_context(|| format!("Fuzz target {target} does not say what it did"))?;
        let kept = if keep { self.keep(target, &found)? } else { 0 };
        Ok(Done { inputs, kept })
    }

    fn corpus(&self, target: &str) -> PathBuf {
        self.sources.join("corpus").join(target)
    }

    fn command(&self, target: &str) -> Command {
        let mut command = Command::new(self.work.join(PROGRAMS).join(target));
        command.current_dir(&self.sources).args(LIMITS);
        command
    }

    /// Adds those inputs to the corpus that reach what it does not. Returns how many.
    fn keep(&self, target: &str, found: &Path) -> Result<usize> {
        let corpus = self.corpus(target);
        let before = count(&corpus)?;
        let mut command = self.command(target);
        command.arg("-merge=1").arg(&corpus).arg(found);
        let mut process = Process::spawn(format!("merge of {target}"), command)?;
        match process.wait(MERGE_TIMEOUT)? {
            Some(status) if status.success() => Ok(count(&corpus)? - before),
            Some(status) => bail!(
                "The finds of {target} cannot be merged: {}",
                describe(status)
            ),
            None => bail!("Merging the finds of {target} does not end"),
        }
    }
}

/// The names of the targets: those of their programs.
fn targets(sources: &Path) -> Result<Vec<String>> {
    let folder = sources.join("src/bin");
    let mut names = Vec::new();
    for entry in
        fs::read_dir(&folder).with_context(|| format!("Cannot read {}", folder.display()))?
    {
        if let Some(name) = entry?.file_name().to_string_lossy().strip_suffix(".rs") {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

fn count(folder: &Path) -> Result<usize> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("Cannot read {}", folder.display()))?;
    Ok(entries.count())
}

fn build(workspace: &Workspace, sources: &Path, work: &Path) -> Result<()> {
    let mut command = workspace.cargo(&[
        "build",
        "--profile",
        "fuzz",
        "--features",
        "libfuzzer",
        "--quiet",
    ]);
    // The flags are in a configuration file that cargo finds from this folder, and the environment
    // overrides it.
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

    #[test]
    fn every_target_is_listed_by_the_name_of_its_program() {
        let workspace = Workspace::find().unwrap();
        let names = targets(&workspace.root().join(FOLDER)).unwrap();
        assert!(names.contains(&"call_ring".to_owned()));
    }
}
