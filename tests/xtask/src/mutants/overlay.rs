//! A private view of the checkout, in which a fault can be put into a file and built.
//!
//! The process runs in a mount namespace of its own (mount_namespaces(7)). Over the checkout and
//! over cargo's target folder it mounts an overlayfs (Documentation/filesystems/overlayfs.rst)
//! whose lower layer is what is there and whose upper layer is memory. Paths stay the same, so
//! cargo finds everything built that the fault does not change; nothing reaches the checkout; and
//! all of it is gone with the process, also when it is killed.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::packages;
use farlane_kit::process::check_output;
use farlane_kit::workspace::Workspace;

/// How long a mount may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The folder in the target folder on which the memory of the upper layers is mounted; outside of
/// the namespace it is empty.
const UPPER: &str = "mutants";

/// What starts a program in a mount namespace of its own, from which no mount reaches others.
pub const NAMESPACE: [&str; 4] = ["unshare", "--mount", "--propagation", "private"];

/// Says what is missing on this machine.
///
/// # Errors
/// When this process may not mount.
pub fn ensure_possible() -> Result<()> {
    ensure!(
        packages::is_root(),
        "Only root can mount the overlay in which a fault is built"
    );
    Ok(())
}

/// Covers the checkout and the target folder. The working folder is the checkout then.
///
/// # Errors
/// When this process is in the mount namespace of its parent, or what mount says.
pub fn cover(workspace: &Workspace) -> Result<()> {
    ensure_possible()?;
    let namespace = |process: &str| {
        let link = format!("/proc/{process}/ns/mnt");
        fs::read_link(&link).with_context(|| format!("Cannot read {link}"))
    };
    let parent = std::os::unix::process::parent_id().to_string();
    ensure!(
        namespace("self")? != namespace(&parent)?,
        "A fault is built in a mount namespace of its own only"
    );
    let (root, target) = (workspace.root(), workspace.target());
    let memory = target.join(UPPER);
    fs::create_dir_all(&memory).with_context(|| format!("Cannot make {}", memory.display()))?;
    mount(&["-t", "tmpfs", "-o", "mode=700", UPPER], &memory)?;
    // The overlays hide the folder's path: from here on it is the working folder.
    env::set_current_dir(&memory).with_context(|| format!("Cannot enter {}", memory.display()))?;
    let lower = root
        .to_str()
        .filter(|path| !path.contains([',', ':', '\\']));
    let lower = lower.with_context(|| {
        format!(
            "The path {} has a character that overlayfs takes for a separator",
            root.display()
        )
    })?;
    overlay("root", lower, root)?;
    // The target folder may be a mount of its own, or outside of the checkout.
    overlay("target", "..", target)?;
    env::set_current_dir(root).with_context(|| format!("Cannot enter {}", root.display()))
}

/// Mounts an overlay whose upper layer is in the working folder.
fn overlay(name: &str, lower: &str, over: &Path) -> Result<()> {
    for layer in ["upper", "work"] {
        let folder = format!("{name}-{layer}");
        fs::create_dir(&folder).with_context(|| format!("Cannot make {folder}"))?;
    }
    let options = format!("lowerdir={lower},upperdir={name}-upper,workdir={name}-work");
    mount(&["-t", "overlay", "-o", &options, UPPER], over)
}

fn mount(words: &[&str], on: &Path) -> Result<()> {
    let mut command = Command::new("mount");
    command.args(words).arg(on);
    check_output("mount", command, TIMEOUT)?;
    Ok(())
}
