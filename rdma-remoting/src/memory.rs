//! Memory keys: what a work request may touch.

mod access;
mod fast;
mod region;
mod window;

use crate::keys::Keys;
use crate::request::{Binding, Element, MemoryKey, Registration};
use crate::table::Table;
use farlane_abi::Errno;
use farlane_abi::width::{to_u64, to_usize};
use farlane_sys::sync::{read, write};
use farlane_zero_copy::WordLocks;
use fast::Fast;
use std::sync::{Arc, RwLock};
use window::Window;

pub use access::{Access, Use};
pub use fast::{FastError, FastRegion, PageList};
pub use region::{DomainId, KeyError, MemoryRegion, Part, PdHandle};
pub use window::{Binder, WindowError, WindowKind};

/// What a key is of.
#[derive(Debug)]
enum Slot {
    Region(MemoryRegion),
    Fast(Fast),
    Window(Window),
}

/// A memory region that has been taken out of its table. What lasts as long as it ends with this.
#[derive(Debug)]
pub struct Removed {
    _slot: Arc<Slot>,
}

/// The keys of a context, and how many of them are of windows.
#[derive(Debug)]
struct Keyed {
    table: Table<Slot, Keys>,
    windows: usize,
}

/// The memory regions and windows of one context, by key. Local and remote key of a region are the
/// same.
///
/// The upper 24 bits of a window's key lead to it as long as it lasts; its tag changes when it is
/// bound. So do those of a registration that requests make.
#[derive(Debug)]
pub struct MemoryTable {
    keyed: RwLock<Keyed>,
    /// Of regions, and as much of windows.
    limit: u32,
    /// Of the words of all its memory.
    locks: Arc<WordLocks>,
}

impl MemoryTable {
    /// A table for at most `limit` regions and as many windows.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self::with_locks(limit, Arc::default())
    }

    /// The same, of memory of which other tables have some, too: atomic operations exclude each
    /// other by these locks.
    #[must_use]
    pub fn with_locks(limit: u32, locks: Arc<WordLocks>) -> Self {
        Self {
            keyed: RwLock::new(Keyed {
                table: Table::named_by(Keys::default(), limit.saturating_mul(2)),
                windows: 0,
            }),
            limit,
            locks,
        }
    }

    /// The locks of words of its memory.
    #[must_use]
    pub fn word_locks(&self) -> &WordLocks {
        &self.locks
    }

    /// Adds a memory region and returns its key.
    ///
    /// # Errors
    /// `ENOMEM` when the table is full.
    pub fn insert(&self, memory: MemoryRegion) -> Result<MemoryKey, Errno> {
        let memory = MemoryRegion {
            region: memory.region.share(),
            ..memory
        };
        self.insert_slot(Slot::Region(memory))
    }

    fn insert_slot(&self, slot: Slot) -> Result<MemoryKey, Errno> {
        let mut keyed = write(&self.keyed);
        let regions = keyed.table.len() - keyed.windows;
        if regions >= to_usize(self.limit.into()) {
            return Err(Errno::ENOMEM);
        }
        keyed.table.insert(slot).map(MemoryKey)
    }

    /// Adds a registration that requests make, of no memory yet. Returns its key until then, which
    /// [`owner`](Self::owner), [`deregister`](Self::deregister) and requests know it by for ever.
    ///
    /// # Errors
    /// `ENOMEM` when the table is full.
    pub fn insert_fast(&self, region: FastRegion) -> Result<MemoryKey, Errno> {
        self.insert_slot(Slot::Fast(Fast::free(Arc::new(region))))
    }

    /// Registers memory for a request.
    ///
    /// # Errors
    /// See [`FastError`]; it is as it was then.
    pub fn register(&self, pd: PdHandle, wanted: &Registration) -> Result<(), FastError> {
        let unknown = || FastError::Unknown(wanted.region);
        let free = |keyed: &Keyed| {
            let (name, fast) = keyed.fast(wanted.region).ok_or_else(unknown)?;
            if fast.region.pd != pd {
                return Err(unknown());
            }
            if fast.bound.is_some() {
                return Err(FastError::Registered(name));
            }
            match name.leads_where(wanted.key) {
                true => Ok((name, Arc::clone(&fast.region))),
                false => Err(FastError::Key(wanted.key)),
            }
        };
        let (_, region) = free(&read(&self.keyed))?;
        // Its pages are looked up while others use the table.
        let registered = Fast::register(region, wanted)?;
        let mut keyed = write(&self.keyed);
        let (name, _) = free(&keyed)?;
        let slot = Slot::Fast(registered);
        let before = keyed.table.replace(name.0, wanted.key.0, slot);
        before.map(drop).ok_or(FastError::Key(wanted.key))
    }

    /// What is to last as long as the memory region of a key; none where there is no such region.
    #[must_use]
    pub fn owner(&self, key: MemoryKey) -> Option<Arc<dyn std::any::Any + Send + Sync>> {
        let keyed = read(&self.keyed);
        match &**keyed.table.get(keyed.registration(key).0)? {
            Slot::Region(region) => region.owner.clone(),
            Slot::Fast(fast) => fast.region.owner.clone(),
            Slot::Window(_) => None,
        }
    }

    /// Gives a key to another memory region. When this returns, no request touches the memory of
    /// the one before, as with [`deregister`](Self::deregister).
    ///
    /// # Errors
    /// Those of [`deregister`](Self::deregister).
    pub fn replace(&self, key: MemoryKey, memory: MemoryRegion) -> Result<Removed, Errno> {
        let memory = MemoryRegion {
            region: memory.region.share(),
            ..memory
        };
        let slot = {
            let mut keyed = write(&self.keyed);
            keyed.check_unused(key)?;
            if keyed.fast(key).is_some() {
                return Err(Errno::EBADF);
            }
            let before = keyed.table.replace(key.0, key.0, Slot::Region(memory));
            before.ok_or(Errno::EBADF)?
        };
        slot.revoke();
        Ok(Removed { _slot: slot })
    }

    /// Adds a memory window that is not bound. Returns the key by which it is bound for the first
    /// time.
    ///
    /// # Errors
    /// `ENOMEM` when the table is full.
    pub fn insert_window(&self, pd: PdHandle, kind: WindowKind) -> Result<MemoryKey, Errno> {
        let mut keyed = write(&self.keyed);
        if keyed.windows >= to_usize(self.limit.into()) {
            return Err(Errno::ENOMEM);
        }
        let key = keyed.table.insert(Slot::Window(Window::free(pd, kind)))?;
        keyed.windows += 1;
        Ok(MemoryKey(key))
    }

    /// How many regions and windows there are.
    #[must_use]
    pub fn len(&self) -> u64 {
        to_u64(read(&self.keyed).table.len())
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes a memory region out. When this returns, no request touches its memory, also none that
    /// is in progress (IBTA, 10.6.6.2.6).
    ///
    /// # Errors
    /// `EBADF` for a key that is no region's; `EBUSY` while a window is bound to it (IBTA
    /// 10.6.7.1).
    pub fn deregister(&self, key: MemoryKey) -> Result<Removed, Errno> {
        let slot = {
            let mut keyed = write(&self.keyed);
            let key = keyed.registration(key);
            keyed.check_unused(key)?;
            keyed.table.remove(key.0).ok_or(Errno::EBADF)?
        };
        slot.revoke();
        Ok(Removed { _slot: slot })
    }

    /// The same of a region whose maker is gone: windows that are bound to it stay bound, to
    /// nothing.
    ///
    /// # Errors
    /// `EBADF` for a key that is no region's.
    pub fn withdraw(&self, key: MemoryKey) -> Result<Removed, Errno> {
        let slot = {
            let mut keyed = write(&self.keyed);
            let key = keyed.registration(key);
            match keyed.table.get(key.0).map(|slot| &**slot) {
                Some(Slot::Region(_) | Slot::Fast(_)) => {
                    keyed.table.remove(key.0).ok_or(Errno::EBADF)?
                }
                Some(Slot::Window(_)) | None => return Err(Errno::EBADF),
            }
        };
        slot.revoke();
        Ok(Removed { _slot: slot })
    }

    /// As [`deregister`](Self::deregister), for whoever does not want to know why not.
    pub fn remove(&self, key: MemoryKey) -> Option<Removed> {
        self.deregister(key).ok()
    }

    /// Takes a memory window out, bound or not, by any key that it has had. When this returns,
    /// nothing touches memory by its key.
    ///
    /// # Errors
    /// `EBADF` where there is none.
    pub fn remove_window(&self, key: MemoryKey) -> Result<(), Errno> {
        let slot = {
            let mut keyed = write(&self.keyed);
            let (name, _) = keyed.window(key).ok_or(Errno::EBADF)?;
            let slot = keyed.table.remove(name.0).ok_or(Errno::EBADF)?;
            keyed.windows -= 1;
            slot
        };
        slot.revoke();
        Ok(())
    }

    /// Takes all out, as [`deregister`](Self::deregister) does, and returns the regions.
    pub fn drain(&self) -> Vec<Removed> {
        let mut removed = {
            let mut keyed = write(&self.keyed);
            keyed.windows = 0;
            keyed.table.drain()
        };
        removed.iter().for_each(|slot| slot.revoke());
        removed.retain(|slot| !matches!(**slot, Slot::Window(_)));
        removed.into_iter().map(|_slot| Removed { _slot }).collect()
    }

    /// Opens `length` bytes at `address` of the memory region that `key` names in protection domain
    /// `pd`.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn open(
        &self,
        pd: PdHandle,
        key: MemoryKey,
        address: u64,
        length: u64,
        wanted: Use,
    ) -> Result<Part, KeyError> {
        match read(&self.keyed).table.get(key.0).map(|slot| &**slot) {
            Some(Slot::Region(region)) => region.open(pd, key, (address, length), wanted),
            Some(Slot::Fast(fast)) => fast.open(pd, key, (address, length), wanted),
            Some(Slot::Window(_)) | None => Err(KeyError::Unknown(key)),
        }
    }

    /// Opens what a peer of a queue pair names: memory of a region, or of a window that is bound.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn open_to_peer(
        &self,
        (pd, binder): (PdHandle, Binder),
        key: MemoryKey,
        address: u64,
        length: u64,
        wanted: Use,
    ) -> Result<Part, KeyError> {
        match read(&self.keyed).table.get(key.0).map(|slot| &**slot) {
            Some(Slot::Region(region)) => region.open(pd, key, (address, length), wanted),
            Some(Slot::Fast(fast)) => fast.open(pd, key, (address, length), wanted),
            Some(Slot::Window(window)) => window.open(pd, binder, key, (address, length), wanted),
            None => Err(KeyError::Unknown(key)),
        }
    }

    /// Opens all of what a peer of a queue pair names by a key, as
    /// [`open_to_peer`](Self::open_to_peer) does.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn open_all_to_peer(
        &self,
        of: (PdHandle, Binder),
        key: MemoryKey,
        wanted: Use,
    ) -> Result<Part, KeyError> {
        let (address, length) = match read(&self.keyed).table.get(key.0).map(|slot| &**slot) {
            Some(Slot::Region(region)) => (region.iova, region.length),
            Some(Slot::Fast(fast)) => {
                let bound = fast.bound.as_ref().ok_or(KeyError::Unknown(key))?;
                (bound.iova, bound.length)
            }
            Some(Slot::Window(window)) => window.range().ok_or(KeyError::Unknown(key))?,
            None => return Err(KeyError::Unknown(key)),
        };
        self.open_to_peer(of, key, address, length, wanted)
    }

    /// Opens what an element of a work request names.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn open_element(&self, pd: PdHandle, e: &Element, wanted: Use) -> Result<Part, KeyError> {
        self.open(pd, e.lkey, e.address, e.length.into(), wanted)
    }

    /// Binds a memory window for a queue pair (IBTA 10.6.7.2). When this returns, nothing touches
    /// memory by the key that it had before.
    ///
    /// # Errors
    /// See [`WindowError`]; the window is as it was then.
    pub fn bind(
        &self,
        (pd, binder): (PdHandle, Binder),
        binding: &Binding,
    ) -> Result<(), WindowError> {
        let before = {
            let mut keyed = write(&self.keyed);
            let unknown = || WindowError::Unknown(binding.window);
            let (name, window) = keyed.window(binding.window).ok_or_else(unknown)?;
            if window.pd != pd {
                return Err(unknown());
            }
            let wrong = || WindowError::Key {
                window: name,
                key: binding.key,
            };
            if !name.leads_where(binding.key) {
                return Err(wrong());
            }
            let region = keyed.table.get(binding.region.0);
            let bound = Slot::Window(window.bind(binder, binding, region)?);
            let before = keyed.table.replace(name.0, binding.key.0, bound);
            before.ok_or_else(wrong)?
        };
        before.revoke();
        Ok(())
    }

    /// Invalidates the key of a bound window of type 2: for its owner, or for a peer of the queue
    /// pair that has bound it; or of a registration that a request has made. When this returns,
    /// nothing touches memory by the key.
    ///
    /// # Errors
    /// [`WindowError::Unknown`] for any other key.
    pub fn invalidate(
        &self,
        pd: PdHandle,
        peer_of: Option<Binder>,
        key: MemoryKey,
    ) -> Result<(), WindowError> {
        let before = {
            let mut keyed = write(&self.keyed);
            let free = match keyed.table.get(key.0).map(|slot| &**slot) {
                Some(Slot::Window(window)) if window.is_invalidated_by(pd, peer_of) => {
                    Slot::Window(Window::free(pd, window.kind))
                }
                Some(Slot::Fast(fast)) if fast.region.pd == pd => {
                    Slot::Fast(Fast::free(Arc::clone(&fast.region)))
                }
                _ => return Err(WindowError::Unknown(key)),
            };
            let before = keyed.table.replace(key.0, key.0, free);
            before.ok_or(WindowError::Unknown(key))?
        };
        before.revoke();
        Ok(())
    }
}

impl Keyed {
    /// Checks that a key is of a region, and that no window is bound to that.
    fn check_unused(&self, key: MemoryKey) -> Result<(), Errno> {
        let slot = self.table.get(key.0).ok_or(Errno::EBADF)?;
        match **slot {
            // A window that is bound to it holds it.
            Slot::Region(_) if Arc::strong_count(slot) > 1 => Err(Errno::EBUSY),
            Slot::Region(_) | Slot::Fast(_) => Ok(()),
            Slot::Window(_) => Err(Errno::EBADF),
        }
    }

    /// The registration that requests make that a key leads to, whatever its tag, and its present
    /// key.
    fn fast(&self, key: MemoryKey) -> Option<(MemoryKey, &Fast)> {
        let name = MemoryKey(self.table.name_like(key.0)?);
        match &**self.table.get(name.0)? {
            Slot::Fast(fast) if name.leads_where(key) => Some((name, fast)),
            _ => None,
        }
    }

    /// The present key of a registration.
    fn registration(&self, key: MemoryKey) -> MemoryKey {
        self.fast(key).map_or(key, |(name, _)| name)
    }

    /// The window that a key leads to, whatever its tag, and its present key.
    fn window(&self, key: MemoryKey) -> Option<(MemoryKey, &Window)> {
        let name = MemoryKey(self.table.name_like(key.0)?);
        match &**self.table.get(name.0)? {
            Slot::Window(window) if name.leads_where(key) => Some((name, window)),
            _ => None,
        }
    }
}

impl Slot {
    /// Ends all access through it.
    fn revoke(&self) {
        match self {
            Self::Region(region) => region.region.revoke(),
            Self::Fast(fast) => fast.revoke(),
            Self::Window(window) => window.revoke(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_abi::rdma::{
        ACCESS_LOCAL_WRITE, ACCESS_OPTIONAL, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ,
    };
    use farlane_zero_copy::{Pool, Region};
    use proptest::prelude::*;

    /// Registers part of a buffer.
    fn register(table: &MemoryTable, access: u32) -> MemoryKey {
        let pool = Pool::separate_files(1 << 20);
        let buffer = pool.allocate(8192).unwrap();
        let memory = MemoryRegion {
            pd: PdHandle(3),
            iova: 0x1000_0000,
            offset: 100,
            length: 4096,
            access: Access::from_wire(access).unwrap(),
            region: Region::from_buffer(&buffer),
            owner: None,
        };
        table.insert(memory).unwrap()
    }

    fn table(access: u32) -> (MemoryTable, MemoryKey) {
        let table = MemoryTable::new(8);
        let key = register(&table, access);
        (table, key)
    }

    #[test]
    fn a_key_opens_only_its_own_domain_and_rights() {
        let (table, key) = table(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ);
        let open = |pd, key, wanted| table.open(PdHandle(pd), key, 0x1000_0000, 1, wanted);
        assert!(open(3, key, Use::LocalRead).is_ok());
        assert!(open(3, key, Use::LocalWrite).is_ok());
        assert!(open(3, key, Use::RemoteRead).is_ok());
        assert!(matches!(
            open(3, key, Use::RemoteWrite),
            Err(KeyError::Rights { .. })
        ));
        assert!(matches!(
            open(4, key, Use::LocalRead),
            Err(KeyError::Unknown(_))
        ));
        assert!(matches!(
            open(3, MemoryKey(key.0 ^ 1), Use::LocalRead),
            Err(KeyError::Unknown(_))
        ));
        table.remove(key).unwrap();
        assert!(matches!(
            open(3, key, Use::LocalRead),
            Err(KeyError::Unknown(_))
        ));
    }

    #[test]
    fn a_stale_key_names_nothing() {
        let (table, first) = table(ACCESS_LOCAL_WRITE);
        let opens = |key| {
            let opened = table.open(PdHandle(3), key, 0x1000_0000, 1, Use::LocalRead);
            opened.is_ok()
        };
        let mut keys = vec![first];
        for _ in 0..100 {
            table.remove(*keys.last().unwrap()).unwrap();
            let key = register(&table, ACCESS_LOCAL_WRITE);
            assert!(opens(key));
            assert!(!keys.iter().any(|stale| opens(*stale)), "{key}: {keys:?}");
            keys.push(key);
        }
        let last = *keys.last().unwrap();
        let tags = (1..=0xff).map(|tag| MemoryKey(last.0 ^ tag));
        assert_eq!(tags.filter(|key| opens(*key)).count(), 0);
        table.remove(last).unwrap();
        assert!(!opens(last) && table.remove(last).is_none());
    }

    #[test]
    fn keys_of_two_registrations_in_a_row_are_no_neighbours() {
        let table = MemoryTable::new(128);
        let keys: Vec<_> = (0..128).map(|_| register(&table, 0).0).collect();
        let near = keys.windows(2).filter(|k| k[0].abs_diff(k[1]) < 1 << 16);
        // One pair in 30,000.
        assert!(near.count() < 4, "{keys:x?}");
    }

    #[test]
    fn a_region_has_no_byte_before_and_none_behind_it() {
        let (table, key) = table(ACCESS_LOCAL_WRITE);
        let first = 0x1000_0000;
        for (address, length, inside) in [
            (first, 4096, true),
            (first + 4095, 1, true),
            (first, 4097, false),
            (first + 4095, 2, false),
            (first + 4096, 1, false),
            (first - 1, 1, false),
            (first - 1, 2, false),
        ] {
            // The memory behind it is larger, so that nothing but the region's own bounds refuses.
            let opened = table.open(PdHandle(3), key, address, length, Use::LocalRead);
            assert_eq!(opened.is_ok(), inside, "{length} bytes at {address:#x}");
        }
    }

    #[test]
    fn unknown_rights_are_refused() {
        assert!(Access::from_wire(1 << 10).is_none());
        let atomic = |more| Access::from_wire(ACCESS_REMOTE_ATOMIC | more).unwrap();
        assert!(atomic(0).lacks_local_write() && !atomic(ACCESS_LOCAL_WRITE).lacks_local_write());
        assert!(Access::from_wire(ACCESS_OPTIONAL | 1).is_some());
    }

    proptest! {
        #[test]
        fn what_opens_lies_inside(
            address in prop_oneof![any::<u64>(), 0x0fff_f000u64..0x1000_3000],
            length in prop_oneof![any::<u64>(), 0u64..9000],
        ) {
            let (table, key) = table(ACCESS_LOCAL_WRITE);
            let inside = address >= 0x1000_0000
                && u128::from(address) + u128::from(length) <= 0x1000_0000 + 4096;
            match table.open(PdHandle(3), key, address, length, Use::LocalWrite) {
                Ok(part) => {
                    prop_assert!(inside);
                    prop_assert_eq!(part.offset, address - 0x1000_0000 + 100);
                }
                Err(_) => prop_assert!(!inside),
            }
        }
    }
}
