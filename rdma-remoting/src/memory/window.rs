//! Memory windows: keys for part of a memory region, with rights of their own for the peer (IBTA
//! 10.6.7).

use super::region::skip;
use super::{Access, KeyError, Part, PdHandle, Slot, Use};
use crate::request::{Binding, MemoryKey};
use farlane_zero_copy::Region;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

/// How a memory window is bound, and for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowKind {
    /// Type 1: bound again whenever its owner likes, for all queue pairs of its protection domain.
    One,
    /// Type 2B: bound once, until its key is invalidated, for the queue pair that has bound it.
    Two,
}

/// Queue pairs that have been made.
static BINDERS: AtomicU64 = AtomicU64::new(0);

/// Tells a queue pair from all others that there have been, for the windows that it binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binder(u64);

impl Binder {
    /// One that no queue pair has had.
    #[must_use]
    pub fn new_one() -> Self {
        Self(BINDERS.fetch_add(1, Ordering::Relaxed))
    }
}

/// Why a memory window is not bound, or a key not invalidated.
#[derive(Debug, Error)]
pub enum WindowError {
    /// No such window in this context and protection domain, or one that is not bound.
    #[error("{0} names no window")]
    Unknown(MemoryKey),
    /// A key that leads to another place of the table than the window's.
    #[error("{key} is no key of the window of {window}")]
    Key {
        /// The window, by its present key.
        window: MemoryKey,
        /// The key that it was to get.
        key: MemoryKey,
    },
    /// A window of type 2 that is bound.
    #[error("{0} is bound")]
    Bound(MemoryKey),
    /// A window of type 2 without a byte.
    #[error("{0} would be bound to nothing")]
    Empty(MemoryKey),
    /// Rights that a window cannot have.
    #[error("A window has no rights {0:#x}")]
    NoRights(u32),
    /// A key that names no memory region in this context and protection domain.
    #[error("{0} names no memory region")]
    NoRegion(MemoryKey),
    /// The region does not allow it.
    #[error("{0} does not allow a window of these rights")]
    Rights(MemoryKey),
    /// Bytes outside of the region.
    #[error(transparent)]
    Bounds(KeyError),
}

/// A memory window. What changes is put in its place in the table.
#[derive(Debug)]
pub(super) struct Window {
    pub pd: PdHandle,
    pub kind: WindowKind,
    pub bound: Option<Bound>,
}

/// What a window is bound to.
#[derive(Debug)]
pub(super) struct Bound {
    /// A [`Slot::Region`]: it does not go while a window is bound to it.
    _of: Arc<Slot>,
    /// Its memory, with an end of its own.
    memory: Region,
    /// Address of the first byte in the peer's requests.
    address: u64,
    /// Offset of the first byte in `memory`.
    offset: u64,
    /// Length in bytes.
    length: u64,
    access: Access,
    binder: Binder,
}

impl Window {
    /// One that is not bound.
    pub fn free(pd: PdHandle, kind: WindowKind) -> Self {
        Self {
            pd,
            kind,
            bound: None,
        }
    }

    /// What it is when it has been bound as `binding` says; `region` is what that names.
    pub fn bind(
        &self,
        binder: Binder,
        binding: &Binding,
        region: Option<&Arc<Slot>>,
    ) -> Result<Self, WindowError> {
        if self.kind == WindowKind::Two {
            // IBTA C10-73.
            if self.bound.is_some() {
                return Err(WindowError::Bound(binding.window));
            }
            if binding.length == 0 {
                return Err(WindowError::Empty(binding.window));
            }
        }
        let access = Access::from_wire(binding.access).filter(|access| !access.binds_windows());
        let access = access.ok_or(WindowError::NoRights(binding.access))?;
        // Without a byte it is unbound, and no region is looked at.
        let bound = match binding.length {
            0 => None,
            _ => Some(self.bound_to(binder, binding, access, region)?),
        };
        Ok(Self {
            bound,
            ..Self::free(self.pd, self.kind)
        })
    }

    fn bound_to(
        &self,
        binder: Binder,
        binding: &Binding,
        access: Access,
        region: Option<&Arc<Slot>>,
    ) -> Result<Bound, WindowError> {
        let unknown = WindowError::NoRegion(binding.region);
        let Some((slot, Slot::Region(region))) = region.map(|slot| (slot, &**slot)) else {
            return Err(unknown);
        };
        if region.pd != self.pd {
            return Err(unknown);
        }
        // IBTA C10-74: what the peer may write, the owner may.
        let writes = access.remote_write() || access.remote_atomic();
        if !region.access.binds_windows() || writes && !region.access.local_write() {
            return Err(WindowError::Rights(binding.region));
        }
        if access.flush() && !region.access.flush() {
            return Err(WindowError::Rights(binding.region));
        }
        let (address, length) = (binding.address, binding.length);
        let skip = region.skip(address, length).ok_or({
            WindowError::Bounds(KeyError::Bounds {
                key: binding.region,
                address,
                length,
            })
        })?;
        Ok(Bound {
            _of: Arc::clone(slot),
            memory: region.region.clone().share(),
            address,
            offset: region.offset + skip,
            length,
            access,
            binder,
        })
    }

    /// Whether its key names memory for a peer of this queue pair.
    fn is_open_to(&self, pd: PdHandle, binder: Binder) -> Option<&Bound> {
        let bound = self.bound.as_ref()?;
        let is_for = match self.kind {
            WindowKind::One => true,
            WindowKind::Two => bound.binder == binder,
        };
        (self.pd == pd && is_for).then_some(bound)
    }

    /// Address and length of what it is bound to.
    pub fn range(&self) -> Option<(u64, u64)> {
        let bound = self.bound.as_ref()?;
        Some((bound.address, bound.length))
    }

    /// Opens what a peer of a queue pair names by its key.
    pub fn open(
        &self,
        pd: PdHandle,
        binder: Binder,
        key: MemoryKey,
        (address, length): (u64, u64),
        wanted: Use,
    ) -> Result<Part, KeyError> {
        let bound = self.is_open_to(pd, binder).ok_or(KeyError::Unknown(key))?;
        if !bound.access.allows_peer(wanted) {
            return Err(KeyError::Rights { key, wanted });
        }
        let skip = skip(bound.address, bound.length, address, length);
        let skip = skip.ok_or(KeyError::Bounds {
            key,
            address,
            length,
        })?;
        Ok(Part {
            region: bound.memory.clone(),
            offset: bound.offset + skip,
            length,
        })
    }

    /// Whether its key can be invalidated: by its owner, or by a peer of the queue pair that has
    /// bound it.
    pub fn is_invalidated_by(&self, pd: PdHandle, peer_of: Option<Binder>) -> bool {
        let bound = self.bound.as_ref();
        self.kind == WindowKind::Two
            && self.pd == pd
            && bound.is_some_and(|bound| peer_of.is_none_or(|binder| bound.binder == binder))
    }

    /// Ends all access through it. When it returns nothing touches memory by its key.
    pub fn revoke(&self) {
        if let Some(bound) = &self.bound {
            bound.memory.revoke();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryTable;
    use farlane_abi::Errno;
    use farlane_abi::rdma::{
        ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE,
    };
    use farlane_zero_copy::{Pool, copy_to_slice};
    use proptest::prelude::*;

    const PD: PdHandle = PdHandle(3);
    const IOVA: u64 = 0x1000_0000;

    fn region(table: &MemoryTable) -> MemoryKey {
        let buffer = Pool::separate_files(1 << 20).allocate(8192).unwrap();
        let memory = crate::memory::MemoryRegion {
            pd: PD,
            iova: IOVA,
            offset: 100,
            length: 4096,
            access: Access::from_wire(ACCESS_LOCAL_WRITE | ACCESS_MW_BIND).unwrap(),
            region: Region::from_buffer(&buffer),
            owner: None,
        };
        table.insert(memory).unwrap()
    }

    fn binding(window: MemoryKey, region: MemoryKey) -> Binding {
        Binding {
            window,
            key: MemoryKey(window.0 ^ 1),
            region,
            address: IOVA + 16,
            length: 64,
            access: ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ,
        }
    }

    /// What a request has opened is not touched any more when the call that ends the window has
    /// returned.
    #[test]
    fn what_was_opened_through_a_window_ends_with_it() {
        type End = fn(&MemoryTable, Binder, Binding);
        let ends: [(WindowKind, End); 4] = [
            (WindowKind::Two, |table, _, bound| {
                table.invalidate(PD, None, bound.key).unwrap();
            }),
            (WindowKind::One, |table, binder, bound| {
                let again = binding(bound.key, bound.region);
                table.bind((PD, binder), &again).unwrap();
            }),
            (WindowKind::Two, |table, _, bound| {
                table.remove_window(bound.window).unwrap();
            }),
            (WindowKind::Two, |table, _, _| drop(table.drain())),
        ];
        for (kind, end) in ends {
            let table = MemoryTable::new(4);
            let (region, binder) = (region(&table), Binder::new_one());
            let bound = binding(table.insert_window(PD, kind).unwrap(), region);
            table.bind((PD, binder), &bound).unwrap();
            let open = || {
                let (at, read) = (IOVA + 16, Use::RemoteRead);
                table.open_to_peer((PD, binder), bound.key, at, 8, read)
            };
            let (part, mut bytes) = (open().unwrap(), [0; 8]);
            assert_eq!(part.offset, 116);
            copy_to_slice(&part.region, part.offset, &mut bytes).unwrap();
            end(&table, binder, bound);
            assert!(copy_to_slice(&part.region, part.offset, &mut bytes).is_err());
            assert!(open().is_err());
        }
    }

    #[test]
    fn windows_have_a_limit_of_their_own() {
        let table = MemoryTable::new(2);
        let windows = [(); 2].map(|()| table.insert_window(PD, WindowKind::One).unwrap());
        let full = table.insert_window(PD, WindowKind::One);
        assert_eq!(full, Err(Errno::ENOMEM));
        let regions = [(); 2].map(|()| region(&table));
        assert_eq!(table.len(), 4);
        table.remove_window(windows[0]).unwrap();
        // A region does not take the place of a window.
        let buffer = Pool::separate_files(1 << 20).allocate(4096).unwrap();
        let memory = crate::memory::MemoryRegion {
            pd: PD,
            iova: 0,
            offset: 0,
            length: 1,
            access: Access::default(),
            region: Region::from_buffer(&buffer),
            owner: None,
        };
        assert_eq!(table.insert(memory), Err(Errno::ENOMEM));
        table.deregister(regions[0]).unwrap();
        region(&table);
        table.insert_window(PD, WindowKind::Two).unwrap();
        // Neither is taken for the other.
        assert_eq!(table.remove_window(regions[1]), Err(Errno::EBADF));
        assert_eq!(table.deregister(windows[1]).unwrap_err(), Errno::EBADF);
    }

    proptest! {
        /// Whatever is asked for: what opens lies in the window, which lies in the region.
        #[test]
        fn what_opens_lies_inside_of_the_window(
            at in prop_oneof![any::<u64>(), IOVA - 10..IOVA + 5000],
            length in prop_oneof![any::<u64>(), 0u64..5000],
            address in prop_oneof![any::<u64>(), IOVA - 10..IOVA + 5000],
            bytes in prop_oneof![any::<u64>(), 0u64..5000],
        ) {
            let table = MemoryTable::new(2);
            let (region, binder) = (region(&table), Binder::new_one());
            let window = table.insert_window(PD, WindowKind::Two).unwrap();
            let bound = Binding { address: at, length, ..binding(window, region) };
            let end = |first: u64, length: u64| u128::from(first) + u128::from(length);
            let is_inside = length > 0
                && at >= IOVA
                && end(at, length) <= u128::from(IOVA) + 4096;
            prop_assert_eq!(table.bind((PD, binder), &bound).is_ok(), is_inside);
            let opened =
                table.open_to_peer((PD, binder), bound.key, address, bytes, Use::RemoteRead);
            let may_open = is_inside
                && address >= at
                && end(address, bytes) <= end(at, length);
            prop_assert_eq!(opened.is_ok(), may_open);
            if let Ok(part) = opened {
                prop_assert_eq!(part.offset, address - IOVA + 100);
            }
        }
    }
}
