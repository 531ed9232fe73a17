//! Phony memory: buffers that a request borrows for its time. A page of it belongs to one slot for
//! good, so that who has the page has the slot.
//!
//! There are small buffers, for many short requests at a time, and a few large ones; memory is
//! pinned when it is used first.

use farlane_abi::tunnel::{SECTOR_BYTES, SECTORS_PER_PAGE};
use farlane_abi::width::to_usize;
use farlane_transport::{Map, Pin, PinKind, Transport};
use rustix::thread::futex;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const PAGE: usize = SECTOR_BYTES * SECTORS_PER_PAGE;
/// Pages of a small buffer: 64 KiB.
const SMALL_PAGES: usize = 16;
/// Small buffers, which lie in one piece of memory.
const SMALL: usize = 64;
/// Pages of a large buffer: 4 MiB, as in spin-atc17.
const LARGE_PAGES: usize = 1024;
/// Number of large buffers.
const LARGE: usize = 8;

/// Slots that all of them need.
pub(crate) const SLOTS: u32 = 9216;
const _: () = assert!(SMALL * SMALL_PAGES + LARGE * LARGE_PAGES == SLOTS as usize);

/// Phony memory that is mapped and pinned.
#[derive(Debug)]
struct Memory {
    // Unpinned before it is unmapped.
    _pin: Pin,
    map: Map,
}

impl Memory {
    fn new(transport: &Arc<dyn Transport>, pages: usize) -> Option<Self> {
        let map = Map::anonymous(pages * PAGE).ok()?;
        let base = map.base().as_ptr().cast();
        // In a child it would be copied for nothing, and envelopes are not for files that others
        // read.
        for advice in [
            rustix::mm::Advice::LinuxDontFork,
            rustix::mm::Advice::LinuxDontDump,
        ] {
            // SAFETY: the mapping just made.
            let _ = unsafe { rustix::mm::madvise(base, map.len(), advice) };
        }
        // SAFETY: the pin goes before the mapping; disks are to change it.
        let pin = unsafe { Pin::new(transport, PinKind::Phony, base.addr(), map.len(), true) };
        match pin {
            Ok(pin) => Some(Self { _pin: pin, map }),
            Err(error) => {
                let why = farlane_sys::chain(&error);
                crate::log::once(&format!("Memory for tunnels cannot be pinned: {why}"));
                None
            }
        }
    }
}

/// Buffers of one size, at most 64.
#[derive(Debug)]
struct Class {
    pages: usize,
    /// Slot of the first page of the first buffer.
    first_slot: usize,
    count: usize,
    /// A bit for each buffer that is not lent.
    free: AtomicU64,
    /// Counts buffers that have been given back. Those who wait for one of this size sleep on it,
    /// and nobody else: one of them is woken for each.
    returned: AtomicU32,
    /// Pieces of memory, for one buffer each, or one for all.
    memory: Vec<OnceLock<Option<Memory>>>,
}

/// All phony memory of a tunnel.
#[derive(Debug)]
pub(crate) struct Phony {
    small: Class,
    large: Class,
}

impl Class {
    fn new(pages: usize, first_slot: usize, count: usize, pieces: usize) -> Self {
        let bits = (0..64).zip(0..count).map(|(bit, _)| 1_u64 << bit);
        Self {
            pages,
            first_slot,
            count,
            free: AtomicU64::new(bits.sum()),
            returned: AtomicU32::new(0),
            memory: (0..pieces).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Takes a free buffer.
    fn take(&self) -> Option<usize> {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            let index = free.trailing_zeros();
            let bit = 1_u64.checked_shl(index)?;
            match self.free.compare_exchange_weak(
                free,
                free & !bit,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(to_usize(index.into())),
                Err(now) => free = now,
            }
        }
    }

    /// The memory of a buffer, and where in it the buffer begins; none where it cannot be pinned.
    fn memory(&self, transport: &Arc<dyn Transport>, index: usize) -> Option<(&Memory, usize)> {
        let (piece, at) = match self.memory.len() {
            1 => (0, index * self.pages * PAGE),
            _ => (index, 0),
        };
        let pages = if self.memory.len() == 1 {
            self.pages * self.count
        } else {
            self.pages
        };
        let memory = self.memory.get(piece)?;
        let memory = memory.get_or_init(|| Memory::new(transport, pages));
        Some((memory.as_ref()?, at))
    }
}

impl Phony {
    /// As many buffers as `slots` are enough for.
    pub(crate) fn new(slots: usize) -> Self {
        let small = SMALL * SMALL_PAGES;
        let large = slots.saturating_sub(small) / LARGE_PAGES;
        Self {
            small: Class::new(SMALL_PAGES, 0, if slots < small { 0 } else { SMALL }, 1),
            large: Class::new(LARGE_PAGES, small, large.min(LARGE), large.min(LARGE)),
        }
    }

    /// Lends a buffer for up to `length` bytes: a large one for what is too long for a small one.
    /// Waits while all are lent. None where no memory can be pinned.
    pub(crate) fn lend(
        &self,
        transport: &Arc<dyn Transport>,
        length: usize,
    ) -> Option<PhonyBuffer<'_>> {
        let class = if length <= SMALL_PAGES * PAGE {
            &self.small
        } else {
            &self.large
        };
        if class.count == 0 {
            return None;
        }
        loop {
            let returned = class.returned.load(Ordering::Acquire);
            let Some(index) = class.take() else {
                let _ = futex::wait(&class.returned, futex::Flags::PRIVATE, returned, None);
                continue;
            };
            let mut lent = PhonyBuffer {
                class,
                index,
                base: std::ptr::null_mut(),
            };
            // Dropped, and so given back, where there is no memory.
            let (memory, at) = class.memory(transport, index)?;
            lent.base = memory.map.at(at, class.pages * PAGE).as_ptr();
            return Some(lent);
        }
    }
}

/// A phony buffer in use, and the slots of its pages.
#[derive(Debug)]
pub(crate) struct PhonyBuffer<'a> {
    class: &'a Class,
    index: usize,
    base: *mut u8,
}

impl PhonyBuffer<'_> {
    /// Pointer to the first byte.
    pub(crate) fn base(&self) -> *mut c_void {
        self.base.cast()
    }

    /// Length in bytes.
    pub(crate) fn length(&self) -> usize {
        self.class.pages * PAGE
    }

    /// Slot of the first page.
    pub(crate) fn first_slot(&self) -> usize {
        self.class.first_slot + self.index * self.class.pages
    }

    /// What is in it now, when no request is under way.
    pub(crate) fn bytes(&self, range: &Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.length());
        // SAFETY: inside the buffer, which is lent to this one and which nobody else writes.
        unsafe { std::slice::from_raw_parts(self.base.add(range.start), range.len()) }
    }

    /// Puts bytes into it, when no request is under way.
    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.length());
        // SAFETY: inside the buffer, which is lent to this one only.
        unsafe {
            self.base
                .add(offset)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }
}

impl Drop for PhonyBuffer<'_> {
    fn drop(&mut self) {
        let bit = 1_u64 << self.index;
        self.class.free.fetch_or(bit, Ordering::Release);
        self.class.returned.fetch_add(1, Ordering::Release);
        let _ = futex::wake(&self.class.returned, futex::Flags::PRIVATE, 1);
    }
}
