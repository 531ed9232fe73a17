//! Mappings.

use anyhow::{Context as _, Result, ensure};
use farlane_sys::Mmap;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;

/// A shared mapping of a file, or memory of this process alone. Its bytes are accessed by volatile
/// or atomic operations only.
pub struct Memory(Mmap);

impl Memory {
    /// `length` bytes of `file` at `offset`.
    pub fn of(file: impl AsFd, offset: u64, length: usize) -> Result<Self> {
        let mapping = Mmap::shared(file, offset, length, Mmap::READ_WRITE);
        Ok(Self(mapping.with_context(|| {
            format!("Cannot map {length} bytes at {offset:#x}")
        })?))
    }

    /// The last `length` bytes of the file at `path`: where honest programs that use the same
    /// device come last.
    pub fn open(path: &str, length: usize) -> Result<Self> {
        let file = File::options().read(true).write(true).open(path);
        let file = file.with_context(|| format!("Cannot open {path}"))?;
        let size = file.metadata()?.len();
        let offset = size.checked_sub(u64::try_from(length)?);
        Self::of(
            file,
            offset.with_context(|| format!("{path} has {size} bytes"))?,
            length,
        )
    }

    /// Pages of this process.
    pub fn private(length: usize) -> Result<Self> {
        Ok(Self(Mmap::anonymous(length)?))
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.0.base().as_ptr().addr() as u64
    }

    /// The bytes at `offset`, for system calls.
    pub fn at(&self, offset: usize, length: usize) -> Result<*mut libc::c_void> {
        let place = self.0.get(offset, length);
        let place = place.with_context(|| format!("{length} bytes at {offset} are not mapped"))?;
        Ok(place.as_ptr().cast())
    }

    /// The word at `offset`.
    pub fn word(&self, offset: usize) -> Result<&AtomicU64> {
        let word = self.at(offset, 8)?.cast::<u64>();
        ensure!(word.is_aligned(), "{offset} is not a multiple of eight");
        // SAFETY: eight aligned bytes of a mapping that lives as long as `self`.
        Ok(unsafe { AtomicU64::from_ptr(word) })
    }

    /// Reads bytes.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let from = self.at(offset, bytes.len())?.cast::<u8>();
        for (i, byte) in bytes.iter_mut().enumerate() {
            // SAFETY: inside of the mapping, checked above.
            *byte = unsafe { from.add(i).read_volatile() };
        }
        Ok(())
    }

    /// Writes bytes.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let to = self.at(offset, bytes.len())?.cast::<u8>();
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: inside of the mapping, checked above.
            unsafe { to.add(i).write_volatile(*byte) };
        }
        Ok(())
    }
}
