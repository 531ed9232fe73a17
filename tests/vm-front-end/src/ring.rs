//! The driver's side of a split virtqueue (virtio 1.2, 2.7).

use crate::memory::{GuestMemory, MemoryError};
use crate::{high, low, to_usize};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Of the available ring: no interrupts.
const NO_INTERRUPT: u32 = 1;
/// Of the used ring: no notifications.
const NO_NOTIFY: u32 = 1;
/// Descriptors of an indirect table.
const TABLE: usize = 32;
const DESCRIPTOR_BYTES: usize = 16;

/// Why a queue does not go on.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The guest's memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The device breaks the rules of virtio.
    #[error("The device breaks the rules: {0}")]
    Device(String),
    /// The system failed.
    #[error("System call failed")]
    Io(#[from] std::io::Error),
}

impl From<rustix::io::Errno> for RingError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// A part of a chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Offset in the guest's memory.
    pub offset: u64,
    pub length: u32,
    /// The device writes it.
    pub writable: bool,
}

/// Where a ring is, and its events: what a VMM knows of it.
#[derive(Debug)]
pub(crate) struct Place {
    memory: Arc<GuestMemory>,
    pub size: u16,
    descriptors: u64,
    available: u64,
    used: u64,
    pub kick: EventFd,
    pub call: EventFd,
}

impl Place {
    /// Makes one in a half of the memory.
    pub fn new(memory: &Arc<GuestMemory>, half: usize, size: u16) -> Result<Arc<Self>, RingError> {
        let n = u64::from(size);
        // Used ring, then available ring, each with the event index behind it.
        let available = 16 * n;
        let used = (available + 8 + 2 * n).next_multiple_of(64);
        let base = memory.take_in(half, used + 8 + 8 * n)?;
        Ok(Arc::new(Self {
            memory: Arc::clone(memory),
            size,
            descriptors: base,
            available: base + available,
            used: base + used,
            kick: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            call: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        }))
    }

    /// Addresses in this process: descriptors, available, used.
    pub fn addresses(&self) -> [u64; 3] {
        [self.descriptors, self.available, self.used].map(|at| self.memory.user_address(at))
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        self.memory.map().word(to_usize(offset))
    }

    fn descriptor(&self, index: u16) -> u64 {
        self.descriptors + u64::from(index) * DESCRIPTOR_BYTES as u64
    }

    fn describe(&self, at: u64, part: &Part, flags: u16, next: Option<u16>) {
        let flags = flags | if part.writable { WRITE } else { 0 };
        let flags = flags | if next.is_some() { NEXT } else { 0 };
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[..8].copy_from_slice(&self.memory.guest_address(part.offset).to_le_bytes());
        bytes[8..12].copy_from_slice(&part.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.unwrap_or(0).to_le_bytes());
        self.write(at, &bytes);
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        // SAFETY: descriptors and available ring are the driver's to write; only its `Ring` does,
        // by one thread.
        unsafe { self.memory.map().write_bytes(to_usize(at), bytes) };
    }

    /// The device's running number: how many chains it has used.
    pub fn used_index(&self) -> u16 {
        high(self.word(self.used).load(Ordering::Acquire))
    }

    fn clear(&self) {
        let bytes = to_usize(self.used + 8 + 8 * u64::from(self.size) - self.descriptors);
        let zeroes = vec![0; bytes];
        // SAFETY: the ring's memory, while no device has it and its owner resets it.
        unsafe {
            self.memory
                .map()
                .write_bytes(to_usize(self.descriptors), &zeroes)
        };
    }
}

/// Whether somebody who wants to be told at `event` is to be told of the step from `old` to `new`
/// (virtio 1.2, 2.7.7.1).
fn crosses(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A queue.
#[derive(Debug)]
pub(crate) struct Ring {
    place: Arc<Place>,
    event_index: bool,
    /// Offset of the indirect tables, one for each descriptor, if there are some.
    tables: Option<u64>,
    /// Descriptors that no chain has.
    free: Vec<u16>,
    /// The next one of each that is in a chain.
    next: Vec<Option<u16>>,
    /// Heads of chains that the device has.
    outstanding: Vec<bool>,
    published: u16,
    /// What was published when the device was last told.
    told: u16,
    seen: u16,
}

impl Ring {
    pub fn new(
        memory: &Arc<GuestMemory>,
        half: usize,
        size: u16,
        features: u64,
    ) -> Result<Self, RingError> {
        let place = Place::new(memory, half, size)?;
        let tables = if features & 1 << VIRTIO_RING_F_INDIRECT_DESC != 0 {
            let bytes = TABLE * DESCRIPTOR_BYTES * usize::from(size);
            Some(memory.take_in(half, bytes as u64)?)
        } else {
            None
        };
        let mut ring = Self {
            place,
            event_index: features & 1 << VIRTIO_RING_F_EVENT_IDX != 0,
            tables,
            free: Vec::new(),
            next: Vec::new(),
            outstanding: Vec::new(),
            published: 0,
            told: 0,
            seen: 0,
        };
        ring.reset();
        Ok(ring)
    }

    /// Empties the queue, as a driver does that starts. No device has it.
    pub fn reset(&mut self) {
        self.place.clear();
        let size = self.place.size;
        self.free = (0..size).rev().collect();
        self.next = vec![None; size.into()];
        self.outstanding = vec![false; size.into()];
        (self.published, self.told, self.seen) = (0, 0, 0);
        self.ignore();
    }

    pub fn place(&self) -> &Arc<Place> {
        &self.place
    }

    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.place.memory
    }

    /// Chains that were made available so far.
    pub fn published(&self) -> u16 {
        self.published
    }

    /// Descriptors that a chain of so many parts takes.
    fn needed(&self, parts: usize) -> usize {
        if self.is_indirect(parts) { 1 } else { parts }
    }

    fn is_indirect(&self, parts: usize) -> bool {
        self.tables.is_some() && parts > 1 && parts <= TABLE
    }

    /// Whether there is room for a chain of so many parts.
    pub fn has_room(&self, parts: usize) -> bool {
        self.free.len() >= self.needed(parts)
    }

    /// Descriptors that are free.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Puts a chain into the available ring, without telling the device; returns its head, or
    /// `None` if there is no room.
    pub fn post(&mut self, parts: &[Part]) -> Option<u16> {
        if parts.is_empty() || !self.has_room(parts.len()) {
            return None;
        }
        let place = &*self.place;
        let head = *self.free.last()?;
        if let (Some(tables), true) = (self.tables, self.is_indirect(parts.len())) {
            let table = tables + u64::from(head) * (TABLE * DESCRIPTOR_BYTES) as u64;
            for (part, index) in parts.iter().zip(0_u16..) {
                let last = usize::from(index) + 1 == parts.len();
                let next = (!last).then_some(index + 1);
                place.describe(table + u64::from(index) * 16, part, 0, next);
            }
            self.free.pop();
            let all = Part {
                offset: table,
                length: u32::try_from(parts.len() * DESCRIPTOR_BYTES).ok()?,
                writable: false,
            };
            place.describe(place.descriptor(head), &all, INDIRECT, None);
        } else {
            for (at, part) in parts.iter().enumerate() {
                let this = self.free.pop()?;
                let next = self.free.last().copied().filter(|_| at + 1 < parts.len());
                place.describe(place.descriptor(this), part, 0, next);
                *self.next.get_mut(usize::from(this))? = next;
            }
        }
        *self.outstanding.get_mut(usize::from(head))? = true;
        let slot = u64::from(self.published % place.size);
        place.write(place.available + 4 + slot * 2, &head.to_le_bytes());
        self.published = self.published.wrapping_add(1);
        let word = place.word(place.available);
        let flags = word.load(Ordering::Relaxed) & 0xffff;
        word.store(u32::from(self.published) << 16 | flags, Ordering::Release);
        Some(head)
    }

    /// Tells the device of what was posted, if it wants to know.
    pub fn kick(&mut self) -> Result<bool, RingError> {
        let (new, old) = (self.published, self.told);
        if new == old {
            return Ok(false);
        }
        self.told = new;
        // What was posted is visible before the device's wish is read.
        fence(Ordering::SeqCst);
        let wanted = if self.event_index {
            let at = self.place.used + 4 + 8 * u64::from(self.place.size);
            crosses(low(self.place.word(at).load(Ordering::Relaxed)), new, old)
        } else {
            let flags = self.place.word(self.place.used).load(Ordering::Relaxed);
            flags & NO_NOTIFY == 0
        };
        if wanted {
            self.place.kick.write(1)?;
        }
        Ok(wanted)
    }

    /// The next chain that the device has used: its head and the bytes written.
    pub fn take_used(&mut self) -> Result<Option<(u16, u32)>, RingError> {
        let ready = self.used();
        if ready == 0 {
            return Ok(None);
        }
        if ready > self.place.size {
            return Err(RingError::Device(format!(
                "{ready} chains used of {}",
                self.place.size
            )));
        }
        let slot = u64::from(self.seen % self.place.size);
        let at = to_usize(self.place.used + 4 + slot * 8);
        // SAFETY: no thread of this process writes the used ring.
        let [id, length]: [u32; 2] = unsafe { self.place.memory.map().read(at) };
        let head = u16::try_from(id).unwrap_or(u16::MAX);
        match self.outstanding.get_mut(usize::from(head)) {
            Some(outstanding) if *outstanding => *outstanding = false,
            _ => {
                return Err(RingError::Device(format!(
                    "chain {id} used, which it has not"
                )));
            }
        }
        self.seen = self.seen.wrapping_add(1);
        // In the order in which they are taken again: what is used last is warm.
        let mut chain = vec![];
        let mut at = Some(head);
        if self
            .next
            .get(usize::from(head))
            .is_some_and(Option::is_some)
        {
            while let Some(this) = at {
                chain.push(this);
                at = self.next.get_mut(usize::from(this)).and_then(Option::take);
            }
            self.free.extend(chain.iter().rev());
        } else {
            self.free.push(head);
        }
        Ok(Some((head, length)))
    }

    /// Chains that were used and not taken yet.
    pub fn used(&self) -> u16 {
        self.place.used_index().wrapping_sub(self.seen)
    }

    /// The device need not interrupt: somebody looks all the time.
    pub fn ignore(&mut self) {
        if self.event_index {
            // The last that it will reach.
            self.set_used_event(self.seen.wrapping_sub(1));
        } else {
            let flags = NO_INTERRUPT;
            self.place
                .word(self.place.available)
                .store(u32::from(self.published) << 16 | flags, Ordering::SeqCst);
        }
    }

    fn set_used_event(&self, event: u16) {
        let at = self.place.available + 4 + 2 * u64::from(self.place.size);
        self.place.word(at).store(event.into(), Ordering::SeqCst);
    }

    /// Asks for an interrupt at the next chain that is used; returns whether there is one already.
    pub fn arm(&mut self) -> bool {
        if self.event_index {
            self.set_used_event(self.seen);
        } else {
            self.place
                .word(self.place.available)
                .store(u32::from(self.published) << 16, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
        self.used() != 0
    }
}

/// Sleeps until one of the armed queues is told of used chains, or for so long.
pub(crate) fn sleep(rings: &[&Ring], longest: Duration) -> Result<(), RingError> {
    let mut fds: Vec<PollFd<'_>> = rings
        .iter()
        .map(|ring| {
            // SAFETY: the event lives as long as the borrowed ring.
            let fd = unsafe { BorrowedFd::borrow_raw(ring.place.call.as_raw_fd()) };
            PollFd::from_borrowed_fd(fd, PollFlags::IN)
        })
        .collect();
    let longest = Timespec::try_from(longest).ok();
    match poll(&mut fds, longest.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    for ring in rings {
        // Empty is as good: it does not block.
        let _ = ring.place.call.read();
    }
    Ok(())
}
