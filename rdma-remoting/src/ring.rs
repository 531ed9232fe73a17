//! Rings of entries in memory shared with a process: where they lie, and the producer's end.
//!
//! Both ends count entries, free-running, and each tells the other how far it is in a word: by that
//! number, or by the index of an entry ([`Words`]).

use farlane_abi::rxe::{RING_OFF_CONSUMED, RING_OFF_ENTRIES, RING_OFF_PRODUCED, RingLayout};
use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::{Immutable, IntoBytes};
use farlane_sys::sync::lock;
use farlane_zero_copy::{OutOfBounds, SharedMemory};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

/// Bytes of entries that are moved to another ring at most: about as long as a turn, for which
/// others wait. A tenant's debt for a longer one ends after a few turns
/// ([`Arrears`](crate::drr::Arrears)).
const MOST_MOVED: usize = 1 << 20;

/// What the words of a ring say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Words {
    /// A running number, which wraps at 2^32.
    Numbers,
    /// The index of an entry. One entry stays free, so that a full ring is told from an empty one.
    Indices,
}

/// Where a ring lies in its segment: offsets and sizes in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub produced_at: usize,
    pub consumed_at: usize,
    pub entries_at: usize,
    /// A power of two.
    pub entries: u32,
    pub stride: usize,
    pub words: Words,
}

impl Place {
    /// A ring of the user ABI of rxe, at the beginning of its segment.
    pub fn of_indices(layout: &RingLayout) -> Self {
        Self {
            produced_at: RING_OFF_PRODUCED,
            consumed_at: RING_OFF_CONSUMED,
            entries_at: RING_OFF_ENTRIES,
            entries: layout.slots,
            stride: to_usize(layout.stride.into()),
            words: Words::Indices,
        }
    }

    /// Entries that can wait in it.
    pub fn room(&self) -> u32 {
        match self.words {
            Words::Numbers => self.entries,
            Words::Indices => self.entries.saturating_sub(1),
        }
    }

    /// What its word says of a running number.
    pub fn word(&self, number: u32) -> u32 {
        match self.words {
            Words::Numbers => number,
            Words::Indices => number & (self.entries - 1),
        }
    }

    /// How many entries lie from one place to another, each a word or a running number. Of indices
    /// it is never more than there is [room](Self::room) for, whatever a process has written.
    pub fn distance(&self, from: u32, to: u32) -> u32 {
        self.word(to.wrapping_sub(from))
    }

    /// Where the entry with this running number lies.
    pub fn entry(&self, number: u32) -> usize {
        self.entries_at + to_usize(u64::from(number & (self.entries - 1))) * self.stride
    }
}

/// The end that adds entries.
#[derive(Debug)]
pub(crate) struct Producer(Mutex<Ring>);

/// Where the next entry goes.
#[derive(Debug)]
struct Ring {
    /// Where both words lie.
    words: SharedMemory,
    memory: SharedMemory,
    place: Place,
    produced: u32,
}

impl Ring {
    /// Entries that the consumer has not taken, as it says.
    fn waiting(&self) -> Option<u32> {
        let consumed = self.words.word(self.place.consumed_at).ok()?;
        let consumed = consumed.load(Ordering::Acquire);
        Some(self.place.distance(consumed, self.produced))
    }
}

impl Producer {
    pub fn new(memory: SharedMemory, place: Place) -> Self {
        Self(Mutex::new(Ring {
            words: memory.clone(),
            memory,
            place,
            produced: 0,
        }))
    }

    /// Entries that can wait in it.
    pub fn entries(&self) -> u32 {
        lock(&self.0).place.room()
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
        let mut ring = lock(&self.0);
        if ring.waiting()? >= ring.place.room() {
            return None;
        }
        let at = ring.place.entry(ring.produced);
        write(&ring.memory, at).ok()?;
        let produced = ring.produced.wrapping_add(1);
        let word = ring.words.word(ring.place.produced_at).ok()?;
        word.store(ring.place.word(produced), Ordering::Release);
        ring.produced = produced;
        Some(())
    }

    /// Whether there is room for an entry.
    pub fn has_room(&self) -> bool {
        let ring = lock(&self.0);
        ring.waiting()
            .is_some_and(|waiting| waiting < ring.place.room())
    }

    /// Has the next entries lie elsewhere: a power of two of them at the beginning of `memory`.
    /// Those that wait stay where they are; returns the running number of the first that does not.
    /// `None` where more wait than there is room for from now on.
    pub fn move_to(&self, memory: SharedMemory, entries: u32) -> Option<u32> {
        let mut ring = lock(&self.0);
        if ring.waiting()? > entries {
            return None;
        }
        ring.memory = memory;
        ring.place.entries_at = 0;
        ring.place.entries = entries;
        Some(ring.produced)
    }

    /// Moves the ring, its words too, to where `place` says in `memory`, with the entries that
    /// wait, of which `bytes` are meant. The consumer takes none meanwhile. `None` where more wait
    /// than there is room for, or than are moved in a turn, or it does not lie there.
    pub fn move_all_to(&self, memory: SharedMemory, place: Place, bytes: usize) -> Option<()> {
        let mut ring = lock(&self.0);
        let waiting = ring.waiting().filter(|waiting| *waiting <= place.room())?;
        let first = ring.produced.wrapping_sub(waiting);
        let from = (&ring.memory, &ring.place);
        copy_entries(from, first, waiting, (&memory, &place), bytes)?;
        *ring = Ring {
            words: memory.clone(),
            memory,
            place,
            produced: waiting,
        };
        Some(())
    }
}

/// Copies `count` entries, the first of which has the number `first`, to the beginning of another
/// ring, in which nothing waits besides: `bytes` of each. `None` where that takes too long for a
/// turn.
pub(crate) fn copy_entries(
    (from, place): (&SharedMemory, &Place),
    first: u32,
    count: u32,
    (to, place_there): (&SharedMemory, &Place),
    bytes: usize,
) -> Option<()> {
    let bytes = bytes.min(place.stride).min(place_there.stride);
    if to_usize(count.into()) > MOST_MOVED / bytes.max(1) {
        return None;
    }
    let mut entry = vec![0; bytes];
    for number in 0..count {
        let at = place.entry(first.wrapping_add(number));
        from.read_bytes(at, &mut entry).ok()?;
        to.write_bytes(place_there.entry(number), &entry).ok()?;
    }
    let consumed = to.word(place_there.consumed_at).ok()?;
    consumed.store(0, Ordering::Relaxed);
    let produced = to.word(place_there.produced_at).ok()?;
    produced.store(place_there.word(count), Ordering::Release);
    Some(())
}
