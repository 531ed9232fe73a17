//! The process's registered memory.

use crate::bounce::{LARGE, SMALL};
use crate::files::FILES;
use crate::fork::{ForkLock, ParentState};
use crate::lock::Lock;
use crate::log::SAID;
use crate::provider::{self, Provider, ProviderError};
use crate::ranges::{CAPACITY, Ranges};
use crate::readahead::SET;
use crate::region::{Region, RegionGuard, RegionTable};
use crate::tunnel::{self, TUNNELS};
use crate::{fork, locks};
use farlane_abi::width::to_usize;
use farlane_transport::with_signals_blocked;
use std::cell::Cell;
use std::sync::Arc;

static RANGES: Ranges = Ranges::new();
static SLOTS: RegionTable = RegionTable::new();
static WRITER: Lock<Writer> = Lock::new(Writer {
    free: Vec::new(),
    retired: Vec::new(),
    used: 0,
});

/// What only writers see.
#[derive(Debug)]
struct Writer {
    /// Slots that are empty again.
    free: Vec<usize>,
    /// Names of regions that were taken away while they were in use.
    retired: Vec<u64>,
    /// Slots that were ever used.
    used: usize,
}

impl ParentState for Writer {
    /// Nobody is inside any more.
    fn forget(&mut self) {
        SLOTS.forget_users();
    }
}

impl Writer {
    /// Frees the slots of regions that nobody uses any more.
    fn collect(&mut self) -> Vec<Region> {
        let mut regions = Vec::new();
        self.retired.retain(|name| {
            let region = SLOTS.collect(*name);
            let is_left = region.is_none();
            if let Some(region) = region {
                regions.push(*region);
                self.free.push(slot_of(*name));
            }
            is_left
        });
        regions
    }
}

fn slot_of(name: u64) -> usize {
    to_usize(name & u64::from(u32::MAX))
}

/// What is locked over a fork, in the order in which it is locked: the tables last, as whoever has
/// another lock may take or give back memory, and allocators unmap some.
static FORK_LOCKS: [&dyn ForkLock; 7] = [&TUNNELS, &FILES, &SET, &SMALL, &LARGE, &SAID, &WRITER];

/// Sees to forks from now on.
pub(crate) fn watch_forks() {
    fork::watch(&FORK_LOCKS, locks::forget);
}

thread_local! {
    /// This thread changes the tables.
    static CHANGING: Cell<bool> = const { Cell::new(false) };
}

/// Changes the tables. No handler of this thread runs meanwhile: one that looked for a buffer over
/// an unfinished change would look for ever.
fn change<T>(work: impl FnOnce(&mut Writer) -> T) -> T {
    with_signals_blocked(|| {
        CHANGING.set(true);
        let result = if fork::has_locks() {
            // SAFETY: this thread has the lock for a fork, and is in a handler of that: in no other
            // change, as those do not fork.
            work(unsafe { WRITER.held() })
        } else {
            work(&mut WRITER.lock())
        };
        CHANGING.set(false);
        result
    })
}

/// Why memory cannot be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// No bytes, or more than there are addresses.
    #[error("{length} bytes at {address:#x} are no memory")]
    Range {
        /// Address of the first byte.
        address: usize,
        /// Length in bytes.
        length: usize,
    },
    /// A part of it is registered already.
    #[error("{length} bytes at {address:#x} overlap registered memory at {other:#x}")]
    Overlap {
        /// Address of the first byte.
        address: usize,
        /// Length in bytes.
        length: usize,
        /// The first byte of what is registered.
        other: usize,
    },
    /// There are as many ranges as there can be.
    #[error("{CAPACITY} ranges are registered: there is no room for another one")]
    Full,
    /// Nothing is registered at the address.
    #[error("Nothing is registered at {0:#x}")]
    Unknown(usize),
    /// The provider cannot be used.
    #[error(transparent)]
    Provider(#[from] ProviderError),
}

impl RegisterError {
    /// The error number that the C interface reports for this.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Range { .. } => libc::EINVAL,
            Self::Overlap { .. } => libc::EEXIST,
            Self::Full => libc::ENOSPC,
            Self::Unknown(_) => libc::ENOENT,
            Self::Provider(ProviderError::Unknown(_)) => libc::EINVAL,
            Self::Provider(ProviderError::Cuda(_)) => libc::ENODEV,
        }
    }
}

/// Registers `length` bytes of device memory at `address`, of the provider with this name.
///
/// # Errors
/// When they are no range, overlap registered memory, or the provider cannot be used.
pub fn register(address: usize, length: usize, provider: &str) -> Result<(), RegisterError> {
    register_with(address, length, provider::find(provider)?)
}

/// As [`register`], with a provider at hand.
///
/// # Errors
/// As [`register`].
pub fn register_with(
    address: usize,
    length: usize,
    provider: Arc<dyn Provider>,
) -> Result<(), RegisterError> {
    put(address, length, &provider, false)
}

/// Registers an allocation that nobody has registered, and that was found to be device memory.
/// Nobody tells when it is gone: what was adopted before at some of its addresses is gone by now,
/// unless it is all of it, by another thread.
///
/// # Errors
/// As [`register`].
pub(crate) fn adopt(
    address: usize,
    length: usize,
    provider: Arc<dyn Provider>,
) -> Result<(), RegisterError> {
    put(address, length, &provider, true)
}

/// Registers memory, in the place of what was adopted there.
fn put(
    address: usize,
    length: usize,
    provider: &Arc<dyn Provider>,
    is_adopted: bool,
) -> Result<(), RegisterError> {
    let mut has_swept = false;
    loop {
        let refused = match try_put(address, length, provider, is_adopted) {
            Err(refused @ RegisterError::Overlap { .. }) => refused,
            // What was adopted may be gone.
            Err(RegisterError::Full) if !has_swept => {
                has_swept = true;
                sweep();
                continue;
            }
            result => return result,
        };
        if is_adopted && is_registered(address, length) {
            return Ok(());
        }
        let RegisterError::Overlap { other, .. } = refused else {
            return Err(refused);
        };
        // What has gone meanwhile is not in the way.
        if let Some(name) = RANGES.find(other, 1)
            && let Some(region) = SLOTS.enter(name)
        {
            let (gives_way, is_mapped) = (region.is_adopted, region.provider.is_mapped());
            drop(region);
            if !gives_way {
                return Err(refused);
            }
            let _ = let_go(other, name, is_mapped);
        }
    }
}

/// Lets go of adopted memory that is no more.
fn sweep() {
    for (start, end, name) in change(|_| RANGES.overlapping(0, usize::MAX)) {
        let Some(region) = SLOTS.enter(name).filter(|region| region.is_adopted) else {
            continue;
        };
        let provider = Arc::clone(&region.provider);
        drop(region);
        if !provider.holds(start, end - start) {
            let _ = let_go(start, name, provider.is_mapped());
        }
    }
}

fn try_put(
    address: usize,
    length: usize,
    provider: &Arc<dyn Provider>,
    is_adopted: bool,
) -> Result<(), RegisterError> {
    watch_forks();
    let end = address
        .checked_add(length)
        .filter(|_| length > 0 && address > 0)
        .ok_or(RegisterError::Range { address, length })?;
    // The device is asked before anything is locked.
    let pinned = provider
        .is_tunnelled()
        .then(|| tunnel::pin_device(address, length))
        .flatten();
    let mut region = Region::new(address, Arc::clone(provider), pinned);
    region.is_adopted = is_adopted;
    // What has no place in the tables is dropped when signals are on again.
    let mut region = Some(Box::new(region));
    let mut retired = Vec::new();
    change(|writer| {
        retired = writer.collect();
        if let Some((other, ..)) = RANGES.overlapping(address, end).first() {
            return Err(RegisterError::Overlap {
                address,
                length,
                other: *other,
            });
        }
        let index = match writer.free.pop() {
            Some(index) => index,
            None if writer.used < CAPACITY => {
                writer.used += 1;
                writer.used - 1
            }
            None => return Err(RegisterError::Full),
        };
        let put = region.take().and_then(|region| SLOTS.put(index, region));
        let name = put.ok_or(RegisterError::Full)?;
        if !RANGES.insert(address, end, name) {
            region = SLOTS.take(name);
            writer.free.push(index);
            return Err(RegisterError::Full);
        }
        Ok(())
    })
}

/// Unregisters what was registered at `address`. Returns when no I/O is under way in it.
///
/// # Errors
/// `ENOENT`: nothing is registered there.
pub fn unregister(address: usize) -> Result<(), RegisterError> {
    take_away(address, None)
}

/// As [`unregister`]. With `only`, the name of what was looked at: another thread may have put
/// something else in its place.
fn take_away(address: usize, only: Option<u64>) -> Result<(), RegisterError> {
    // In a child before it has forgotten them there are users that never leave; in a parent they
    // may wait for a lock that this thread has.
    if fork::has_locks() {
        return retire(address, only);
    }
    let name = change(|_| RANGES.remove(address, only)).ok_or(RegisterError::Unknown(address))?;
    let region = SLOTS.take(name);
    change(|writer| writer.free.push(slot_of(name)));
    drop(region);
    Ok(())
}

/// As [`take_away`], of memory that is not mapped without waiting for its users: the driver that
/// unmaps something may hold what they wait for. It is their driver that knows what is there.
fn let_go(address: usize, name: u64, is_mapped: bool) -> Result<(), RegisterError> {
    match is_mapped {
        true => take_away(address, Some(name)),
        false => retire(address, Some(name)),
    }
}

/// As [`take_away`], without waiting.
fn retire(address: usize, only: Option<u64>) -> Result<(), RegisterError> {
    let region = change(|writer| {
        let name = RANGES.remove(address, only)?;
        let region = SLOTS.retire(name);
        match region {
            Some(_) => writer.free.push(slot_of(name)),
            None => writer.retired.push(name),
        }
        Some(region)
    });
    region.map(drop).ok_or(RegisterError::Unknown(address))
}

/// Unregisters every range that overlaps `address..address + length`; returns what was taken away
/// of what the program has registered: first byte, length, provider. What was adopted is adopted
/// once more, with the bounds that it has by then.
pub fn unregister_overlapping(
    address: usize,
    length: usize,
) -> Vec<(usize, usize, Arc<dyn Provider>)> {
    // Memory of the allocator, which gives it back because a table changes its place.
    if CHANGING.get() {
        return Vec::new();
    }
    let end = address.saturating_add(length);
    let overlapping = change(|_| RANGES.overlapping(address, end));
    let mut taken = Vec::new();
    for (start, end, name) in overlapping {
        let Some(region) = SLOTS.enter(name) else {
            continue;
        };
        let (provider, is_adopted) = (Arc::clone(&region.provider), region.is_adopted);
        drop(region);
        if let_go(start, name, provider.is_mapped()).is_ok() && !is_adopted {
            taken.push((start, end - start, provider));
        }
    }
    taken
}

/// Whether any registered memory is near `address`: false for nearly all buffers, at the price of
/// two loads.
#[inline]
#[must_use]
pub fn may_hold(address: usize) -> bool {
    RANGES.may_hold(address)
}

/// Whether any registered memory is near `length` bytes at `address`.
#[inline]
#[must_use]
pub fn may_overlap(address: usize, length: usize) -> bool {
    RANGES.may_overlap(address, address.saturating_add(length))
}

/// Whether one registered range holds all of `length` bytes at `address`.
#[inline]
#[must_use]
pub fn is_registered(address: usize, length: usize) -> bool {
    RANGES.find(address, length).is_some()
}

/// The region that holds all of `length` bytes at `address`, in use until dropped.
#[must_use]
pub fn find(address: usize, length: usize) -> Option<RegionGuard<'static>> {
    SLOTS.enter(RANGES.find(address, length)?)
}

/// A region that was found for `length` bytes at `address`, if they are its memory still. Nobody
/// tells when an allocation is gone that was adopted, and the addresses may be something else by
/// now: then it is taken away.
pub(crate) fn still_there(
    region: RegionGuard<'_>,
    address: usize,
    length: usize,
) -> Option<RegionGuard<'_>> {
    if region.provider.holds(address, length) {
        return Some(region);
    }
    let (start, name, is_mapped) = (region.start, region.name(), region.provider.is_mapped());
    drop(region);
    let _ = let_go(start, name, is_mapped);
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Device memory that is not mapped.
    #[derive(Debug)]
    struct Device;

    impl Provider for Device {
        fn name(&self) -> &'static str {
            "device"
        }

        fn is_mapped(&self) -> bool {
            false
        }

        fn is_direct(&self) -> bool {
            false
        }
    }

    const UNIT: usize = 1 << 16;

    /// Addresses that nothing else of this process has: those of a mapping that is kept.
    fn addresses(units: usize) -> usize {
        let memory = vec![0_u8; units * UNIT];
        memory.leak().as_ptr().addr()
    }

    fn device() -> Arc<dyn Provider> {
        Arc::new(Device)
    }

    #[test]
    fn addresses_that_are_used_again_are_adopted_again() {
        let at = addresses(8);
        adopt(at + UNIT, 2 * UNIT, device()).unwrap();
        // Another thread has found the same allocation.
        adopt(at + UNIT, 2 * UNIT, device()).unwrap();
        // A larger one in the place of two, and one in the middle of it.
        adopt(at + 4 * UNIT, UNIT, device()).unwrap();
        adopt(at, 6 * UNIT, device()).unwrap();
        assert!(is_registered(at, 6 * UNIT));
        unregister(at).unwrap();
        adopt(at, 2 * UNIT, device()).unwrap();
        adopt(at + UNIT, 2 * UNIT, device()).unwrap();
        assert!(is_registered(at + UNIT, 2 * UNIT) && !is_registered(at, 1));
        unregister(at + UNIT).unwrap();
    }

    #[test]
    fn what_was_adopted_gives_way_to_what_is_registered_and_that_to_nothing() {
        let at = addresses(4);
        adopt(at, 2 * UNIT, device()).unwrap();
        register_with(at, 2 * UNIT, device()).unwrap();
        for at in [at, at + UNIT] {
            let refused = register_with(at, 2 * UNIT, device()).unwrap_err();
            assert_eq!(refused.errno(), libc::EEXIST);
        }
        // What is registered is not adopted as well, nor replaced by what is.
        adopt(at, UNIT, device()).unwrap();
        assert!(adopt(at + UNIT, 2 * UNIT, device()).is_err());
        assert!(is_registered(at, 2 * UNIT));
        unregister(at).unwrap();
        assert!(!is_registered(at, 1) && unregister(at).is_err());
    }

    #[test]
    fn what_was_looked_at_is_taken_away_and_not_what_has_come_in_its_place() {
        let at = addresses(1);
        adopt(at, UNIT, device()).unwrap();
        let looked_at = RANGES.find(at, 1);
        register_with(at, UNIT, device()).unwrap();
        assert!(looked_at.is_some() && take_away(at, looked_at).is_err());
        assert!(is_registered(at, UNIT));
        assert!(take_away(at, RANGES.find(at, 1)).is_ok() && !is_registered(at, 1));
    }

    #[test]
    fn threads_that_adopt_the_same_allocation_all_have_it() {
        let at = addresses(1);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        adopt(at, UNIT, device()).unwrap();
                        assert!(is_registered(at, UNIT));
                    }
                });
            }
        });
        unregister(at).unwrap();
    }
}
