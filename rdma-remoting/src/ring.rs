//! Rings of entries in memory shared with a process: where they lie, and the producer's end.
//!
//! Both ends count entries, free-running, and each tells the other how far it is in a word.

use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::{Immutable, IntoBytes};
use farlane_sys::sync::lock;
use farlane_zero_copy::{OutOfBounds, SharedMemory};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

/// Where a ring lies in its segment: offsets and sizes in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub produced_at: usize,
    pub consumed_at: usize,
    pub entries_at: usize,
    /// A power of two.
    pub entries: u32,
    pub stride: usize,
}

impl Place {
    /// Where the entry with this running number lies.
    pub fn entry(&self, number: u32) -> usize {
        self.entries_at + to_usize(u64::from(number & (self.entries - 1))) * self.stride
    }
}

/// The end that adds entries.
#[derive(Debug)]
pub(crate) struct Producer {
    /// Where both words lie, always.
    memory: SharedMemory,
    produced_at: usize,
    consumed_at: usize,
    ring: Mutex<Ring>,
}

/// Where the next entry goes.
#[derive(Debug)]
struct Ring {
    memory: SharedMemory,
    place: Place,
    produced: u32,
}

impl Producer {
    pub fn new(memory: SharedMemory, place: Place) -> Self {
        let ring = Ring {
            memory: memory.clone(),
            place,
            produced: 0,
        };
        Self {
            memory,
            produced_at: place.produced_at,
            consumed_at: place.consumed_at,
            ring: Mutex::new(ring),
        }
    }

    /// The segment that it lies in.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    pub fn entries(&self) -> u32 {
        lock(&self.ring).place.entries
    }

    /// Writes an entry and publishes it. `None` when there is no room: a consumer word beyond the
    /// producer's reads as a full ring as well.
    pub fn push(&self, entry: &(impl IntoBytes + Immutable)) -> Option<()> {
        self.push_with(|ring, at| ring.write(at, entry))
    }

    /// The same of an entry that is made and written, at that offset, when it has its place: of two
    /// entries the later one is made later.
    pub fn push_with(
        &self,
        write: impl FnOnce(&SharedMemory, usize) -> Result<(), OutOfBounds>,
    ) -> Option<()> {
        let mut ring = lock(&self.ring);
        if self.waiting(&ring)? >= ring.place.entries {
            return None;
        }
        let word = self.memory.word(self.produced_at).ok()?;
        let at = ring.place.entry(ring.produced);
        write(&ring.memory, at).ok()?;
        ring.produced = ring.produced.wrapping_add(1);
        word.store(ring.produced, Ordering::Release);
        Some(())
    }

    /// Whether there is room for an entry.
    pub fn has_room(&self) -> bool {
        let ring = lock(&self.ring);
        self.waiting(&ring)
            .is_some_and(|waiting| waiting < ring.place.entries)
    }

    /// Entries that the consumer has not taken, as it says.
    fn waiting(&self, ring: &Ring) -> Option<u32> {
        let consumed = self.memory.word(self.consumed_at).ok()?;
        Some(ring.produced.wrapping_sub(consumed.load(Ordering::Acquire)))
    }

    /// Has the next entries lie elsewhere: a power of two of them at the beginning of `memory`.
    /// Those that wait stay where they are; returns the running number of the first that does not.
    /// `None` where more wait than there is room for from now on.
    pub fn move_to(&self, memory: SharedMemory, entries: u32) -> Option<u32> {
        let mut ring = lock(&self.ring);
        if self.waiting(&ring)? > entries {
            return None;
        }
        ring.memory = memory;
        ring.place.entries_at = 0;
        ring.place.entries = entries;
        Some(ring.produced)
    }
}
