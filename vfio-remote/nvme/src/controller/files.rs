//! The namespaces, as the request engine sees them: a file is known by its namespace's identifier.

use crate::identify::Identity;
use crate::ids::NamespaceId;
use crate::namespace::{Namespace, Storage};
use crate::ring::Ring;
use crate::syncs::{Beside, UnderWay};
use farlane_block::engine::Files;
use farlane_block::engine::memory::Access;
use std::io;
use std::sync::Arc;

/// The namespaces of a controller, and the ring that moves their bytes.
#[derive(Debug)]
pub struct NamespaceFiles {
    /// Its file numbers are the places of the namespaces.
    pub ring: Ring,
    identity: Arc<Identity>,
}

impl NamespaceFiles {
    /// Those of a controller.
    pub fn new(ring: Ring, identity: Arc<Identity>) -> Self {
        Self { ring, identity }
    }

    fn namespace(&self, nsid: NamespaceId) -> Option<&Namespace> {
        self.identity.namespace(nsid)
    }

    /// Whether a sync of a namespace can still make what was written durable.
    pub fn is_sound(&self, nsid: NamespaceId) -> bool {
        self.namespace(nsid).is_some_and(Namespace::can_sync)
    }
}

/// The number by which the ring knows a namespace's file.
fn number(nsid: NamespaceId) -> io::Result<u32> {
    nsid.index().ok_or(io::ErrorKind::NotFound.into())
}

impl Files for NamespaceFiles {
    type Id = NamespaceId;

    fn access(&mut self, nsid: NamespaceId) -> io::Result<Access<'_>> {
        let namespace = self.identity.namespace(nsid);
        match &namespace.ok_or(io::ErrorKind::NotFound)?.storage {
            Storage::Ring { .. } => Ok(Access::Ring(&mut self.ring, number(nsid)?)),
            Storage::Memory { file } => Ok(Access::Memory(file)),
            Storage::Null => Ok(Access::Null),
        }
    }

    fn ring(&mut self, nsid: NamespaceId) -> io::Result<(&mut Ring, u32)> {
        Ok((&mut self.ring, number(nsid)?))
    }

    fn is_cached(&self, nsid: NamespaceId) -> bool {
        self.namespace(nsid).is_some_and(|namespace| {
            let storage = &namespace.storage;
            matches!(storage, Storage::Ring { is_cached, .. } if *is_cached)
        })
    }

    /// Of an operation that does both nobody can say which has failed: with the page cache it would
    /// use up the error of an earlier write, and a disk may not reach the memory of another device.
    fn syncs_after(&self, nsid: NamespaceId, from_device: bool) -> bool {
        from_device || self.is_cached(nsid)
    }

    fn failed_syncs(&self, nsid: NamespaceId) -> u64 {
        self.namespace(nsid).map_or(0, Namespace::failed_syncs)
    }

    /// What was written around the page cache after a sync has failed is not lost with what was
    /// written before.
    fn can_sync(&self, nsid: NamespaceId, since: Option<u64>) -> bool {
        match since {
            Some(since) if !self.is_cached(nsid) => self.failed_syncs(nsid) == since,
            _ => self.is_sound(nsid),
        }
    }

    fn sync_has_failed(&mut self, nsid: NamespaceId, errno: i32, _end: Option<u64>) {
        // Memory has no cache whose state would not be known.
        if let Some(namespace) = self.namespace(nsid)
            && matches!(namespace.storage, Storage::Ring { .. })
        {
            namespace.sync_has_failed(errno);
        }
    }

    fn begin_sync(&self, nsid: NamespaceId) -> Option<UnderWay> {
        let namespace = self.namespace(nsid).filter(|_| self.is_cached(nsid));
        namespace.map(|namespace| namespace.syncs.begin())
    }

    fn are_over(&self, beside: &Beside) -> bool {
        beside.are_over()
    }

    fn ends_before(&self, nsid: NamespaceId, end: u64) -> bool {
        let namespace = self.namespace(nsid);
        namespace.is_some_and(|namespace| namespace.storage.ends_before(end))
    }
}
