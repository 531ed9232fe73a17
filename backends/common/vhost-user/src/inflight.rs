//! Requests under way, in memory that outlives the backend (vhost-user, "Inflight I/O tracking",
//! split virtqueues).
//!
//! The VMM keeps the memory and hands it to the next backend, which finds there what its
//! predecessor had begun and not completed. Each step of ours leaves it such that a backend that
//! is killed right after it loses no request and completes none twice. The VMM may write
//! it: whatever stands there is checked, and can at most name heads that are in the queue.
//!
//! Behind the queues is a [`Note`]: words of the device for its next backend. The guest does not
//! see them.

use farlane_abi::width::to_u64;
use farlane_zero_copy::memory_file::{self, MemoryFileError, Source};
use farlane_zero_copy::{Mapping, MappingError};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};
use thiserror::Error;

/// The layout's version.
const VERSION: u16 = 1;
/// Bytes before a queue's entries: features, version, entries, head of the last batch, used index.
const HEADER: usize = 16;
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_BATCH_AT: usize = 12;
const USED_AT: usize = 14;
/// Bytes of an entry: whether it is under way, the next of its batch, its counter.
const ENTRY: usize = 16;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;
/// Alignment of queues, and bytes of the note.
const QUEUE_ALIGN: usize = 64;
/// Before the words of a note: "FARLNOTE".
const NOTE: u64 = 0x4554_4f4e_4c52_4146;

/// What a device leaves for its next backend.
pub type Note = [u64; 3];

/// Why there is no such memory.
#[derive(Debug, Error)]
pub enum InflightError {
    /// Not as many bytes as are needed.
    #[error("{bytes:#x} bytes cannot track {queues} queues of {entries} entries")]
    Size {
        /// Bytes.
        bytes: u64,
        /// Queues.
        queues: u16,
        /// Entries of each.
        entries: u16,
    },
    /// A file that must not be mapped.
    #[error("The file that tracks requests cannot be used")]
    File(#[from] MemoryFileError),
    /// It cannot be mapped.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The system failed.
    #[error("Cannot make memory that tracks requests")]
    Io(#[from] io::Error),
}

/// Memory that tracks the requests of all queues of a device.
#[derive(Debug)]
pub struct Inflight {
    mapping: Arc<Mapping>,
    queues: u16,
    entries: u16,
    /// Whether there is room for a note behind the queues.
    has_note: bool,
}

fn queue_bytes(entries: u16) -> usize {
    (HEADER + ENTRY * usize::from(entries)).next_multiple_of(QUEUE_ALIGN)
}

fn all_queues_bytes(queues: u16, entries: u16) -> usize {
    queue_bytes(entries) * usize::from(queues)
}

/// Bytes for so many queues of so many entries, and the note.
#[must_use]
pub fn region_bytes(queues: u16, entries: u16) -> u64 {
    to_u64(all_queues_bytes(queues, entries) + QUEUE_ALIGN)
}

/// Makes a file for so many queues of so many entries, with nothing under way.
///
/// # Errors
/// What the system says.
pub fn make(queues: u16, entries: u16) -> io::Result<OwnedFd> {
    let file = memfd_create("inflight", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, region_bytes(queues, entries))?;
    Ok(file)
}

impl Inflight {
    /// Maps what the VMM has kept.
    ///
    /// # Errors
    /// See [`InflightError`].
    pub fn map(
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        queues: u16,
        entries: u16,
    ) -> Result<Self, InflightError> {
        let least = to_u64(all_queues_bytes(queues, entries));
        if bytes < least {
            return Err(InflightError::Size {
                bytes,
                queues,
                entries,
            });
        }
        memory_file::check(file, (offset, bytes), true, Source::Vmm)?;
        let whole = region_bytes(queues, entries);
        let has_note = bytes >= whole;
        let length = if has_note { whole } else { least };
        Ok(Self {
            mapping: Arc::new(Mapping::new(file, offset, length, true)?),
            queues,
            entries,
            has_note,
        })
    }

    /// The words of the note.
    fn note_words(&self) -> Option<&[AtomicU64; 4]> {
        if !self.has_note {
            return None;
        }
        let at = all_queues_bytes(self.queues, self.entries);
        // SAFETY: behind the queues the mapping has room for them, and begins at a page; the offset
        // is a multiple of 64. Others write it, which atomics allow.
        Some(unsafe { &*self.mapping.base().add(at).cast() })
    }

    /// What the last backend has left for the next one.
    #[must_use]
    pub fn note(&self) -> Option<Note> {
        let [mark, words @ ..] = self.note_words()?;
        if mark.load(Ordering::Acquire) != NOTE {
            return None;
        }
        Some(words.each_ref().map(|word| word.load(Ordering::Relaxed)))
    }

    /// Leaves this for the next backend, where there is room for it.
    pub fn set_note(&self, note: Note) {
        if self.note() == Some(note) {
            return;
        }
        if let Some([mark, words @ ..]) = self.note_words() {
            // Killed in between, a backend leaves none.
            mark.store(0, Ordering::Release);
            for (word, value) in words.iter().zip(note) {
                word.store(value, Ordering::Release);
            }
            mark.store(NOTE, Ordering::Release);
        }
    }

    /// The part of a queue, if it has one for queues of this size.
    #[must_use]
    pub fn queue(&self, index: u16, size: u16) -> Option<QueueInflight> {
        if index >= self.queues || size > self.entries {
            return None;
        }
        Some(QueueInflight {
            mapping: Arc::clone(&self.mapping),
            at: queue_bytes(self.entries) * usize::from(index),
            size,
            counter: 0,
        })
    }
}

/// Tracks the requests of one queue.
#[derive(Debug)]
pub struct QueueInflight {
    mapping: Arc<Mapping>,
    /// Offset of the queue's part.
    at: usize,
    /// Entries of the queue: heads are below it.
    size: u16,
    counter: u64,
}

impl QueueInflight {
    /// The word at `offset` of this queue's part.
    ///
    /// # Safety
    /// `offset` is inside of the part, and a multiple of the word's size.
    unsafe fn word<T>(&self, offset: usize) -> &T {
        // SAFETY: as the caller promises; parts are inside of the mapping and aligned to 64 bytes
        // in it, and a mapping begins at a page. Others write it, which atomics allow: `T` is one.
        unsafe { &*self.mapping.base().add(self.at + offset).cast::<T>() }
    }

    fn header(&self, offset: usize) -> &AtomicU16 {
        debug_assert!(offset < HEADER && offset.is_multiple_of(2));
        // SAFETY: in the header.
        unsafe { self.word(offset) }
    }

    fn entry(&self, head: u16) -> usize {
        HEADER + ENTRY * usize::from(head.min(self.size - 1))
    }

    fn flag(&self, head: u16) -> &AtomicU8 {
        // SAFETY: the first byte of an entry.
        unsafe { self.word(self.entry(head)) }
    }

    fn next(&self, head: u16) -> &AtomicU16 {
        // SAFETY: in an entry, aligned.
        unsafe { self.word(self.entry(head) + NEXT_AT) }
    }

    fn counter(&self, head: u16) -> &AtomicU64 {
        // SAFETY: in an entry, aligned.
        unsafe { self.word(self.entry(head) + COUNTER_AT) }
    }

    /// Finds what a predecessor has left: heads in the order in which they were taken. `used` is
    /// the queue's used index.
    #[must_use]
    pub fn recover(&mut self, used: u16) -> Vec<u16> {
        if self.header(VERSION_AT).load(Ordering::Acquire) != VERSION {
            // Fresh memory.
            for head in 0..self.size {
                self.flag(head).store(0, Ordering::Relaxed);
            }
            self.header(ENTRIES_AT).store(self.size, Ordering::Relaxed);
            self.header(USED_AT).store(used, Ordering::Relaxed);
            self.header(VERSION_AT).store(VERSION, Ordering::Release);
            return Vec::new();
        }
        let known = self.header(USED_AT).load(Ordering::Acquire);
        // It was killed after the driver saw its last batch and before it said so here.
        let batch = used.wrapping_sub(known);
        let mut head = self.header(LAST_BATCH_AT).load(Ordering::Relaxed);
        for _ in 0..batch.min(self.size) {
            if head >= self.size {
                break;
            }
            self.flag(head).store(0, Ordering::Relaxed);
            head = self.next(head).load(Ordering::Relaxed);
        }
        self.header(USED_AT).store(used, Ordering::Release);
        let mut left: Vec<(u64, u16)> = (0..self.size)
            .filter(|&head| self.flag(head).load(Ordering::Acquire) != 0)
            .map(|head| (self.counter(head).load(Ordering::Relaxed), head))
            .collect();
        left.sort_unstable();
        self.counter = left
            .last()
            .map_or(0, |&(counter, _)| counter.wrapping_add(1));
        left.into_iter().map(|(_, head)| head).collect()
    }

    /// Nothing is under way: what was taken and not completed is the driver's again.
    pub fn forget(&mut self) {
        for head in 0..self.size {
            self.flag(head).store(0, Ordering::Release);
        }
    }

    /// A request has been taken from the queue.
    pub fn begin(&mut self, head: u16) {
        self.counter(head).store(self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.flag(head).store(1, Ordering::Release);
    }

    /// Requests are going to be made visible as used. Their batch is everything since
    /// [`end`](Self::end).
    pub fn prepare(&mut self, head: u16) {
        let last = self.header(LAST_BATCH_AT).load(Ordering::Relaxed);
        self.next(head).store(last, Ordering::Relaxed);
        self.header(LAST_BATCH_AT).store(head, Ordering::Release);
    }

    /// The batch is visible; the queue's used index is `used` now.
    pub fn end(&mut self, batch: &[u16], used: u16) {
        for &head in batch {
            self.flag(head).store(0, Ordering::Release);
        }
        self.header(USED_AT).store(used, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    fn pair() -> (OwnedFd, Inflight) {
        let file = make(2, 8).unwrap();
        let map = Inflight::map(file.as_fd(), 0, region_bytes(2, 8), 2, 8).unwrap();
        (file, map)
    }

    fn successor(file: &OwnedFd) -> QueueInflight {
        let map = Inflight::map(file.as_fd(), 0, region_bytes(2, 8), 2, 8).unwrap();
        map.queue(1, 8).unwrap()
    }

    #[test]
    fn a_successor_finds_what_was_not_completed_in_order() {
        let (file, map) = pair();
        let mut queue = map.queue(1, 8).unwrap();
        assert!(queue.recover(0).is_empty());
        for head in [5, 1, 7, 2] {
            queue.begin(head);
        }
        queue.prepare(1);
        queue.end(&[1], 1);
        assert_eq!(successor(&file).recover(1), [5, 7, 2]);
        // New ones come after those.
        let mut next = successor(&file);
        let _ = next.recover(1);
        next.begin(1);
        assert_eq!(successor(&file).recover(1), [5, 7, 2, 1]);
        // The other queue has none.
        assert!(map.queue(0, 8).unwrap().recover(0).is_empty());
    }

    #[test]
    fn a_batch_that_the_driver_has_seen_is_not_done_again() {
        let (file, map) = pair();
        let mut queue = map.queue(1, 8).unwrap();
        let _ = queue.recover(0xfffe);
        for head in [3, 4, 5, 6] {
            queue.begin(head);
        }
        queue.prepare(6);
        queue.prepare(3);
        queue.prepare(5);
        // Killed here: the driver has not seen them.
        assert_eq!(successor(&file).recover(0xfffe), [3, 4, 5, 6]);
        // Killed here: it has.
        assert_eq!(successor(&file).recover(1), [4]);
        assert_eq!(successor(&file).recover(1), [4]);
    }

    #[test]
    fn a_successor_finds_what_its_predecessor_has_noted() {
        let (file, map) = pair();
        let again = |bytes| Inflight::map(file.as_fd(), 0, bytes, 2, 8).unwrap();
        assert_eq!(map.note(), None);
        map.set_note([7, u64::MAX, 1]);
        map.set_note([8, 9, 2]);
        assert_eq!(again(region_bytes(2, 8)).note(), Some([8, 9, 2]));
        // The queues are beside it.
        let mut queue = map.queue(1, 8).unwrap();
        assert!(queue.recover(0).is_empty());
        queue.begin(7);
        assert_eq!(successor(&file).recover(0), [7]);
        assert_eq!(map.note(), Some([8, 9, 2]));
        // Memory that has no room for one.
        let small = again(region_bytes(2, 8) - 64);
        small.set_note([1, 2, 3]);
        assert_eq!(small.note(), None);
        assert_eq!(map.note(), Some([8, 9, 2]));
    }

    #[test]
    fn nonsense_in_the_memory_is_survived() {
        let (file, map) = pair();
        rustix::io::pwrite(&file, &[0xff; 64], u64::try_from(queue_bytes(8)).unwrap()).unwrap();
        rustix::io::pwrite(
            &file,
            &VERSION.to_ne_bytes(),
            u64::try_from(queue_bytes(8) + VERSION_AT).unwrap(),
        )
        .unwrap();
        let heads = map.queue(1, 8).unwrap().recover(9);
        assert!(heads.len() <= 8 && heads.iter().all(|&head| head < 8));
        assert!(map.queue(2, 8).is_none() && map.queue(0, 16).is_none());
        assert!(Inflight::map(file.as_fd(), 4096, region_bytes(2, 8), 2, 8).is_err());
        assert!(Inflight::map(file.as_fd(), 0, region_bytes(2, 8) - 65, 2, 8).is_err());
        assert!(Inflight::map(file.as_fd(), 0, 64, 2, 8).is_err());
    }
}
