//! A memory region, and the opening of a part of it.

use super::{Access, Use};
use crate::request::MemoryKey;
use farlane_zero_copy::{Region, RegionError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

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

impl PdHandle {
    /// That of no protection domain.
    pub const NONE: Self = Self(0);
}

/// Protection domains that have been made.
static DOMAINS: AtomicU64 = AtomicU64::new(0);

/// Tells a protection domain from all others that there have been, of any context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DomainId(u64);

impl DomainId {
    /// One that no domain has had.
    #[must_use]
    pub fn new_one() -> Self {
        Self(DOMAINS.fetch_add(1, Ordering::Relaxed))
    }
}

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
    /// The memory. In a [`MemoryTable`](super::MemoryTable) it is a region of its own, which ends
    /// when the memory region does.
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

impl MemoryRegion {
    /// Opens some of it.
    pub(super) fn open(
        &self,
        pd: PdHandle,
        key: MemoryKey,
        (address, length): (u64, u64),
        wanted: Use,
    ) -> Result<Part, KeyError> {
        if self.pd != pd {
            return Err(KeyError::Unknown(key));
        }
        let allowed = match wanted {
            Use::LocalRead => true,
            Use::LocalWrite => self.access.local_write(),
            Use::RemoteRead | Use::RemoteWrite | Use::RemoteAtomic | Use::RemoteFlush => {
                self.access.allows_peer(wanted)
            }
        };
        if !allowed {
            return Err(KeyError::Rights { key, wanted });
        }
        let skip = self.skip(address, length).ok_or(KeyError::Bounds {
            key,
            address,
            length,
        })?;
        Ok(Part {
            region: self.region.clone(),
            offset: self.offset + skip,
            length,
        })
    }

    /// How far behind its first byte this begins, where it lies inside.
    pub(super) fn skip(&self, address: u64, length: u64) -> Option<u64> {
        skip(self.iova, self.length, address, length)
    }

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

/// How far `[address, address + length)` begins behind `first`, where it lies in the `most` bytes
/// from there.
pub(super) fn skip(first: u64, most: u64, address: u64, length: u64) -> Option<u64> {
    let skip = address.checked_sub(first)?;
    let end = skip.checked_add(length)?;
    (end <= most).then_some(skip)
}
