//! Memory shared with another party: bounds are checked here and nowhere else.

use crate::{Origin, TransportError};
use farlane_abi::zerocopy::{FromBytes, Immutable, IntoBytes};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

/// A mapping of this process, unmapped when dropped, not inherited by children.
///
/// The other party may change the memory at any time, so no reference to it is ever made except
/// to atomics.
#[derive(Debug)]
pub struct Map {
    base: NonNull<u8>,
    length: usize,
    origin: Origin,
}

// SAFETY: the mapping belongs to the process, not to a thread; the methods that access it
// without atomics are unsafe and ask for exclusion.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps `length` bytes at `offset` of `fd`, shared.
    ///
    /// # Errors
    /// `ENOMEM` where there are no addresses left, `EACCES`, `EINVAL` or `ENODEV` where the file
    /// cannot be mapped like this.
    pub fn shared(fd: BorrowedFd<'_>, offset: u64, length: usize) -> Result<Self, TransportError> {
        // SAFETY: the kernel chooses an address range that nothing else uses.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                offset,
            )
        };
        let map = Self::take(base, length)?;
        // SAFETY: the range is the mapping just made. Kernels refuse the advice for device
        // memory that a driver has already marked so.
        let _ =
            unsafe { rustix::mm::madvise(map.base.as_ptr().cast(), length, Advice::LinuxDontFork) };
        Ok(map)
    }

    /// Maps `length` bytes of private zeroed memory.
    ///
    /// # Errors
    /// `ENOMEM` where there is no memory left.
    pub fn anonymous(length: usize) -> Result<Self, TransportError> {
        // SAFETY: the kernel chooses an address range that nothing else uses.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        Self::take(base, length)
    }

    fn take(
        base: rustix::io::Result<*mut core::ffi::c_void>,
        length: usize,
    ) -> Result<Self, TransportError> {
        let base = base.map_err(|source| TransportError::os("mmap", source))?;
        let base = NonNull::new(base.cast()).ok_or(TransportError::Protocol("mmap at zero"))?;
        Ok(Self {
            base,
            length,
            origin: Origin::here(),
        })
    }

    /// Pointer to the first byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there is nothing; never so for a mapping that was made.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The address of `length` bytes at `offset`.
    ///
    /// # Panics
    /// When they do not lie inside: offsets come from this program, never from the other side.
    #[must_use]
    pub fn at(&self, offset: usize, length: usize) -> NonNull<u8> {
        let inside = offset
            .checked_add(length)
            .is_some_and(|end| end <= self.length);
        assert!(
            inside,
            "{length} bytes at {offset} of a mapping of {}",
            self.length
        );
        // SAFETY: offset is inside the mapping.
        unsafe { self.base.add(offset) }
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

impl Drop for Map {
    fn drop(&mut self) {
        // A child may have something else there.
        if self.origin.is_here() {
            // SAFETY: the mapping is ours and its owner is gone.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
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
