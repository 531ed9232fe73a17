//! How requests go on, and how they end.

use super::QueueWorker;
use super::requests::{Answer, Request, Whole};
use super::virtqueue::Completion;
use crate::bits::Status;
use crate::counters::count;
use crate::paths::PathId;
use crate::per_node::steering::NumaSpan;
use crate::request::Request as Kind;
use farlane_block::engine::{Failure, Slot, Stage, Step, Trouble, Work};
use farlane_daemon::warn_limited;
use std::io;
use std::rc::Rc;

/// Most requests that have a copy of their data; others wait.
const MAX_COPIES: usize = 16;

impl QueueWorker {
    /// Does what comes next.
    pub(super) fn advance(&mut self, slot: Slot) {
        let Some(request) = self.requests.slots.get_mut(slot) else {
            return;
        };
        if request.operation.memory().copies() && !request.is_copying {
            if self.requests.copying >= MAX_COPIES {
                self.requests.awaiting_copy.push_back(slot);
                return;
            }
            self.requests.copying += 1;
            request.is_copying = true;
            count(&self.disk.counters().copied, 1);
        }
        if request.is_remote && !request.operation.is_moved() {
            if let Some(offload) = &mut self.offload
                && offload.hand_over(&self.disk, &self.files, request, slot)
            {
                return;
            }
            // It cannot now: the worker does it itself.
            request.is_remote = false;
            request.executing_node = self.home;
        }
        let step = request.operation.advance(&mut self.files, slot);
        self.after(slot, step);
    }

    fn after(&mut self, slot: Slot, step: Step) {
        match step {
            Step::Pending => (),
            Step::Unsettled => self.requests.unsettled.push_back(slot),
            Step::Done => self.end(slot, Status::Ok),
            Step::Trouble(Trouble::Elsewhere(errno)) => self.redo(slot, errno),
            Step::Trouble(Trouble::Failed(failure)) => {
                let status = self.status_of(slot, failure);
                self.end(slot, status);
            }
        }
    }

    /// What a failure is answered with.
    fn status_of(&mut self, slot: Slot, failure: Failure) -> Status {
        let request = self.requests.slots.get_mut(slot);
        let discards = request.is_some_and(
            |request| matches!(request.operation.work(), Work::Clear(clear) if clear.discards()),
        );
        let is_unsupported = matches!(
            failure.errno,
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV
        );
        if discards && is_unsupported && failure.stage == Stage::Data {
            return Status::Unsupp;
        }
        let other = self.disk.can_sync().err();
        match other.filter(|_| failure.stage == Stage::OtherSync) {
            Some(error) => self.failed(&error),
            None => self.failed(&failure.error()),
        }
    }

    /// What was under way for a request has ended with `result`: a number of bytes, or a negative
    /// error number.
    pub(super) fn ended(&mut self, slot: Slot, result: i32) {
        let Some(request) = self.requests.slots.get_mut(slot) else {
            return;
        };
        match request.operation.ended(&mut self.files, result) {
            Ok(()) => {
                // Where it had failed before, that was the paths' fault.
                if let Some(failure) = &request.failure
                    && result >= 0
                    && !matches!(request.operation.work(), Work::Sync)
                {
                    let tried = failure.tried.without(request.operation.file());
                    self.files.paths.confirm(tried);
                }
                self.advance(slot);
            }
            Err(trouble) => self.after(slot, Step::Trouble(trouble)),
        }
    }

    /// Looks at all requests that wait for syncs of others. Returns whether one does not any more.
    pub(super) fn look_at_unsettled(&mut self) -> bool {
        let waiting = self.requests.unsettled.len();
        for _ in 0..waiting {
            if let Some(slot) = self.requests.unsettled.pop_front() {
                self.advance(slot);
            }
        }
        self.requests.unsettled.len() < waiting
    }

    /// Ends a request, or a part of one.
    pub(super) fn end(&mut self, slot: Slot, status: Status) {
        let Some(mut request) = self.requests.slots.remove(slot) else {
            return;
        };
        if request.is_copying {
            self.requests.copying -= 1;
        }
        let mut tunnelled = 0;
        if status == Status::Ok {
            if let Some(guest) = request.operation.memory().guest_mut() {
                tunnelled = guest.landed();
            }
            self.count_moved(&request);
        }
        let Request {
            answer, operation, ..
        } = request;
        if let Some(list) = operation.into_memory().into_list() {
            self.requests.give_list(list);
        }
        match answer {
            Answer::Driver(completion) => self.complete(completion, status, tunnelled),
            Answer::Whole(whole) => {
                if status != Status::Ok {
                    whole.status.set(status);
                }
                // The last part has the request for itself.
                if let Some(Whole { completion, status }) = Rc::into_inner(whole) {
                    self.complete(completion, status.get(), 0);
                }
            }
        }
        // Whoever waited for room has it now.
        while self.requests.copying < MAX_COPIES
            && let Some(next) = self.requests.awaiting_copy.pop_front()
        {
            self.advance(next);
        }
    }

    /// Counts what a request, or a part of one, has moved; of a sync, what it has made durable.
    fn count_moved(&self, request: &Request) {
        let operation = &request.operation;
        let path = operation.file();
        match operation.work() {
            Work::Sync if self.files.paths.several() => {
                self.files.paths.synced(path, &request.marks);
            }
            Work::Read | Work::Write(_) => {
                let bytes = operation.extent().bytes;
                self.count_locality(&request.span, request.executing_node, path, bytes);
            }
            Work::Sync | Work::Clear(_) => (),
        }
    }

    /// Counts bytes that a node has moved over a path.
    pub(super) fn count_locality(&self, span: &NumaSpan, node: usize, path: PathId, bytes: u64) {
        let Some(worker_node) = self.disk.around().nodes.all().get(node) else {
            return;
        };
        let (locality, path) = (self.disk.locality(), path.index());
        match span {
            NumaSpan::Single(data) => locality.add(*data, worker_node.node(), path, bytes),
            NumaSpan::Split(all) => {
                for (data, bytes) in all {
                    locality.add(*data, worker_node.node(), path, *bytes);
                }
            }
        }
    }

    /// Counts a request of the driver that has ended, and answers it.
    pub(super) fn complete(&mut self, completion: Completion, status: Status, tunnelled: u64) {
        let counters = self.disk.counters();
        let mut written = 0;
        match completion.kind {
            _ if status != Status::Ok => count(&counters.errors, 1),
            Kind::Read(extent) => {
                count(&counters.reads, 1);
                count(&counters.bytes_read, extent.bytes.into());
                count(&counters.bytes_tunnelled_in, tunnelled);
                written = extent.bytes;
            }
            Kind::Write(extent) => {
                count(&counters.writes, 1);
                count(&counters.bytes_written, extent.bytes);
                count(&counters.bytes_tunnelled_out, tunnelled);
            }
            Kind::Flush => count(&counters.flushes, 1),
            Kind::Discard => count(&counters.discards, 1),
            Kind::WriteZeroes => count(&counters.write_zeroes, 1),
            Kind::GetId => (),
        }
        self.queue.answer(completion, status, written);
    }

    /// An operation has failed.
    pub(super) fn failed(&self, error: &io::Error) -> Status {
        let serial = self.disk.serial();
        warn_limited!(self.disk.limit(), "Disk {serial}: {error}");
        Status::IoErr
    }
}
