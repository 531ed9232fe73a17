//! Everything that guests are booted from, prepared once.

use std::env;
use std::fs;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::debian::{
    GUEST_TREE, HEADERS_6_1, HEADERS_6_12, LIBVIRT_BOOKWORM, LIBVIRT_TRIXIE, RDMA_PROGRAMS,
};
use crate::guest::Guest;
use crate::guest_root::{GuestFile, GuestRoot};
use crate::kernel::Kernel;
use crate::progress;
use crate::qemu::{Accelerator, Qemu, VmConfig};
use crate::scratch::Scratch;
use crate::tree::Tree;
use crate::workspace::Workspace;

/// An environment variable that chooses what runs the guests: `tcg`, `kvm`, or `auto`, which is KVM
/// where it works.
pub const ACCELERATOR_VARIABLE: &str = "FARLANE_VM_ACCEL";

/// How long a guest may take to boot under KVM.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);

/// Makes the guests' Debian tree and root file system, which takes long and needs no program of
/// this workspace.
///
/// # Errors
/// When they cannot be made.
pub fn prepare_root(workspace: &Workspace) -> Result<()> {
    let tree = Tree::ensure(workspace, &GUEST_TREE)?;
    let kernel = Kernel::of(workspace, &tree, &tree)?;
    GuestRoot::ensure(workspace, &tree, &kernel)?;
    Ok(())
}

/// Makes that and the other Debian trees, two at a time.
///
/// # Errors
/// When one cannot be made.
pub fn prepare_trees(workspace: &Workspace) -> Result<()> {
    thread::scope(|scope| {
        let older = scope.spawn(|| {
            Tree::ensure(workspace, &HEADERS_6_1)?;
            Tree::ensure(workspace, &HEADERS_6_12)?;
            Tree::ensure(workspace, &RDMA_PROGRAMS)?;
            Tree::ensure(workspace, &LIBVIRT_BOOKWORM)?;
            Tree::ensure(workspace, &LIBVIRT_TRIXIE)
        });
        prepare_root(workspace)?;
        match older.join() {
            Ok(made) => made.map(drop),
            Err(panic) => resume_unwind(panic),
        }
    })
}

/// The things that all guests need.
#[derive(Debug, Clone)]
pub struct Kit {
    workspace: Workspace,
    tree: Tree,
    qemu: Qemu,
    kernel_tree: Tree,
    kernel: Kernel,
    root: GuestRoot,
    agent: PathBuf,
    accelerator: Accelerator,
}

impl Kit {
    /// Finds or makes everything.
    ///
    /// # Errors
    /// When something cannot be made.
    pub fn prepare(workspace: &Workspace) -> Result<Self> {
        Self::build_own(workspace)?;
        Self::of_built(workspace)
    }

    /// Builds what of the workspace is the kit's own.
    ///
    /// # Errors
    /// When the build fails.
    pub fn build_own(workspace: &Workspace) -> Result<()> {
        workspace.build(&["farlane-kit"])
    }

    /// Finds or makes everything else.
    ///
    /// # Errors
    /// When something cannot be made.
    pub fn of_built(workspace: &Workspace) -> Result<Self> {
        let tree = Tree::ensure(workspace, &GUEST_TREE)?;
        let kernel = Kernel::of(workspace, &tree, &tree)?;
        let root = GuestRoot::ensure(workspace, &tree, &kernel)?;
        let mut kit = Self {
            qemu: Qemu::find(&tree),
            agent: workspace.built("farlane-vm-agent")?,
            workspace: workspace.clone(),
            kernel_tree: tree.clone(),
            tree,
            kernel,
            root,
            accelerator: Accelerator::Tcg,
        };
        kit.accelerator = kit.choose_accelerator()?;
        progress::note(&kit.versions()?);
        Ok(kit)
    }

    /// What runs the guests, and what runs in them, in a line: Debian's packages are those that its
    /// mirror had when a tree was made.
    ///
    /// # Errors
    /// When QEMU or the tree's list of packages cannot be asked.
    pub fn versions(&self) -> Result<String> {
        let package = |name: &str| self.tree.package_version(name);
        Ok(format!(
            "QEMU {} ({}), Linux {}, rdma-core {}, fio {}, Debian {} of {}",
            self.qemu.version()?,
            match self.accelerator {
                Accelerator::Tcg => "emulating",
                Accelerator::Kvm => "KVM",
            },
            self.kernel.release,
            package("rdma-core")?,
            package("fio")?,
            GUEST_TREE.suite,
            self.tree.point_release()?,
        ))
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

    /// The tree that the guests' kernel is from, which builds modules for it.
    #[must_use]
    pub fn kernel_tree(&self) -> &Tree {
        &self.kernel_tree
    }

    /// The guests' kernel.
    #[must_use]
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    pub(crate) fn root(&self) -> &GuestRoot {
        &self.root
    }

    /// A kit whose guests run the kernel of another tree, with the same programs.
    ///
    /// # Errors
    /// When the tree has no kernel, or the guests' root cannot be made.
    pub fn with_kernel_of(&self, tree: &Tree) -> Result<Self> {
        self.with_kernel(Kernel::of(&self.workspace, &self.tree, tree)?, tree)
    }

    /// The same, with the kernel started packed: see [`Kernel::packed`].
    ///
    /// # Errors
    /// As above.
    pub fn with_packed_kernel_of(&self, tree: &Tree) -> Result<Self> {
        let kernel = Kernel::of(&self.workspace, &self.tree, tree)?.packed(tree);
        self.with_kernel(kernel, tree)
    }

    fn with_kernel(&self, kernel: Kernel, tree: &Tree) -> Result<Self> {
        Ok(Self {
            root: GuestRoot::ensure(&self.workspace, &self.tree, &kernel)?,
            kernel,
            kernel_tree: tree.clone(),
            ..self.clone()
        })
    }

    /// Starts to boot a guest, see [`Guest::start`].
    ///
    /// # Errors
    /// When QEMU cannot be started.
    pub fn start(&self, config: &VmConfig<'_>, scratch: &Path, logs: &Path) -> Result<Guest> {
        Guest::start(self, config, self.accelerator, scratch, logs)
    }

    /// The read-only file systems of one guest, the topmost first. That of this run's files is
    /// written to `path`.
    pub(crate) fn images(&self, config: &VmConfig<'_>, path: &Path) -> Result<Vec<PathBuf>> {
        let mut files = vec![GuestFile::new(&self.agent, "usr/sbin/farlane-vm-agent")];
        files.extend(config.files.iter().cloned());
        self.root.images(&self.tree, config, &files, path)
    }

    fn choose_accelerator(&self) -> Result<Accelerator> {
        let wanted = env::var(ACCELERATOR_VARIABLE).unwrap_or_else(|_| "auto".into());
        let works = match wanted.as_str() {
            "kvm" => true,
            "tcg" => false,
            "auto" => self.kvm_works()?,
            _ => bail!("{ACCELERATOR_VARIABLE} is {wanted:?}: it may be tcg, kvm or auto"),
        };
        Ok(if works {
            Accelerator::Kvm
        } else {
            Accelerator::Tcg
        })
    }

    /// Whether KVM runs guests here; tried once each time this machine was booted. A `/dev/kvm`
    /// that exists may still not run a stock kernel: a guest that boots is the proof.
    fn kvm_works(&self) -> Result<bool> {
        if !Path::new("/dev/kvm").exists() {
            return Ok(false);
        }
        let host = fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .context("Cannot read this machine's boot id")?;
        let proof = self.workspace.cache().join("kvm-probe");
        let known = || {
            let known = fs::read_to_string(&proof).unwrap_or_default();
            known
                .strip_prefix(host.as_str())
                .map(|result| result == "works")
        };
        if let Some(works) = known() {
            return Ok(works);
        }
        let _lock = self.workspace.lock_cache()?;
        if let Some(works) = known() {
            return Ok(works);
        }
        let boots = progress::step("Trying whether KVM boots a guest", || Ok(self.boot_kvm()))?;
        if let Err(error) = &boots {
            progress::note(&format!(
                "KVM does not ({}): QEMU emulates the guests' processors",
                error.root_cause()
            ));
        }
        let result = if boots.is_ok() { "works" } else { "fails" };
        fs::write(&proof, format!("{host}{result}"))
            .with_context(|| format!("Cannot write {}", proof.display()))?;
        Ok(boots.is_ok())
    }

    fn boot_kvm(&self) -> Result<()> {
        let scratch = Scratch::new()?;
        let folder = scratch.path();
        let config = VmConfig::new("kvm-probe");
        let mut guest = Guest::start(self, &config, Accelerator::Kvm, folder, folder)?;
        guest.wait_ready_for(PROBE_TIMEOUT)
    }
}
