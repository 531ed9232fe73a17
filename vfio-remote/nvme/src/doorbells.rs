//! The doorbell page: written by the function's users as messages, or mapped by the borrower.

use crate::bits::PAGE;
use crate::ids::{CqId, SqId};
use farlane_zero_copy::{Mapping, SharedMemory};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::Ordering;

/// A page of doorbells: eight bytes a queue pair (CAP.DSTRD 0), submission tail first.
#[derive(Clone, Debug)]
pub struct DoorbellPage(SharedMemory);

/// Memory for a page of doorbells at `offset`, which cannot shrink under whoever maps it.
pub fn new_file(offset: u64) -> std::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("farlane-doorbells", flags)?;
    rustix::fs::ftruncate(&file, offset + PAGE)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

impl DoorbellPage {
    /// The page in a file, with all doorbells zero.
    pub fn new(file: &OwnedFd, offset: u64) -> std::io::Result<Self> {
        let mapping =
            Mapping::new(file.as_fd(), offset, PAGE, true).map_err(std::io::Error::other)?;
        let page = Self(SharedMemory::new(mapping));
        page.clear();
        Ok(page)
    }

    /// Sets all of them to zero.
    pub fn clear(&self) {
        for at in (0..self.0.len()).step_by(4) {
            self.store(at, 0);
        }
    }

    fn store(&self, at: usize, value: u32) {
        if let Ok(word) = self.0.word(at) {
            word.store(value, Ordering::Release);
        }
    }

    fn load(&self, at: usize) -> u32 {
        self.0
            .word(at)
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// A doorbell write that came as a message; those that are not a whole doorbell do nothing.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if let (Ok(at), Ok(value)) = (usize::try_from(offset), data.try_into()) {
            self.store(at, u32::from_le_bytes(value));
        }
    }

    /// Tail of a submission queue as the driver has it.
    pub fn tail(&self, queue: SqId) -> u32 {
        self.load(queue.index() * 8)
    }

    /// Head of a completion queue as the driver has it.
    pub fn head(&self, queue: CqId) -> u32 {
        self.load(queue.index() * 8 + 4)
    }

    /// A new submission queue begins at zero.
    pub fn reset_tail(&self, queue: SqId) {
        self.store(queue.index() * 8, 0);
    }

    /// A new completion queue begins at zero.
    pub fn reset_head(&self, queue: CqId) {
        self.store(queue.index() * 8 + 4, 0);
    }
}
