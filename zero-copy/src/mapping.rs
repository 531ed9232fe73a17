//! Mappings of memory that others may take away.

use crate::fault::{self, Covered};
use farlane_sys::Mmap;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::mm::ProtFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
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
    /// Too many at a time, see [`fault`].
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

/// A shared mapping of a file's bytes.
///
/// The bytes are written by others at any time; they are therefore never lent out as a slice.
#[derive(Debug)]
pub struct Mapping {
    /// Ends first: the addresses may be somebody else's as soon as they are unmapped.
    covered: Covered,
    memory: Mmap,
}

impl Mapping {
    /// Maps `length` bytes from `offset` of `fd`, readable and, if asked, writable.
    ///
    /// # Errors
    /// Zero length, or what `mmap` says. The file must not shrink while it is mapped: see
    /// [`fault`].
    pub fn new(
        fd: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        writable: bool,
    ) -> Result<Self, MappingError> {
        let access = if writable {
            Mmap::READ_WRITE
        } else {
            ProtFlags::READ
        };
        let bytes = bytes(length)?;
        Self::cover(Mmap::shared(fd, offset, bytes, access).map_err(failed(offset, bytes))?)
    }

    /// Reserves `length` bytes of address space without memory behind them.
    ///
    /// # Errors
    /// Zero length, or what `mmap` says.
    pub fn reserve(length: u64) -> Result<Self, MappingError> {
        let bytes = bytes(length)?;
        Self::cover(Mmap::reserve(bytes).map_err(failed(0, bytes))?)
    }

    fn cover(memory: Mmap) -> Result<Self, MappingError> {
        let start = memory.base().as_ptr().expose_provenance();
        let covered = fault::cover(start, memory.len()).ok_or(MappingError::Full)?;
        Ok(Self { covered, memory })
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
        let laid = self.memory.overlay(at, fd, offset, length);
        laid.map_err(failed(offset, length))
    }

    /// First byte. Valid for [`len`](Self::len) bytes while the mapping lives.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.memory.base().as_ptr()
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// How many of its pages had gone when they were touched, because somebody shrank the file:
    /// see [`fault`].
    #[must_use]
    pub fn lost_pages(&self) -> u64 {
        self.covered.lost()
    }

    /// Never: a mapping has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }
}

/// A length that can be mapped.
fn bytes(length: u64) -> Result<usize, MappingError> {
    usize::try_from(length)
        .ok()
        .filter(|&l| l > 0 && isize::try_from(l).is_ok())
        .ok_or(MappingError::Length(length))
}

fn failed(offset: u64, length: usize) -> impl Fn(Errno) -> MappingError {
    move |errno| MappingError::Map {
        offset,
        length: length as u64,
        source: errno.into(),
    }
}
