//! Loop devices whose blocks can be taken away and given back: a path to a disk that fails.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

// linux/loop.h
const LOOP_SET_STATUS64: libc::c_ulong = 0x4c04;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4c05;
const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// How often somebody else may take the loop device that was free.
const TRIES: u32 = 16;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    names_and_key: [[u8; 32]; 5],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const NOTHING: Info = Info {
    device: 0,
    inode: 0,
    rdevice: 0,
    offset: 0,
    size_limit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    names_and_key: [[0; 32]; 5],
    init: [0; 2],
};

/// A loop device over a file. It goes when this and everything else that has it open has gone.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    device: File,
}

impl LoopDevice {
    /// A free loop device over a file. Needs root.
    ///
    /// # Errors
    /// When there is none.
    pub fn new(file: &Path) -> Result<Self> {
        let backing = File::options()
            .read(true)
            .write(true)
            .open(file)
            .with_context(|| format!("Cannot open {}", file.display()))?;
        let control = Path::new("/dev/loop-control");
        let control = File::options()
            .read(true)
            .write(true)
            .open(control)
            .context("Cannot use loop devices (this needs root)")?;
        for _ in 0..TRIES {
            // SAFETY: the call takes no pointer.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                return Err(std::io::Error::last_os_error()).context("No loop device is free");
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = File::options()
                .read(true)
                .write(true)
                .open(&path)
                .with_context(|| format!("Cannot open {}", path.display()))?;
            let mut config = Config {
                fd: u32::try_from(backing.as_raw_fd())?,
                block_size: 0,
                info: NOTHING,
                reserved: [0; 8],
            };
            config.info.flags = LO_FLAGS_AUTOCLEAR;
            // SAFETY: the kernel reads a `struct loop_config`.
            let rc = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) };
            if rc == 0 {
                return Ok(Self { path, device });
            }
            let error = std::io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EBUSY) {
                return Err(error)
                    .with_context(|| format!("Cannot give {} blocks", path.display()));
            }
        }
        bail!("Every free loop device was taken by others")
    }

    /// Its device node.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes all blocks but the first sector away, so that reads and writes fail, or gives them
    /// back.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_failing(&self, failing: bool) -> Result<()> {
        let mut info = NOTHING;
        let fd = self.device.as_raw_fd();
        // SAFETY: the kernel writes a `struct loop_info64`.
        let mut rc = unsafe { libc::ioctl(fd, LOOP_GET_STATUS64, &raw mut info) };
        if rc == 0 {
            info.size_limit = if failing { 512 } else { 0 };
            // SAFETY: the kernel reads a `struct loop_info64`.
            rc = unsafe { libc::ioctl(fd, LOOP_SET_STATUS64, &raw const info) };
        }
        if rc != 0 {
            return Err(std::io::Error::last_os_error())
                .with_context(|| format!("Cannot change {}", self.path.display()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packages::is_root;
    use std::os::unix::fs::FileExt;

    #[test]
    fn the_structures_are_those_of_the_kernel() {
        assert_eq!((size_of::<Info>(), size_of::<Config>()), (232, 304));
    }

    #[test]
    fn a_failing_device_cannot_be_written_until_it_is_back() {
        if !is_root() || !Path::new("/dev/loop-control").exists() {
            eprintln!("Loop devices need root: nothing was tested");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("blocks");
        File::create(&file).unwrap().set_len(1 << 20).unwrap();
        let device = LoopDevice::new(&file).unwrap();
        let disk = File::options().write(true).open(device.path()).unwrap();
        disk.write_all_at(&[1; 4096], 8192).unwrap();
        device.set_failing(true).unwrap();
        assert!(disk.write_all_at(&[2; 4096], 8192).is_err());
        device.set_failing(false).unwrap();
        disk.write_all_at(&[3; 4096], 8192).unwrap();
        disk.sync_all().unwrap();
        assert_eq!(std::fs::read(&file).unwrap()[8192], 3);
    }
}
