//! Programs of other projects that cargo builds, for tasks that need them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use farlane_kit::process::{Process, describe};
use farlane_kit::progress;
use farlane_kit::workspace::Workspace;

/// How long building one may take.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// The program that a package has by its own name, built if it is not there. What is asked for is
/// `NAME` or `NAME@VERSION`; each has a folder of its own in `target/tools`. `words` are further
/// words for `cargo install`.
///
/// # Errors
/// When cargo cannot build it.
pub fn ensure(workspace: &Workspace, package: &str, words: &[&str]) -> Result<PathBuf> {
    let root = workspace.target().join("tools").join(package);
    let (name, _) = package.split_once('@').unwrap_or((package, ""));
    let program = root.join("bin").join(name);
    if !program.exists() {
        let mut command = workspace.cargo(&["install", "--locked", "--quiet", "--root"]);
        command.arg(&root).args(words).arg(package);
        progress::step(&format!("Building {name}"), || {
            let mut process = Process::spawn("cargo install", command)?;
            match process.wait(TIMEOUT)? {
                Some(status) if status.success() => Ok(()),
                Some(status) => bail!("cargo install failed: {}", describe(status)),
                None => bail!("cargo install takes over an hour"),
            }
        })?;
    }
    Ok(program)
}
