//! Contiguous memory that a hostile party writes at the same time.

use crate::Mapping;
use farlane_abi::width::to_usize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

/// An access outside of shared memory, or not aligned to eight bytes (four for words).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{length:#x} bytes at {offset:#x} are not inside of {size:#x} shared bytes, or not aligned"
)]
pub struct OutOfBounds {
    /// Offset of the first byte.
    pub offset: usize,
    /// Bytes.
    pub length: usize,
    /// Bytes there are.
    pub size: usize,
}

/// A contiguous mapping for rings and queues.
///
/// Every access is checked against its bounds and is made with atomic loads and stores of eight
/// bytes, so that a value is fetched once and what a hostile peer writes meanwhile cannot be seen
/// twice.
#[derive(Clone, Debug)]
pub struct SharedMemory {
    mapping: Arc<Mapping>,
    /// Where it begins in the mapping, a multiple of eight.
    start: usize,
    /// Bytes that may be accessed: not more than are mapped.
    length: usize,
}

impl SharedMemory {
    /// The whole of a mapping.
    #[must_use]
    pub fn new(mapping: Mapping) -> Self {
        let length = mapping.len();
        Self::first(mapping, length)
    }

    /// The first `length` bytes of a mapping, or as many as there are.
    pub(crate) fn first(mapping: Mapping, length: usize) -> Self {
        Self {
            start: 0,
            length: length.min(mapping.len()),
            mapping: Arc::new(mapping),
        }
    }

    /// `length` bytes of a mapping from `start` on, a multiple of eight, or as many as there are.
    pub(crate) fn inside(mapping: Arc<Mapping>, start: usize, length: usize) -> Self {
        Self {
            start,
            length: length.min(mapping.len().saturating_sub(start)),
            mapping,
        }
    }

    /// `length` bytes of it from `offset` on, a multiple of eight.
    ///
    /// # Errors
    /// They are not all inside.
    pub fn part(&self, offset: usize, length: usize) -> Result<Self, OutOfBounds> {
        self.check(offset, length, 8)?;
        Ok(Self {
            mapping: Arc::clone(&self.mapping),
            start: self.start + offset,
            length,
        })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Never: see [`Mapping::is_empty`].
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Checks that it has so many bytes.
    ///
    /// # Errors
    /// It is shorter.
    pub fn require(&self, bytes: u64) -> Result<(), OutOfBounds> {
        self.check(0, to_usize(bytes), 1).map(drop)
    }

    #[inline]
    fn check(&self, offset: usize, length: usize, align: usize) -> Result<*mut u8, OutOfBounds> {
        let inside = offset
            .checked_add(length)
            .is_some_and(|end| end <= self.length);
        if !inside || !offset.is_multiple_of(align) {
            return Err(OutOfBounds {
                offset,
                length,
                size: self.length,
            });
        }
        // SAFETY: the offset lies inside of this part of the mapping, checked above.
        Ok(unsafe { self.mapping.base().add(self.start + offset) })
    }

    /// The word at `offset`, which both sides access atomically.
    ///
    /// # Errors
    /// Outside, or not aligned to four bytes.
    #[inline]
    pub fn word(&self, offset: usize) -> Result<&AtomicU32, OutOfBounds> {
        let p = self.check(offset, 4, 4)?;
        // SAFETY: in bounds and aligned (the mapping is page-aligned); lives as long as `self`;
        // the memory is only ever accessed atomically by this process.
        Ok(unsafe { AtomicU32::from_ptr(p.cast()) })
    }

    #[inline]
    fn quads(&self, offset: usize, length: usize) -> Result<&[AtomicU64], OutOfBounds> {
        let p = self.check(offset, length.next_multiple_of(8), 8)?;
        // SAFETY: as in `word`, for `length` rounded up to eight bytes.
        Ok(unsafe { std::slice::from_raw_parts(p.cast::<AtomicU64>(), length.div_ceil(8)) })
    }

    /// Copies the value at `offset` out, once.
    ///
    /// # Errors
    /// Outside, or not aligned to eight bytes.
    pub fn read<T: FromBytes + IntoBytes>(&self, offset: usize) -> Result<T, OutOfBounds> {
        let mut value = T::new_zeroed();
        self.read_bytes(offset, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Copies bytes at `offset` out, once.
    ///
    /// # Errors
    /// Outside, or not aligned to eight bytes.
    #[inline]
    pub fn read_bytes(&self, offset: usize, out: &mut [u8]) -> Result<(), OutOfBounds> {
        let quads = self.quads(offset, out.len())?;
        for (chunk, quad) in out.chunks_mut(8).zip(quads) {
            let bytes = quad.load(Ordering::Relaxed).to_ne_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
        Ok(())
    }

    /// Copies a value to `offset`. Its size must be a multiple of eight bytes.
    ///
    /// # Errors
    /// Outside, or not aligned to eight bytes.
    pub fn write<T: IntoBytes + zerocopy::Immutable>(
        &self,
        offset: usize,
        value: &T,
    ) -> Result<(), OutOfBounds> {
        self.write_bytes(offset, value.as_bytes())
    }

    /// Copies bytes to `offset`; a last group of fewer than eight is padded with zeroes.
    ///
    /// # Errors
    /// Outside, or not aligned to eight bytes.
    #[inline]
    pub fn write_bytes(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let quads = self.quads(offset, bytes.len())?;
        for (chunk, quad) in bytes.chunks(8).zip(quads) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            quad.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page() -> SharedMemory {
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        SharedMemory::new(Mapping::new(std::os::fd::AsFd::as_fd(&fd), 0, 4096, true).unwrap())
    }

    #[test]
    fn what_is_written_is_read_back() {
        let memory = page();
        memory.write_bytes(8, b"hello, shared world").unwrap();
        let mut out = [0; 19];
        memory.read_bytes(8, &mut out).unwrap();
        assert_eq!(&out, b"hello, shared world");
        memory.word(4092).unwrap().store(7, Ordering::Relaxed);
        assert_eq!(memory.read::<[u8; 8]>(4088).unwrap()[4], 7);
    }

    proptest! {
        #[test]
        fn no_access_leaves_the_mapping(offset in any::<usize>(), length in 0usize..9000) {
            let memory = page();
            let mut buffer = vec![0; length];
            let fits = offset % 8 == 0 && offset < 4097
                && offset + length.next_multiple_of(8) <= 4096;
            prop_assert_eq!(memory.read_bytes(offset, &mut buffer).is_ok(), fits);
            prop_assert_eq!(memory.write_bytes(offset, &buffer).is_ok(), fits);
            prop_assert_eq!(memory.word(offset).is_ok(), offset % 4 == 0 && offset <= 4092);
        }
    }
}
