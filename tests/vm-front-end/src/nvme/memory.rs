//! Memory of the machine that the driver plays.

use farlane_abi::width::{to_u64, to_usize};
use farlane_zero_copy::{Mapping, OutOfBounds, SharedMemory};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// A range of guest-physical addresses with a file behind it. Pages are handed out one after the
/// other and never come back.
#[derive(Debug)]
pub struct Memory {
    file: Arc<OwnedFd>,
    bytes: SharedMemory,
    base: u64,
    next: u64,
}

impl Memory {
    /// `bytes` of memory at guest-physical `base`, both multiples of the page size.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(base: u64, bytes: u64) -> io::Result<Self> {
        let file = memfd_create("nvme-driver", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes)?;
        let mapping = Mapping::new(file.as_fd(), 0, bytes, true).map_err(io::Error::other)?;
        Ok(Self {
            file: Arc::new(file),
            bytes: SharedMemory::new(mapping),
            base,
            next: 0,
        })
    }

    /// First address.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        to_u64(self.bytes.len())
    }

    /// Never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// All of it, from the first address on.
    #[must_use]
    pub fn bytes(&self) -> &SharedMemory {
        &self.bytes
    }

    /// Takes whole pages for `bytes`; zeroed, because they have not been used before.
    ///
    /// # Errors
    /// None are left.
    pub fn allocate(&mut self, bytes: u64) -> io::Result<u64> {
        let at = self.next;
        let next = at + bytes.next_multiple_of(PAGE);
        if next > self.len() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.next = next;
        Ok(self.base + at)
    }

    /// Offset of an address.
    #[must_use]
    pub fn offset(&self, address: u64) -> usize {
        to_usize(address.wrapping_sub(self.base))
    }

    /// Copies from it; the address is a multiple of eight.
    ///
    /// # Errors
    /// Outside, or not aligned.
    pub fn read(&self, address: u64, data: &mut [u8]) -> Result<(), OutOfBounds> {
        self.bytes.read_bytes(self.offset(address), data)
    }

    /// Copies to it; the address is a multiple of eight.
    ///
    /// # Errors
    /// Outside, or not aligned.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), OutOfBounds> {
        self.bytes.write_bytes(self.offset(address), data)
    }
}
