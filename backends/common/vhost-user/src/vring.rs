//! A split virtqueue in guest memory (virtio 1.2, 2.7): where it lies, and its words.
//!
//! The driver writes all of it at any time. Words are read and written atomically; what is read is
//! looked at once it is in memory of ours.

use crate::bits::{AVAIL_NO_INTERRUPT, Descriptor, USED_NO_NOTIFY};
use farlane_zero_copy::{AddressSpaceError, View};
use std::rc::Rc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
use thiserror::Error;

/// Most entries of a queue.
pub const MAX_SIZE: u16 = 1024;

/// Why a queue cannot be used (any more).
#[derive(Debug, Error)]
pub enum RingError {
    /// Not a power of two, or too large.
    #[error("A queue cannot have {0} entries")]
    Size(u16),
    /// A part of it is not aligned as it must be.
    #[error("The {part} at {address:#x} is not aligned")]
    Misaligned {
        /// Which part.
        part: &'static str,
        /// Guest-physical address.
        address: u64,
    },
    /// A part of it is in several pieces of the backend's memory.
    #[error("The {part} at {address:#x} crosses a border of memory")]
    Scattered {
        /// Which part.
        part: &'static str,
        /// Guest-physical address.
        address: u64,
    },
    /// It is not in memory.
    #[error(transparent)]
    Memory(#[from] AddressSpaceError),
    /// The driver claims more buffers than the queue has room for.
    #[error("The driver makes {available} buffers available in a queue of {size}")]
    Overrun {
        /// Buffers that are new.
        available: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A buffer that cannot be.
    #[error("The available ring names descriptor {head} of {size}")]
    Head {
        /// Its first descriptor.
        head: u16,
        /// Entries of the queue.
        size: u16,
    },
}

/// Where a queue lies, by guest-physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Entries: a power of two.
    pub size: u16,
    /// The descriptor table.
    pub descriptors: u64,
    /// The available ring, which the driver writes.
    pub available: u64,
    /// The used ring, which the device writes.
    pub used: u64,
}

/// A queue in memory that stays as long as this does.
#[derive(Debug)]
pub struct Rings {
    view: Rc<View>,
    size: u16,
    descriptors: *const AtomicU64,
    available: *const AtomicU16,
    used: *const AtomicU16,
}

fn part(
    view: &View,
    part: &'static str,
    address: u64,
    bytes: u64,
    align: usize,
    writable: bool,
) -> Result<*mut u8, RingError> {
    let mut found = None;
    view.resolve(address, bytes, writable, |base, run| {
        if u64::try_from(run) == Ok(bytes) {
            found = Some(base);
        }
    })?;
    let base = found.ok_or(RingError::Scattered { part, address })?;
    if !base.addr().is_multiple_of(align) {
        return Err(RingError::Misaligned { part, address });
    }
    Ok(base)
}

impl Rings {
    /// Finds a queue in memory as it is now.
    ///
    /// # Errors
    /// See [`RingError`].
    pub fn map(view: View, layout: &Layout) -> Result<Self, RingError> {
        let size = layout.size;
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Err(RingError::Size(size));
        }
        let n = u64::from(size);
        // 2.7: alignments are 16, 2 and 4; each ring has a word for event indices at its end.
        let descriptors = part(
            &view,
            "descriptor table",
            layout.descriptors,
            16 * n,
            16,
            false,
        )?;
        let available = part(
            &view,
            "available ring",
            layout.available,
            6 + 2 * n,
            2,
            false,
        )?;
        let used = part(&view, "used ring", layout.used, 6 + 8 * n, 4, true)?;
        Ok(Self {
            view: Rc::new(view),
            size,
            descriptors: descriptors.cast_const().cast(),
            available: available.cast_const().cast(),
            used: used.cast_const().cast(),
        })
    }

    /// The memory that the queue is in.
    #[must_use]
    pub fn view(&self) -> &Rc<View> {
        &self.view
    }

    /// Entries.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Where in a ring the entry with this running number is.
    fn slot(&self, number: u16) -> usize {
        usize::from(number & (self.size - 1))
    }

    fn available_word(&self, index: usize) -> &AtomicU16 {
        debug_assert!(index < 3 + usize::from(self.size));
        // SAFETY: the ring has `3 + size` words, aligned and mapped as long as the view, as `map`
        // has checked; others write them, which atomics allow.
        unsafe { &*self.available.add(index) }
    }

    fn used_word(&self, index: usize) -> &AtomicU16 {
        debug_assert!(index < 3 + 4 * usize::from(self.size));
        // SAFETY: as above: `3 + 4 * size` words, writable.
        unsafe { &*self.used.add(index) }
    }

    /// The running number that the driver's next buffer will have.
    #[must_use]
    pub fn available_index(&self) -> u16 {
        u16::from_le(self.available_word(1).load(Ordering::Acquire))
    }

    /// The first descriptor of the buffer with this running number.
    #[must_use]
    pub fn available_head(&self, number: u16) -> u16 {
        let word = self.available_word(2 + self.slot(number));
        u16::from_le(word.load(Ordering::Relaxed))
    }

    /// Whether the driver wants no interrupts, where there are no event indices.
    #[must_use]
    pub fn wants_no_interrupts(&self) -> bool {
        let flags = u16::from_le(self.available_word(0).load(Ordering::Relaxed));
        flags & AVAIL_NO_INTERRUPT != 0
    }

    /// The used buffer of which the driver wants to be told.
    #[must_use]
    pub fn used_event(&self) -> u16 {
        let word = self.available_word(2 + usize::from(self.size));
        u16::from_le(word.load(Ordering::Relaxed))
    }

    /// The descriptor of this index, which is within the table.
    #[must_use]
    pub fn descriptor(&self, index: u16) -> Option<Descriptor> {
        if index >= self.size {
            return None;
        }
        let at = 2 * usize::from(index);
        // SAFETY: the table has `2 * size` words, aligned and mapped as long as the view; others
        // write them, which atomics allow.
        let words = unsafe { [&*self.descriptors.add(at), &*self.descriptors.add(at + 1)] };
        let [low, high] = words.map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        Some(zerocopy::transmute!([low, high]))
    }

    /// The running number that the device's next used buffer will have.
    #[must_use]
    pub fn used_index(&self) -> u16 {
        u16::from_le(self.used_word(1).load(Ordering::Acquire))
    }

    /// Puts a used buffer into the ring; the driver sees it when it is
    /// [published](Self::publish_used).
    pub fn put_used(&self, number: u16, head: u16, written: u32) {
        let at = 2 + 4 * self.slot(number);
        for (at, value) in [(at, u32::from(head)), (at + 2, written)] {
            let word: *const AtomicU32 = std::ptr::from_ref(self.used_word(at)).cast();
            // SAFETY: elements have eight bytes and begin at a multiple of four, as the ring does;
            // both words of the element are inside of it, as `slot` is below `size`.
            unsafe { &*word }.store(value.to_le(), Ordering::Relaxed);
        }
    }

    /// Makes used buffers up to this running number visible.
    pub fn publish_used(&self, index: u16) {
        self.used_word(1).store(index.to_le(), Ordering::Release);
    }

    /// Asks to be told of the available buffer with this running number.
    pub fn set_available_event(&self, number: u16) {
        let word = self.used_word(2 + 4 * usize::from(self.size));
        word.store(number.to_le(), Ordering::Relaxed);
    }

    /// Asks to be told of available buffers, or not, where there are no event indices.
    pub fn set_notify(&self, notify: bool) {
        let flags = if notify { 0 } else { USED_NO_NOTIFY };
        self.used_word(0).store(flags.to_le(), Ordering::Relaxed);
    }
}

/// Where a queue goes on whose buffers nobody tracks in flight, of `size` buffers, `used` of which
/// have been used so far, and which starts at `base` as its VMM says. VMMs of a backend
/// that was killed do not know what it has used, and some (Cloud Hypervisor, whenever a queue
/// starts) name the driver's available index: buffers that are available and not used are nobody's
/// then, and are taken (again). A device that stops uses what it has taken before it says where it
/// is, so that for one that goes on the two are the same.
#[must_use]
pub fn resume_at(base: u16, used: u16, size: u16) -> u16 {
    let unused = base.wrapping_sub(used);
    if unused <= size { used } else { base }
}

/// How far device and driver are.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Whether event indices were negotiated.
    pub event_index: bool,
    /// Running number of the next available buffer.
    pub next_available: u16,
    /// Running number of the next used buffer.
    pub next_used: u16,
    /// Used buffers that are visible to the driver.
    published: u16,
    /// Used buffers of which the driver has been told, or does not want to be.
    told: u16,
}

impl Progress {
    /// Of a queue that starts with these running numbers.
    #[must_use]
    pub fn new(event_index: bool, next_available: u16, next_used: u16) -> Self {
        Self {
            event_index,
            next_available,
            next_used,
            published: next_used,
            told: next_used,
        }
    }

    /// Of a queue whose buffers nobody tracks in flight, which starts at `base` as its VMM
    /// says: see [`resume_at`].
    #[must_use]
    pub fn resume(event_index: bool, base: u16, rings: &Rings) -> Self {
        let used = rings.used_index();
        let next_available = resume_at(base, used, rings.size());
        Self::new(event_index, next_available, used)
    }

    /// Takes the first descriptor of the next buffer.
    ///
    /// # Errors
    /// The driver's words make no sense.
    pub fn take(&mut self, rings: &Rings) -> Result<Option<u16>, RingError> {
        let head = self.peek(rings, 0)?;
        if head.is_some() {
            self.skip(1);
        }
        Ok(head)
    }

    /// The first descriptor of the buffer that is `ahead` buffers after the next one; it is not
    /// taken.
    ///
    /// # Errors
    /// The driver's words make no sense.
    pub fn peek(&self, rings: &Rings, ahead: u16) -> Result<Option<u16>, RingError> {
        let available = rings.available_index().wrapping_sub(self.next_available);
        let size = rings.size();
        if available > size {
            return Err(RingError::Overrun { available, size });
        }
        if ahead >= available {
            return Ok(None);
        }
        let head = rings.available_head(self.next_available.wrapping_add(ahead));
        if head >= size {
            return Err(RingError::Head { head, size });
        }
        Ok(Some(head))
    }

    /// Takes as many buffers, which were all seen by [`peek`](Self::peek).
    pub fn skip(&mut self, count: u16) {
        self.next_available = self.next_available.wrapping_add(count);
    }

    /// Whether there is another buffer.
    #[must_use]
    pub fn has_more(&self, rings: &Rings) -> bool {
        rings.available_index() != self.next_available
    }

    /// Puts a buffer into the used ring.
    pub fn put(&mut self, rings: &Rings, head: u16, written: u32) {
        rings.put_used(self.next_used, head, written);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Used buffers that wait to be published.
    #[must_use]
    pub fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }

    /// Whether used buffers wait to be published.
    #[must_use]
    pub fn has_unpublished(&self) -> bool {
        self.unpublished() > 0
    }

    /// Shows the driver all used buffers.
    pub fn publish(&mut self, rings: &Rings) {
        rings.publish_used(self.next_used);
        self.published = self.next_used;
    }

    /// Whether the driver wants to be told of what was published (2.7.7.2).
    #[must_use]
    pub fn must_tell(&mut self, rings: &Rings) -> bool {
        if self.told == self.published {
            return false;
        }
        // What was published is visible before the driver's wish is read: either it is seen here,
        // or the driver sees the buffers.
        fence(Ordering::SeqCst);
        let before = std::mem::replace(&mut self.told, self.published);
        if self.event_index {
            passes(rings.used_event(), before, self.published)
        } else {
            !rings.wants_no_interrupts()
        }
    }

    /// Asks the driver to tell of the next buffer. Look once more before sleeping.
    pub fn ask_to_be_told(&self, rings: &Rings) {
        self.ask_to_be_told_after(rings, 0);
    }

    /// Asks the driver to tell of the buffer that is `ahead` buffers after the next one. Look once
    /// more before sleeping.
    pub fn ask_to_be_told_after(&self, rings: &Rings, ahead: u16) {
        if self.event_index {
            rings.set_available_event(self.next_available.wrapping_add(ahead));
        } else {
            rings.set_notify(true);
        }
        fence(Ordering::SeqCst);
    }

    /// The next buffers will be found without being told. With event indices there is nothing to
    /// be done: the driver tells of the one buffer that it was asked to tell of.
    pub fn will_look(&self, rings: &Rings) {
        if !self.event_index {
            rings.set_notify(false);
        }
    }
}

/// Whether going from `before` to `after` passes the buffer `event` (2.7.7.2, `vring_need_event`).
fn passes(event: u16, before: u16, after: u16) -> bool {
    after.wrapping_sub(event).wrapping_sub(1) < after.wrapping_sub(before)
}

#[cfg(test)]
mod tests;
