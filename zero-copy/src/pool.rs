//! Buffers in host memory that a guest or a process maps (paper section IV-C).

use crate::{Mapping, MappingError, punch_hole};
use farlane_abi::PAGE_BYTES;
use rustix::fs::{MemfdFlags, SealFlags};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

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
        /// Bytes in use.
        used: u64,
        /// Bytes of the pool.
        size: u64,
    },
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
    used: Mutex<u64>,
    backing: Backing,
}

fn sealed_memfd(bytes: u64) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(
        "farlane-pool",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
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

    /// Bytes in use.
    #[must_use]
    pub fn used(&self) -> u64 {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a zeroed buffer of `length` bytes, rounded up to pages. It is freed on drop.
    ///
    /// # Errors
    /// No room, or what the system says.
    pub fn allocate(self: &Arc<Self>, length: u64) -> Result<PoolBuffer, PoolError> {
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
            let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
            let sum = used.checked_add(length).filter(|&sum| sum <= self.size);
            *used = sum.ok_or_else(|| full(*used))?;
        }
        let made = match &self.backing {
            Backing::Window {
                file,
                mapping,
                free,
            } => free
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
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
                file,
                mapping,
                offset,
                length,
            }),
            Err(e) => {
                self.release(length);
                Err(e)
            }
        }
    }

    fn release(&self, length: u64) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.saturating_sub(length);
    }
}

/// A buffer of a pool.
#[derive(Debug)]
pub struct PoolBuffer {
    pool: Arc<Pool>,
    file: Arc<OwnedFd>,
    mapping: Arc<Mapping>,
    offset: u64,
    length: u64,
}

impl PoolBuffer {
    /// Offset in the window; zero where it has a file of its own.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes, whole pages.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The file that holds it, from [`offset`](Self::offset) on.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn parts(&self) -> (&Arc<Mapping>, &Arc<OwnedFd>, usize) {
        // An offset in a mapping fits usize.
        let offset = usize::try_from(self.offset).unwrap_or(0);
        (&self.mapping, &self.file, offset)
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        if let Backing::Window { file, free, .. } = &self.pool.backing {
            // Gives the memory back to the host and zeroes it for the next user in one step.
            let punched = punch_hole(file, self.offset, self.length);
            match punched {
                Ok(()) => free
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .give(self.offset, self.length),
                // What could not be zeroed is never given to anybody else.
                Err(e) => log::error!("Cannot clear {:#x} bytes of a pool: {e}", self.length),
            }
        }
        self.pool.release(self.length);
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
            steps in prop::collection::vec((any::<bool>(), 1u64..40_000, any::<prop::sample::Index>()), 1..80),
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
