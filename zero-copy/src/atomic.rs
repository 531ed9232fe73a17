//! Atomic operations on words of registered memory.
//!
//! An operation on memory that is mapped here is one of the processor's. On memory of a process it
//! is a read and a write by system calls, so all operations hold a lock meanwhile: which one, says
//! the word's offset in its page. A physical word has that offset under each mapping, so operations
//! on it that go by the same locks, those of one tenant's memory, exclude each other however it is
//! reached: as `IBV_ATOMIC_HCA` promises, atomic among the operations of the device (IBTA 9.4.5).
//! Those on mapped memory are atomic beside any others, and beside the program's own processors;
//! those on memory of a process are not.

use crate::registration::Runs;
use crate::{Process, Region, RegionError};
use farlane_abi::PAGE_BYTES;
use farlane_abi::width::to_usize;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

/// Bytes of a word.
const WORD: usize = size_of::<u64>();
/// Words of a page.
const WORDS: usize = 4096 / WORD;
/// Looks at a lock before its word is [busy](RegionError::Busy): some times as long as the two
/// system calls take that its holder may be in. They take for ever where a process has its page
/// faults handled by somebody who does not: words of the same offset stay busy then, but whoever
/// operates on them does something else meanwhile.
const LOOKS: u32 = 500;

/// Locks of words, by the offset of a word in its page: those of one owner's memory, so that what
/// it does to its own words is not felt by others. Held for one operation; nothing else is locked
/// meanwhile.
#[derive(Debug)]
pub struct WordLocks([Mutex<()>; WORDS]);

impl Default for WordLocks {
    fn default() -> Self {
        Self([const { Mutex::new(()) }; WORDS])
    }
}

impl WordLocks {
    /// Holds the lock of the word at an address, as an operation does; none where somebody holds
    /// it for long.
    pub fn hold(&self, address: u64) -> Option<MutexGuard<'_, ()>> {
        let index = to_usize(address % PAGE_BYTES) / WORD;
        for _ in 0..LOOKS {
            match self.0[index].try_lock() {
                Ok(held) => return Some(held),
                // Nothing lies behind it.
                Err(TryLockError::Poisoned(held)) => return Some(held.into_inner()),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        None
    }
}

/// What is done to a word, in the byte order of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Stores `swap` where the word equals `compare`.
    CompareSwap {
        /// What it must be.
        compare: u64,
        /// What it becomes.
        swap: u64,
    },
    /// Adds, modulo 2^64.
    FetchAdd(u64),
    /// Stores this.
    Store(u64),
}

impl AtomicOp {
    /// What a word of this value becomes, where it changes.
    fn of(self, old: u64) -> Option<u64> {
        match self {
            Self::CompareSwap { compare, swap } => (old == compare).then_some(swap),
            Self::FetchAdd(addend) => Some(old.wrapping_add(addend)),
            Self::Store(new) => Some(new),
        }
    }

    /// Carries it out on a word of our own address space. Returns what was there.
    fn on(self, word: &AtomicU64) -> u64 {
        match self {
            Self::CompareSwap { compare, swap } => word
                .compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst)
                .unwrap_or_else(|old| old),
            Self::FetchAdd(addend) => word.fetch_add(addend, Ordering::SeqCst),
            Self::Store(new) => word.swap(new, Ordering::SeqCst),
        }
    }

    /// Carries it out on a word of a process at `address`. Returns what was there. The caller holds
    /// the word's lock.
    fn on_process(self, process: &Process, address: u64) -> io::Result<u64> {
        let mut old = 0;
        transfer(process, address, &mut old, false)?;
        if let Some(mut new) = self.of(old) {
            transfer(process, address, &mut new, true)?;
        }
        Ok(old)
    }
}

/// Moves a word between `ours` and `process` at `address`: a word that does not cross a page moves
/// whole or not at all.
fn transfer(process: &Process, address: u64, ours: &mut u64, write: bool) -> io::Result<()> {
    let fault = || io::Error::from_raw_os_error(libc::EFAULT);
    let vector = |base| libc::iovec {
        iov_base: base,
        iov_len: WORD,
    };
    let theirs = usize::try_from(address).map_err(|_| fault())?;
    let theirs = vector(std::ptr::without_provenance_mut(theirs));
    let ours = vector(std::ptr::from_mut(ours).cast());
    match process.transfer(&[ours], &[theirs], write)? {
        WORD => Ok(()),
        _ => Err(fault()),
    }
}

impl Region {
    /// Carries out `operation` on the word of 8 bytes at `offset`, and returns what was there. No
    /// other operation on the same memory comes in between, through whichever region, that goes by
    /// the same `locks`: those of the memory's owner.
    ///
    /// # Errors
    /// Bounds, rights, a revocation, or memory that a process does not have, as of
    /// [`copy`](crate::copy()); [`RegionError::Misaligned`] where the word's memory does not begin
    /// at a multiple of 8, or is not in one piece. [`RegionError::Busy`] where the word, or one
    /// with the same offset in its page, is in use for long: to be tried again later. Nothing has
    /// changed then.
    ///
    /// # Examples
    /// ```
    /// use farlane_zero_copy::{AtomicOp, Pool, Region, WordLocks};
    /// let locks = WordLocks::default();
    /// let buffer = Pool::separate_files(1 << 20).allocate(4096)?;
    /// let region = Region::from_buffer(&buffer);
    /// assert_eq!(region.atomic(8, AtomicOp::FetchAdd(3), &locks)?, 0);
    /// let swap = AtomicOp::CompareSwap { compare: 3, swap: 7 };
    /// assert_eq!(region.atomic(8, swap, &locks)?, 3);
    /// assert_eq!(region.atomic(8, swap, &locks)?, 7);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn atomic(
        &self,
        offset: u64,
        operation: AtomicOp,
        locks: &WordLocks,
    ) -> Result<u64, RegionError> {
        let access = self.access(offset, WORD as u64, true)?;
        let misaligned = |address| RegionError::Misaligned { address };
        match access.runs() {
            Runs::Mapped(mut runs) => {
                let (base, length) = runs.next(WORD).ok_or(misaligned(offset))?;
                let address = base.addr() as u64;
                let word = base.cast::<AtomicU64>();
                if length != WORD || !word.is_aligned() {
                    return Err(misaligned(address));
                }
                let _held = locks.hold(address).ok_or(RegionError::Busy)?;
                // SAFETY: aligned, and 8 bytes of a mapping that the access keeps and that may be
                // written. Others may write them at any time, as they may any such memory: with
                // instructions of another size, or in another address space.
                Ok(operation.on(unsafe { &*word }))
            }
            // There is no word.
            Runs::Null => Err(misaligned(offset)),
            Runs::Process(process, address) => {
                if !address.is_multiple_of(WORD as u64) {
                    return Err(misaligned(address));
                }
                let _held = locks.hold(address).ok_or(RegionError::Busy)?;
                Ok(operation.on_process(process, address)?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const fn compare_swap(compare: u64, swap: u64) -> AtomicOp {
        AtomicOp::CompareSwap { compare, swap }
    }

    #[test]
    fn an_operation_is_the_same_in_both_kinds_of_memory() {
        for (old, operation) in [
            (u64::MAX, AtomicOp::FetchAdd(2)),
            (5, compare_swap(5, 6)),
            (5, compare_swap(4, 6)),
            (5, AtomicOp::Store(9)),
        ] {
            let word = AtomicU64::new(old);
            assert_eq!(operation.on(&word), old);
            let new = word.into_inner();
            assert_eq!(operation.of(old).unwrap_or(old), new, "{operation:?}");
        }
    }

    #[test]
    fn a_word_has_one_lock_in_all_mappings_and_its_neighbour_another() {
        let [locks, others] = [(); 2].map(|()| WordLocks::default());
        let held = locks.hold(0x1238).unwrap();
        assert!(locks.hold(0x7f00_0000_1000 + 0x238).is_none());
        assert!(locks.hold(0x1240).is_some() && locks.hold(0x1230).is_some());
        assert!(others.hold(0x1238).is_some());
        drop(held);
        assert!(locks.hold(0x238).is_some());
    }

    #[test]
    fn operations_of_two_threads_lose_nothing() {
        const ADDS: u64 = if cfg!(miri) { 100 } else { 100_000 };
        let word = AtomicU64::new(0);
        // SAFETY: it is valid and aligned as long as the threads run.
        let again = unsafe { AtomicU64::from_ptr(word.as_ptr()) };
        thread::scope(|scope| {
            for word in [&word, again] {
                scope.spawn(move || {
                    for _ in 0..ADDS {
                        AtomicOp::FetchAdd(3).on(word);
                    }
                });
            }
        });
        assert_eq!(word.into_inner(), 2 * 3 * ADDS);
    }
}
