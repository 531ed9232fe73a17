//! Memory mappings that unmap themselves.

use crate::fault::{self, Covered};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, compiler_fence};
use thiserror::Error;

/// Why a mapping could not be made.
#[derive(Debug, Error)]
pub enum MappingError {
    /// A length of zero, or beyond the address space.
    #[error("Cannot map {0:#x} bytes")]
    Length(u64),
    /// The kernel refused.
    #[error("Cannot map {length:#x} bytes at file offset {offset:#x}")]
    Map {
        /// Offset in the file.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Too many at a time, see [`fault`](crate::fault).
    #[error("There are {} mappings already", fault::PLACES)]
    Full,
}

/// Fills part of a file with zeroes by giving its pages back, also for all who map them.
///
/// # Errors
/// When the file system cannot, or the range is none.
pub fn punch_hole(file: impl AsFd, offset: u64, length: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, flags, offset, length)?;
    // rustix tells the compiler that this call writes no memory. It does, where the file is mapped:
    // what was read before must be read again.
    compiler_fence(Ordering::SeqCst);
    Ok(())
}

/// A shared mapping of a file's bytes, unmapped on drop.
///
/// The bytes are written by others at any time; they are therefore never lent out as a slice.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    length: usize,
    /// Until it is unmapped.
    covered: Option<Covered>,
}

// SAFETY: a mapping is plain memory without thread affinity. All access goes through raw
// pointers or atomics whose users do not assume exclusive access.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes from `offset` of `fd`, readable and, if asked, writable.
    ///
    /// # Errors
    /// Zero length, or what `mmap` says. The file must not shrink while it is mapped: see
    /// [`fault`](crate::fault).
    pub fn new(
        fd: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        writable: bool,
    ) -> Result<Self, MappingError> {
        let bytes = Self::check(length)?;
        let prot = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                prot,
                MapFlags::SHARED,
                fd,
                offset,
            )
        };
        Self::wrap(base, bytes, offset)
    }

    /// Reserves `length` bytes of address space without memory behind them.
    ///
    /// # Errors
    /// Zero length, or what `mmap` says.
    pub fn reserve(length: u64) -> Result<Self, MappingError> {
        let bytes = Self::check(length)?;
        // SAFETY: as in `new`.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        Self::wrap(base, bytes, 0)
    }

    fn check(length: u64) -> Result<usize, MappingError> {
        usize::try_from(length)
            .ok()
            .filter(|&l| l > 0 && isize::try_from(l).is_ok())
            .ok_or(MappingError::Length(length))
    }

    fn wrap(
        base: rustix::io::Result<*mut core::ffi::c_void>,
        length: usize,
        offset: u64,
    ) -> Result<Self, MappingError> {
        let fail = |source: std::io::Error| MappingError::Map {
            offset,
            length: length as u64,
            source,
        };
        let base = base.map_err(|e| fail(e.into()))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| fail(std::io::ErrorKind::OutOfMemory.into()))?;
        let covered = fault::cover(base.as_ptr().expose_provenance(), length);
        let mapping = Self {
            base,
            length,
            covered,
        };
        if mapping.covered.is_none() {
            return Err(MappingError::Full);
        }
        Ok(mapping)
    }

    /// Lays `length` bytes from `offset` of `fd` over this mapping, from byte `at` on.
    ///
    /// # Errors
    /// What lies outside of this mapping, or what `mmap` says.
    pub(crate) fn overlay(
        &mut self,
        at: usize,
        fd: BorrowedFd<'_>,
        offset: u64,
        length: usize,
    ) -> Result<(), MappingError> {
        if length == 0 || at.checked_add(length).is_none_or(|end| end > self.length) {
            return Err(MappingError::Length(length as u64));
        }
        // SAFETY: [at, at + length) lies inside of this mapping, which nobody else knows yet
        // (`&mut self`), so replacing its pages affects nobody.
        let base = unsafe {
            rustix::mm::mmap(
                self.base.as_ptr().add(at).cast(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                fd,
                offset,
            )
        };
        base.map(|_| ()).map_err(|e| MappingError::Map {
            offset,
            length: length as u64,
            source: e.into(),
        })
    }

    /// First byte. Valid for [`len`](Self::len) bytes while the mapping lives.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// How many of its pages had gone when they were touched, because somebody shrank the file:
    /// see [`fault`](crate::fault).
    #[must_use]
    pub fn lost_pages(&self) -> u64 {
        self.covered.as_ref().map_or(0, Covered::lost)
    }

    /// Never: a mapping has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First: the range may be somebody else's at once.
        self.covered = None;
        // SAFETY: the range was mapped by us, and no pointer into it outlives its owner.
        if let Err(e) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) } {
            log::error!("Cannot unmap {:#x} bytes: {e}", self.length);
        }
    }
}
