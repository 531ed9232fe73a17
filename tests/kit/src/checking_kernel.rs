//! A kernel that checks itself: built from the distribution's source with KASAN (use of memory that
//! is not there), lockdep (locks taken in orders that can block) and kmemleak (memory that nothing
//! points to).

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::debian::KERNEL_SOURCE;
use crate::process::check_output;
use crate::progress;
use crate::tree::Tree;
use crate::workspace::Workspace;

/// What the kernel is built with; all else is left out.
const CONFIG: &str = include_str!("kasan.config");

/// How long the build may take: a quarter of an hour on two cores that do nothing else.
const BUILD_TIMEOUT: Duration = Duration::from_secs(2 * 3600);

/// Where the tree says what was built in it.
const STAMP: &str = ".farlane-kernel";

/// A tree with the kernel built in it, as a tree has the distribution's.
///
/// # Errors
/// When it does not build.
pub fn tree(workspace: &Workspace) -> Result<Tree> {
    let tree = Tree::ensure(workspace, &KERNEL_SOURCE)?;
    let _lock = tree.lock()?;
    let stamp = tree.join(STAMP);
    if fs::read_to_string(&stamp).is_ok_and(|built| built == CONFIG) {
        return Ok(tree);
    }
    progress::step(
        "Building a kernel with KASAN, lockdep and kmemleak (then kept)",
        || build(&tree),
    )?;
    tree.changed()?;
    fs::write(&stamp, CONFIG).with_context(|| format!("Cannot write {}", stamp.display()))?;
    Ok(tree)
}

fn build(tree: &Tree) -> Result<()> {
    let source = source(tree)?;
    let inside = format!("/usr/src/{source}");
    let folder = tree.join(&inside);
    if !folder.exists() {
        run(tree, &format!("cd /usr/src && tar xf {source}.tar.xz"))?;
    }
    let config = folder.join("farlane.config");
    fs::write(&config, CONFIG).with_context(|| format!("Cannot write {}", config.display()))?;
    run(
        tree,
        &format!(
            "cd {inside} && make -s KCONFIG_ALLCONFIG=farlane.config allnoconfig && make -s \
             -j$(nproc) bzImage modules && \
             make -s modules_install && make -s kernelrelease >/farlane-release"
        ),
    )?;
    // What is asked for and cannot be had is left out without a word.
    let built = fs::read_to_string(folder.join(".config")).context("There is no .config")?;
    for wanted in CONFIG.lines().filter(|line| line.starts_with("CONFIG_")) {
        ensure!(
            wanted.ends_with("=n") || built.lines().any(|line| line == wanted),
            "The kernel's configuration lacks {wanted}"
        );
    }
    let release = fs::read_to_string(tree.join("farlane-release")).context("No release")?;
    let release = release.trim();
    let boot = tree.join(format!("boot/vmlinuz-{release}"));
    fs::copy(folder.join("arch/x86/boot/bzImage"), &boot)
        .with_context(|| format!("Cannot write {}", boot.display()))?;
    let headers = tree.join(format!("usr/src/linux-headers-{release}"));
    if !headers.exists() {
        symlink(&source, &headers).with_context(|| format!("Cannot make {}", headers.display()))?;
    }
    Ok(())
}

/// The name of the source's folder, which its package has packed.
fn source(tree: &Tree) -> Result<String> {
    let folder = tree.join("usr/src");
    let entries = fs::read_dir(&folder);
    let entries = entries.with_context(|| format!("Cannot read {}", folder.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let name = PathBuf::from(entry?.file_name());
        let name = name.to_string_lossy();
        names.push(name.trim_end_matches(".tar.xz").to_owned());
    }
    names.retain(|name| name.starts_with("linux-source-"));
    names.pop().context("The tree has no kernel source")
}

fn run(tree: &Tree, script: &str) -> Result<()> {
    let mut shell = tree.chroot("sh");
    shell.args(["-c", script]);
    check_output("the build of a kernel", shell, BUILD_TIMEOUT)?;
    Ok(())
}
