//! What a process has attached: segments of queues, memory, files.

use super::{Context, Header};
use crate::async_ring::AsyncRing;
use crate::call_ring::CallRing;
use crate::ledger::{Resource, Share};
use crate::segment::Segment;
use crate::xrc_domains::FileId;
use farlane_abi::Errno;
use farlane_abi::arena::{BACKEND_SLEEPING, HEADER_SEGMENT_BYTES, OFF_BACKEND_STATE};
use farlane_abi::control::MAX_SEGMENT_BYTES;
use farlane_abi::ids::RegionId;
use farlane_abi::width::to_u64;
use farlane_zero_copy::{AddressSpace, Region, RegionError, SharedMemory};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// A region that the process's kernel has vouched for.
pub(super) enum Attached {
    /// Segment of rings and queues, shared with the process.
    Segment {
        segment: Arc<Segment>,
        /// Kept where its node is known, to look again.
        memory: Option<Region>,
        _shares: [Share; 2],
    },
    /// Memory of the program.
    Pin { memory: Region, _shares: [Share; 3] },
    /// A file that it has open.
    File(Arc<FileId>),
    /// All memory of the VM, of a context of its kernel.
    All {
        memory: Region,
        space: Arc<AddressSpace>,
        _share: Share,
    },
}

impl Context {
    /// Makes memory known as segment `region`. The first segment is the context's header.
    ///
    /// # Errors
    /// `EEXIST` for an id in use, `EINVAL` for a length beyond its limit or memory that cannot be
    /// one mapping, `ENOMEM` where it is more than the tenant's share of this process's
    /// mappings.
    pub fn attach_segment(&self, region: RegionId, memory: Region) -> Result<(), Errno> {
        Self::check_new(&self.regions(), region)?;
        if memory.len() > MAX_SEGMENT_BYTES {
            return Err(Errno::EINVAL);
        }
        // Stitched, each of its extents is a mapping. What is kept besides may have a mapping and a
        // file of its own.
        let own = memory.node().map_or(0, |_| to_u64(memory.own_files()));
        let mappings = to_u64(memory.extents()).saturating_add(own);
        let take = |of, amount| self.account.take(of, amount).ok_or(Errno::ENOMEM);
        let shares = [
            take(Resource::Mappings, mappings)?,
            take(Resource::Descriptors, own)?,
        ];
        let shared = memory.stitch().map_err(|e| {
            log::debug!("{self:?}: segment {region}: {e}");
            match e {
                RegionError::Mapping(_) => Errno::ENOMEM,
                _ => Errno::EINVAL,
            }
        })?;
        // Not locked while it is mapped, which may take long: the worker wants to know its
        // segments, and does not wait for that.
        let mut regions = self.regions();
        Self::check_new(&regions, region)?;
        if self.header.get().is_none() {
            if (shared.len() as u64) < HEADER_SEGMENT_BYTES {
                return Err(Errno::EINVAL);
            }
            // Until a worker has taken note of it, its doorbell is needed.
            let state = shared.word(OFF_BACKEND_STATE).map_err(|_| Errno::EINVAL)?;
            state.store(BACKEND_SLEEPING, Ordering::SeqCst);
            let header = Header {
                memory: shared.clone(),
                calls: Mutex::new(CallRing::new(shared.clone())),
                asyncs: Arc::new(AsyncRing::new(shared.clone(), Arc::clone(&self.events))),
            };
            self.header.set(header).map_err(|_| Errno::EEXIST)?;
        }
        let memory = memory.node().map(|_| memory);
        let segment = Attached::Segment {
            segment: Segment::new(shared),
            memory,
            _shares: shares,
        };
        regions.insert(region, segment);
        Ok(())
    }

    /// Its header, once it is there.
    #[must_use]
    pub fn header(&self) -> Option<&SharedMemory> {
        self.header.get().map(|header| &header.memory)
    }

    /// Makes memory of the program known as pin `region`.
    ///
    /// # Errors
    /// `EEXIST` for an id in use, `ENOMEM` where it has more extents, or mappings and files of its
    /// own, than the tenant's share.
    pub fn attach_pin(&self, region: RegionId, memory: Region) -> Result<(), Errno> {
        let (extents, own) = (to_u64(memory.extents()), to_u64(memory.own_files()));
        let take = |of, amount| self.account.take(of, amount).ok_or(Errno::ENOMEM);
        let mut regions = self.regions();
        Self::check_new(&regions, region)?;
        let pin = Attached::Pin {
            memory,
            _shares: [
                take(Resource::Extents, extents)?,
                take(Resource::Mappings, own)?,
                take(Resource::Descriptors, own)?,
            ],
        };
        regions.insert(region, pin);
        Ok(())
    }

    /// Makes all memory of the VM known as region `region`, at guest-physical addresses.
    ///
    /// # Errors
    /// `EPERM` where it is not a context of the guest's kernel, `EEXIST` for an id in use, `ENOMEM`
    /// where it has more extents than the tenant's share.
    pub fn attach_all_memory(
        &self,
        region: RegionId,
        memory: Region,
        space: Arc<AddressSpace>,
    ) -> Result<(), Errno> {
        if !self.is_kernel {
            return Err(Errno::EPERM);
        }
        let extents = to_u64(memory.extents());
        let mut regions = self.regions();
        Self::check_new(&regions, region)?;
        let all = Attached::All {
            memory,
            space,
            _share: self
                .account
                .take(Resource::Extents, extents)
                .ok_or(Errno::ENOMEM)?,
        };
        regions.insert(region, all);
        Ok(())
    }

    /// Makes a file known as region `region`: one that the process has shown to have open. Nobody
    /// calls another file so before the region is taken away.
    ///
    /// # Errors
    /// `EEXIST` for an id in use.
    pub fn attach_file(&self, region: RegionId, file: FileId) -> Result<(), Errno> {
        let mut regions = self.regions();
        Self::check_new(&regions, region)?;
        regions.insert(region, Attached::File(Arc::new(file)));
        Ok(())
    }

    fn check_new(regions: &HashMap<RegionId, Attached>, region: RegionId) -> Result<(), Errno> {
        if regions.contains_key(&region) {
            return Err(Errno::EEXIST);
        }
        Ok(())
    }

    /// Takes a region away. Registrations over a pin become invalid; when this returns nothing
    /// touches it any more.
    ///
    /// # Errors
    /// `ENOENT` for an unknown region, `EBUSY` for a segment or a file in use.
    pub fn detach(&self, region: RegionId) -> Result<(), Errno> {
        let pin = {
            let mut regions = self.regions();
            match regions.get(&region).ok_or(Errno::ENOENT)? {
                Attached::Segment { segment, .. }
                    if Arc::strong_count(segment) > 1 || self.is_header(segment.memory()) =>
                {
                    return Err(Errno::EBUSY);
                }
                Attached::File(file) if Arc::strong_count(file) > 1 => return Err(Errno::EBUSY),
                _ => {}
            }
            regions.remove(&region)
        };
        if let Some(Attached::Pin { memory, .. } | Attached::All { memory, .. }) = pin {
            memory.revoke();
        }
        Ok(())
    }

    fn is_header(&self, shared: &SharedMemory) -> bool {
        let word = |m: &SharedMemory| m.word(0).map(|w| w.as_ptr()).ok();
        self.header
            .get()
            .is_some_and(|h| word(&h.memory) == word(shared))
    }

    /// A segment for queues.
    pub(crate) fn segment(&self, region: RegionId) -> Result<Arc<Segment>, Errno> {
        match self.regions().get(&region) {
            Some(Attached::Segment { segment, .. }) => {
                if self.is_header(segment.memory()) {
                    return Err(Errno::EBUSY);
                }
                Ok(Arc::clone(segment))
            }
            _ => Err(Errno::EINVAL),
        }
    }

    /// The memory of a pin.
    pub(crate) fn pin(&self, region: RegionId) -> Result<Region, Errno> {
        match self.regions().get(&region) {
            Some(Attached::Pin { memory, .. }) => Ok(memory.clone()),
            _ => Err(Errno::EINVAL),
        }
    }

    /// All memory of the VM, where a region is that.
    pub(crate) fn all_memory(&self, region: RegionId) -> Option<Region> {
        match self.regions().get(&region) {
            Some(Attached::All { memory, .. }) => Some(memory.clone()),
            _ => None,
        }
    }

    /// The memory of the VM, of a context of its kernel that has attached it.
    pub(crate) fn space(&self) -> Option<Arc<AddressSpace>> {
        self.regions().values().find_map(|attached| match attached {
            Attached::All { space, .. } => Some(Arc::clone(space)),
            _ => None,
        })
    }

    /// A file that the process has open. It cannot be detached while the result is kept.
    pub(crate) fn file(&self, region: RegionId) -> Result<Arc<FileId>, Errno> {
        match self.regions().get(&region) {
            Some(Attached::File(file)) => Ok(Arc::clone(file)),
            _ => Err(Errno::EINVAL),
        }
    }
}
