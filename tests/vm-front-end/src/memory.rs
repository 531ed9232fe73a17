//! Guest memory: a memfd of this process.

use crate::to_usize;
use farlane_abi::PAGE_BYTES;
use farlane_sys::Mmap;
use farlane_transport::Map;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vhost::VhostUserMemoryRegionInfo;

/// Guest-physical address of the upper half: memory has a hole, as on a PC.
const UPPER: u64 = 4 << 30;

/// Why there is no guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// It is used up.
    #[error("No {0:#x} bytes of guest memory are left")]
    Exhausted(u64),
    /// The system failed.
    #[error("System call failed")]
    Io(#[from] std::io::Error),
    /// It cannot be mapped.
    #[error(transparent)]
    Map(#[from] farlane_transport::TransportError),
}

impl From<rustix::io::Errno> for MemoryError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// The memory of a guest. Offsets are those of the file; a page is a page of the host.
#[derive(Debug)]
pub struct GuestMemory {
    file: OwnedFd,
    map: Map,
    bytes: u64,
    /// Free runs: offset to length in bytes, never adjacent.
    free: Mutex<BTreeMap<u64, u64>>,
    /// Scattered buffers by address: the offsets of their pages.
    scattered: Mutex<BTreeMap<usize, Vec<u64>>>,
}

/// A part of the guest's memory that holds all of it below or above the hole.
#[derive(Clone, Copy, Debug)]
pub struct Half {
    /// Its first guest-physical address.
    pub guest_address: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Where it is mapped in this process.
    pub user_address: u64,
    /// Where it begins in the file.
    pub offset: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GuestMemory {
    /// Memory of so many bytes, half of them above the hole.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(bytes: u64) -> Result<Arc<Self>, MemoryError> {
        let bytes = bytes.next_multiple_of(2 * PAGE_BYTES);
        let file = memfd_create("guest", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes)?;
        let map = Map::shared(file.as_fd(), 0, to_usize(bytes))?;
        Ok(Arc::new(Self {
            file,
            map,
            bytes,
            free: Mutex::new(BTreeMap::from([(0, bytes)])),
            scattered: Mutex::default(),
        }))
    }

    /// All of it, as this process has mapped it, by offset.
    #[must_use]
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// The file that has the bytes.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Its halves.
    #[must_use]
    pub fn halves(&self) -> [Half; 2] {
        let base = self.map.base().as_ptr().expose_provenance() as u64;
        let half = self.bytes / 2 / PAGE_BYTES * PAGE_BYTES;
        [(0, 0, half), (UPPER, half, self.bytes - half)].map(|(guest_address, offset, bytes)| {
            Half {
                guest_address,
                bytes,
                user_address: base + offset,
                offset,
            }
        })
    }

    /// What a VMM tells of it over vhost-user.
    #[must_use]
    pub fn regions(&self) -> [VhostUserMemoryRegionInfo; 2] {
        self.halves().map(|half| VhostUserMemoryRegionInfo {
            guest_phys_addr: half.guest_address,
            memory_size: half.bytes,
            userspace_addr: half.user_address,
            mmap_offset: half.offset,
            mmap_handle: self.file.as_raw_fd(),
        })
    }

    /// The guest-physical address of the byte at `offset`.
    #[must_use]
    pub fn guest_address(&self, offset: u64) -> u64 {
        let [_, upper] = self.halves();
        match offset.checked_sub(upper.offset) {
            Some(above) => upper.guest_address + above,
            None => offset,
        }
    }

    /// The address in this process of the byte at `offset`.
    #[must_use]
    pub fn user_address(&self, offset: u64) -> u64 {
        self.map.base().as_ptr().expose_provenance() as u64 + offset
    }

    /// Takes `length` bytes in a run, zeroed and page-aligned, that the hole does not cut.
    pub(crate) fn take(&self, length: u64) -> Result<u64, MemoryError> {
        self.take_where(length, |_| true)
    }

    /// The same in the lower half (`half` is 0) or in the upper one.
    ///
    /// # Errors
    /// When there is none left.
    pub fn take_in(&self, half: usize, length: u64) -> Result<u64, MemoryError> {
        let [_, upper] = self.halves();
        self.take_where(length, |at| usize::from(at >= upper.offset) == half)
    }

    fn take_where(&self, length: u64, wanted: impl Fn(u64) -> bool) -> Result<u64, MemoryError> {
        let length = length.max(1).next_multiple_of(PAGE_BYTES);
        let [_, upper] = self.halves();
        let mut free = lock(&self.free);
        let found = free.iter().find_map(|(&offset, &run)| {
            let beyond = offset.max(upper.offset);
            [offset, beyond]
                .into_iter()
                .find(|&at| {
                    let end = at + length;
                    let uncut = end <= upper.offset || at >= upper.offset;
                    end <= offset + run && uncut && wanted(at)
                })
                .map(|at| (offset, run, at))
        });
        let (offset, run, at) = found.ok_or(MemoryError::Exhausted(length))?;
        free.remove(&offset);
        if at > offset {
            free.insert(offset, at - offset);
        }
        if at + length < offset + run {
            free.insert(at + length, offset + run - at - length);
        }
        drop(free);
        self.clear(at, length);
        Ok(at)
    }

    fn clear(&self, offset: u64, length: u64) {
        let target = self.map.at(to_usize(offset), to_usize(length));
        // SAFETY: inside the mapping; the run was free, so nobody else in this process uses it.
        unsafe { target.write_bytes(0, to_usize(length)) };
    }

    /// Gives a run back.
    pub fn give(&self, mut offset: u64, length: u64) {
        let mut length = length.max(1).next_multiple_of(PAGE_BYTES);
        let mut free = lock(&self.free);
        if let Some(next) = free.remove(&(offset + length)) {
            length += next;
        }
        if let Some((&before, &run)) = free.range(..offset).next_back()
            && before + run == offset
        {
            offset = before;
            length += run;
        }
        free.insert(offset, length);
    }

    /// What `length` bytes at `address` of this process are in guest-physical memory: runs as
    /// long as can be. `None` where they are not all the guest's.
    #[must_use]
    pub fn translate(&self, address: usize, length: usize) -> Option<Vec<(u64, u64)>> {
        let base = self.map.base().as_ptr().addr();
        let end = address.checked_add(length)?;
        let mut extents: Vec<(u64, u64)> = Vec::new();
        let mut add = |offset: u64, bytes: u64| {
            let guest = self.guest_address(offset);
            match extents.last_mut() {
                Some(last) if last.0 + last.1 == guest => last.1 += bytes,
                _ => extents.push((guest, bytes)),
            }
        };
        if address >= base && end <= base + self.map.len() {
            let offset = (address - base) as u64;
            let [_, upper] = self.halves();
            let below = upper.offset.saturating_sub(offset).min(length as u64);
            if below > 0 {
                add(offset, below);
            }
            if below < length as u64 {
                add(offset + below, length as u64 - below);
            }
            return Some(extents);
        }
        let scattered = lock(&self.scattered);
        let (&start, pages) = scattered.range(..=address).next_back()?;
        if end > start + pages.len() * to_usize(PAGE_BYTES) {
            return None;
        }
        let (mut at, end) = ((address - start) as u64, (end - start) as u64);
        while at < end {
            let page = pages.get(to_usize(at / PAGE_BYTES))?;
            let within = at % PAGE_BYTES;
            let bytes = (PAGE_BYTES - within).min(end - at);
            add(page + within, bytes);
            at += bytes;
        }
        Some(extents)
    }

    pub(crate) fn allocate(self: &Arc<Self>, length: u64) -> Result<GuestBuffer, MemoryError> {
        let offset = self.take(length)?;
        Ok(GuestBuffer {
            base: self.map.at(to_usize(offset), to_usize(length)),
            length: to_usize(length),
            place: Place::Run(offset, length),
            memory: Arc::clone(self),
        })
    }

    pub(crate) fn allocate_scattered(
        self: &Arc<Self>,
        length: u64,
    ) -> Result<GuestBuffer, MemoryError> {
        let count = to_usize(length.max(1).div_ceil(PAGE_BYTES));
        let mut pages = Vec::with_capacity(count);
        for _ in 0..count {
            match self.take(PAGE_BYTES) {
                Ok(page) => pages.push(page),
                Err(e) => {
                    self.give_pages(&pages);
                    return Err(e);
                }
            }
        }
        // Every page has neighbours that it does not have in memory.
        let (even, odd): (Vec<_>, Vec<_>) = pages.chunks(2).map(|p| (p.first(), p.get(1))).unzip();
        let pages: Vec<u64> = even
            .into_iter()
            .chain(odd.into_iter().rev())
            .flatten()
            .copied()
            .collect();
        let mapped = self.map_pages(&pages);
        let scattered = mapped.inspect_err(|_| self.give_pages(&pages))?;
        let base = scattered.base();
        lock(&self.scattered).insert(base.as_ptr().addr(), pages.clone());
        Ok(GuestBuffer {
            base,
            length: to_usize(length),
            place: Place::Scattered(scattered, pages),
            memory: Arc::clone(self),
        })
    }

    /// Maps pages of the guest's one after the other.
    fn map_pages(&self, pages: &[u64]) -> Result<Mmap, MemoryError> {
        let page_bytes = to_usize(PAGE_BYTES);
        let mut mapping = Mmap::reserve(pages.len() * page_bytes)?;
        for (i, &page) in pages.iter().enumerate() {
            mapping.overlay(i * page_bytes, &self.file, page, page_bytes)?;
        }
        Ok(mapping)
    }

    fn give_pages(&self, pages: &[u64]) {
        pages.iter().for_each(|&page| self.give(page, PAGE_BYTES));
    }
}

/// Memory of a guest's program. It must outlive what is registered in it.
#[derive(Debug)]
pub struct GuestBuffer {
    base: NonNull<u8>,
    length: usize,
    place: Place,
    memory: Arc<GuestMemory>,
}

/// Where a buffer lies in guest memory.
#[derive(Debug)]
enum Place {
    /// In a run: offset and length.
    Run(u64, u64),
    /// In pages at these offsets, with a mapping of its own.
    Scattered(Mmap, Vec<u64>),
}

// SAFETY: plain memory that belongs to the process; methods that touch it are unsafe.
unsafe impl Send for GuestBuffer {}
// SAFETY: as above.
unsafe impl Sync for GuestBuffer {}

impl GuestBuffer {
    /// First byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base.as_ptr().addr()
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The bytes.
    ///
    /// # Safety
    /// Neither the backend nor another thread writes them while the slice lives.
    #[must_use]
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for as long as the buffer lives; not written, says the caller.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.length) }
    }

    /// The bytes, to be written.
    ///
    /// # Safety
    /// Neither the backend nor another thread touches them while the slice lives.
    #[must_use]
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: mapped for as long as the buffer lives; not touched, says the caller.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.length) }
    }
}

impl Drop for GuestBuffer {
    fn drop(&mut self) {
        match &self.place {
            Place::Run(offset, length) => self.memory.give(*offset, *length),
            Place::Scattered(mapping, pages) => {
                lock(&self.memory.scattered).remove(&mapping.base().as_ptr().addr());
                self.memory.give_pages(pages);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_translated_page_by_page_and_comes_back() {
        let memory = GuestMemory::new(1 << 20).unwrap();
        let all = memory.take(512 << 10).unwrap();
        memory.give(all, 512 << 10);
        {
            let mut plain = memory.allocate(10_000).unwrap();
            // SAFETY: no backend, one thread.
            unsafe { plain.bytes_mut() }.fill(7);
            let extents = memory.translate(plain.address() + 5, 9_000).unwrap();
            assert_eq!(extents, [(5, 9_000)]);
            let mut pieces = memory.allocate_scattered(5 * 4096).unwrap();
            // SAFETY: as above.
            let bytes = unsafe { pieces.bytes_mut() };
            bytes.iter_mut().zip(0u8..=255).for_each(|(b, n)| *b = n);
            let extents = memory
                .translate(pieces.address() + 100, 5 * 4096 - 200)
                .unwrap();
            assert_eq!(extents.len(), 5);
            assert_eq!(extents.iter().map(|e| e.1).sum::<u64>(), 5 * 4096 - 200);
            assert_eq!(memory.translate(pieces.address(), 5 * 4096 + 1), None);
            assert_eq!(memory.translate(1, 1), None);
        }
        // All is free again, and in one piece.
        assert_eq!(lock(&memory.free).len(), 1);
    }

    #[test]
    fn the_hole_cuts_no_run() {
        let memory = GuestMemory::new(64 << 10).unwrap();
        assert_eq!(memory.take(20 << 10).unwrap(), 0);
        assert_eq!(memory.take(20 << 10).unwrap(), 32 << 10);
        assert_eq!(memory.guest_address(32 << 10), UPPER);
        assert!(matches!(
            memory.take(20 << 10),
            Err(MemoryError::Exhausted(_))
        ));
        assert_eq!(memory.take(12 << 10).unwrap(), 20 << 10);
    }
}
