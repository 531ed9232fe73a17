//! Debian trees in the cache: made once, remade when their make-up changes or their making was interrupted.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};

use crate::debian::{TreeSpec, mirror};
use crate::process::check_output;
use crate::workspace::Workspace;
use crate::{packages, progress};

/// Counts up when the way a tree is made changes.
const FORMAT: u32 = 1;

/// Where a finished tree says what it was made of.
const STAMP: &str = ".farlane-stamp";

/// How long making a tree may take.
const MAKE_TIMEOUT: Duration = Duration::from_secs(1800);

/// A Debian tree that is complete.
#[derive(Debug, Clone)]
pub struct Tree(PathBuf);

impl Tree {
    /// Finds a tree in the cache or makes it.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn ensure(workspace: &Workspace, spec: &TreeSpec) -> Result<Self> {
        let path = workspace.cache().join(spec.name);
        let stamp = stamp(spec);
        let is_current = || fs::read_to_string(path.join(STAMP)).is_ok_and(|found| found == stamp);
        if is_current() {
            return Ok(Self(path));
        }
        let _lock = workspace.lock_cache()?;
        if !is_current() {
            packages::ensure(&["mmdebstrap", "debian-archive-keyring"])?;
            let what = format!(
                "Making a Debian {} tree (about a minute, then kept)",
                spec.suite
            );
            progress::step(&what, || make(spec, &path, &stamp))?;
        }
        Ok(Self(path))
    }

    /// The folder of the tree.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// When the tree was made.
    ///
    /// # Errors
    /// When it has gone.
    pub fn made_at(&self) -> Result<SystemTime> {
        let stamp = self.join(STAMP);
        let made = fs::metadata(&stamp).and_then(|file| file.modified());
        made.with_context(|| format!("Cannot see {}", stamp.display()))
    }

    /// A path in the tree; `inside` may begin with a slash. Links are followed as from within the tree.
    #[must_use]
    pub fn join(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        self.0.join(inside.strip_prefix("/").unwrap_or(inside))
    }

    /// The folder of its shared libraries.
    #[must_use]
    pub fn libraries(&self) -> PathBuf {
        self.join("usr/lib/x86_64-linux-gnu")
    }

    /// A command that runs a program of the tree on this machine through the tree's own loader and libraries: this
    /// machine's C library may be older.
    #[must_use]
    pub fn program(&self, inside: &str) -> Command {
        let mut command = self.loader();
        command.arg(self.join(inside));
        command
    }

    /// A command that runs the tree's loader with its library path, ready for more options and a program.
    #[must_use]
    pub fn loader(&self) -> Command {
        self.loader_with(&[])
    }

    /// Like [`Tree::loader`], for programs that find some of their libraries in folders within that of the others.
    #[must_use]
    pub fn loader_with(&self, folders: &[&str]) -> Command {
        // Not lib64/ld-linux-x86-64.so.2: `lib64` and that link may be absolute, and lead out of the tree.
        let mut command = Command::new(self.libraries().join("ld-linux-x86-64.so.2"));
        let mut path = self.libraries().into_os_string();
        for folder in folders {
            path.push(":");
            path.push(self.libraries().join(folder));
        }
        command.arg("--library-path").arg(path);
        command
    }

    /// A command that runs within the tree as its root folder, with a `/proc` and process numbers of its own; what it
    /// starts ends with it. Needs root.
    #[must_use]
    pub fn chroot(&self, program: &str) -> Command {
        let mut command = Command::new("unshare");
        command
            .args([
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "--root",
            ])
            .arg(&self.0)
            .arg(program);
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LC_ALL", "C");
        command
    }

    /// The release of the newest kernel whose headers are in the tree.
    ///
    /// # Errors
    /// When there is none.
    pub fn kernel_release(&self) -> Result<String> {
        let sources = self.join("usr/src");
        let entries =
            fs::read_dir(&sources).with_context(|| format!("Cannot read {}", sources.display()))?;
        let mut releases = Vec::new();
        for entry in entries {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if let Some(release) = name.strip_prefix("linux-headers-")
                && release.ends_with("-amd64")
            {
                releases.push(release.to_owned());
            }
        }
        releases.sort_by_key(|release| version_key(release));
        releases
            .pop()
            .with_context(|| format!("No kernel headers in {}", sources.display()))
    }
}

/// Orders versions by their numbers: 6.9 before 6.12.
fn version_key(version: &str) -> Vec<u64> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect()
}

fn stamp(spec: &TreeSpec) -> String {
    format!(
        "{FORMAT}\n{}\n{}\n{}\n",
        spec.suite,
        spec.packages.join(" "),
        spec.backports.join(" ")
    )
}

fn make(spec: &TreeSpec, path: &Path, stamp: &str) -> Result<()> {
    if !packages::is_root() {
        bail!("A Debian tree can only be made by root: run this command once as root");
    }
    let part = path.with_extension("part");
    for old in [path, &part] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("Cannot remove {}", old.display()))?;
        }
    }
    let mirror = mirror()?;
    let mut command = Command::new("mmdebstrap");
    command.args([
        "--variant=apt",
        "--architectures=amd64",
        "--format=directory",
    ]);
    command.arg("--aptopt=Acquire::Retries \"3\"");
    command
        .arg("--dpkgopt=force-unsafe-io")
        .arg("--dpkgopt=path-exclude=/usr/share/man/*");
    command.arg(format!("--include={}", spec.packages.join(",")));
    let mut sources = vec![format!("deb {mirror} {} main", spec.suite)];
    if !spec.backports.is_empty() {
        let backports = format!("{}-backports", spec.suite);
        // INITRD=No: guests get a root of ours, so the kernel's package need not spend time on one.
        command.arg(format!(
            "--customize-hook=chroot \"$1\" env DEBIAN_FRONTEND=noninteractive INITRD=No apt-get install --yes -qq \
             --no-install-recommends -t {backports} {}",
            spec.backports.join(" ")
        ));
        sources.push(format!("deb {mirror} {backports} main"));
    }
    command.arg(spec.suite).arg(&part).args(sources);
    check_output("mmdebstrap", command, MAKE_TIMEOUT)
        .with_context(|| format!("Cannot make a Debian {} tree", spec.suite))?;
    fs::write(part.join(STAMP), stamp).with_context(|| format!("Cannot write {STAMP}"))?;
    fs::rename(&part, path).with_context(|| format!("Cannot put {} in its place", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_by_number() {
        let mut versions = ["6.12.9+deb13-amd64", "6.9.1-amd64", "6.12.10+deb13-amd64"];
        versions.sort_by_key(|version| version_key(version));
        assert_eq!(
            versions,
            ["6.9.1-amd64", "6.12.9+deb13-amd64", "6.12.10+deb13-amd64"]
        );
    }
}
