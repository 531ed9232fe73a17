//! Memory keys: what a work request may touch.

use crate::keys::Keys;
use crate::request::{Element, MemoryKey};
use crate::table::Table;
use farlane_abi::Errno;
use farlane_abi::rdma::{
    ACCESS_LOCAL_WRITE, ACCESS_OPTIONAL, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE,
};
use farlane_abi::width::to_u64;
use farlane_sys::sync::{read, write};
use farlane_zero_copy::{Region, RegionError};
use std::sync::{Arc, RwLock};
use thiserror::Error;

/// Rights of a memory region or of a queue pair's peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access(u32);

impl Access {
    /// Takes rights off the wire; `None` for rights that do not exist or are not supported. The
    /// right to atomic operations may be given, as on any device: those themselves are refused
    /// where a device has none (`atomic_cap`).
    #[must_use]
    pub fn from_wire(bits: u32) -> Option<Self> {
        let bits = bits & !ACCESS_OPTIONAL;
        let known =
            ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
        (bits & !known == 0).then_some(Self(bits))
    }

    /// The bits as they go over the wire.
    #[must_use]
    pub fn to_wire(self) -> u32 {
        self.0
    }

    /// The owner may have it written by receives and reads.
    #[must_use]
    pub fn local_write(self) -> bool {
        self.0 & ACCESS_LOCAL_WRITE != 0
    }

    /// The peer may write.
    #[must_use]
    pub fn remote_write(self) -> bool {
        self.0 & ACCESS_REMOTE_WRITE != 0
    }

    /// Whether a right of the peer's to write goes without the owner's (IBTA 10.6.3.1): such rights
    /// make no sense.
    #[must_use]
    pub fn lacks_local_write(self) -> bool {
        self.0 & (ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0 && !self.local_write()
    }

    /// The peer may read.
    #[must_use]
    pub fn remote_read(self) -> bool {
        self.0 & ACCESS_REMOTE_READ != 0
    }
}

/// What a transfer does to memory that it names by a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Reads the owner's own memory.
    LocalRead,
    /// Writes the owner's own memory.
    LocalWrite,
    /// Reads it for the peer.
    RemoteRead,
    /// Writes it for the peer.
    RemoteWrite,
}

/// Why a key does not open what is asked for.
#[derive(Debug, Error)]
pub enum KeyError {
    /// No such key in this context and protection domain.
    #[error("{0} names no memory")]
    Unknown(MemoryKey),
    /// The rights do not include it.
    #[error("{key} does not allow {wanted:?}")]
    Rights {
        /// The memory key.
        key: MemoryKey,
        /// What was asked for.
        wanted: Use,
    },
    /// Bytes outside of the memory region.
    #[error("{key} does not reach {length:#x} bytes at {address:#x}")]
    Bounds {
        /// The memory key.
        key: MemoryKey,
        /// Address of the first byte.
        address: u64,
        /// Bytes.
        length: u64,
    },
}

/// Handle of a protection domain, in its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PdHandle(pub u32);

/// A memory region.
#[derive(Debug)]
pub struct MemoryRegion {
    /// Protection domain it belongs to.
    pub pd: PdHandle,
    /// Address of its first byte in work requests.
    pub iova: u64,
    /// Offset of its first byte in `region`.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Rights.
    pub access: Access,
    /// The memory. In a [`MemoryTable`] it is a region of its own, which ends when the memory
    /// region does.
    pub region: Region,
    /// What is to last as long as it: what the memory comes from (a pool's buffer), what its owner
    /// uses for it.
    pub owner: Option<Arc<dyn std::any::Any + Send + Sync>>,
}

/// A checked part of a memory region: where in which region.
#[derive(Clone, Debug)]
pub struct Part {
    /// The memory.
    pub region: Region,
    /// Offset in it.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// The memory regions of one context, by key. Local and remote key of a region are the same.
#[derive(Debug)]
pub struct MemoryTable {
    table: RwLock<Table<MemoryRegion, Keys>>,
}

impl MemoryTable {
    /// A table for at most `limit` regions.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self {
            table: RwLock::new(Table::named_by(Keys::default(), limit)),
        }
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
        write(&self.table).insert(memory).map(MemoryKey)
    }

    /// The memory region of a key.
    #[must_use]
    pub fn get(&self, key: MemoryKey) -> Option<Arc<MemoryRegion>> {
        read(&self.table).get(key.0).cloned()
    }

    /// Gives a key to another memory region. When this returns, no request touches the memory of
    /// the one before, as with [`remove`](Self::remove).
    ///
    /// # Errors
    /// `EBADF` of a key that there is not; `EBUSY` while something holds the one before, which
    /// would go on with what it was. Nothing has changed then.
    pub fn replace(
        &self,
        key: MemoryKey,
        memory: MemoryRegion,
    ) -> Result<Arc<MemoryRegion>, Errno> {
        let memory = MemoryRegion {
            region: memory.region.share(),
            ..memory
        };
        let before = {
            let mut table = write(&self.table);
            let before = table.get(key.0).ok_or(Errno::EBADF)?;
            if Arc::strong_count(before) > 1 {
                return Err(Errno::EBUSY);
            }
            table.replace(key.0, memory).ok_or(Errno::EBADF)?
        };
        before.region.revoke();
        Ok(before)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> u64 {
        let table = read(&self.table);
        to_u64(table.len())
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes a memory region out. When this returns, no request touches its memory, also none that
    /// is in progress (IBTA, 10.6.6.2.6).
    pub fn remove(&self, key: MemoryKey) -> Option<Arc<MemoryRegion>> {
        let removed = {
            let mut table = write(&self.table);
            table.remove(key.0)?
        };
        removed.region.revoke();
        Some(removed)
    }

    /// Takes all out, as [`remove`](Self::remove) does.
    pub fn drain(&self) -> Vec<Arc<MemoryRegion>> {
        let removed = {
            let mut table = write(&self.table);
            table.drain()
        };
        removed.iter().for_each(|memory| memory.region.revoke());
        removed
    }

    /// Opens `length` bytes at `address` of the memory that `key` names in protection domain `pd`.
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
        let table = read(&self.table);
        let memory = table
            .get(key.0)
            .filter(|m| m.pd == pd)
            .ok_or(KeyError::Unknown(key))?;
        let allowed = match wanted {
            Use::LocalRead => true,
            Use::LocalWrite => memory.access.local_write(),
            Use::RemoteRead => memory.access.remote_read(),
            Use::RemoteWrite => memory.access.remote_write(),
        };
        if !allowed {
            return Err(KeyError::Rights { key, wanted });
        }
        let inside = address.checked_sub(memory.iova).filter(|skip| {
            skip.checked_add(length)
                .is_some_and(|end| end <= memory.length)
        });
        let skip = inside.ok_or(KeyError::Bounds {
            key,
            address,
            length,
        })?;
        Ok(Part {
            region: memory.region.clone(),
            offset: memory.offset + skip,
            length,
        })
    }

    /// Opens what an element of a work request names.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn open_element(&self, pd: PdHandle, e: &Element, wanted: Use) -> Result<Part, KeyError> {
        self.open(pd, e.lkey, e.address, e.length.into(), wanted)
    }
}

impl MemoryRegion {
    /// Checks that the region's bytes lie inside of the memory behind it.
    ///
    /// # Errors
    /// [`RegionError::Bounds`]; [`RegionError::ReadOnly`] where the rights include writing and the
    /// memory's do not.
    pub fn check(&self) -> Result<(), RegionError> {
        self.region.check(self.offset, self.length)?;
        let writes = self.access.local_write() || self.access.lacks_local_write();
        if writes && !self.region.is_writable() {
            return Err(RegionError::ReadOnly);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_zero_copy::Pool;
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
    fn a_region_that_something_holds_is_not_replaced() {
        let (table, key) = table(ACCESS_LOCAL_WRITE);
        let other = || {
            let pool = Pool::separate_files(1 << 20);
            MemoryRegion {
                pd: PdHandle(4),
                iova: 0,
                offset: 0,
                length: 10,
                access: Access::from_wire(0).unwrap(),
                region: Region::from_buffer(&pool.allocate(8192).unwrap()),
                owner: None,
            }
        };
        let held = table.get(key).unwrap();
        assert_eq!(table.replace(key, other()).err(), Some(Errno::EBUSY));
        let open = |pd, address| table.open(PdHandle(pd), key, address, 1, Use::LocalRead);
        assert!(open(3, 0x1000_0000).is_ok());
        drop(held);
        let strange = MemoryKey(key.0 ^ 1);
        assert_eq!(table.replace(strange, other()).err(), Some(Errno::EBADF));
        table.replace(key, other()).unwrap();
        assert!(open(3, 0x1000_0000).is_err() && open(4, 9).is_ok());
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
        assert!(Access::from_wire(1 << 4).is_none());
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
