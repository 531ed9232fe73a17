//! Abort (NVMe 1.4, 5.1): a command that has not been begun is completed at once, and never begun.
//! What has been given to a device cannot be taken back. Of those that wait in a submission queue
//! only the oldest can be aborted: a completion tells the driver that an entry is free, but the
//! entries are freed in their order (4.1).

use super::fetch::read_entry;
use super::{CommandId, Controller, Permit};
use crate::bits::Status;
use crate::ids::SqId;

impl Controller {
    /// Aborts a command of submission queue `queue`, if it waits. Returns whether it did.
    pub(super) fn abort(&mut self, queue: SqId, cid: u16) -> bool {
        let aborted = if queue.is_admin() && self.events.abort(cid) {
            if let Some(sq) = self.queues.sq_mut(SqId::ADMIN) {
                sq.began();
            }
            Some(Permit::new(CommandId::admin(cid)))
        } else {
            let waiting = self.requests.abandon(queue, cid);
            waiting.or_else(|| self.abort_entry(queue, cid))
        };
        let Some(command) = aborted else {
            return false;
        };
        self.complete(command, Status::ABORT_REQUESTED, 0);
        true
    }

    /// Takes a command out of its queue, if it is the next one there.
    fn abort_entry(&mut self, queue: SqId, cid: u16) -> Option<Permit> {
        self.queues.sq(queue)?;
        let tail = self.driver_tail(queue);
        let view = self.view();
        let sq = self.queues.sq_mut(queue)?;
        // Entries that are fetched by messages are begun as soon as they have come.
        if sq.fetching || sq.deleting.is_some() || sq.set_tail(tail).is_err() {
            return None;
        }
        // No more completions wait for room than there are entries, as where commands are taken.
        if sq.pending() == 0 || sq.free() == 0 {
            return None;
        }
        let sqe = read_entry(&view, sq.head_address()).ok()?;
        if sqe.cid != cid {
            return None;
        }
        sq.advance();
        sq.began();
        Some(Permit::new(CommandId::new(queue, &sqe)))
    }
}
