//! A kernel that guests run: what QEMU starts, and its modules.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};

use crate::process::{check_output, output};
use crate::progress;
use crate::tree::Tree;
use crate::workspace::Workspace;

/// How long unpacking may take.
const UNPACK_TIMEOUT: Duration = Duration::from_secs(120);

/// Where a bzImage says how many sectors of 512 bytes its set-up code has besides the first, and,
/// counted from the end of that code, where its packed kernel is and how long (Linux
/// Documentation/arch/x86/boot.rst).
const SETUP_SECTORS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;

/// How packed kernels begin.
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const GZIP: &[u8] = &[0x1f, 0x8b];
const XZ: &[u8] = b"\xfd7zXZ\0";
const ELF: &[u8] = b"\x7fELF";

/// A kernel.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Its release: what `uname -r` says.
    pub release: String,
    /// The kernel as an ELF file, which QEMU starts at its PVH entry: unpacking itself would take
    /// an emulated machine a second. Or as it is packed: see [`packed`](Self::packed).
    pub image: PathBuf,
    /// The folder of its modules.
    pub modules: PathBuf,
    /// When what it came from was made.
    pub made_at: SystemTime,
}

impl Kernel {
    /// The kernel of a tree; `tools` has the programs that unpack it.
    ///
    /// # Errors
    /// When the tree has none, or it cannot be unpacked.
    pub fn of(workspace: &Workspace, tools: &Tree, tree: &Tree) -> Result<Self> {
        let release = tree.kernel_release()?;
        let kernel = Self {
            image: workspace.cache().join(format!("vmlinux-{release}")),
            modules: tree.join("usr/lib/modules").join(&release),
            made_at: tree.made_at()?,
            release,
        };
        let is_current = || {
            let made = fs::metadata(&kernel.image).and_then(|file| file.modified());
            made.is_ok_and(|made| made >= kernel.made_at)
        };
        if !is_current() {
            let _lock = workspace.lock_cache()?;
            if !is_current() {
                let packed = packed(tree, &kernel.release);
                let what = format!("Unpacking Linux {}", kernel.release);
                progress::step(&what, || unpack(tools, &packed, &kernel.image))?;
            }
        }
        Ok(kernel)
    }

    /// The same kernel, packed, which QEMU starts by Linux' own boot protocol: slower. For one with
    /// KASAN, whose PVH entry cannot run: its checks touch shadow memory that is not mapped so
    /// early.
    #[must_use]
    pub fn packed(self, tree: &Tree) -> Self {
        Self {
            image: packed(tree, &self.release),
            ..self
        }
    }
}

/// Where a tree has its kernel of a release.
fn packed(tree: &Tree, release: &str) -> PathBuf {
    tree.join(format!("boot/vmlinuz-{release}"))
}

/// Unpacks a bzImage.
fn unpack(tools: &Tree, packed: &Path, image: &Path) -> Result<()> {
    let bytes = fs::read(packed).with_context(|| format!("Cannot read {}", packed.display()))?;
    let payload = payload(&bytes).with_context(|| format!("{} is no bzImage", packed.display()))?;
    let scratch = tempfile::tempdir().context("Cannot make a temporary folder")?;
    let file = scratch.path().join("kernel");
    fs::write(&file, payload).with_context(|| format!("Cannot write {}", file.display()))?;
    let unpacked = if payload.starts_with(ZSTD) {
        let plain = scratch.path().join("vmlinux");
        let mut zstd = tools.program("usr/bin/zstd");
        zstd.args(["-d", "-q"]).arg(&file).arg("-o").arg(&plain);
        check_output("zstd", zstd, UNPACK_TIMEOUT)?;
        fs::read(&plain).with_context(|| format!("Cannot read {}", plain.display()))?
    } else if payload.starts_with(XZ) {
        unpack_with(tools.program("usr/bin/xz"), &file)?
    } else if payload.starts_with(GZIP) {
        let mut gzip = Command::new(tools.join("usr/bin/busybox"));
        gzip.arg("gzip");
        unpack_with(gzip, &file)?
    } else {
        bail!(
            "{} is packed in a way that is not known here",
            packed.display()
        );
    };
    ensure!(
        unpacked.starts_with(ELF),
        "What {} unpacks to is no ELF file",
        packed.display()
    );
    let part = image.with_extension("part");
    fs::write(&part, unpacked).with_context(|| format!("Cannot write {}", part.display()))?;
    fs::rename(&part, image).with_context(|| format!("Cannot put {} in its place", image.display()))
}

/// The packed kernel in a bzImage.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let number = |at: usize| {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let start = (usize::from(*image.get(SETUP_SECTORS)?) + 1) * 512 + number(PAYLOAD_OFFSET)?;
    let payload = image.get(start..start + number(PAYLOAD_LENGTH)?)?;
    // Its unpacked size follows, unless that is what the format ends with.
    let size = if payload.starts_with(GZIP) { 0 } else { 4 };
    payload.get(..payload.len().checked_sub(size)?)
}

/// Unpacks a file with `xz` or one that takes the same words.
pub fn unpack_with(mut command: Command, packed: &Path) -> Result<Vec<u8>> {
    command.arg("-dc").arg(packed);
    let output = output("unpacking", command, UNPACK_TIMEOUT)?;
    if !output.status.success() {
        bail!(
            "Cannot unpack {}: {}",
            packed.display(),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packed_kernel_is_found_and_a_short_image_is_refused() {
        let mut image = vec![0; 2048];
        image[SETUP_SECTORS] = 1;
        image[PAYLOAD_OFFSET] = 16;
        image[PAYLOAD_LENGTH] = 10;
        image[1040..1046].copy_from_slice(b"packed");
        assert_eq!(payload(&image), Some(&b"packed"[..]));
        image.truncate(1045);
        assert_eq!(payload(&image), None);
    }
}
