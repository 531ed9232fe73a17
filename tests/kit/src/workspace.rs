//! Where things lie: sources, what cargo builds, and what the kit keeps.

use std::env;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::process::{Process, describe};

/// The package that has the features of dependencies resolved as for the whole workspace, see its
/// manifest.
const FEATURES: &str = "farlane-features";

/// How long one build may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(3600);

/// The folders of this checkout.
#[derive(Debug, Clone)]
pub struct Workspace {
    root: PathBuf,
    target: PathBuf,
    /// Whether all that can be built was, by this process.
    all_built: Arc<AtomicBool>,
}

/// A test program that cargo built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestProgram {
    /// Its package's folder in the checkout, and which of its programs: `backends/blk/src` holds
    /// the unit tests, `backends/blk/tests/disk` those of a file.
    pub name: String,
    /// The program's file.
    pub program: PathBuf,
    /// The package's folder, in which cargo runs tests.
    pub folder: PathBuf,
}

impl Workspace {
    /// The checkout that this program was built from.
    ///
    /// # Errors
    /// When it is not there any more.
    pub fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let root = root
            .canonicalize()
            .with_context(|| format!("There is no checkout at {}", root.display()))?;
        let target =
            env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        Ok(Self {
            target: if target.is_absolute() {
                target
            } else {
                root.join(target)
            },
            root,
            all_built: Arc::default(),
        })
    }

    /// The top folder of the checkout.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where cargo puts what it builds.
    #[must_use]
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The folder of the programs and libraries that cargo built. Everything is built in one
    /// profile, `dev`: tests, daemons, guest libraries and benches share what they are made of.
    #[must_use]
    pub fn programs(&self) -> PathBuf {
        self.target.join("debug")
    }

    /// A program or library that cargo built.
    ///
    /// # Errors
    /// When it was not built.
    pub fn built(&self, name: &str) -> Result<PathBuf> {
        let path = self.programs().join(name);
        if !path.exists() {
            bail!("The build did not make {}", path.display());
        }
        Ok(path)
    }

    /// The folder of everything that the kit makes once and keeps.
    #[must_use]
    pub fn cache(&self) -> PathBuf {
        self.root.join("target/vmkit")
    }

    /// A folder for the logs of one run; whoever made it removes it when all went well.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn log_folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.cache().join("logs");
        fs::create_dir_all(&folder).with_context(|| format!("Cannot make {}", folder.display()))?;
        let run = tempfile::Builder::new()
            .prefix(&format!("{name}-"))
            .tempdir_in(&folder);
        Ok(run
            .with_context(|| format!("Cannot make a folder in {}", folder.display()))?
            .keep())
    }

    /// Keeps other runs of the kit out of the cache while something is made there.
    ///
    /// # Errors
    /// When the lock file cannot be opened.
    pub fn lock_cache(&self) -> Result<File> {
        let path = self.cache().join("lock");
        fs::create_dir_all(self.cache())
            .with_context(|| format!("Cannot make {}", self.cache().display()))?;
        let file = File::options().create(true).append(true).open(&path);
        let file = file.with_context(|| format!("Cannot open {}", path.display()))?;
        file.lock()
            .with_context(|| format!("Cannot lock {}", path.display()))?;
        Ok(file)
    }

    /// A cargo command in this checkout.
    #[must_use]
    pub fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.current_dir(&self.root).args(arguments);
        // What `cargo run` told this program about itself must not reach the builds that it starts.
        for (name, _) in env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
                command.env_remove(name.as_ref());
            }
        }
        command
    }

    /// Builds the programs and libraries of packages; cargo's own output goes to the terminal. Does
    /// nothing when everything was built already, see [`Workspace::build_all`].
    ///
    /// # Errors
    /// When the build fails.
    pub fn build(&self, packages: &[&str]) -> Result<()> {
        self.build_targets(packages, &["--lib", "--bins"])
    }

    /// Builds the programs and libraries of packages as users install them, optimised and in the
    /// profile `release`, and returns the folder that they are in.
    ///
    /// # Errors
    /// When the build fails.
    pub fn build_release(&self, packages: &[&str]) -> Result<PathBuf> {
        let mut command = self.cargo(&["build", "--release"]);
        command
            .args(with_features(packages))
            .args(["--lib", "--bins"]);
        finish(
            Process::spawn("cargo build", command)?,
            &packages.join(", "),
        )?;
        Ok(self.target.join("release"))
    }

    /// Builds an example of a package and returns its path.
    ///
    /// # Errors
    /// When the build fails.
    pub fn build_example(&self, package: &str, name: &str) -> Result<PathBuf> {
        self.build_targets(&[package], &["--example", name])?;
        self.built(&format!("examples/{name}"))
    }

    /// Builds all that is asked for later, and no more, at once: packages, and examples among
    /// theirs.
    ///
    /// # Errors
    /// When the build fails.
    pub fn build_once(&self, packages: &[&str], examples: &[&str]) -> Result<()> {
        let mut targets = vec!["--lib", "--bins"];
        targets.extend(examples.iter().flat_map(|example| ["--example", example]));
        self.build_targets(packages, &targets)?;
        self.assume_built();
        Ok(())
    }

    fn build_targets(&self, packages: &[&str], targets: &[&str]) -> Result<()> {
        if self.all_built.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut command = self.cargo(&["build", "--quiet"]);
        command.args(with_features(packages)).args(targets);
        finish(
            Process::spawn("cargo build", command)?,
            &packages.join(", "),
        )
    }

    /// Builds everything in the workspace at once, tests too, and returns the test programs: what
    /// is asked for later is there already.
    ///
    /// # Errors
    /// When the build fails.
    pub fn build_all(&self) -> Result<Vec<TestProgram>> {
        let programs = self.build_tests(&["--workspace", "--all-targets"])?;
        self.assume_built();
        Ok(programs)
    }

    /// Whoever started this process has built everything.
    pub fn assume_built(&self) {
        self.all_built.store(true, Ordering::Release);
    }

    /// Builds packages with their tests, and returns the test programs.
    ///
    /// # Errors
    /// When the build fails.
    pub fn build_tests_of(&self, packages: &[&str]) -> Result<Vec<TestProgram>> {
        let words = with_features(packages);
        self.build_tests(&[&words[..], &["--all-targets"]].concat())
    }

    /// Builds one test program and no more than it needs: the unit tests of a package (`lib`), or
    /// those of a file in its `tests` folder.
    ///
    /// # Errors
    /// When the build fails, or there is no such test program.
    pub fn build_test(&self, package: &str, target: &str) -> Result<TestProgram> {
        let mut words = vec!["test", "--no-run"];
        words.extend(with_features(&[package]));
        let name = match target {
            "lib" => {
                words.push("--lib");
                "src".to_owned()
            }
            target => {
                words.extend(["--test", target]);
                format!("tests/{target}")
            }
        };
        let programs = self.build_programs(&words)?;
        let is_meant = |program: &TestProgram| {
            // The package of the features has no tests.
            program.name.ends_with(&format!("/{name}")) && !program.folder.ends_with("features")
        };
        programs
            .into_iter()
            .find(is_meant)
            .with_context(|| format!("{package} has no test program {target}"))
    }

    fn build_tests(&self, words: &[&str]) -> Result<Vec<TestProgram>> {
        self.build_programs(&[&["build"], words].concat())
    }

    /// Has cargo build, and returns the test programs.
    fn build_programs(&self, words: &[&str]) -> Result<Vec<TestProgram>> {
        self.test_programs(self.cargo(words))
    }

    /// The test programs that a cargo command builds.
    ///
    /// # Errors
    /// When the build fails.
    pub fn test_programs(&self, mut command: Command) -> Result<Vec<TestProgram>> {
        command
            .arg("--message-format=json-render-diagnostics")
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut build = Process::spawn("cargo build", command)?;
        let stdout = build.take_stdout().context("cargo build has no output")?;
        let mut programs = Vec::new();
        for line in BufReader::new(stdout).lines() {
            let line = line.context("Cannot read what cargo says")?;
            programs.extend(TestProgram::parse(&line, &self.root)?);
        }
        finish(build, "the workspace")?;
        programs.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(programs)
    }
}

/// The words that choose packages.
fn with_features<'a>(packages: &[&'a str]) -> Vec<&'a str> {
    let packages = packages.iter().chain([&FEATURES]);
    packages
        .flat_map(|package| ["--package", package])
        .collect()
}

fn finish(mut build: Process, what: &str) -> Result<()> {
    let status = build
        .wait(BUILD_TIMEOUT)?
        .context("cargo build takes over an hour")?;
    if !status.success() {
        bail!("cargo build of {what} failed: {}", describe(status));
    }
    Ok(())
}

impl TestProgram {
    /// Reads a line of cargo's JSON messages (The Cargo Book, External tools): an artifact that is
    /// a test program, if it is one.
    fn parse(line: &str, root: &Path) -> Result<Option<Self>> {
        let message: Value =
            serde_json::from_str(line).with_context(|| format!("cargo said {line:?}"))?;
        if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
            return Ok(None);
        }
        let Some(program) = message["executable"].as_str() else {
            return Ok(None);
        };
        let manifest = message["manifest_path"].as_str().unwrap_or_default();
        let folder = Path::new(manifest)
            .parent()
            .with_context(|| format!("cargo names no manifest of {program}"))?;
        let package = folder.strip_prefix(root).unwrap_or(folder).display();
        let target = message["target"]["name"].as_str().unwrap_or_default();
        let kind = message["target"]["kind"][0].as_str().unwrap_or_default();
        let name = match kind {
            "test" => format!("{package}/tests/{target}"),
            "bin" | "example" => format!("{package}/{kind}/{target}"),
            _ => format!("{package}/src"),
        };
        Ok(Some(Self {
            name,
            program: program.into(),
            folder: folder.to_owned(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_told_from_other_artifacts() {
        let line = |test: bool, kind: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/backends/blk/Cargo.toml",
                "target":{{"kind":["{kind}"],"name":"disk"}},"profile":{{"test":{test}}},
                "executable":"/w/t/disk-1"}}"#
            )
        };
        let parse = |line: &str| TestProgram::parse(line, Path::new("/w"));
        let found = parse(&line(true, "test")).unwrap().unwrap();
        assert_eq!(found.name, "backends/blk/tests/disk");
        assert_eq!(found.folder, Path::new("/w/backends/blk"));
        let found = parse(&line(true, "lib")).unwrap().unwrap();
        assert_eq!(found.name, "backends/blk/src");
        assert!(parse(&line(false, "bin")).unwrap().is_none());
        assert!(parse("nonsense").is_err());
    }
}
