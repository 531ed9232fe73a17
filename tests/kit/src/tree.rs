//! Debian trees in the cache: made once, remade when their make-up changes or their making was
//! interrupted.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};

use crate::debian::{TreeSpec, mirror};
use crate::process::check_output;
use crate::root_contents::OTHER_LIBRARIES;
use crate::workspace::Workspace;
use crate::{packages, progress};

/// Counts up when the way a tree is made changes.
const FORMAT: u32 = 2;

/// Where a finished tree says what it was made of.
const STAMP: &str = ".farlane-stamp";

/// How long making a tree may take.
const MAKE_TIMEOUT: Duration = Duration::from_secs(1800);

/// The documentation of rdma-core; trees have no other.
pub const RDMA_CORE: &str = "usr/share/doc/rdma-core";

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
        let _lock = lock(&path)?;
        if !is_current() {
            // Two trees may be made at once, but this machine's apt works for one at a time.
            let mirror = {
                let _apt = workspace.lock_cache()?;
                packages::ensure(&["mmdebstrap", "debian-archive-keyring"])?;
                mirror()?
            };
            let what = format!(
                "Making the Debian {} tree {} (about a minute, then kept)",
                spec.suite, spec.name
            );
            progress::step(&what, || make(spec, &path, &stamp, &mirror))?;
        }
        Ok(Self(path))
    }

    /// Keeps other runs of the kit from building in the tree.
    ///
    /// # Errors
    /// When its lock file cannot be opened.
    pub fn lock(&self) -> Result<File> {
        lock(&self.0)
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

    /// What is in it has changed: what was made of it is to be made again.
    ///
    /// # Errors
    /// When it is not a whole tree, or cannot be written.
    pub fn changed(&self) -> Result<()> {
        let stamp = self.join(STAMP);
        let set = File::options().write(true).open(&stamp);
        set.and_then(|file| file.set_modified(SystemTime::now()))
            .with_context(|| format!("Cannot touch {}", stamp.display()))
    }

    /// A path in the tree; `inside` may begin with a slash. Links are followed as from within the
    /// tree.
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

    /// A command that runs a program of the tree on this machine through the tree's own loader and
    /// libraries: this machine's C library may be older.
    #[must_use]
    pub fn program(&self, inside: &str) -> Command {
        let mut command = self.loader();
        command.arg(self.join(inside));
        command
    }

    /// A command that runs the tree's loader with its library path, ready for more options and a
    /// program.
    #[must_use]
    pub fn loader(&self) -> Command {
        self.loader_with(&[])
    }

    /// Like [`Tree::loader`], for programs that find some of their libraries in folders within that
    /// of the others.
    #[must_use]
    pub fn loader_with(&self, folders: &[&str]) -> Command {
        self.loader_over(None, folders)
    }

    /// Like [`Tree::program`], with the libraries of a folder of this machine in place of the
    /// tree's own of the same names.
    #[must_use]
    pub fn program_over(&self, first: &Path, inside: &str) -> Command {
        let mut command = self.loader_over(Some(first), OTHER_LIBRARIES);
        command.arg(self.join(inside));
        command
    }

    fn loader_over(&self, first: Option<&Path>, folders: &[&str]) -> Command {
        // Not lib64/ld-linux-x86-64.so.2: `lib64` and that link may be absolute, and lead out of
        // the tree.
        let mut command = Command::new(self.libraries().join("ld-linux-x86-64.so.2"));
        let mut path = OsString::new();
        if let Some(first) = first {
            path.push(first);
            path.push(":");
        }
        path.push(self.libraries());
        for folder in folders {
            path.push(":");
            path.push(self.libraries().join(folder));
        }
        command.arg("--library-path").arg(path);
        command
    }

    /// A command that runs within the tree as its root folder, with a `/proc` and process numbers
    /// of its own; what it starts ends with it. Needs root.
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

    /// The version of a package that is installed in the tree.
    ///
    /// # Errors
    /// When it is not.
    pub fn package_version(&self, package: &str) -> Result<String> {
        let status = self.join("var/lib/dpkg/status");
        let text = fs::read_to_string(&status)
            .with_context(|| format!("Cannot read {}", status.display()))?;
        installed_version(&text, package)
            .with_context(|| format!("{} has no package {package}", self.0.display()))
    }

    /// Which point release of Debian the tree is.
    ///
    /// # Errors
    /// When it does not say.
    pub fn point_release(&self) -> Result<String> {
        let path = self.join("etc/debian_version");
        let text = fs::read_to_string(&path);
        let text = text.with_context(|| format!("Cannot read {}", path.display()))?;
        Ok(text.trim().to_owned())
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
                && !release.ends_with("-common")
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

/// Finds a package in dpkg's list.
fn installed_version(status: &str, package: &str) -> Option<String> {
    let field = |paragraph: &str, name: &str| {
        let mut lines = paragraph.lines();
        lines.find_map(|line| line.strip_prefix(name).map(|value| value.trim().to_owned()))
    };
    status.split("\n\n").find_map(|paragraph| {
        (field(paragraph, "Package:")? == package).then_some(())?;
        field(paragraph, "Version:")
    })
}

/// A path next to that of a tree. Its name is added to: the dot in `headers-6.1` begins no
/// extension.
fn beside(path: &Path, kind: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(kind);
    path.with_file_name(name)
}

/// Takes the lock of the tree at `path`, which need not exist; it lies beside it.
fn lock(path: &Path) -> Result<File> {
    let path = beside(path, "lock");
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("Cannot make {}", folder.display()))?;
    }
    let file = File::options().create(true).append(true).open(&path);
    let file = file.with_context(|| format!("Cannot open {}", path.display()))?;
    file.lock()
        .with_context(|| format!("Cannot lock {}", path.display()))?;
    Ok(file)
}

fn stamp(spec: &TreeSpec) -> String {
    let lists = [spec.packages, spec.backports, spec.unpacked];
    // A tree without the last list is as it was before there was one.
    let lists = lists
        .iter()
        .enumerate()
        .filter(|(n, list)| *n < 2 || !list.is_empty());
    let lists: String = lists.map(|(_, list)| list.join(" ") + "\n").collect();
    let foreign = spec.foreign.unwrap_or_default();
    format!("{FORMAT}\n{}\n{lists}{foreign}", spec.suite)
}

fn make(spec: &TreeSpec, path: &Path, stamp: &str, mirror: &str) -> Result<()> {
    if !packages::is_root() {
        bail!("A Debian tree can only be made by root: run this command once as root");
    }
    let part = beside(path, "part");
    for old in [path, &part] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("Cannot remove {}", old.display()))?;
        }
    }
    // INITRD=No: guests get a root of ours, so the kernel's package need not spend time on one. It
    // mounts /proc, /sys and /dev/shm of this machine in the tree. They go with its namespace, also
    // when it is killed: whoever removes what is left of the tree must not come to them.
    let mut command = Command::new("unshare");
    command.args(["--mount", "mmdebstrap"]);
    command.env("INITRD", "No");
    command.arg(match spec.foreign {
        Some(_) => "--variant=extract",
        None => "--variant=apt",
    });
    let architecture = spec.foreign.unwrap_or("amd64");
    command.arg(format!("--architectures={architecture}"));
    command.arg("--format=directory");
    command.arg("--aptopt=Acquire::Retries \"3\"");
    command.arg("--dpkgopt=force-unsafe-io");
    for unread in ["man", "doc", "info", "locale"] {
        command.arg(format!("--dpkgopt=path-exclude=/usr/share/{unread}/*"));
    }
    // dpkg keeps the folder that a pattern begins with, and none above it.
    command.arg(format!("--dpkgopt=path-include=/{RDMA_CORE}/*"));
    command.arg(format!("--include={}", spec.packages.join(",")));
    if !spec.unpacked.is_empty() {
        command.arg(format!(
            "--customize-hook=chroot \"$1\" sh -c 'cd /tmp && apt-get download -qq {} && \
             for deb in *.deb; do dpkg-deb --extract $deb / && rm $deb; done'",
            spec.unpacked.join(" ")
        ));
    }
    let mut sources = vec![format!("deb {mirror} {} main", spec.suite)];
    if !spec.backports.is_empty() {
        let backports = format!("{}-backports", spec.suite);
        command.arg(format!(
            "--customize-hook=chroot \"$1\" env DEBIAN_FRONTEND=noninteractive INITRD=No apt-get \
             install --yes -qq \
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
    fn trees_of_similar_names_have_nothing_in_common() {
        let (one, other) = (Path::new("/c/headers-6.1"), Path::new("/c/headers-6.12"));
        assert_ne!(beside(one, "part"), beside(other, "part"));
        assert_eq!(beside(one, "lock"), Path::new("/c/headers-6.1.lock"));
    }

    #[test]
    fn the_version_of_a_package_is_its_own() {
        let status = "Package: fio-examples\nVersion: 1\n\nPackage: fio\nStatus: install ok \
                      installed\nVersion: 3.39-1\n";
        assert_eq!(installed_version(status, "fio").unwrap(), "3.39-1");
        assert_eq!(installed_version(status, "fi"), None);
    }

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
