//! A raw disk.

use crate::memory::Memory;
use anyhow::{Context as _, Result, ensure};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

/// A disk, past the page cache.
pub struct Disk(File);

impl Disk {
    /// Opens it.
    pub fn open(path: &str) -> Result<Self> {
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let file = options
            .open(path)
            .with_context(|| format!("Cannot open {path}"))?;
        Ok(Self(file))
    }

    /// Fills `length` bytes from the beginning with what [`byte_at`] says, and reads nothing back.
    pub fn fill(path: &str, length: usize) -> Result<()> {
        let file = File::options().write(true).open(path)?;
        let bytes: Vec<u8> = (0..length).map(byte_at).collect();
        file.write_all_at(&bytes, 0)?;
        file.sync_all()?;
        // SAFETY: no memory is involved.
        let dropped =
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        ensure!(dropped == 0, "The page cache keeps {path}");
        Ok(())
    }

    /// Reads into memory of this process.
    pub fn read(
        &self,
        at: usize,
        memory: &Memory,
        offset: usize,
        length: usize,
    ) -> Result<io::Result<usize>> {
        let (to, at) = (memory.at(offset, length)?, i64::try_from(at)?);
        // SAFETY: `length` bytes at `to` are mapped, checked by `at`.
        Ok(count(unsafe {
            libc::pread(self.0.as_raw_fd(), to, length, at)
        }))
    }

    /// Writes from memory of this process.
    pub fn write(
        &self,
        at: usize,
        memory: &Memory,
        offset: usize,
        length: usize,
    ) -> Result<io::Result<usize>> {
        let (from, at) = (memory.at(offset, length)?, i64::try_from(at)?);
        // SAFETY: as in `read`.
        Ok(count(unsafe {
            libc::pwrite(self.0.as_raw_fd(), from, length, at)
        }))
    }
}

fn count(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// What stands on the disk.
pub fn byte_at(at: usize) -> u8 {
    u8::try_from((at / 512 * 31 + at * 7) % 251).unwrap_or(0)
}
