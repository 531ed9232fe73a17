//! Scratchpads and doorbells in shared memory: the area of one end.
//!
//! | offset | words | what | written by |
//! |-------:|------:|------|------------|
//! | 0x000  | 1  | magic number | owner |
//! | 0x004  | 1  | version | owner |
//! | 0x008  | 1  | beat: changes while the owner lives, zero when it has gone | owner |
//! | 0x00c  | 1  | doorbells that raise no event | owner |
//! | 0x040  | 32 | rings of each doorbell, modulo 2^32 | other end |
//! | 0x100  | 32 | scratchpads | both |
//!
//! All words are little-endian. But for the scratchpads each has one writer, so that no atomic
//! operation has to cross a bus. A doorbell has been rung if its count is not the one that its
//! owner has seen last.

use crate::NtbError;
use farlane_sys::sync::lock;
use farlane_zero_copy::{OutOfBounds, SharedMemory};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Bytes of an area.
pub(crate) const AREA_BYTES: usize = 0x800;
/// Doorbells of each end.
pub(crate) const DOORBELLS: usize = 32;
/// All doorbells.
pub(crate) const ALL_DOORBELLS: u64 = 0xffff_ffff;
/// Scratchpads of each end.
pub(crate) const SCRATCHPADS: u32 = 32;

const MAGIC: u32 = u32::from_le_bytes(*b"FNTB");
const VERSION: u32 = 1;
const AT_MAGIC: usize = 0x00;
const AT_VERSION: usize = 0x04;
const AT_BEAT: usize = 0x08;
const AT_MASK: usize = 0x0c;
const AT_RINGS: usize = 0x40;
const AT_SCRATCHPADS: usize = 0x100;

/// The area of one end.
#[derive(Clone, Debug)]
pub(crate) struct Area {
    memory: SharedMemory,
    base: usize,
}

impl Area {
    /// The area that begins at byte `base` of `memory`.
    pub fn new(memory: SharedMemory, base: usize) -> Result<Self, NtbError> {
        let area = Self { memory, base };
        let fits = base
            .checked_add(AREA_BYTES)
            .is_some_and(|end| end <= area.memory.len());
        if !fits || !base.is_multiple_of(4) {
            return Err(NtbError::File("it is too small for a control page"));
        }
        Ok(area)
    }

    fn word(&self, offset: usize) -> Result<&AtomicU32, OutOfBounds> {
        self.memory.word(self.base + offset)
    }

    // `new` has checked that all words of the layout are there.
    fn load(&self, offset: usize) -> u32 {
        self.word(offset)
            .map_or(0, |w| u32::from_le(w.load(Ordering::Acquire)))
    }

    fn store(&self, offset: usize, value: u32) {
        if let Ok(word) = self.word(offset) {
            word.store(value.to_le(), Ordering::Release);
        }
    }

    /// Makes it an area that the other end will know.
    pub fn format(&self) {
        self.store(AT_VERSION, VERSION);
        self.store(AT_MAGIC, MAGIC);
    }

    /// Whether its owner speaks as we do.
    pub fn is_formatted(&self) -> bool {
        self.load(AT_MAGIC) == MAGIC && self.load(AT_VERSION) == VERSION
    }

    pub fn beat(&self) -> u32 {
        self.load(AT_BEAT)
    }

    pub fn set_beat(&self, value: u32) {
        self.store(AT_BEAT, value);
    }

    pub fn scratchpad(&self, index: u32) -> Result<u32, NtbError> {
        Ok(self.load(Self::scratchpad_offset(index)?))
    }

    pub fn set_scratchpad(&self, index: u32, value: u32) -> Result<(), NtbError> {
        self.store(Self::scratchpad_offset(index)?, value);
        Ok(())
    }

    fn scratchpad_offset(index: u32) -> Result<usize, NtbError> {
        let error = NtbError::Scratchpad {
            index,
            count: SCRATCHPADS,
        };
        match usize::try_from(index) {
            Ok(at) if index < SCRATCHPADS => Ok(AT_SCRATCHPADS + 4 * at),
            _ => Err(error),
        }
    }

    fn rings(&self) -> [u32; DOORBELLS] {
        std::array::from_fn(|bit| self.load(AT_RINGS + 4 * bit))
    }
}

fn check(bits: u64) -> Result<u32, NtbError> {
    u32::try_from(bits).map_err(|_| NtbError::Doorbells {
        bits,
        valid: ALL_DOORBELLS,
    })
}

fn bits(word: u32) -> impl Iterator<Item = usize> {
    (0..DOORBELLS).filter(move |bit| word & (1 << bit) != 0)
}

/// The doorbells of an area's owner.
#[derive(Debug)]
pub(crate) struct OwnDoorbells {
    area: Area,
    seen: Mutex<[u32; DOORBELLS]>,
}

impl OwnDoorbells {
    /// Doorbells that have not been rung.
    pub fn new(area: Area) -> Self {
        let seen = Mutex::new(area.rings());
        Self { area, seen }
    }

    /// Those that have been rung.
    pub fn pending(&self) -> u64 {
        let seen = *lock(&self.seen);
        let rung = self.area.rings();
        let differ = (0..DOORBELLS).filter(|&bit| seen[bit] != rung[bit]);
        differ.fold(0, |all, bit| all | 1 << bit)
    }

    pub fn clear(&self, which: u64) -> Result<(), NtbError> {
        let which = check(which)?;
        let mut seen = lock(&self.seen);
        for bit in bits(which) {
            seen[bit] = self.area.load(AT_RINGS + 4 * bit);
        }
        Ok(())
    }

    pub fn mask(&self, which: u64) -> Result<(), NtbError> {
        self.area.store(AT_MASK, check(which)?);
        // Whoever rings a doorbell counts first and looks at the mask then: see `Ringer::ring`.
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// Those that have been rung and are to raise an event.
    pub fn due(&self) -> u64 {
        self.pending() & !u64::from(self.area.load(AT_MASK))
    }
}

/// Rings the doorbells of the other end.
#[derive(Debug, Default)]
pub(crate) struct Ringer {
    // Counts have one writer.
    one: Mutex<()>,
}

impl Ringer {
    /// Rings `which` of `area`'s owner. Says whether one of them is to raise an event.
    pub fn ring(&self, area: &Area, which: u64) -> Result<bool, NtbError> {
        let which = check(which)?;
        let _one = lock(&self.one);
        for bit in bits(which) {
            let at = AT_RINGS + 4 * bit;
            area.store(at, area.load(at).wrapping_add(1));
        }
        fence(Ordering::SeqCst);
        Ok(which & !area.load(AT_MASK) != 0)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use farlane_zero_copy::Mapping;
    use proptest::prelude::*;
    use std::os::fd::AsFd as _;

    pub(crate) fn memory(bytes: u64) -> SharedMemory {
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        SharedMemory::new(Mapping::new(fd.as_fd(), 0, bytes, true).unwrap())
    }

    #[test]
    fn an_area_must_fit() {
        Area::new(memory(0x1000), 0x800).unwrap();
        Area::new(memory(0x1000), 0x804).unwrap_err();
        Area::new(memory(0x1000), usize::MAX).unwrap_err();
        let area = Area::new(memory(0x1000), 0x800).unwrap();
        area.set_scratchpad(31, 7).unwrap();
        assert_eq!(area.scratchpad(31).unwrap(), 7);
        area.scratchpad(32).unwrap_err();
        area.set_scratchpad(u32::MAX, 0).unwrap_err();
    }

    #[derive(Debug, Clone)]
    enum Step {
        Ring(u32),
        Clear(u32),
        Mask(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            any::<u32>().prop_map(Step::Ring),
            any::<u32>().prop_map(Step::Clear),
            any::<u32>().prop_map(Step::Mask),
        ]
    }

    proptest! {
        #[test]
        fn doorbells_are_a_register_of_bits(steps in prop::collection::vec(step(), 0..40)) {
            let area = Area::new(memory(0x1000), 0).unwrap();
            let own = OwnDoorbells::new(area.clone());
            let ringer = Ringer::default();
            let (mut pending, mut mask) = (0, 0);
            for step in steps {
                match step {
                    Step::Ring(bits) => {
                        let event = ringer.ring(&area, bits.into()).unwrap();
                        prop_assert_eq!(event, bits & !mask != 0);
                        pending |= bits;
                    }
                    Step::Clear(bits) => {
                        own.clear(bits.into()).unwrap();
                        pending &= !bits;
                    }
                    Step::Mask(bits) => {
                        own.mask(bits.into()).unwrap();
                        mask = bits;
                    }
                }
                prop_assert_eq!(own.pending(), u64::from(pending));
                prop_assert_eq!(own.due(), u64::from(pending & !mask));
            }
            prop_assert!(own.clear(1 << 32).is_err());
        }
    }
}
