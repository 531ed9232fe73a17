//! Everything that guests are booted from, prepared once.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::debian::{GUEST_TREE, HEADERS_6_1, HEADERS_6_12};
use crate::guest::Guest;
use crate::guest_root::{GuestFile, GuestRoot};
use crate::progress;
use crate::qemu::{Accelerator, Qemu, VmConfig};
use crate::scratch::Scratch;
use crate::tree::Tree;
use crate::workspace::Workspace;

/// An environment variable that chooses what runs the guests: `tcg`, `kvm`, or `auto`.
pub const ACCELERATOR_VARIABLE: &str = "FARLANE_VM_ACCEL";

/// How long a guest may take to boot under KVM.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);

/// Makes the guests' Debian tree and root file system, which takes long and needs no program of this workspace.
///
/// # Errors
/// When they cannot be made.
pub fn prepare_root(workspace: &Workspace) -> Result<()> {
    let tree = Tree::ensure(workspace, &GUEST_TREE)?;
    GuestRoot::ensure(workspace, &tree)?;
    Ok(())
}

/// Makes that and the Debian trees of other kernels.
///
/// # Errors
/// When one cannot be made.
pub fn prepare_trees(workspace: &Workspace) -> Result<()> {
    prepare_root(workspace)?;
    for spec in [&HEADERS_6_1, &HEADERS_6_12] {
        Tree::ensure(workspace, spec)?;
    }
    Ok(())
}

/// The things that all guests need.
#[derive(Debug)]
pub struct Kit {
    workspace: Workspace,
    tree: Tree,
    qemu: Qemu,
    root: GuestRoot,
    kernel: PathBuf,
    agent: PathBuf,
    accelerator: Accelerator,
}

impl Kit {
    /// Finds or makes everything.
    ///
    /// # Errors
    /// When something cannot be made.
    pub fn prepare(workspace: &Workspace) -> Result<Self> {
        let tree = Tree::ensure(workspace, &GUEST_TREE)?;
        let root = GuestRoot::ensure(workspace, &tree)?;
        workspace.build(&["farlane-vm-agent"])?;
        let mut kit = Self {
            qemu: Qemu::find(&tree),
            kernel: tree.join(format!("boot/vmlinuz-{}", tree.kernel_release()?)),
            agent: workspace.built("farlane-vm-agent")?,
            workspace: workspace.clone(),
            tree,
            root,
            accelerator: Accelerator::Tcg,
        };
        kit.accelerator = kit.choose_accelerator()?;
        Ok(kit)
    }

    /// The checkout that the kit works for.
    #[must_use]
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// The guests' Debian tree.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// The QEMU that is used.
    #[must_use]
    pub fn qemu(&self) -> &Qemu {
        &self.qemu
    }

    /// The guests' kernel image.
    #[must_use]
    pub fn kernel(&self) -> &Path {
        &self.kernel
    }

    /// Starts to boot a guest, see [`Guest::start`].
    ///
    /// # Errors
    /// When QEMU cannot be started.
    pub fn start(&self, config: &VmConfig<'_>, scratch: &Path, logs: &Path) -> Result<Guest> {
        Guest::start(self, config, self.accelerator, scratch, logs)
    }

    pub(crate) fn write_initrd(&self, config: &VmConfig<'_>, path: &Path) -> Result<()> {
        let mut files = vec![GuestFile::new(&self.agent, "usr/sbin/farlane-vm-agent")];
        files.extend(config.files.iter().cloned());
        self.root.write_with(config, &files, path)
    }

    fn choose_accelerator(&self) -> Result<Accelerator> {
        match std::env::var(ACCELERATOR_VARIABLE).as_deref() {
            Ok("kvm") => return Ok(Accelerator::Kvm),
            Ok("auto") => {}
            _ => return Ok(Accelerator::Tcg),
        }
        // A /dev/kvm that exists may still not run a stock kernel: a guest that boots is the proof.
        let host = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .context("Cannot read this machine's boot id")?;
        let proof = self.workspace.cache().join("kvm-probe");
        let known = fs::read_to_string(&proof).unwrap_or_default();
        let works = match known.strip_prefix(host.as_str()) {
            Some(result) => result == "works",
            None => {
                let works =
                    progress::step("Trying whether KVM boots a guest", || Ok(self.kvm_boots()))?;
                let result = if works { "works" } else { "fails" };
                fs::write(&proof, format!("{host}{result}"))
                    .with_context(|| format!("Cannot write {}", proof.display()))?;
                works
            }
        };
        Ok(if works {
            Accelerator::Kvm
        } else {
            Accelerator::Tcg
        })
    }

    fn kvm_boots(&self) -> bool {
        let boot = || -> Result<()> {
            let scratch = Scratch::new()?;
            let config = VmConfig::new("kvm-probe");
            let mut guest = Guest::start(
                self,
                &config,
                Accelerator::Kvm,
                scratch.path(),
                scratch.path(),
            )?;
            guest.wait_ready_for(PROBE_TIMEOUT)
        };
        Path::new("/dev/kvm").exists() && boot().is_ok()
    }
}
