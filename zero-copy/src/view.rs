//! One consistent state of an address space, kept as it is while transfers use it.

use crate::snapshot::{AddressSpaceError, Snapshot};
use farlane_abi::width::to_u64;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// One state of an [`AddressSpace`](crate::AddressSpace). While it lives, the memory that it
/// resolves stays mapped, and whoever takes a range of it away waits: a transfer keeps it from
/// begin to end, a thread that sleeps keeps none.
#[derive(Debug)]
pub struct View {
    state: Arc<Snapshot>,
}

impl View {
    /// A view of `state`, which is the current one: its lock is held.
    pub(crate) fn new(state: &Arc<Snapshot>) -> Self {
        state.views.enter();
        Self {
            state: Arc::clone(state),
        }
    }

    pub(crate) fn state(&self) -> &Snapshot {
        &self.state
    }

    /// Whether both are of one state of one address space.
    #[must_use]
    pub fn is_same_state(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Calls `each(first byte, bytes)` for every mapped run of `length` bytes at guest-physical
    /// `address`, in order. The bytes stay mapped as long as this view, or a clone of it, lives;
    /// others write them at any time.
    ///
    /// # Errors
    /// Not all of it is memory, or it is to be written and is not writable. `each` may have been
    /// called for a part then.
    pub fn resolve(
        &self,
        address: u64,
        length: u64,
        writable: bool,
        mut each: impl FnMut(*mut u8, usize),
    ) -> Result<(), AddressSpaceError> {
        let mut refused = false;
        self.state.resolve(address, length, |range, offset, run| {
            refused |= writable && !range.writable;
            if let Ok(run) = usize::try_from(run)
                && !refused
            {
                each(range.mapping.base().wrapping_add(offset), run);
            }
        })?;
        if refused {
            return Err(AddressSpaceError::ReadOnly { address });
        }
        Ok(())
    }

    /// How many of `length` bytes at guest-physical `address` are memory of devices, as
    /// [`map_device`](crate::AddressSpace::map_device) has it.
    #[must_use]
    pub fn device_bytes(&self, address: u64, length: u64) -> u64 {
        self.state.device_bytes(address, length)
    }

    /// The four bytes at `address`, a multiple of four, which can be written.
    ///
    /// # Errors
    /// They are not memory, or not writable.
    pub fn word(&self, address: u64) -> Result<&AtomicU32, AddressSpaceError> {
        let [word] = self.words(address)?;
        Ok(word)
    }

    /// So many words of four bytes from `address` on, a multiple of four, which can be written.
    ///
    /// # Errors
    /// They are not memory in one piece, or not writable.
    pub fn words<const COUNT: usize>(
        &self,
        address: u64,
    ) -> Result<&[AtomicU32; COUNT], AddressSpaceError> {
        let bytes = size_of::<[AtomicU32; COUNT]>();
        let length = to_u64(bytes);
        let mut found = None;
        self.resolve(address, length, true, |base, run| {
            if run == bytes && base.addr().is_multiple_of(align_of::<AtomicU32>()) {
                found = Some(base.cast::<[AtomicU32; COUNT]>());
            }
        })?;
        let words = found.ok_or(AddressSpaceError::Unmapped { address, length })?;
        // SAFETY: `resolve` gave as many bytes, aligned as checked, in a writable mapping that
        // lives as long as this view, from which the reference is borrowed. Others write them,
        // which atomics allow.
        Ok(unsafe { &*words })
    }

    /// Copies from guest-physical `address`.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn read(&self, address: u64, data: &mut [u8]) -> Result<(), AddressSpaceError> {
        let length = to_u64(data.len());
        let mut rest = data;
        self.resolve(address, length, false, |base, run| {
            if let Some((part, after)) = std::mem::take(&mut rest).split_at_mut_checked(run) {
                // SAFETY: `run` bytes at `base` are mapped while this view lives; `part` is ours
                // and as long.
                unsafe { std::ptr::copy_nonoverlapping(base, part.as_mut_ptr(), run) };
                rest = after;
            }
        })
    }

    /// Copies to guest-physical `address`.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve). A part may have been written then.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), AddressSpaceError> {
        let length = to_u64(data.len());
        let mut rest = data;
        self.resolve(address, length, true, |base, run| {
            if let Some((part, after)) = rest.split_at_checked(run) {
                // SAFETY: as in `read`; the mapping is writable.
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), base, run) };
                rest = after;
            }
        })
    }
}

impl Clone for View {
    fn clone(&self) -> Self {
        Self::new(&self.state)
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.state.views.leave();
    }
}

#[cfg(test)]
mod tests {
    use crate::{AddressSpace, AddressSpaceError};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::{AsFd as _, OwnedFd};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn memory(bytes: u64) -> OwnedFd {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    }

    #[test]
    fn ranges_come_and_go_and_transfers_cross_them() {
        let space = AddressSpace::new();
        let fd = memory(0x4000);
        // Two neighbours, in the other order in the file.
        space.map(0x1000, 0x1000, fd.as_fd(), 0x2000, true).unwrap();
        space.map(0x2000, 0x1000, fd.as_fd(), 0x1000, true).unwrap();
        space
            .map(0x8000, 0x1000, fd.as_fd(), 0x1000, false)
            .unwrap();
        let view = space.view();
        view.write(0x1ffe, &[1, 2, 3, 4]).unwrap();
        let mut read = [0; 2];
        view.read(0x8000, &mut read).unwrap();
        assert_eq!(read, [3, 4]);
        assert!(matches!(
            view.write(0x8000, &[0]),
            Err(AddressSpaceError::ReadOnly { address: 0x8000 })
        ));
        assert!(view.read(0x2fff, &mut read).is_err());
        assert!(view.read(u64::MAX, &mut read).is_err());
        drop(view);
        space.unmap(0x2000, 0x1000).unwrap();
        assert!(space.unmap(0x2000, 0x1000).is_err());
        assert!(space.view().read(0x2000, &mut read).is_err());
        space.view().read(0x1000, &mut read).unwrap();
    }

    #[test]
    fn overlaps_and_short_files_are_refused() {
        let space = AddressSpace::new();
        let fd = memory(0x4000);
        space.map(0x4000, 0x2000, fd.as_fd(), 0, true).unwrap();
        for (start, length) in [
            (0x3000, 0x2000),
            (0x5000, 0x1000),
            (0x4000, 0x2000),
            (0, 0x4000_u64),
        ] {
            let result = space.map(start, length, fd.as_fd(), 0, true);
            assert_eq!(result.is_err(), start != 0, "{start:#x}");
        }
        for (offset, length) in [(0x3000, 0x2000), (u64::MAX, 0x1000), (0, 0)] {
            assert!(
                space
                    .map(0x10_0000, length, fd.as_fd(), offset, true)
                    .is_err()
            );
        }
    }

    #[test]
    fn unmapping_waits_for_the_views_that_have_the_range() {
        let space = AddressSpace::new();
        let fd = memory(0x2000);
        space.map(0, 0x1000, fd.as_fd(), 0, true).unwrap();
        let oldest = space.view();
        space.map(0x1000, 0x1000, fd.as_fd(), 0x1000, true).unwrap();
        let older = space.view().clone();
        let done = Arc::new(AtomicBool::new(false));
        let unmapping = std::thread::spawn({
            let (space, done) = (Arc::clone(&space), Arc::clone(&done));
            move || {
                space.unmap(0, 0x1000).unwrap();
                done.store(true, Ordering::SeqCst);
            }
        });
        while space.view().word(0).is_ok() {
            std::thread::yield_now();
        }
        // Whoever looks now no longer sees it; who has seen it goes on.
        drop(older);
        oldest.write(0, &[7]).unwrap();
        assert!(!done.load(Ordering::SeqCst));
        drop(oldest);
        unmapping.join().unwrap();
    }

    #[test]
    fn what_is_waited_for_keeps_nobody_from_other_memory() {
        let space = AddressSpace::new();
        let fd = memory(0x2000);
        space.map(0, 0x1000, fd.as_fd(), 0, true).unwrap();
        let view = space.view();
        let unmapping = std::thread::spawn({
            let space = Arc::clone(&space);
            move || space.unmap(0, 0x1000).unwrap()
        });
        while space.view().word(0).is_ok() {
            std::thread::yield_now();
        }
        let (tell, told) = std::sync::mpsc::channel();
        let mapping = std::thread::spawn({
            let space = Arc::clone(&space);
            move || {
                space.map(0x1000, 0x1000, fd.as_fd(), 0x1000, true).unwrap();
                tell.send(()).unwrap();
            }
        });
        let mapped = told.recv_timeout(std::time::Duration::from_secs(20));
        drop(view);
        mapping.join().unwrap();
        unmapping.join().unwrap();
        assert!(mapped.is_ok());
        // Two that are taken away at once wait for the same view.
        let view = space.view();
        space
            .map(0, 0x1000, memory(0x1000).as_fd(), 0, true)
            .unwrap();
        let unmap = |address| {
            let space = Arc::clone(&space);
            std::thread::spawn(move || space.unmap(address, 0x1000).unwrap())
        };
        let both = [unmap(0x1000), unmap(0)];
        while [0, 0x1000].iter().any(|&at| space.view().word(at).is_ok()) {
            std::thread::yield_now();
        }
        assert!(!both.iter().any(|thread| thread.is_finished()));
        drop(view);
        both.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn words_lie_in_one_piece_that_can_be_written() {
        let space = AddressSpace::new();
        let fd = memory(0x4000);
        for (address, offset, writable) in
            [(0, 0x2000, true), (0x1000, 0, true), (0x2000, 0, false)]
        {
            space
                .map(address, 0x1000, fd.as_fd(), offset, writable)
                .unwrap();
        }
        let view = space.view();
        let [first, last] = view.words(0xff8).unwrap();
        first.store(1, Ordering::Relaxed);
        last.store(2, Ordering::Relaxed);
        let mut read = [0; 8];
        view.read(0xff8, &mut read).unwrap();
        assert_eq!(read, [1, 0, 0, 0, 2, 0, 0, 0]);
        // Across two pieces, not aligned, not to be written, and where nothing is.
        for address in [0xffc, 0xff6, 0x2000, 0x3000] {
            assert!(view.words::<2>(address).is_err(), "{address:#x}");
        }
    }

    #[test]
    fn memory_of_devices_is_told_from_the_vms() {
        let space = AddressSpace::new();
        let fd = memory(0x4000);
        space.map(0x1000, 0x1000, fd.as_fd(), 0, true).unwrap();
        assert_eq!(space.view().device_bytes(0, u64::MAX), 0);
        space
            .map_device(0x2000, 0x2000, fd.as_fd(), 0x1000, true)
            .unwrap();
        let view = space.view();
        assert_eq!(view.device_bytes(0x1f00, 0x200), 0x100);
        assert_eq!(view.device_bytes(0x3fff, 0x1000), 1);
        assert_eq!(view.device_bytes(0x5000, 0x1000), 0);
        view.write(0x1fff, &[1, 2]).unwrap();
        drop(view);
        space.unmap(0x2000, 0x2000).unwrap();
        assert_eq!(space.view().device_bytes(0, u64::MAX), 0);
    }

    #[test]
    fn words_are_aligned_and_writable() {
        let space = AddressSpace::new();
        let fd = memory(0x1000);
        space.map(0x1000, 0x1000, fd.as_fd(), 0, true).unwrap();
        let view = space.view();
        view.word(0x1004).unwrap().store(9, Ordering::Relaxed);
        assert!(view.word(0x1002).is_err());
        assert!(view.word(0x1ffe).is_err());
        let mut read = [0; 4];
        view.read(0x1004, &mut read).unwrap();
        assert_eq!(read, [9, 0, 0, 0]);
    }
}
