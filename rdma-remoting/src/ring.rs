//! Rings of entries in memory shared with a process: where they lie, and the producer's end.
//!
//! Both ends count entries, free-running, and each tells the other how far it is in a word.

use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::{Immutable, IntoBytes};
use farlane_sys::sync::lock;
use farlane_zero_copy::SharedMemory;
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
    memory: SharedMemory,
    place: Place,
    produced: Mutex<u32>,
}

impl Producer {
    pub fn new(memory: SharedMemory, place: Place) -> Self {
        let produced = Mutex::new(0);
        Self {
            memory,
            place,
            produced,
        }
    }

    /// The segment that it lies in.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    pub fn entries(&self) -> u32 {
        self.place.entries
    }

    /// Writes an entry and publishes it. `None` when there is no room: a consumer word beyond the
    /// producer's reads as a full ring as well.
    pub fn push(&self, entry: &(impl IntoBytes + Immutable)) -> Option<()> {
        let (memory, place) = (&self.memory, &self.place);
        let mut produced = lock(&self.produced);
        let consumed = memory.word(place.consumed_at).ok()?.load(Ordering::Acquire);
        if produced.wrapping_sub(consumed) >= place.entries {
            return None;
        }
        let word = memory.word(place.produced_at).ok()?;
        memory.write(place.entry(*produced), entry).ok()?;
        *produced = produced.wrapping_add(1);
        word.store(*produced, Ordering::Release);
        Some(())
    }
}
