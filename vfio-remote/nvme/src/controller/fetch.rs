//! Commands on their way in.

use super::completion::{CommandId, Permit};
use super::{Controller, State};
use crate::bits::{SQE_BYTES, Sqe};
use crate::data::Unreachable;
use crate::features::AsyncEvent;
use crate::ids::SqId;
use crate::queue::CompletionQueue;
use crate::remote::{Done, Job};
use crate::ring::Event;
use farlane_abi::width::{at_most, to_usize};
use farlane_pci::DmaView;
use probe::probe;
use std::sync::Arc;
use zerocopy::IntoBytes as _;

/// Entries of an I/O queue that are read at once: the driver's processor has most of them in its
/// caches, and so these misses overlap.
const AT_ONCE: usize = 8;
/// Most commands of a queue in a turn.
const BATCH: u32 = 64;
/// Most bytes that the commands of a queue move in a turn before it is another's.
const BATCH_BYTES: u64 = 4 << 20;

pub(super) fn read_entry(view: &DmaView, address: u64) -> Result<Sqe, Unreachable> {
    let mut sqe = Sqe::default();
    read_entries(view, address, std::slice::from_mut(&mut sqe))?;
    Ok(sqe)
}

fn read_entries(view: &DmaView, address: u64, entries: &mut [Sqe]) -> Result<(), Unreachable> {
    view.read(address, entries.as_mut_bytes())
        .map_err(|_| Unreachable)
}

impl Controller {
    /// Takes what has ended. Returns whether anything had.
    pub(super) fn reap(&mut self) -> bool {
        let mut worked = false;
        while let Some(event) = self.files.ring.take_event() {
            if let Event::Done { slot, result } = event {
                worked = true;
                self.transferred(slot, result);
            }
        }
        while let Some(done) = self.remote.next() {
            worked = true;
            match done {
                Done::Fetched { sq, entries } => self.fetched(sq, entries),
                Done::Posted { cq, sq, result } => self.posted(cq, sq, result),
                Done::Gathered { slot, data } => self.gathered(slot, data),
                Done::Scattered { slot, result } => self.scattered(slot, result),
            }
        }
        worked | self.look_at_unsettled()
    }

    /// Takes new commands, of each queue in turn. Returns whether there were any.
    pub(super) fn take_commands(&mut self) -> bool {
        let mut worked = false;
        for queue in self.queues.sq_ids_from(self.first) {
            if self.queues.sq(queue).is_some() {
                worked |= self.take_commands_of(queue);
            }
            if self.state != State::Running {
                break;
            }
        }
        self.first = self.queues.sq_id_after(self.first);
        worked
    }

    fn take_commands_of(&mut self, queue: SqId) -> bool {
        let tail = self.driver_tail(queue);
        let Some(sq) = self.queues.sq_mut(queue) else {
            return false;
        };
        if sq.set_tail(tail).is_err() {
            if !std::mem::replace(&mut sq.bad_tail, true) {
                log::debug!("Submission queue {queue}: tail {tail} is none");
                self.report(AsyncEvent::InvalidDoorbellValue);
            }
            return false;
        }
        sq.bad_tail = false;
        if sq.pending() == 0 || sq.fetching || sq.deleting.is_some() {
            return false;
        }
        // As many as fit into the ring are in flight at most, even if the driver moves its tail on
        // before the first has been completed.
        let (cq, free) = (sq.cq, sq.free().min(BATCH));
        let waits = |cq: &CompletionQueue| !cq.backlog.is_empty();
        let cq_waits = self.queues.cq(cq).is_none_or(waits);
        if cq_waits || free == 0 {
            return false;
        }
        self.follow_tail(queue);
        let before = self.requests.moved();
        let is_admin = queue.is_admin();
        // An Abort takes entries of its own queue out.
        let at_once = if is_admin { 1 } else { AT_ONCE };
        let mut entries = [Sqe::default(); AT_ONCE];
        let mut taken = 0;
        while let Some(sq) = self.queues.sq_mut(queue) {
            let run = sq.run(free - taken);
            let Some(entries) = entries.get_mut(..to_usize(run.into()).min(at_once)) else {
                break;
            };
            if entries.is_empty() || !self.requests.has_room(is_admin) {
                break;
            }
            let address = sq.head_address();
            if read_entries(&self.view(), address, entries).is_err() {
                self.fetch_remotely(queue, run);
                return true;
            }
            for sqe in entries {
                taken += 1;
                self.execute(queue, sqe);
                let moved = self.requests.moved() - before;
                if self.state != State::Running
                    || moved >= BATCH_BYTES
                    || !self.requests.has_room(is_admin)
                {
                    return true;
                }
            }
        }
        taken > 0
    }

    /// Executes the entry at the head of a queue.
    fn execute(&mut self, queue: SqId, sqe: &Sqe) {
        let Some(sq) = self.queues.sq_mut(queue) else {
            return;
        };
        sq.advance();
        sq.began();
        let command = CommandId::new(queue, sqe);
        let controller = Arc::as_ptr(&self.shared);
        probe!(
            farlane,
            nvme_begin,
            controller,
            queue.get(),
            command.cid,
            sqe.opcode
        );
        let permit = Permit::new(command);
        if queue.is_admin() {
            self.admin(permit, sqe);
        } else {
            self.io(permit, sqe);
        }
    }

    /// Entries that are not mapped are read by messages, or turn out not to be memory.
    fn fetch_remotely(&mut self, queue: SqId, run: u32) {
        if let Some(sq) = self.queues.sq_mut(queue) {
            sq.fetching = true;
            // Up to the end of the page: the next one may be mapped.
            let in_page = (4096 - sq.head_address() % 4096) / SQE_BYTES;
            let count = at_most(in_page, run).max(1);
            self.remote.submit(Job::Fetch {
                sq: queue,
                address: sq.head_address(),
                count,
            });
        }
    }

    fn fetched(&mut self, queue: SqId, entries: Result<Vec<Sqe>, Unreachable>) {
        let Some(sq) = self.queues.sq_mut(queue) else {
            return;
        };
        sq.fetching = false;
        let is_deleted = sq.deleting.is_some();
        if self.state != State::Running {
            return;
        }
        // What was not begun ends with its queue (5.6).
        if is_deleted {
            self.finish_deletion(queue);
            return;
        }
        let Ok(entries) = entries else {
            self.fail();
            return;
        };
        let Some(sq) = self.queues.sq_mut(queue) else {
            return;
        };
        // They are still on their way for one of them that aborts another.
        sq.fetching = true;
        for sqe in entries {
            // Those that there is no room for are fetched again.
            if !self.requests.has_room(queue.is_admin()) {
                break;
            }
            self.execute(queue, &sqe);
        }
        if let Some(sq) = self.queues.sq_mut(queue) {
            sq.fetching = false;
        }
    }
}
