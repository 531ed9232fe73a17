//! One state of an address space: its ranges, and who looks at them.

use crate::memory_file::MemoryFileError;
use crate::registration::{Memory, Piece, Registration};
use crate::{Mapping, MappingError};
use farlane_abi::width::to_usize;
use farlane_sys::sync::{held, lock};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use thiserror::Error;

/// Why an address space could not be changed or an address not be resolved.
#[derive(Debug, Error)]
pub enum AddressSpaceError {
    /// Nothing, or not all, lies at the address.
    #[error("{length:#x} bytes at guest address {address:#x} are not memory")]
    Unmapped {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// A range without a file behind it cannot be shared.
    #[error("The range at guest address {address:#x} has no file behind it")]
    NotShared {
        /// Guest-physical address.
        address: u64,
    },
    /// Two ranges claim the same addresses.
    #[error("The range of {length:#x} bytes at guest address {address:#x} overlaps another")]
    Overlap {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// The range is not one of this address space.
    #[error("No range of {length:#x} bytes begins at guest address {address:#x}")]
    NotARange {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// A write to a range that is not writable.
    #[error("The range at guest address {address:#x} is not writable")]
    ReadOnly {
        /// Guest-physical address.
        address: u64,
    },
    /// A file that must not be mapped.
    #[error("The file of a guest memory range cannot be used")]
    File(#[from] MemoryFileError),
    /// The range went away meanwhile.
    #[error("The range at guest address {address:#x} is gone")]
    Gone {
        /// Guest-physical address.
        address: u64,
    },
    /// A mapping failed.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The system failed.
    #[error("Cannot examine the file of a guest memory range")]
    Io(#[from] std::io::Error),
}

/// What lies behind a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RangeKind {
    /// The VM's memory.
    #[default]
    Ram,
    /// Memory of a device, such as a BAR.
    DeviceBar,
    /// Memory of a backend, mapped into the VM.
    Shared,
}

/// Identity of a file's bytes: the same in two tables means the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
}

#[derive(Debug)]
pub(crate) struct Range {
    pub start: u64,
    pub length: u64,
    pub kind: RangeKind,
    pub writable: bool,
    pub mapping: Arc<Mapping>,
    pub file: Arc<OwnedFd>,
    pub file_offset: u64,
    id: FileId,
    /// Regions over this range, to be revoked when it goes; `None` once it has gone.
    regions: Mutex<Option<Vec<Weak<Registration>>>>,
}

impl Range {
    fn regions(&self) -> MutexGuard<'_, Option<Vec<Weak<Registration>>>> {
        lock(&self.regions)
    }

    fn is_same(&self, start: u64, length: u64, id: FileId, file_offset: u64) -> bool {
        (self.start, self.length, self.id, self.file_offset) == (start, length, id, file_offset)
            && self.writable
    }

    pub fn end(&self) -> u64 {
        self.start + (self.length - 1)
    }

    /// Ends all access to the range. When it returns, nothing touches it.
    pub fn drain(&self) {
        let regions = self.regions().take().unwrap_or_default();
        for region in regions.iter().filter_map(Weak::upgrade) {
            region.revoke();
        }
    }
}

/// One consistent state of an address space: ranges sorted by address, disjoint.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    pub ranges: Vec<Arc<Range>>,
    /// Whether one of them is memory of a device.
    has_devices: bool,
    pub views: Views,
}

impl Snapshot {
    /// Of ranges that are sorted and disjoint.
    pub fn new(ranges: Vec<Arc<Range>>) -> Self {
        Self {
            has_devices: ranges.iter().any(|r| r.kind == RangeKind::DeviceBar),
            ranges,
            views: Views::default(),
        }
    }

    /// The range of this state that has the same address, length, file and offset, or else a new
    /// one, which is mapped.
    pub fn keep_or_map(
        &self,
        kind: RangeKind,
        (start, length): (u64, u64),
        (fd, file_offset): (BorrowedFd<'_>, u64),
        writable: bool,
    ) -> Result<Arc<Range>, AddressSpaceError> {
        let stat = rustix::fs::fstat(fd).map_err(std::io::Error::from)?;
        let id = FileId {
            device: stat.st_dev,
            inode: stat.st_ino,
        };
        if start.checked_add(length).is_none() || length == 0 {
            return Err(AddressSpaceError::Unmapped {
                address: start,
                length,
            });
        }
        if let Some(range) = self
            .find(start)
            .filter(|r| r.is_same(start, length, id, file_offset))
        {
            return Ok(Arc::clone(range));
        }
        let file = fd.try_clone_to_owned()?;
        Ok(Arc::new(Range {
            start,
            length,
            kind,
            writable,
            mapping: Arc::new(Mapping::new(file.as_fd(), file_offset, length, writable)?),
            file: Arc::new(file),
            file_offset,
            id,
            regions: Mutex::new(Some(Vec::new())),
        }))
    }

    pub fn find(&self, address: u64) -> Option<&Arc<Range>> {
        let index = self.ranges.partition_point(|r| r.end() < address);
        self.ranges.get(index).filter(|r| r.start <= address)
    }

    /// Calls `each(range, offset in its mapping, bytes)` for every run of
    /// `[address, address + length)`.
    pub fn resolve(
        &self,
        address: u64,
        length: u64,
        mut each: impl FnMut(&Range, usize, u64),
    ) -> Result<(), AddressSpaceError> {
        let unmapped = || AddressSpaceError::Unmapped { address, length };
        if length == 0 || address.checked_add(length).is_none() {
            return Err(unmapped());
        }
        let mut at = address;
        let end = address + length;
        while at < end {
            let range = self.find(at).ok_or_else(unmapped)?;
            let offset = at - range.start;
            let run = (range.length - offset).min(end - at);
            each(range, to_usize(offset), run);
            at += run;
        }
        Ok(())
    }

    /// The VM's memory, at its guest-physical addresses.
    pub fn all_ram(&self) -> Memory {
        let ram = self.ranges.iter().filter(|r| r.kind == RangeKind::Ram);
        let pieces = ram.map(|range| Piece {
            start: range.start,
            length: range.length,
            guest: Some(range.start),
            offset: 0,
            mapping: Arc::clone(&range.mapping),
            file: Arc::clone(&range.file),
            file_offset: range.file_offset,
        });
        Memory::Mapped(pieces.collect())
    }

    /// How many of `length` bytes at `address` are memory of devices.
    pub fn device_bytes(&self, address: u64, length: u64) -> u64 {
        if !self.has_devices {
            return 0;
        }
        let end = address.saturating_add(length);
        let devices = self
            .ranges
            .iter()
            .filter(|r| r.kind == RangeKind::DeviceBar);
        devices
            .map(|r| {
                let upto = end.min(r.start + r.length);
                upto.saturating_sub(address.max(r.start))
            })
            .sum()
    }

    /// Has `region`, which lies in `extents`, revoked when one of its ranges goes.
    pub fn attach(
        &self,
        extents: &[(u64, u64)],
        region: &Arc<Registration>,
    ) -> Result<(), AddressSpaceError> {
        for range in &self.ranges {
            let touched = extents.iter().any(|&(address, length)| {
                address < range.start + range.length && range.start < address + length
            });
            if !touched {
                continue;
            }
            let mut regions = range.regions();
            let Some(list) = regions.as_mut() else {
                return Err(AddressSpaceError::Gone {
                    address: range.start,
                });
            };
            if list.len() == list.capacity() {
                list.retain(|r| r.strong_count() > 0);
            }
            list.push(Arc::downgrade(region));
        }
        Ok(())
    }
}

/// Counts the views of a state.
#[derive(Debug, Default)]
pub(crate) struct Views {
    count: AtomicUsize,
    /// Somebody waits for the last view to go.
    awaited: AtomicBool,
    /// Guards nothing; orders the last view's notice after the wait for it.
    lock: Mutex<()>,
    idle: Condvar,
}

impl Views {
    pub fn enter(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    pub fn leave(&self) {
        let was_last = self.count.fetch_sub(1, Ordering::SeqCst) == 1;
        if was_last && self.awaited.load(Ordering::SeqCst) {
            let _guard = lock(&self.lock);
            self.idle.notify_all();
        }
    }

    /// Whether there are views.
    pub fn any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// Waits until there are none. New ones must not be taken meanwhile, but from others.
    pub fn wait(&self) {
        self.awaited.store(true, Ordering::SeqCst);
        let mut guard = lock(&self.lock);
        while self.any() {
            guard = held(self.idle.wait(guard));
        }
    }
}
