//! Memory shared with another party: bounds are checked here and nowhere else.

use crate::{Origin, TransportError};
use farlane_abi::zerocopy::{FromBytes, Immutable, IntoBytes};
use farlane_sys::Mmap;
use rustix::io::Errno;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

/// A mapping of this process, unmapped when dropped, not inherited by children. Derefs to its
/// [`Mmap`].
///
/// The other party may change the memory at any time, so no reference to it is ever made except
/// to atomics. The methods that access it without atomics are unsafe and ask for exclusion.
#[derive(Debug)]
pub struct Map {
    memory: ManuallyDrop<Mmap>,
    origin: Origin,
}

impl Map {
    /// Maps `length` bytes at `offset` of `fd`, shared.
    ///
    /// # Errors
    /// `ENOMEM` where there are no addresses left, `EACCES`, `EINVAL` or `ENODEV` where the file
    /// cannot be mapped like this.
    pub fn shared(fd: BorrowedFd<'_>, offset: u64, length: usize) -> Result<Self, TransportError> {
        let map = Self::new(Mmap::shared(fd, offset, length, Mmap::READ_WRITE))?;
        // Kernels refuse it for device memory that a driver has already marked so.
        let _ = map.keep_from_children();
        Ok(map)
    }

    /// Maps `length` bytes of private zeroed memory.
    ///
    /// # Errors
    /// `ENOMEM` where there is no memory left.
    pub fn anonymous(length: usize) -> Result<Self, TransportError> {
        Self::new(Mmap::anonymous(length))
    }

    fn new(memory: Result<Mmap, Errno>) -> Result<Self, TransportError> {
        let memory = memory.map_err(|source| TransportError::os("mmap", source))?;
        Ok(Self {
            memory: ManuallyDrop::new(memory),
            origin: Origin::here(),
        })
    }

    /// The address of `length` bytes at `offset`.
    ///
    /// # Panics
    /// When they do not lie inside: offsets come from this program, never from the other side.
    #[must_use]
    pub fn at(&self, offset: usize, length: usize) -> NonNull<u8> {
        match self.get(offset, length) {
            Some(place) => place,
            None => panic!("{length} bytes at {offset} of a mapping of {}", self.len()),
        }
    }

    /// The 32-bit word at `offset`, a multiple of four.
    ///
    /// # Panics
    /// As [`at`](Self::at), or when `offset` is not aligned.
    #[must_use]
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(align_of::<AtomicU32>()));
        let word = self.at(offset, size_of::<AtomicU32>());
        // SAFETY: inside the mapping for as long as `self` lives, aligned (mappings are page
        // aligned), and atomics may change under a shared reference.
        unsafe { word.cast::<AtomicU32>().as_ref() }
    }

    /// Copies a value out.
    ///
    /// # Panics
    /// As [`at`](Self::at).
    ///
    /// # Safety
    /// No other thread of this process writes these bytes at the same time. The other party may:
    /// every bit pattern is a valid `T`.
    #[must_use]
    pub unsafe fn read<T: FromBytes>(&self, offset: usize) -> T {
        let from = self.at(offset, size_of::<T>());
        // SAFETY: inside the mapping; any bits are a `T`.
        unsafe { from.cast::<T>().read_unaligned() }
    }

    /// Copies bytes out of the mapping.
    ///
    /// # Panics
    /// As [`at`](Self::at).
    ///
    /// # Safety
    /// As [`read`](Self::read).
    pub unsafe fn read_bytes(&self, offset: usize, to: &mut [u8]) {
        let from = self.at(offset, to.len());
        // SAFETY: inside the mapping; `to` is exclusively ours, so they do not overlap.
        unsafe { from.copy_to_nonoverlapping(NonNull::from_mut(to).cast(), to.len()) }
    }

    /// Copies a value in.
    ///
    /// # Panics
    /// As [`at`](Self::at).
    ///
    /// # Safety
    /// No other thread of this process accesses these bytes at the same time.
    pub unsafe fn write<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        // SAFETY: as promised by the caller.
        unsafe { self.write_bytes(offset, value.as_bytes()) }
    }

    /// Copies bytes into the mapping.
    ///
    /// # Panics
    /// As [`at`](Self::at).
    ///
    /// # Safety
    /// As [`write`](Self::write).
    pub unsafe fn write_bytes(&self, offset: usize, from: &[u8]) {
        let to = self.at(offset, from.len());
        // SAFETY: inside the mapping; a Rust reference never points into it, so they do not
        // overlap.
        unsafe { to.copy_from_nonoverlapping(NonNull::from_ref(from).cast(), from.len()) }
    }
}

impl Deref for Map {
    type Target = Mmap;

    fn deref(&self) -> &Mmap {
        &self.memory
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // A child may have something else there.
        if self.origin.is_here() {
            // SAFETY: only here, and it is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn what_is_written_is_read_back_up_to_the_last_byte() {
        let map = Map::anonymous(4096).unwrap();
        // SAFETY: one thread.
        unsafe { map.write_bytes(4092, &[1, 2, 3, 4]) };
        assert_eq!(map.word(4092).load(Ordering::Relaxed), 0x0403_0201);
    }

    #[test]
    #[should_panic(expected = "8 bytes at 4092 of a mapping of 4096")]
    fn a_value_that_ends_beyond_the_mapping_is_refused() {
        let map = Map::anonymous(4096).unwrap();
        // SAFETY: one thread.
        let _: [u8; 8] = unsafe { map.read(4092) };
    }

    #[test]
    #[should_panic(expected = "of a mapping of 4096")]
    fn an_offset_that_overflows_is_refused() {
        let map = Map::anonymous(4096).unwrap();
        let _ = map.at(usize::MAX, 2);
    }
}
