//! How requests end.

use super::engine::Engine;
use super::requests::{Request, StatusByte, Work};
use super::steps::{self, Step};
use crate::bits::Status;
use crate::counters::count;
use crate::limb::steering::Lies;
use farlane_daemon::warn_limited;
use std::io;

impl Engine {
    /// Goes on with a request after a step.
    pub(super) fn after(&mut self, slot: usize, mut request: Box<Request>, step: io::Result<Step>) {
        let status = match step {
            Ok(Step::Pending | Step::Waiting | Step::Stranded) => {
                self.requests.put(slot, request);
                return;
            }
            Ok(Step::Done(status)) => status,
            Err(e) => self.failed(&e),
        };
        self.finish(slot, &mut request, status);
        self.requests
            .give_vectors(std::mem::take(&mut request.vectors));
        drop(request);
        // Whoever waited for room has it now.
        while self.copying < steps::MAX_COPIES
            && let Some(next) = self.waiting.pop_front()
        {
            if let Some(mut request) = self.requests.take(next) {
                let step = self.step(next, &mut request);
                self.after(next, request, step);
            }
        }
    }

    /// Ends a request, or a part of one.
    fn finish(&mut self, slot: usize, request: &mut Request, status: Status) {
        self.requests.release(slot);
        if std::mem::take(&mut request.is_copying) {
            self.copying -= 1;
        }
        request.bounce = None;
        let mut tunnelled = 0;
        if status == Status::Ok {
            if let Some(opened) = request.opened.take() {
                tunnelled = opened.tunnelled_bytes();
                opened.landed();
            }
            self.moved(request);
        }
        let Some(whole) = request.whole.take() else {
            self.complete(request, &request.work, status, tunnelled);
            return;
        };
        if status != Status::Ok {
            whole.status.set(status);
        }
        whole.left.set(whole.left.get() - 1);
        if whole.left.get() == 0 {
            let status = whole.status.get();
            if status == Status::Ok
                && let Some(opened) = whole.opened.take()
            {
                tunnelled = opened.tunnelled_bytes();
                opened.landed();
            }
            self.complete(request, &whole.work, status, tunnelled);
        }
    }

    /// Counts what a request, or a part of one, has moved.
    fn moved(&self, request: &Request) {
        let (Work::Read(extent) | Work::Write(extent)) = &request.work else {
            return;
        };
        let Some(limb) = self.disk.around().limbs.all().get(request.by) else {
            return;
        };
        let locality = self.disk.locality();
        match &request.lies {
            Lies::On(node) => locality.add(*node, limb.node(), request.path, extent.bytes),
            Lies::Mixed(all) => {
                for (node, bytes) in all {
                    locality.add(*node, limb.node(), request.path, *bytes);
                }
            }
        }
    }

    /// Counts a request of the driver that has ended, and answers it.
    fn complete(&mut self, request: &Request, work: &Work, status: Status, tunnelled: u64) {
        self.taken -= 1;
        let counters = self.disk.counters();
        let mut written = 0;
        if status == Status::Ok {
            match work {
                Work::Read(extent) => {
                    count(&counters.reads, 1);
                    count(&counters.bytes_read, extent.bytes);
                    count(&counters.bytes_tunnelled_in, tunnelled);
                    written = u32::try_from(extent.bytes).unwrap_or(u32::MAX - 1);
                }
                Work::Write(extent) => {
                    count(&counters.writes, 1);
                    count(&counters.bytes_written, extent.bytes);
                    count(&counters.bytes_tunnelled_out, tunnelled);
                }
                Work::Flush => count(&counters.flushes, 1),
                Work::Discard(_) => count(&counters.discards, 1),
                Work::Zero(_) => count(&counters.write_zeroes, 1),
            }
        } else {
            count(&counters.errors, 1);
        }
        self.answer(request.head, request.status, status, written);
    }

    /// Tells the guest how a request has ended; it sees it when the batch is [shown](Self::show).
    pub(super) fn answer(&mut self, head: u16, byte: StatusByte, status: Status, written: u32) {
        byte.set(status);
        self.ended.push((head, written + 1));
    }

    /// An operation has failed.
    pub(super) fn failed(&self, error: &io::Error) -> Status {
        let serial = self.disk.serial();
        warn_limited!(self.disk.limit(), "Disk {serial}: {error}");
        Status::IoErr
    }
}
