//! What a guest is booted from whose VMM is not started by the kit, but by a management program:
//! the same kernel and the same root, whose read-only file systems are disks of the guest.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::contents::Contents;
use crate::kit::Kit;
use crate::modules::Modules;
use crate::qemu::{Accelerator, VmConfig, kernel_command_line};
use crate::root_contents::unpack_module;

/// The driver of the disks; what it depends on is loaded for the other devices.
const DRIVER: &str = "virtio_blk";

/// What such a guest is booted from. All files are its own: a management program may change their
/// owner.
#[derive(Debug)]
pub struct DiskBoot {
    /// The kernel.
    pub kernel: PathBuf,
    /// The first file system.
    pub initrd: PathBuf,
    /// The file systems of its root, which are to be its virtio disks with the names that
    /// [`DiskBoot::new`] was given.
    pub images: Vec<PathBuf>,
    /// The kernel's command line.
    pub words: String,
}

impl DiskBoot {
    /// Puts these files into a folder. `disks` are the names of block devices in the guest: as many
    /// as the guest of this configuration has file systems, or more.
    ///
    /// # Errors
    /// When a file cannot be read or written, or names are missing.
    pub fn new(
        kit: &Kit,
        config: &VmConfig<'_>,
        accelerator: Accelerator,
        disks: &[&str],
        folder: &Path,
    ) -> Result<Self> {
        let copy = |from: &Path| {
            let to = folder.join(from.file_name().context("A file has no name")?);
            if from != to {
                fs::copy(from, &to).with_context(|| format!("Cannot copy {}", from.display()))?;
            }
            Ok(to)
        };
        let images = kit.images(config, &folder.join(format!("{}.erofs", config.name)))?;
        let images: Result<Vec<PathBuf>> = images.iter().map(|image| copy(image)).collect();
        let images = images?;
        let roots = disks.get(..images.len()).context("Too few disks")?;
        let initrd = copy(&kit.root().initrd)?;
        add_driver(kit, &initrd, &folder.join("driver.cpio"))?;
        Ok(Self {
            kernel: copy(&kit.kernel().image)?,
            initrd,
            images,
            words: format!(
                "{} farlane.roots={}",
                kernel_command_line(config, accelerator),
                roots.join(",")
            ),
        })
    }
}

/// Adds the disks' driver to the first file system, behind the modules that are there.
fn add_driver(kit: &Kit, initrd: &Path, archive: &Path) -> Result<()> {
    let kernel = kit.kernel();
    let files = Modules::read(&kernel.modules)?.load_order(&[DRIVER])?;
    let file = files.last();
    let file = file.with_context(|| format!("Linux {} has {DRIVER} built in", kernel.release))?;
    let mut contents = Contents::default();
    let module = unpack_module(kit.tree(), &kernel.modules.join(file))?;
    contents.data(&format!("modules/{DRIVER}.ko"), 0o644, module);
    contents.write_archive(archive)?;
    let add = || {
        let mut whole = File::options().append(true).open(initrd)?;
        io::copy(&mut File::open(archive)?, &mut whole)
    };
    add().with_context(|| format!("Cannot add to {}", initrd.display()))?;
    Ok(())
}
