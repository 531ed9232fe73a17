//! Debian packages that this machine itself must have.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process::check_output;
use crate::progress;

/// How long apt may take.
const APT_TIMEOUT: Duration = Duration::from_secs(900);

/// Makes sure that packages are installed: installs the missing ones when run as root.
///
/// # Errors
/// When some are missing and this is not root (the message has the command to type), or apt fails.
pub fn ensure(packages: &[&str]) -> Result<()> {
    let missing: Vec<&str> = packages
        .iter()
        .copied()
        .filter(|package| !is_installed(package))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    if !is_root() {
        bail!(
            "Debian packages are missing. Install them with: sudo apt-get install \
             --no-install-recommends {list}"
        );
    }
    progress::step(&format!("Installing {list}"), || {
        if apt_get(&missing).is_err() {
            // The package lists may be missing or older than the mirror.
            update_lists()?;
            apt_get(&missing)?;
        }
        Ok(())
    })
}

/// Fetches the package lists of this machine's sources.
///
/// # Errors
/// When apt fails.
pub fn update_lists() -> Result<()> {
    let mut command = apt();
    command.arg("update");
    check_output("apt-get update", command, APT_TIMEOUT)?;
    Ok(())
}

/// Whether this process may install packages.
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["-qq", "-o", "DPkg::Lock::Timeout=300"]);
    command
}

fn apt_get(packages: &[&str]) -> Result<()> {
    let mut command = apt();
    command
        .args(["install", "--yes", "--no-install-recommends"])
        .args(packages);
    check_output("apt-get install", command, APT_TIMEOUT)
        .context("Cannot install Debian packages")?;
    Ok(())
}

fn is_installed(package: &str) -> bool {
    let mut command = Command::new("dpkg-query");
    command.args(["--show", "--showformat", "${db:Status-Abbrev}", package]);
    check_output("dpkg-query", command, APT_TIMEOUT).is_ok_and(|status| status.starts_with("ii"))
}
