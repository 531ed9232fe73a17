//! Debian packages that this machine itself must have.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process::check_output;
use crate::progress;
use crate::workspace::Workspace;

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

/// The version of a package that this machine's sources offer, `None` where they have none.
///
/// # Errors
/// When apt fails.
pub fn offered(package: &str) -> Result<Option<String>> {
    let show = || {
        let mut command = Command::new("apt-cache");
        command.args(["show", "--no-all-versions", package]);
        check_output("apt-cache show", command, APT_TIMEOUT)
    };
    let mut said = show();
    if said.is_err() && is_root() {
        // The package lists may be missing.
        update_lists()?;
        said = show();
    }
    let said = said.unwrap_or_default();
    let version = said.lines().find_map(|line| line.strip_prefix("Version: "));
    Ok(version.map(str::to_owned))
}

/// A folder with the files of packages that are not installed: for those that bring services of
/// their own. It is made once, and kept as `name` in the workspace's cache.
///
/// # Errors
/// When apt or dpkg fails, or the folder cannot be made.
pub fn unpacked(workspace: &Workspace, name: &str, packages: &[&str]) -> Result<PathBuf> {
    let folder = workspace.cache().join(name);
    let _lock = workspace.lock_cache()?;
    if folder.exists() {
        return Ok(folder);
    }
    let list = packages.join(" ");
    let made = progress::step(&format!("Unpacking {list}"), || {
        // Never complete only in part: it gets its name when all is there.
        let made = tempfile::Builder::new()
            .prefix(name)
            .tempdir_in(workspace.cache())
            .context("Cannot make a folder for packages")?;
        if let Err(error) = download(packages, made.path()) {
            if !is_root() {
                return Err(error);
            }
            // The package lists may be older than the mirror.
            update_lists()?;
            download(packages, made.path())?;
        }
        for archive in archives(made.path())? {
            let mut command = Command::new("dpkg-deb");
            command.arg("--extract").arg(&archive).arg(made.path());
            check_output("dpkg-deb", command, APT_TIMEOUT)?;
            fs::remove_file(&archive)
                .with_context(|| format!("Cannot remove {}", archive.display()))?;
        }
        Ok(made)
    })?;
    fs::rename(made.keep(), &folder)
        .with_context(|| format!("Cannot make {}", folder.display()))?;
    Ok(folder)
}

fn download(packages: &[&str], to: &Path) -> Result<()> {
    let mut command = apt();
    command.current_dir(to).arg("download").args(packages);
    check_output("apt-get download", command, APT_TIMEOUT)
        .context("Cannot download Debian packages")?;
    Ok(())
}

/// The packages' archives in a folder.
fn archives(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in
        fs::read_dir(folder).with_context(|| format!("Cannot read {}", folder.display()))?
    {
        let path = entry
            .with_context(|| format!("Cannot read {}", folder.display()))?
            .path();
        if path.extension().is_some_and(|end| end == "deb") {
            found.push(path);
        }
    }
    Ok(found)
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

/// Whether this machine has a package.
pub fn is_installed(package: &str) -> bool {
    let mut command = Command::new("dpkg-query");
    command.args(["--show", "--showformat", "${db:Status-Abbrev}", package]);
    check_output("dpkg-query", command, APT_TIMEOUT).is_ok_and(|status| status.starts_with("ii"))
}
