//! How requests become durable.
//!
//! Around the page cache of the host a durable write is one operation (`RWF_DSYNC`), which a device
//! may do without a flush. Through it, and from memory that the disk may not reach, it is a write
//! and then a sync: of an operation that does both nobody can say which of them has failed. A write
//! that has failed is an error of its request. After a sync that has failed nobody knows what of
//! all that was written before is on the disk: flushes that follow fail, too.

use super::engine::Engine;
use super::requests::{Request, Work};
use super::steps::Step;
use crate::bits::Status;
use farlane_block::ring::{Durable, is_of_the_write};
use std::io;
use std::sync::atomic::Ordering;

impl Engine {
    /// Whether writes are to be durable when they are complete.
    pub(super) fn durable(&self) -> Durable {
        Durable(!self.writeback.load(Ordering::Relaxed))
    }

    /// Whether a durable write is a write and then a sync. Where another path may do the write
    /// again, it could not do the sync.
    pub(super) fn syncs_after(&self, request: &Request) -> bool {
        !self.paths.fails_over() && (self.paths.are_cached() || request.is_tunnelled())
    }

    /// Makes durable what a request has done: its last step.
    pub(super) fn step_sync(&mut self, slot: usize, request: &mut Request) -> io::Result<Step> {
        if request.syncing
            && let Some(beside) = &request.beside
            && !beside.are_over_or_wake(&self.wake)
        {
            self.unsettled.push_back(slot);
            return Ok(Step::Waiting);
        }
        // Of two syncs under way that write-back has failed for, one is told of it.
        if let Err(e) = self.can_sync(request) {
            return Ok(Step::Done(self.failed(&e)));
        }
        if request.syncing {
            if self.paths.several() {
                self.paths.synced(request.path, &request.marks);
            }
            return Ok(Step::Done(Status::Ok));
        }
        if self.disk.in_memory() {
            return Ok(Step::Done(Status::Ok));
        }
        request.syncing = true;
        let file = self.ring.file(request.path)?;
        if self.paths.are_cached()
            && let Some(path) = self.paths.get(request.path)
        {
            request.sync = Some(path.syncs().begin());
        }
        self.ring.sync(file, slot)?;
        Ok(Step::Pending)
    }

    /// Whether what a request has done can be made durable. What a write has written that began
    /// after a sync has failed is not lost with what was written before.
    fn can_sync(&self, request: &Request) -> io::Result<()> {
        let is_new = self.disk.failed_syncs() == request.failed_syncs;
        if matches!(request.work, Work::Write(_)) && is_new {
            return Ok(());
        }
        self.disk.can_sync()
    }

    /// Looks at all requests that wait for syncs of others. Returns whether one does not any more.
    pub(super) fn look_at_unsettled(&mut self) -> bool {
        let mut worked = false;
        for _ in 0..self.unsettled.len() {
            if let Some(slot) = self.unsettled.pop_front()
                && let Some(mut request) = self.requests.take(slot)
            {
                let step = self.step_sync(slot, &mut request);
                worked |= !matches!(step, Ok(Step::Waiting));
                self.after(slot, request, step);
            }
        }
        worked
    }

    /// Whether an error of a request's step is one of making durable what was written.
    pub(super) fn is_of_a_sync(&self, request: &Request, errno: i32) -> bool {
        let around_cache = !self.paths.are_cached();
        let tunnelled = request.is_tunnelled();
        request.syncing || (request.is_durable && !is_of_the_write(errno, around_cache, tunnelled))
    }
}
