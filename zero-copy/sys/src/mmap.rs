//! Memory mappings that unmap themselves.

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};
use rustix::mm::{madvise, mmap, mmap_anonymous, mremap_fixed, munmap};
use std::os::fd::AsFd;
use std::ptr::{NonNull, null_mut};

/// A mapping of this process, at addresses of the kernel's choice, unmapped on drop.
///
/// Others may write its bytes at any time: they are reached by pointers, which are valid while it
/// lives.
#[derive(Debug)]
pub struct Mmap {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: a mapping is plain memory without thread affinity, and here are only pointers into it.
unsafe impl Send for Mmap {}
// SAFETY: as above.
unsafe impl Sync for Mmap {}

impl Mmap {
    /// Readable and writable.
    pub const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

    /// Maps `length` bytes at `offset` of a file, which share them with all who map it so.
    ///
    /// # Errors
    /// What `mmap` says: `EINVAL` where `length` is zero or `offset` not a multiple of the page.
    pub fn shared(
        file: impl AsFd,
        offset: u64,
        length: usize,
        access: ProtFlags,
    ) -> Result<Self, Errno> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe { mmap(null_mut(), length, access, MapFlags::SHARED, file, offset) }?;
        Self::new(base, length)
    }

    /// Maps `length` bytes of this process's own, readable, writable and zero.
    ///
    /// # Errors
    /// What `mmap` says.
    pub fn anonymous(length: usize) -> Result<Self, Errno> {
        Self::private(length, Self::READ_WRITE, MapFlags::PRIVATE)
    }

    /// The same in huge pages of the default size, which are there from the beginning. `length` is
    /// a multiple of that size.
    ///
    /// # Errors
    /// What `mmap` says: `ENOMEM` where no huge pages are left.
    pub fn huge_pages(length: usize) -> Result<Self, Errno> {
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::POPULATE;
        Self::private(length, Self::READ_WRITE, flags)
    }

    /// Reserves `length` bytes of address space, with nothing behind them.
    ///
    /// # Errors
    /// What `mmap` says.
    pub fn reserve(length: usize) -> Result<Self, Errno> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        Self::private(length, ProtFlags::empty(), flags)
    }

    fn private(length: usize, access: ProtFlags, flags: MapFlags) -> Result<Self, Errno> {
        // SAFETY: as in `shared`.
        let base = unsafe { mmap_anonymous(null_mut(), length, access, flags) }?;
        Self::new(base, length)
    }

    fn new(base: *mut std::ffi::c_void, length: usize) -> Result<Self, Errno> {
        // What was mapped at zero, where that is allowed, stays mapped and unused.
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { base, length })
    }

    /// Lays `length` bytes at `offset` of a file over this mapping, from byte `at` on, shared,
    /// readable and writable.
    ///
    /// # Errors
    /// `EINVAL` where they do not lie inside; what `mmap` says.
    pub fn overlay(
        &mut self,
        at: usize,
        file: impl AsFd,
        offset: u64,
        length: usize,
    ) -> Result<(), Errno> {
        let place = self.get(at, length).ok_or(Errno::INVAL)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: [at, at + length) lies inside of this mapping, which nobody else uses now
        // (`&mut self`), so replacing its pages affects nobody.
        unsafe {
            mmap(
                place.as_ptr().cast(),
                length,
                Self::READ_WRITE,
                flags,
                file,
                offset,
            )
        }
        .map(drop)
    }

    /// Moves it to `address`, where it takes the place of what was mapped there, and stays.
    ///
    /// # Errors
    /// What `mremap` says; it is unmapped then, and what was at `address` may be, too.
    ///
    /// # Safety
    /// `length` bytes at `address` are the caller's, to be replaced.
    pub unsafe fn move_to(self, address: usize) -> Result<(), Errno> {
        let mapping = std::mem::ManuallyDrop::new(self);
        let (base, length) = (mapping.base.as_ptr().cast(), mapping.length);
        let to = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: ours, whole, and nobody has pointers into it any more; the target is the
        // caller's.
        let moved = unsafe { mremap_fixed(base, length, length, MremapFlags::MAYMOVE, to) };
        if moved.is_err() {
            drop(std::mem::ManuallyDrop::into_inner(mapping));
        }
        moved.map(drop)
    }

    /// Keeps it from children of this process, which have nothing at its addresses then. Whoever
    /// drops it in a child unmaps what the child has there.
    ///
    /// # Errors
    /// What `madvise` says: `EINVAL` for memory of a device whose driver has seen to it already.
    pub fn keep_from_children(&self) -> Result<(), Errno> {
        // SAFETY: the range is this mapping's, and the advice changes nothing in this process.
        unsafe {
            madvise(
                self.base.as_ptr().cast(),
                self.length,
                Advice::LinuxDontFork,
            )
        }
    }

    /// First byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Never: the kernel maps no zero bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The address of `length` bytes at `offset`, where they lie inside.
    #[must_use]
    pub fn get(&self, offset: usize, length: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(length)?;
        // SAFETY: offset is inside of the mapping.
        (end <= self.length).then(|| unsafe { self.base.add(offset) })
    }
}

impl Drop for Mmap {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this value, and no pointer into it outlives its owner.
        if let Err(e) = unsafe { munmap(self.base.as_ptr().cast(), self.length) } {
            log::error!("Cannot unmap {:#x} bytes: {e}", self.length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    #[test]
    fn what_lies_outside_is_not_lent_nor_replaced() {
        let file = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 2 * PAGE as u64).unwrap();
        let mut mapping = Mmap::reserve(2 * PAGE).unwrap();
        assert!(mapping.get(PAGE, PAGE).is_some());
        assert!(mapping.get(PAGE, PAGE + 1).is_none() && mapping.get(usize::MAX, 2).is_none());
        assert_eq!(mapping.overlay(PAGE, &file, 0, PAGE), Ok(()));
        for (at, length) in [(PAGE, 2 * PAGE), (2 * PAGE, PAGE), (usize::MAX, PAGE)] {
            assert_eq!(mapping.overlay(at, &file, 0, length), Err(Errno::INVAL));
        }
    }

    #[test]
    fn those_who_map_the_same_bytes_see_what_is_written() {
        let file = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 2 * PAGE as u64).unwrap();
        let (both, page) = (Mmap::READ_WRITE, PAGE as u64);
        let whole = Mmap::shared(&file, 0, 2 * PAGE, both).unwrap();
        let part = Mmap::shared(&file, page, PAGE, ProtFlags::READ).unwrap();
        // SAFETY: in bounds, and nobody else uses the file.
        unsafe {
            whole.get(PAGE, 1).unwrap().write(7);
            assert_eq!(part.base().read(), 7);
        }
        assert_eq!(Mmap::shared(&file, 0, 0, both).unwrap_err(), Errno::INVAL);
    }
}
