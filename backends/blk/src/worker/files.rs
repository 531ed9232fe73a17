//! The paths of a disk, as the request engine sees them: each is a file.

use crate::disk::Disk;
use crate::paths::health::can_be_the_path;
use crate::paths::ring::PathRing;
use crate::paths::{PathId, Paths};
use farlane_block::engine::Files;
use farlane_block::engine::memory::Access;
use farlane_block::ring::Ring;
use farlane_block::storage::known_size;
use farlane_block::syncs::{Beside, UnderWay};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The paths of a disk, for one worker.
pub struct PathFiles {
    pub ring: PathRing,
    pub paths: Arc<Paths>,
    disk: Arc<Disk>,
    /// Wakes the worker.
    wake: Arc<OwnedFd>,
}

impl PathFiles {
    /// Those of a disk.
    pub fn new(ring: PathRing, disk: Arc<Disk>, wake: Arc<OwnedFd>) -> Self {
        Self {
            paths: Arc::clone(disk.paths()),
            ring,
            disk,
            wake,
        }
    }
}

impl Files for PathFiles {
    type Id = PathId;

    fn access(&mut self, path: PathId) -> io::Result<Access<'_>> {
        self.ring.access(path)
    }

    fn ring(&mut self, path: PathId) -> io::Result<(&mut Ring, u32)> {
        let number = self.ring.file(path)?;
        Ok((&mut *self.ring, number))
    }

    fn is_cached(&self, _path: PathId) -> bool {
        self.paths.are_cached()
    }

    /// Around the page cache of the host a durable write is one operation (`RWF_DSYNC`), which a
    /// device may do without a flush. Through it, and from memory that the disk may not reach, it
    /// is a write and then a sync. Where another path may do the write again, it could not do the
    /// sync.
    fn syncs_after(&self, _path: PathId, from_device: bool) -> bool {
        !self.paths.fails_over() && (self.paths.are_cached() || from_device)
    }

    fn failed_syncs(&self, _path: PathId) -> u64 {
        self.disk.failed_syncs()
    }

    /// What a write has written that began after a sync has failed is not lost with what was
    /// written before.
    fn can_sync(&self, _path: PathId, since: Option<u64>) -> bool {
        since == Some(self.disk.failed_syncs()) || self.disk.can_sync().is_ok()
    }

    /// Blocks that the disk has no more were not written, and nothing else is lost by that.
    fn sync_has_failed(&mut self, _path: PathId, errno: i32, end: Option<u64>) {
        let is_gone = |end| self.paths.ends_before(end);
        // Memory has no cache whose state would not be known.
        if self.paths.in_memory() || self.paths.fails_over() && end.is_some_and(is_gone) {
            return;
        }
        self.disk.sync_has_failed(errno);
    }

    fn begin_sync(&self, path: PathId) -> Option<UnderWay> {
        let path = self.paths.get(path).filter(|_| self.paths.are_cached());
        path.map(|path| path.syncs().begin())
    }

    fn are_over(&self, beside: &Beside) -> bool {
        beside.are_over_or_wake(&self.wake)
    }

    fn ends_before(&self, path: PathId, end: u64) -> bool {
        let storage = self.ring.storage(path);
        let bytes = storage.and_then(|storage| known_size(&storage.file).ok());
        bytes.is_none_or(|bytes| bytes < end)
    }

    fn discards_by_command(&self, path: PathId) -> bool {
        let storage = self.ring.storage(path);
        storage.is_some_and(|storage| storage.is_device)
    }

    fn can_zero(&self) -> bool {
        self.disk.can_zero()
    }

    fn cannot_zero(&self) {
        self.disk.cannot_zero();
    }

    fn wrote(&self, path: PathId) {
        if self.paths.several()
            && let Some(path) = self.paths.get(path)
        {
            path.wrote();
        }
    }

    /// Another path may lead to what this one does not, but to no blocks that the disk has no more.
    fn fails_over(&self, end: Option<u64>, errno: i32) -> bool {
        let is_gone = |end| self.paths.ends_before(end);
        self.paths.fails_over() && can_be_the_path(errno) && !end.is_some_and(is_gone)
    }
}
