//! The driver's side of a split virtqueue (virtio 1.2, section 2.7) in guest memory.

use super::Error;
use crate::memory::GuestMemory;
use farlane_abi::PAGE_BYTES;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Descriptors of each queue.
pub(crate) const SIZE: u16 = 64;

/// Where the parts lie in the queue's page.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x400;
const USED: u64 = 0x800;
/// `used_event`, behind the available ring.
const USED_EVENT: u64 = AVAILABLE + 4 + 2 * SIZE as u64;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A part of a chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Offset in guest memory.
    pub offset: u64,
    pub length: u32,
    /// The device writes it.
    pub writable: bool,
}

/// A queue. Chains begin at the descriptor that the caller names: what each descriptor is for is
/// fixed.
#[derive(Debug)]
pub(crate) struct Ring {
    memory: Arc<GuestMemory>,
    offset: u64,
    published: u16,
    seen: u16,
}

fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

impl Ring {
    pub fn new(memory: &Arc<GuestMemory>) -> Result<Self, Error> {
        Ok(Self {
            offset: memory.take(PAGE_BYTES)?,
            memory: Arc::clone(memory),
            published: 0,
            seen: 0,
        })
    }

    /// Empties the queue, as a driver does that starts.
    pub fn reset(&mut self) {
        self.write(DESCRIPTORS, &vec![0; index(PAGE_BYTES)]);
        (self.published, self.seen) = (0, 0);
    }

    /// Addresses in this process, as a VMM tells them: descriptors, available, used.
    pub fn addresses(&self) -> [u64; 3] {
        [DESCRIPTORS, AVAILABLE, USED].map(|part| self.memory.user_address(self.offset + part))
    }

    /// Writes the chain that begins at descriptor `head` and continues with the next ones.
    pub fn describe(&mut self, head: u16, parts: &[Part]) {
        for (at, (part, left)) in (head..).zip(parts.iter().zip((0..parts.len()).rev())) {
            let address = self.memory.guest_address(part.offset);
            let write = if part.writable { WRITE } else { 0 };
            let (next, flags) = if left > 0 {
                (at + 1, NEXT | write)
            } else {
                (0, write)
            };
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&address.to_le_bytes());
            bytes[8..12].copy_from_slice(&part.length.to_le_bytes());
            bytes[12..14].copy_from_slice(&flags.to_le_bytes());
            bytes[14..].copy_from_slice(&next.to_le_bytes());
            self.write(DESCRIPTORS + u64::from(at % SIZE) * 16, &bytes);
        }
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        // SAFETY: the driver's own part of the queue, used by one thread at a time (`&mut self`
        // of the callers, or the lock around them).
        unsafe {
            self.memory
                .map()
                .write_bytes(index(self.offset + at), bytes)
        };
    }

    /// Makes the chain at `head` available.
    pub fn publish(&mut self, head: u16) {
        let slot = u64::from(self.published % SIZE);
        self.write(AVAILABLE + 4 + slot * 2, &head.to_le_bytes());
        self.published = self.published.wrapping_add(1);
        // Flags are zero: interrupts are wanted.
        let word = u32::from(self.published) << 16;
        self.available_word().store(word, Ordering::SeqCst);
    }

    /// Chains that were made available so far.
    pub fn available_index(&self) -> u16 {
        self.published
    }

    fn available_word(&self) -> &std::sync::atomic::AtomicU32 {
        self.memory.map().word(index(self.offset + AVAILABLE))
    }

    fn used_index(&self) -> u16 {
        let word = self.memory.map().word(index(self.offset + USED));
        u16::try_from(word.load(Ordering::Acquire) >> 16).unwrap_or(0)
    }

    /// The next chain that was used: its head and the bytes written. When there is none, the next
    /// one interrupts.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        if self.used_index() == self.seen {
            // Looked at by devices with VIRTIO_F_EVENT_IDX (virtio 1.2, section 2.7.10).
            self.write(USED_EVENT, &self.seen.to_le_bytes());
            fence(Ordering::SeqCst);
            if self.used_index() == self.seen {
                return None;
            }
        }
        let slot = u64::from(self.seen % SIZE);
        let at = index(self.offset + USED + 4 + slot * 8);
        // SAFETY: no thread of this process writes the used ring.
        let [head, length]: [u32; 2] = unsafe { self.memory.map().read(at) };
        self.seen = self.seen.wrapping_add(1);
        Some((u16::try_from(head).unwrap_or(u16::MAX), length))
    }
}
