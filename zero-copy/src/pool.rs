//! Buffers in host memory that a guest or a process maps (paper section IV-C).
//!
//! What is freed is cleared before anybody else gets it, or given back to the system. For much
//! memory that takes long (256 MiB: 17 ms), and whoever frees may be a thread that serves others:
//! it is done by one of the pool's own, which ends when it has no more to do.

use crate::{Mapping, MappingError, punch_hole};
use farlane_abi::PAGE_BYTES;
use farlane_abi::width::to_usize;
use farlane_sys::sync::lock;
use rustix::fs::SealFlags;
use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use thiserror::Error;

/// Bytes that whoever frees them clears at once: 12 us.
const CLEARED_AT_ONCE: u64 = 256 << 10;

/// Why there is no buffer.
#[derive(Debug, Error)]
pub enum PoolError {
    /// A length of zero, or beyond any pool.
    #[error("A buffer of {0:#x} bytes")]
    Length(u64),
    /// No room for it.
    #[error("No room for {length:#x} bytes: {used:#x} of {size:#x} are in use")]
    Full {
        /// Bytes wanted.
        length: u64,
        /// Bytes in use, or not yet cleared.
        used: u64,
        /// Bytes of the pool.
        size: u64,
    },
    /// No room for it before what was freed is cleared.
    #[error("No room for {0:#x} bytes yet: memory is being cleared")]
    Clearing(u64),
    /// A mapping failed.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The system failed.
    #[error("Cannot make memory for a buffer")]
    Io(#[from] io::Error),
}

/// Free runs of a range, first fit: offset to length, never adjacent.
#[derive(Debug)]
struct FreeRuns {
    runs: BTreeMap<u64, u64>,
}

impl FreeRuns {
    fn new(size: u64) -> Self {
        Self {
            runs: BTreeMap::from([(0, size)]),
        }
    }

    fn take(&mut self, length: u64) -> Option<u64> {
        let (&offset, &run) = self.runs.iter().find(|&(_, &run)| run >= length)?;
        self.runs.remove(&offset);
        if run > length {
            self.runs.insert(offset + length, run - length);
        }
        Some(offset)
    }

    fn give(&mut self, mut offset: u64, mut length: u64) {
        if let Some(next) = self.runs.remove(&(offset + length)) {
            length += next;
        }
        if let Some((&before, &run)) = self.runs.range(..offset).next_back()
            && before + run == offset
        {
            offset = before;
            length += run;
        }
        self.runs.insert(offset, length);
    }
}

#[derive(Debug)]
enum Backing {
    /// One file, mapped into the VM once and whole.
    Window {
        file: Arc<OwnedFd>,
        mapping: Arc<Mapping>,
        free: Mutex<FreeRuns>,
    },
    /// A file for each buffer.
    Separate,
}

/// Host memory from which buffers are allocated.
#[derive(Debug)]
pub struct Pool {
    size: u64,
    /// Bytes in use or not yet cleared.
    used: Mutex<u64>,
    backing: Backing,
    clearing: Mutex<Clearing>,
}

/// What was freed and is to be cleared.
#[derive(Debug, Default)]
struct Clearing {
    waiting: Vec<Run>,
    /// A thread does it.
    is_under_way: bool,
    /// Has it wait.
    #[cfg(test)]
    gate: Arc<Mutex<()>>,
}

/// Memory of a buffer.
#[derive(Debug)]
struct Run {
    file: Arc<OwnedFd>,
    mapping: Arc<Mapping>,
    offset: u64,
    length: u64,
    /// See [`PoolBuffer::keep`].
    kept: Option<Box<dyn Any + Send + Sync>>,
}

fn sealed_memfd(bytes: u64) -> io::Result<OwnedFd> {
    let fd = farlane_sys::memory_file("farlane-pool")?;
    rustix::fs::ftruncate(&fd, bytes)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

impl Pool {
    /// One memfd of `bytes`, rounded up to pages, from which all buffers come. For a VM: mapped
    /// into its shared-memory region once and whole.
    ///
    /// # Errors
    /// What `memfd_create` or `mmap` say.
    pub fn shared_window(bytes: u64) -> io::Result<Arc<Self>> {
        let size = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let file = sealed_memfd(size)?;
        let mapping = Mapping::new(file.as_fd(), 0, size, true).map_err(io::Error::other)?;
        Ok(Arc::new(Self {
            size,
            used: Mutex::new(0),
            clearing: Mutex::default(),
            backing: Backing::Window {
                file: Arc::new(file),
                mapping: Arc::new(mapping),
                free: Mutex::new(FreeRuns::new(size)),
            },
        }))
    }

    /// A memfd for each buffer, `limit_bytes` in all. For host processes, each of which may see
    /// only its own.
    #[must_use]
    pub fn separate_files(limit_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            size: limit_bytes,
            used: Mutex::new(0),
            clearing: Mutex::default(),
            backing: Backing::Separate,
        })
    }

    /// The window's file.
    #[must_use]
    pub fn window_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.backing {
            Backing::Window { file, .. } => Some(file.as_fd()),
            Backing::Separate => None,
        }
    }

    /// Length of the window in bytes; zero where buffers have files of their own.
    #[must_use]
    pub fn window_bytes(&self) -> u64 {
        match &self.backing {
            Backing::Window { .. } => self.size,
            Backing::Separate => 0,
        }
    }

    /// Bytes that all buffers together can have.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.size
    }

    /// Bytes in use, or not yet cleared.
    #[must_use]
    pub fn used(&self) -> u64 {
        *lock(&self.used)
    }

    /// Allocates a zeroed buffer of `length` bytes, rounded up to pages. It is freed on drop.
    ///
    /// # Errors
    /// No room, or no room [yet](PoolError::Clearing), or what the system says.
    pub fn allocate(self: &Arc<Self>, length: u64) -> Result<PoolBuffer, PoolError> {
        // Asked before: what is cleared from now on is there.
        let is_clearing = self.clearing().is_under_way;
        match self.take(length) {
            Err(PoolError::Full { length, .. }) if is_clearing && length <= self.size => {
                Err(PoolError::Clearing(length))
            }
            other => other,
        }
    }

    fn take(self: &Arc<Self>, length: u64) -> Result<PoolBuffer, PoolError> {
        let length = length
            .checked_next_multiple_of(PAGE_BYTES)
            .filter(|&l| l > 0)
            .ok_or(PoolError::Length(length))?;
        let full = |used| PoolError::Full {
            length,
            used,
            size: self.size,
        };
        {
            let mut used = lock(&self.used);
            let sum = used.checked_add(length).filter(|&sum| sum <= self.size);
            *used = sum.ok_or_else(|| full(*used))?;
        }
        let made = match &self.backing {
            Backing::Window {
                file,
                mapping,
                free,
            } => lock(free)
                .take(length)
                .ok_or_else(|| full(self.used()))
                .map(|offset| (Arc::clone(file), Arc::clone(mapping), offset)),
            Backing::Separate => sealed_memfd(length).map_err(Into::into).and_then(|file| {
                let mapping = Mapping::new(file.as_fd(), 0, length, true)?;
                Ok((Arc::new(file), Arc::new(mapping), 0))
            }),
        };
        match made {
            Ok((file, mapping, offset)) => Ok(PoolBuffer {
                pool: Arc::clone(self),
                run: Some(Run {
                    file,
                    mapping,
                    offset,
                    length,
                    kept: None,
                }),
            }),
            Err(e) => {
                self.release(length);
                Err(e)
            }
        }
    }

    fn release(&self, length: u64) {
        let mut used = lock(&self.used);
        *used = used.saturating_sub(length);
    }

    fn clearing(&self) -> MutexGuard<'_, Clearing> {
        lock(&self.clearing)
    }

    /// Has freed memory cleared.
    fn free(self: &Arc<Self>, run: Run) {
        if run.length <= CLEARED_AT_ONCE {
            return self.clear(run);
        }
        let mut clearing = self.clearing();
        clearing.waiting.push(run);
        if std::mem::replace(&mut clearing.is_under_way, true) {
            return;
        }
        drop(clearing);
        let pool = Arc::clone(self);
        let thread = std::thread::Builder::new().name("pool".to_owned());
        if let Err(e) = thread.spawn(move || pool.clear_all()) {
            log::debug!("No thread that clears a pool: {e}");
            self.clear_all();
        }
    }

    /// Clears what waits for it, until there is no more.
    fn clear_all(&self) {
        loop {
            let mut clearing = self.clearing();
            let Some(run) = clearing.waiting.pop() else {
                clearing.is_under_way = false;
                return;
            };
            #[cfg(test)]
            let gate = Arc::clone(&clearing.gate);
            drop(clearing);
            #[cfg(test)]
            drop(gate.lock());
            self.clear(run);
        }
    }

    fn clear(&self, run: Run) {
        let Run {
            file,
            mapping,
            offset,
            length,
            kept,
        } = run;
        // Gives memory with a file of its own back to the system.
        drop((mapping, file));
        drop(kept);
        if let Backing::Window { file, free, .. } = &self.backing {
            // Gives the memory back to the host and zeroes it for the next user in one step.
            match punch_hole(file, offset, length) {
                Ok(()) => lock(free).give(offset, length),
                // What could not be zeroed is never given to anybody else.
                Err(e) => log::error!("Cannot clear {length:#x} bytes of a pool: {e}"),
            }
        }
        self.release(length);
    }
}

/// A buffer of a pool.
#[derive(Debug)]
pub struct PoolBuffer {
    pool: Arc<Pool>,
    run: Option<Run>,
}

impl PoolBuffer {
    fn run(&self) -> &Run {
        match &self.run {
            Some(run) => run,
            None => unreachable!("only drop takes the memory"),
        }
    }

    /// Has `what` be dropped when the memory is free again: what somebody has taken for it.
    pub fn keep(&mut self, what: impl Any + Send + Sync) {
        if let Some(run) = &mut self.run {
            run.kept = Some(Box::new(what));
        }
    }

    /// Offset in the window; zero where it has a file of its own.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.run().offset
    }

    /// Length in bytes, whole pages.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.run().length
    }

    /// The file that holds it, from [`offset`](Self::offset) on.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.run().file.as_fd()
    }

    pub(crate) fn parts(&self) -> (&Arc<Mapping>, &Arc<OwnedFd>, usize) {
        let run = self.run();
        (&run.mapping, &run.file, to_usize(run.offset))
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        if let Some(run) = self.run.take() {
            self.pool.free(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Region, copy_from_slice, copy_to_slice};
    use proptest::prelude::*;

    #[test]
    fn a_freed_buffer_comes_back_zeroed() {
        let pool = Pool::shared_window(64 << 10).unwrap();
        let buffer = pool.allocate(8192).unwrap();
        copy_from_slice(&Region::from_buffer(&buffer), 4096, &[0xaa; 100]).unwrap();
        let offset = buffer.offset();
        drop(buffer);
        let again = pool.allocate(8192).unwrap();
        assert_eq!(again.offset(), offset);
        let mut bytes = [1; 100];
        copy_to_slice(&Region::from_buffer(&again), 4096, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 100]);
    }

    #[test]
    fn who_frees_much_does_not_wait_for_it_to_be_cleared() {
        const MUCH: u64 = 2 * CLEARED_AT_ONCE;
        for pool in [
            Pool::shared_window(MUCH).unwrap(),
            Pool::separate_files(MUCH),
        ] {
            let gate = Arc::clone(&pool.clearing().gate);
            let held = gate.lock().unwrap();
            let buffer = pool.allocate(MUCH).unwrap();
            let region = Region::from_buffer(&buffer);
            copy_from_slice(&region, MUCH - 1, &[0xaa]).unwrap();
            let mapping = Arc::downgrade(buffer.parts().0);
            drop((buffer, region));
            // Not cleared, and nobody's.
            assert!(pool.used() == MUCH && mapping.strong_count() > 0);
            assert!(matches!(
                pool.allocate(4096),
                Err(PoolError::Clearing(4096))
            ));
            let more = pool.allocate(MUCH + 4096);
            assert!(matches!(more, Err(PoolError::Full { .. })));
            drop(held);
            let again = loop {
                match pool.allocate(MUCH) {
                    Err(PoolError::Clearing(_)) => std::thread::yield_now(),
                    other => break other.unwrap(),
                }
            };
            let mut byte = [1];
            copy_to_slice(&Region::from_buffer(&again), MUCH - 1, &mut byte).unwrap();
            assert_eq!(byte, [0]);
        }
    }

    #[test]
    fn a_pool_has_a_limit() {
        for pool in [
            Pool::shared_window(16 << 10).unwrap(),
            Pool::separate_files(16 << 10),
        ] {
            let all = pool.allocate(16 << 10).unwrap();
            assert!(matches!(pool.allocate(1), Err(PoolError::Full { .. })));
            assert!(matches!(pool.allocate(u64::MAX), Err(PoolError::Length(_))));
            drop(all);
            assert_eq!(pool.used(), 0);
            pool.allocate(1).unwrap();
        }
    }

    proptest! {
        #[test]
        fn buffers_never_overlap_and_all_comes_back(
            steps in prop::collection::vec(
                (any::<bool>(), 1u64..40_000, any::<prop::sample::Index>()),
                1..80,
            ),
        ) {
            let pool = Pool::shared_window(256 << 10).unwrap();
            let mut held: Vec<PoolBuffer> = Vec::new();
            for (free, length, which) in steps {
                if free && !held.is_empty() {
                    held.swap_remove(which.index(held.len()));
                } else if let Ok(buffer) = pool.allocate(length) {
                    for other in &held {
                        prop_assert!(buffer.offset() + buffer.length() <= other.offset()
                            || other.offset() + other.length() <= buffer.offset());
                    }
                    prop_assert!(buffer.offset() + buffer.length() <= pool.window_bytes());
                    held.push(buffer);
                }
            }
            held.clear();
            prop_assert_eq!(pool.used(), 0);
            prop_assert_eq!(pool.allocate(256 << 10).unwrap().offset(), 0);
        }
    }
}
