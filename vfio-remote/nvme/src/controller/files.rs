//! The namespaces, as the request engine sees them: file numbers are their indices.

use crate::identify::Identity;
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
    /// Its file numbers are the namespaces' indices.
    pub ring: Ring,
    identity: Arc<Identity>,
}

impl NamespaceFiles {
    /// Those of a controller.
    pub fn new(ring: Ring, identity: Arc<Identity>) -> Self {
        Self { ring, identity }
    }

    fn namespace(&self, index: usize) -> Option<&Namespace> {
        self.identity.namespaces.get(index)
    }

    /// Whether a sync of a namespace can still make what was written durable.
    pub fn is_sound(&self, index: usize) -> bool {
        self.namespace(index).is_some_and(Namespace::can_sync)
    }
}

impl Files for NamespaceFiles {
    fn access(&mut self, file: usize) -> io::Result<Access<'_>> {
        let namespace = self.identity.namespaces.get(file);
        match &namespace.ok_or(io::ErrorKind::NotFound)?.storage {
            Storage::Ring { .. } => {
                let number = u32::try_from(file).map_err(io::Error::other)?;
                Ok(Access::Ring(&mut self.ring, number))
            }
            Storage::Memory { file } => Ok(Access::Memory(file)),
            Storage::Null => Ok(Access::Null),
        }
    }

    fn ring(&mut self, file: usize) -> io::Result<(&mut Ring, u32)> {
        let number = u32::try_from(file).map_err(io::Error::other)?;
        Ok((&mut self.ring, number))
    }

    fn is_cached(&self, file: usize) -> bool {
        self.namespace(file).is_some_and(|namespace| {
            let storage = &namespace.storage;
            matches!(storage, Storage::Ring { is_cached, .. } if *is_cached)
        })
    }

    /// Of an operation that does both nobody can say which has failed: with the page cache it would
    /// use up the error of an earlier write, and a disk may not reach the memory of another device.
    fn syncs_after(&self, file: usize, from_device: bool) -> bool {
        from_device || self.is_cached(file)
    }

    fn failed_syncs(&self, file: usize) -> u64 {
        self.namespace(file).map_or(0, Namespace::failed_syncs)
    }

    /// What was written around the page cache after a sync has failed is not lost with what was
    /// written before.
    fn can_sync(&self, file: usize, since: Option<u64>) -> bool {
        match since {
            Some(since) if !self.is_cached(file) => self.failed_syncs(file) == since,
            _ => self.is_sound(file),
        }
    }

    fn sync_has_failed(&mut self, file: usize, errno: i32, _end: Option<u64>) {
        // Memory has no cache whose state would not be known.
        if let Some(namespace) = self.namespace(file)
            && matches!(namespace.storage, Storage::Ring { .. })
        {
            namespace.sync_has_failed(errno);
        }
    }

    fn begin_sync(&self, file: usize) -> Option<UnderWay> {
        let namespace = self.namespace(file).filter(|_| self.is_cached(file));
        namespace.map(|namespace| namespace.syncs.begin())
    }

    fn are_over(&self, beside: &Beside) -> bool {
        beside.are_over()
    }

    fn ends_before(&self, file: usize, end: u64) -> bool {
        let namespace = self.namespace(file);
        namespace.is_some_and(|namespace| namespace.storage.ends_before(end))
    }
}
