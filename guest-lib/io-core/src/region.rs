//! A registered range of device memory, and who is using it.

use crate::provider::Provider;
use crate::ranges::CAPACITY;
use crate::tunnel::PinnedDevice;
use farlane_abi::width::to_usize;
use rustix::thread::futex;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Pairs of a region and a disk that have been found not to reach each other, remembered per
/// region.
const REFUSED: usize = 16;

/// Device memory at an address of this process.
#[derive(Debug)]
pub struct Region {
    /// Address of the first byte.
    pub start: usize,
    /// Whose memory it is.
    pub provider: Arc<dyn Provider>,
    /// The part of it that a tunnel reaches.
    pub(crate) pinned: Option<PinnedDevice>,
    /// Whether nobody has registered it: it was found to be device memory when it was used.
    pub(crate) is_adopted: bool,
    /// Device numbers, plus one, of file systems whose disk does not reach it directly.
    refused: [AtomicU64; REFUSED],
}

impl Region {
    pub(crate) fn new(
        start: usize,
        provider: Arc<dyn Provider>,
        pinned: Option<PinnedDevice>,
    ) -> Self {
        Self {
            start,
            provider,
            pinned,
            is_adopted: false,
            refused: [const { AtomicU64::new(0) }; REFUSED],
        }
    }

    /// Whether direct I/O between this memory and the file system with device number `device` has
    /// been refused before.
    pub(crate) fn is_refused(&self, device: u64) -> bool {
        let known = device.wrapping_add(1);
        let mut refused = self.refused.iter();
        refused.any(|word| word.load(Ordering::Relaxed) == known)
    }

    /// Remembers a refusal. With more disks than are remembered, some are asked again.
    pub(crate) fn refuse(&self, device: u64) {
        let known = device.wrapping_add(1);
        for word in &self.refused {
            let free = word.compare_exchange(0, known, Ordering::Relaxed, Ordering::Relaxed);
            if free.is_ok() || free == Err(known) {
                return;
            }
        }
    }
}

/// A buffer in a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer<'a> {
    pub(crate) address: usize,
    pub(crate) length: usize,
    pub(crate) region: &'a Region,
}

impl Buffer<'_> {
    /// A part of it.
    pub(crate) fn part(&self, range: &Range<usize>) -> Self {
        Self {
            address: self.address + range.start,
            length: range.len(),
            ..*self
        }
    }
}

const LIVE: u64 = 1 << 31;
const USERS: u64 = LIVE - 1;
const GENERATION: u32 = 32;

#[derive(Debug)]
struct Slot {
    /// Generation, whether there is a region, and how many use it.
    state: AtomicU64,
    region: AtomicPtr<Region>,
}

/// Owns the regions; a number names one, and never another one later.
#[derive(Debug)]
pub struct RegionTable {
    slots: [Slot; CAPACITY],
    /// Counts the times that a dying region lost its last user.
    released: AtomicU32,
}

impl RegionTable {
    /// An empty table.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            slots: [const {
                Slot {
                    state: AtomicU64::new(0),
                    region: AtomicPtr::new(std::ptr::null_mut()),
                }
            }; CAPACITY],
            released: AtomicU32::new(0),
        }
    }

    fn slot(&self, name: u64) -> Option<&Slot> {
        self.slots.get(to_usize(name & (LIVE - 1)))
    }

    /// Puts a region into slot `index`, which is empty; returns its name.
    pub(crate) fn put(&self, index: usize, region: Box<Region>) -> Option<u64> {
        let slot = self.slots.get(index)?;
        let generation = (slot.state.load(Ordering::Relaxed) >> GENERATION) + 1;
        slot.region.store(Box::into_raw(region), Ordering::Relaxed);
        let generation = generation << GENERATION;
        slot.state.store(generation | LIVE, Ordering::Release);
        Some(generation | index as u64)
    }

    /// Uses the region, if it is still there.
    pub(crate) fn enter(&self, name: u64) -> Option<RegionGuard<'_>> {
        let slot = self.slot(name)?;
        let expected = (name >> GENERATION << GENERATION) | LIVE;
        let mut state = slot.state.load(Ordering::Relaxed);
        loop {
            if state & !USERS != expected || state & USERS == USERS {
                return None;
            }
            let more = slot.state.compare_exchange_weak(
                state,
                state + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            match more {
                Ok(_) => break,
                Err(now) => state = now,
            }
        }
        // SAFETY: it stays until the last user has gone.
        let region = unsafe { &*slot.region.load(Ordering::Relaxed) };
        Some(RegionGuard {
            slots: self,
            slot,
            name,
            region,
        })
    }

    /// Takes the region away: nobody gets it any more; returns when nobody has it.
    pub(crate) fn take(&self, name: u64) -> Option<Box<Region>> {
        let slot = self.slot(name)?;
        let state = slot.state.fetch_and(!LIVE, Ordering::AcqRel);
        if state & LIVE == 0 {
            return None;
        }
        loop {
            let released = self.released.load(Ordering::Acquire);
            if slot.state.load(Ordering::Acquire) & USERS == 0 {
                break;
            }
            let _ = futex::wait(&self.released, futex::Flags::PRIVATE, released, None);
        }
        let region = slot.region.swap(std::ptr::null_mut(), Ordering::Relaxed);
        // SAFETY: made by `put`, and nobody else has it.
        (!region.is_null()).then(|| unsafe { Box::from_raw(region) })
    }

    /// Takes the region from its name, without waiting: it, or none while somebody uses it still.
    /// Then [`collect`](Self::collect) has it later.
    pub(crate) fn retire(&self, name: u64) -> Option<Box<Region>> {
        let slot = self.slot(name)?;
        slot.state.fetch_and(!LIVE, Ordering::AcqRel);
        self.collect(name)
    }

    /// The region of that name, which has been [retired](Self::retire), if nobody uses it any more.
    pub(crate) fn collect(&self, name: u64) -> Option<Box<Region>> {
        let slot = self.slot(name)?;
        if slot.state.load(Ordering::Acquire) & (USERS | LIVE) != 0 {
            return None;
        }
        let region = slot.region.swap(std::ptr::null_mut(), Ordering::Relaxed);
        // SAFETY: made by `put`, and nobody else has it.
        (!region.is_null()).then(|| unsafe { Box::from_raw(region) })
    }

    /// In a child there is one thread; what the others were doing does not happen.
    pub(crate) fn forget_users(&self) {
        for slot in &self.slots {
            slot.state.fetch_and(!USERS, Ordering::Relaxed);
        }
    }
}

impl Default for RegionTable {
    fn default() -> Self {
        Self::new()
    }
}

/// A region in use; it stays until this is dropped.
#[derive(Debug)]
pub struct RegionGuard<'a> {
    slots: &'a RegionTable,
    slot: &'a Slot,
    name: u64,
    region: &'a Region,
}

impl RegionGuard<'_> {
    /// Name of the region: slot and generation.
    pub(crate) fn name(&self) -> u64 {
        self.name
    }
}

impl Deref for RegionGuard<'_> {
    type Target = Region;

    fn deref(&self) -> &Region {
        self.region
    }
}

impl Drop for RegionGuard<'_> {
    fn drop(&mut self) {
        // In a child nobody is counted, though the thread that forked, in a handler, may be here.
        let left = |state| (state & USERS > 0).then(|| state - 1);
        let state = &self.slot.state;
        let before = state.fetch_update(Ordering::Release, Ordering::Relaxed, left);
        let Ok(before) = before else {
            return;
        };
        if before & LIVE == 0 && before & USERS == 1 {
            self.slots.released.fetch_add(1, Ordering::Release);
            let _ = futex::wake(&self.slots.released, futex::Flags::PRIVATE, u32::MAX >> 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::Soft;
    use std::sync::atomic::AtomicBool;

    fn region(start: usize) -> Box<Region> {
        Box::new(Region::new(start, Arc::new(Soft), None))
    }

    #[test]
    fn a_name_is_good_for_one_region_only() {
        let slots = Box::new(RegionTable::new());
        let first = slots.put(3, region(0x1000)).unwrap();
        assert_eq!(slots.enter(first).unwrap().start, 0x1000);
        assert_eq!(slots.take(first).unwrap().start, 0x1000);
        assert!(slots.enter(first).is_none() && slots.take(first).is_none());
        let second = slots.put(3, region(0x2000)).unwrap();
        assert!(slots.enter(first).is_none());
        assert_eq!(slots.enter(second).unwrap().start, 0x2000);
        slots.take(second).unwrap();
    }

    #[test]
    fn taking_waits_for_the_last_user() {
        let slots = Box::new(RegionTable::new());
        let left = AtomicBool::new(false);
        let name = slots.put(0, region(0x1000)).unwrap();
        std::thread::scope(|scope| {
            let held = slots.enter(name).unwrap();
            let taker = scope.spawn(|| {
                let region = slots.take(name);
                (region.is_some(), left.load(Ordering::SeqCst))
            });
            while slots.enter(name).is_some() {
                std::thread::yield_now();
            }
            left.store(true, Ordering::SeqCst);
            drop(held);
            assert_eq!(taker.join().unwrap(), (true, true));
        });
    }

    #[test]
    fn a_retired_region_stays_until_its_last_user_has_gone() {
        let slots = Box::new(RegionTable::new());
        let name = slots.put(0, region(0x1000)).unwrap();
        let held = slots.enter(name).unwrap();
        assert!(slots.retire(name).is_none() && slots.enter(name).is_none());
        assert_eq!(held.start, 0x1000);
        assert!(slots.collect(name).is_none());
        drop(held);
        assert_eq!(slots.collect(name).unwrap().start, 0x1000);
        assert!(slots.collect(name).is_none());
        let name = slots.put(0, region(0x2000)).unwrap();
        assert_eq!(slots.retire(name).unwrap().start, 0x2000);
    }

    /// A handler forks while its thread uses a region, and the child returns from the handler.
    #[test]
    fn who_leaves_in_a_child_takes_nothing_with_it() {
        let slots = Box::new(RegionTable::new());
        let name = slots.put(0, region(0x1000)).unwrap();
        let held = slots.enter(name).unwrap();
        slots.forget_users();
        drop(held);
        assert_eq!(slots.enter(name).unwrap().start, 0x1000);
        assert_eq!(slots.take(name).unwrap().start, 0x1000);
    }

    #[test]
    fn refusals_are_remembered_by_disk() {
        let region = region(0x1000);
        region.refuse(0);
        region.refuse(9);
        assert!(region.is_refused(0) && region.is_refused(9) && !region.is_refused(8));
    }
}
