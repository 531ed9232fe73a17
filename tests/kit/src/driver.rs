//! The guest driver, built out of tree for a kernel of one of the Debian trees.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::debian::{GUEST_TREE, HEADERS_6_1, HEADERS_6_12, TreeSpec};
use crate::process::{describe, output};
use crate::tree::Tree;
use crate::workspace::Workspace;
use crate::{packages, progress};

/// How long a build may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(600);

/// Where the driver is built within a tree: the headers refer to each other by absolute paths. It
/// stays there, so that make has little to do the next time.
const BUILD_FOLDER: &str = "/build/farlane";

/// The kernels that the driver is built for: the beginning of their releases, and the trees with
/// their headers.
pub const KERNELS: &[(&str, &TreeSpec)] = &[
    ("6.1.", &HEADERS_6_1),
    ("6.12.", &HEADERS_6_12),
    ("7.", &GUEST_TREE),
];

/// The module of the device itself, and of its RDMA device.
const MODULES: [&str; 2] = ["farlane.ko", "farlane_ib.ko"];

/// Kernel modules.
#[derive(Debug)]
pub struct Driver {
    /// The file of the driver of the virtio device.
    pub path: PathBuf,
    /// The file of the driver of its RDMA device; `None` where the kernel has no RDMA.
    pub rdma: Option<PathBuf>,
    /// The kernel release that it was built for.
    pub kernel: String,
    /// What the compiler said.
    pub messages: String,
}

/// Builds what changed of the driver, with the headers and the compiler of a tree.
///
/// # Errors
/// When it does not build.
pub fn build(workspace: &Workspace, tree: &Tree) -> Result<Driver> {
    let _lock = tree.lock()?;
    build_locked(workspace, tree, None)
}

/// A driver that differs from that of the checkout in one place.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    /// What it is called, in names of folders.
    pub name: &'static str,
    /// The source, below `guest-driver`.
    pub file: &'static str,
    /// What stands there once.
    pub from: &'static str,
    /// What stands there instead.
    pub to: &'static str,
}

/// Builds what changed of a driver that differs from that of the checkout.
///
/// # Errors
/// When it does not build, or has not what is to be changed.
pub fn build_changed(workspace: &Workspace, tree: &Tree, change: Change) -> Result<Driver> {
    let _lock = tree.lock()?;
    build_locked(workspace, tree, Some(change))
}

/// Builds all of the driver, so that the compiler says again what it has to say.
///
/// # Errors
/// When it does not build.
pub fn build_anew(workspace: &Workspace, tree: &Tree) -> Result<Driver> {
    let _lock = tree.lock()?;
    let folder = tree.join(BUILD_FOLDER);
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("Cannot remove {}", folder.display()))?;
    }
    build_locked(workspace, tree, None)
}

fn build_locked(workspace: &Workspace, tree: &Tree, change: Option<Change>) -> Result<Driver> {
    if !packages::is_root() {
        bail!("The guest driver is built within a Debian tree, which needs root");
    }
    let kernel = tree.kernel_release()?;
    let other = change.map_or(String::new(), |change| format!("-{}", change.name));
    let inside = format!("{BUILD_FOLDER}{other}");
    let folder = tree.join(&inside);
    copy_sources(&workspace.root().join("guest-driver"), &folder, change)?;
    let mut make = tree.chroot("make");
    make.args([
        "-C",
        &format!("/usr/src/linux-headers-{kernel}"),
        &format!("M={inside}"),
        "modules",
    ]);
    let what = format!("Building the guest driver for Linux {kernel}");
    let messages = progress::step(&what, || {
        let output = output("make of the guest driver", make, BUILD_TIMEOUT)?;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        if !output.status.success() {
            bail!(
                "The guest driver does not build for Linux {kernel}: {}\n{said}",
                describe(output.status)
            );
        }
        Ok(said)
    })?;
    let kept = workspace
        .cache()
        .join(format!("driver{other}"))
        .join(&kernel);
    fs::create_dir_all(&kept).with_context(|| format!("Cannot make {}", kept.display()))?;
    let [path, rdma] = MODULES.map(|module| keep(&folder.join(module), &kept.join(module)));
    let Some(path) = path? else {
        bail!(
            "make of the guest driver made no {}\n{messages}",
            MODULES[0]
        );
    };
    Ok(Driver {
        path,
        rdma: rdma?,
        kernel,
        messages,
    })
}

/// Copies what was built to where it is kept. `None` where it was not built.
fn keep(built: &Path, kept: &Path) -> Result<Option<PathBuf>> {
    if !built.exists() {
        return Ok(None);
    }
    // Renamed into place: another run may read the old one at this moment.
    let part = kept.with_extension("ko.part");
    fs::copy(built, &part).with_context(|| format!("Cannot copy {}", built.display()))?;
    fs::rename(&part, kept)
        .with_context(|| format!("Cannot put {} in its place", kept.display()))?;
    Ok(Some(kept.to_path_buf()))
}

/// Makes a folder's sources those of another; writes only those that changed, so that make sees
/// which. One of them may be changed on the way.
fn copy_sources(from: &Path, to: &Path, change: Option<Change>) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("Cannot make {}", to.display()))?;
    let sources = sources(from)?;
    for old in self::sources(to)?.difference(&sources) {
        let old = to.join(old);
        fs::remove_file(&old).with_context(|| format!("Cannot remove {}", old.display()))?;
    }
    for name in &sources {
        let (source, copy) = (from.join(name), to.join(name));
        let mut data =
            fs::read(&source).with_context(|| format!("Cannot read {}", source.display()))?;
        if let Some(change) = change.filter(|change| *name == *change.file) {
            let text = String::from_utf8(data).context("A source is no text")?;
            if text.matches(change.from).count() != 1 {
                bail!("{:?} is not once in {}", change.from, source.display());
            }
            data = text.replace(change.from, change.to).into_bytes();
        }
        if fs::read(&copy).ok().as_ref() != Some(&data) {
            fs::write(&copy, data).with_context(|| format!("Cannot write {}", copy.display()))?;
        }
    }
    Ok(())
}

/// The names of the sources in a folder.
fn sources(folder: &Path) -> Result<BTreeSet<OsString>> {
    let mut names = BTreeSet::new();
    for entry in
        fs::read_dir(folder).with_context(|| format!("Cannot read {}", folder.display()))?
    {
        let name = entry?.file_name();
        if is_source(&name.to_string_lossy()) {
            names.insert(name);
        }
    }
    Ok(names)
}

/// What a person wrote, not what a build in the same folder left there.
fn is_source(name: &str) -> bool {
    let is_code = (name.ends_with(".c") && !name.ends_with(".mod.c")) || name.ends_with(".h");
    is_code || matches!(name, "Makefile" | "Kbuild")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_went_goes_from_the_copy_and_builds_stay() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for (folder, name) in [
            (&from, "new.c"),
            (&from, "x.mod.c"),
            (&to, "old.c"),
            (&to, "old.o"),
        ] {
            fs::write(folder.path().join(name), name).unwrap();
        }
        copy_sources(from.path(), to.path(), None).unwrap();
        let mut names: Vec<_> = fs::read_dir(to.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["new.c", "old.o"]);
    }

    #[test]
    fn a_source_is_changed_on_the_way_where_it_has_what_is_to_be() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["a.c", "b.c"] {
            fs::write(from.path().join(name), "one two").unwrap();
        }
        let change = |from| Change {
            name: "other",
            file: "b.c",
            from,
            to: "three",
        };
        copy_sources(from.path(), to.path(), Some(change("two"))).unwrap();
        let read = |name| fs::read_to_string(to.path().join(name)).unwrap();
        assert_eq!([read("a.c"), read("b.c")], ["one two", "one three"]);
        assert!(copy_sources(from.path(), to.path(), Some(change("four"))).is_err());
    }
}
