//! Where things lie: sources, what cargo builds, and what the kit keeps.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process::{Process, describe};

/// The folders of this checkout.
#[derive(Debug, Clone)]
pub struct Workspace {
    root: PathBuf,
    target: PathBuf,
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

    /// A release program or library that cargo built.
    ///
    /// # Errors
    /// When it was not built.
    pub fn built(&self, name: &str) -> Result<PathBuf> {
        let path = self.target.join("release").join(name);
        if !path.exists() {
            bail!("The release build did not make {}", path.display());
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

    /// Builds release binaries; cargo's own output goes to the terminal.
    ///
    /// # Errors
    /// When the build fails.
    pub fn build_release(&self, packages: &[&str]) -> Result<()> {
        let words: Vec<&str> = packages
            .iter()
            .flat_map(|package| ["--package", package])
            .collect();
        self.build_words(&words, &packages.join(", "))
    }

    /// Builds an example of a package for release and returns its path.
    ///
    /// # Errors
    /// When the build fails.
    pub fn build_example(&self, package: &str, name: &str) -> Result<PathBuf> {
        let words = ["--package", package, "--example", name];
        self.build_words(&words, &format!("{name} of {package}"))?;
        self.built(&format!("examples/{name}"))
    }

    fn build_words(&self, words: &[&str], what: &str) -> Result<()> {
        let mut command = self.cargo(&["build", "--release", "--quiet"]);
        command.args(words);
        let mut build = Process::spawn("cargo build", command)?;
        let status = build
            .wait(Duration::from_secs(3600))?
            .context("cargo build takes over an hour")?;
        if !status.success() {
            bail!(
                "cargo build --release of {what} failed: {}",
                describe(status)
            );
        }
        Ok(())
    }
}
