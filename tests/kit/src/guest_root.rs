//! The guests' root file system. Nothing of it is copied or unpacked in a boot: read-only file
//! systems (EROFS) lie in the guest's memory from its start, as persistent memory does, and a small
//! first file system lays them over each other, with a tmpfs on top for what the guest writes. One
//! has what every guest needs and the kernel's modules; where a guest wants them there are the
//! programs for disks, those for networks, and Python; and one, made for each boot, has the files
//! of this run.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::contents::Contents;
use crate::kernel::Kernel;
use crate::progress;
use crate::qemu::VmConfig;
use crate::root_contents::{
    base_contents, boot_contents, make_up, network_contents, python_contents, storage_contents,
};
use crate::tree::Tree;
use crate::workspace::Workspace;

/// Counts up when the way these are made changes.
const FORMAT: u32 = 3;

/// What their names begin with in the cache.
const PREFIX: &str = "guest-root-";

/// One file that a run lays over the guest's root.
#[derive(Debug, Clone)]
pub struct GuestFile {
    /// Where it goes in the guest.
    pub path: String,
    /// A file of this machine; links are followed and its permission bits kept.
    pub source: PathBuf,
}

impl GuestFile {
    /// A file of this machine, and where it goes in the guest.
    pub fn new(source: impl Into<PathBuf>, path: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            source: source.into(),
        }
    }
}

/// The file systems that the guests of one kernel share.
#[derive(Debug, Clone)]
pub struct GuestRoot {
    /// The first file system: an archive that the kernel unpacks.
    pub initrd: PathBuf,
    base: PathBuf,
    storage: PathBuf,
    network: PathBuf,
    python: PathBuf,
}

impl GuestRoot {
    /// Finds the file systems in the cache or makes them. Programs come from `tree`.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn ensure(workspace: &Workspace, tree: &Tree, kernel: &Kernel) -> Result<Self> {
        let mut hash = DefaultHasher::new();
        (FORMAT, make_up(), tree.made_at()?).hash(&mut hash);
        let programs = format!("{:016x}", hash.finish());
        (&kernel.release, kernel.made_at).hash(&mut hash);
        let kernel_name = format!("{}-{:016x}", kernel.release, hash.finish());
        let path = |name: &str| workspace.cache().join(format!("{PREFIX}{name}"));
        let root = Self {
            initrd: path(&format!("{kernel_name}.cpio")),
            base: path(&format!("{kernel_name}.erofs")),
            storage: path(&format!("storage-{programs}.erofs")),
            network: path(&format!("network-{programs}.erofs")),
            python: path(&format!("python-{programs}.erofs")),
        };
        if !root.exists() {
            let _lock = workspace.lock_cache()?;
            if !root.exists() {
                let what = format!("Making the root file system of Linux {}", kernel.release);
                progress::step(&what, || {
                    root.remove_old(&workspace.cache(), kernel)?;
                    root.make(tree, kernel)
                })?;
            }
        }
        Ok(root)
    }

    fn all(&self) -> [&PathBuf; 5] {
        let Self {
            initrd,
            base,
            storage,
            network,
            python,
        } = self;
        [initrd, base, storage, network, python]
    }

    fn exists(&self) -> bool {
        self.all().iter().all(|file| file.exists())
    }

    fn make(&self, tree: &Tree, kernel: &Kernel) -> Result<()> {
        let (base, libraries) = base_contents(tree, kernel)?;
        let boot = boot_contents(tree, kernel)?;
        whole(&self.initrd, |part| boot.write_archive(part))?;
        whole(&self.base, |part| base.write_image(tree, part))?;
        if !self.storage.exists() {
            let storage = storage_contents(tree, &libraries)?;
            whole(&self.storage, |part| storage.write_image(tree, part))?;
        }
        if !self.network.exists() {
            let network = network_contents(tree, &libraries)?;
            whole(&self.network, |part| network.write_image(tree, part))?;
        }
        if !self.python.exists() {
            let python = python_contents(tree, &libraries)?;
            whole(&self.python, |part| python.write_image(tree, part))?;
        }
        Ok(())
    }

    /// Removes what was made of earlier make-ups for this kernel, and earlier programs.
    fn remove_old(&self, cache: &Path, kernel: &Kernel) -> Result<()> {
        let of_this = [
            format!("{PREFIX}{}-", kernel.release),
            format!("{PREFIX}storage-"),
            format!("{PREFIX}network-"),
            format!("{PREFIX}python-"),
        ];
        let current = self.all();
        for entry in
            fs::read_dir(cache).with_context(|| format!("Cannot read {}", cache.display()))?
        {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let is_old = of_this.iter().any(|prefix| name.starts_with(prefix));
            if is_old && !current.contains(&&path) {
                fs::remove_file(&path)
                    .with_context(|| format!("Cannot remove {}", path.display()))?;
            }
        }
        Ok(())
    }

    /// The file systems of one guest, the topmost first; that of the files of this run is written
    /// to `path`.
    ///
    /// # Errors
    /// When a file cannot be read or written.
    pub fn images(
        &self,
        tree: &Tree,
        config: &VmConfig<'_>,
        files: &[GuestFile],
        path: &Path,
    ) -> Result<Vec<PathBuf>> {
        let mut contents = Contents::default();
        for file in files {
            contents.copy(&file.path, &file.source)?;
        }
        contents.write_image(tree, path)?;
        let mut images = vec![path.to_owned()];
        images.extend(config.storage.then(|| self.storage.clone()));
        images.extend(config.network_programs.then(|| self.network.clone()));
        images.extend(config.python.then(|| self.python.clone()));
        images.extend(config.images.iter().cloned());
        images.push(self.base.clone());
        Ok(images)
    }
}

/// Makes a file; it is there as a whole or not at all.
pub(crate) fn whole(path: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let part = path.with_extension("part");
    if part.exists() {
        fs::remove_file(&part).with_context(|| format!("Cannot remove {}", part.display()))?;
    }
    make(&part)?;
    fs::rename(&part, path).with_context(|| format!("Cannot put {} in its place", path.display()))
}
