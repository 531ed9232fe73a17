//! Completions on their way out.

use super::{Controller, State};
use crate::bits::{Cqe, Sqe, Status, nvm, quad};
use crate::counters::count;
use crate::data::Unreachable;
use crate::error_log::Failure;
use crate::features::AsyncEvent;
use crate::ids::{CqId, NamespaceId, SqId};
use crate::queue::{CompletionQueue, Due};
use crate::remote::Job;
use farlane_pci::DmaView;
use probe::probe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long an interrupt is put off for a driver that has not looked at what the last one told of.
const PUT_OFF: Duration = Duration::from_micros(400);

/// Writes an entry so that its phase is seen after the rest of it.
fn write_entry(view: &DmaView, address: u64, cqe: &Cqe) -> Option<()> {
    let [first, second, third, last] = view.words(address).ok()?;
    first.store(cqe.dw0, Ordering::Relaxed);
    second.store(cqe.dw1, Ordering::Relaxed);
    let submission = u32::from(cqe.sq_head) | u32::from(cqe.sq_id) << 16;
    third.store(submission, Ordering::Relaxed);
    let status = u32::from(cqe.cid) | u32::from(cqe.status) << 16;
    last.store(status, Ordering::Release);
    Some(())
}

/// A command, as its completion and the error log name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandId {
    /// Submission Queue Identifier.
    pub queue: SqId,
    /// Command Identifier.
    pub cid: u16,
    /// Namespace ID.
    pub nsid: NamespaceId,
    /// Starting LBA, if it has one.
    pub lba: u64,
}

impl CommandId {
    /// Parses it from an entry of a submission queue.
    pub fn new(queue: SqId, sqe: &Sqe) -> Self {
        let blocks = [nvm::READ, nvm::WRITE, nvm::COMPARE, nvm::WRITE_ZEROES];
        let has_blocks = !queue.is_admin() && blocks.contains(&sqe.opcode);
        Self {
            queue,
            cid: sqe.cid,
            nsid: NamespaceId::new(sqe.nsid),
            lba: if has_blocks {
                quad(sqe.cdw10, sqe.cdw11)
            } else {
                0
            },
        }
    }

    /// A command of the admin queue without a namespace.
    pub fn admin(cid: u16) -> Self {
        Self {
            queue: SqId::ADMIN,
            cid,
            nsid: NamespaceId::UNUSED,
            lba: 0,
        }
    }
}

/// A command that was taken: it is completed once.
#[must_use]
#[derive(Debug)]
pub struct Permit(CommandId);

impl Permit {
    /// That of a command which was taken just now.
    pub fn new(command: CommandId) -> Self {
        Self(command)
    }

    /// Its command.
    pub fn command(&self) -> &CommandId {
        &self.0
    }

    /// It is not completed: it is held, or ends with a reset.
    pub fn forget(self) {}
}

impl Controller {
    /// Completes a command.
    pub(super) fn complete(&mut self, Permit(command): Permit, status: Status, dw0: u32) {
        if self.state != State::Running {
            return;
        }
        let status = if status.is_success() {
            status
        } else {
            self.note_failure(command, status)
        };
        let CommandId { queue, cid, .. } = command;
        let controller = Arc::as_ptr(&self.shared);
        probe!(farlane, nvme_end, controller, queue.get(), cid, status.0);
        let Some(sq) = self.queues.sq(queue) else {
            return;
        };
        let (cq, head) = (sq.cq, sq.head());
        self.post(
            cq,
            Cqe {
                dw0,
                dw1: 0,
                sq_head: head,
                sq_id: queue.get(),
                cid,
                status: status.0 << 1,
            },
        );
    }

    /// Counts a failure and has the error log tell of it. Returns the status to complete the
    /// command with.
    fn note_failure(&mut self, command: CommandId, status: Status) -> Status {
        count(&self.shared.counters.errors, 1);
        // The driver knows what it has aborted.
        if status == Status::ABORT_REQUESTED {
            return status;
        }
        let status = status.with_more();
        self.log_failure(&Failure {
            command: Some(command),
            status,
        });
        status
    }

    /// An entry of the error log.
    pub(super) fn log_failure(&mut self, failure: &Failure) {
        let logged = &self.shared.counters.logged_errors;
        let number = logged.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        self.errors.add(number, failure);
    }

    /// The driver has the completion of a command of this submission queue.
    fn completed(&mut self, queue: SqId) {
        if let Some(sq) = self.queues.sq_mut(queue) {
            sq.ended();
        }
        self.finish_deletion(queue);
    }

    /// An entry about a command of `sq` that went to `cq` by messages has arrived, or not.
    pub(super) fn posted(&mut self, cq: CqId, sq: SqId, result: Result<(), Unreachable>) {
        if result.is_err() {
            self.fail();
        }
        if let Some(cq) = self.queues.cq_mut(cq) {
            cq.arrived();
            // For the pin, whose level is looked at here.
            cq.posted |= self.shared.interrupts.by_pin();
        }
        self.completed(sq);
    }

    fn post(&mut self, queue: CqId, cqe: Cqe) {
        if self.state != State::Running {
            return;
        }
        self.refresh_if_full(queue);
        let Some(cq) = self.queues.cq_mut(queue) else {
            return;
        };
        if cq.is_full() || !cq.backlog.is_empty() {
            cq.backlog.push_back(cqe);
        } else {
            self.write(queue, cqe);
        }
    }

    /// Writes an entry; the queue is not full.
    fn write(&mut self, queue: CqId, cqe: Cqe) {
        let view = self.view();
        let Some(cq) = self.queues.cq_mut(queue) else {
            return;
        };
        let (address, cqe) = cq.claim(cqe);
        if cq.is_posting() || write_entry(&view, address, &cqe).is_none() {
            let vector = cq.vector;
            cq.posts();
            self.remote.submit(Job::Post {
                cq: queue,
                address,
                cqe,
                vector,
            });
        } else {
            self.completed(SqId::new(cqe.sq_id));
        }
    }

    fn refresh_if_full(&mut self, queue: CqId) {
        if let Some(cq) = self.queues.cq(queue)
            && cq.is_full()
        {
            self.refresh_head(queue);
        }
    }

    /// Takes the driver's head over.
    fn refresh_head(&mut self, queue: CqId) {
        let head = self.driver_head(queue);
        let Some(cq) = self.queues.cq_mut(queue) else {
            return;
        };
        if cq.set_head(head).is_err() {
            if !std::mem::replace(&mut cq.bad_head, true) {
                log::debug!("Completion queue {queue}: head {head} is none");
                self.report(AsyncEvent::InvalidDoorbellValue);
            }
            return;
        }
        cq.bad_head = false;
        let behind = cq.behind();
        if !queue.is_admin() {
            self.set_head_event(queue, behind);
        }
    }

    /// Writes what found its queue full, as far as there is room now. Returns whether it did.
    pub(super) fn flush_backlogs(&mut self) -> bool {
        let mut worked = false;
        for queue in self.queues.cq_ids() {
            let waits = |cq: &CompletionQueue| !cq.backlog.is_empty();
            if !self.queues.cq(queue).is_some_and(waits) {
                continue;
            }
            self.refresh_head(queue);
            while let Some(cq) = self.queues.cq_mut(queue)
                && !cq.is_full()
                && let Some(cqe) = cq.backlog.pop_front()
            {
                self.write(queue, cqe);
                worked = true;
            }
        }
        worked
    }

    /// Interrupts, once for each queue with new entries. Returns whether an interrupt is put off:
    /// the driver has not yet looked at what the last one told of.
    pub(super) fn interrupt(&mut self) -> bool {
        let by_pin = self.shared.interrupts.by_pin();
        let (mut posted, mut put_off) = (false, false);
        for queue in self.queues.cq_ids() {
            if !matches!(self.queues.cq(queue), Some(cq) if cq.posted) {
                continue;
            }
            let head = self.driver_head(queue);
            let Some(cq) = self.queues.cq_mut(queue) else {
                continue;
            };
            posted = true;
            let Some(vector) = cq.vector.filter(|_| !by_pin) else {
                cq.posted = false;
                continue;
            };
            match cq.due(head, PUT_OFF) {
                Due::Now => {
                    cq.raise();
                    self.shared.interrupts.raise(vector);
                }
                Due::Later => put_off = true,
                Due::Never => cq.posted = false,
            }
        }
        if by_pin && posted {
            self.evaluate_pin();
        }
        put_off
    }

    /// The pin is high while a queue that interrupts has entries and its vector is not masked
    /// (7.5.1.1).
    pub(super) fn evaluate_pin(&mut self) {
        if self.state != State::Running || !self.shared.interrupts.by_pin() {
            return;
        }
        for queue in self.queues.cq_ids() {
            if matches!(self.queues.cq(queue), Some(cq) if cq.vector.is_some()) {
                self.refresh_head(queue);
            }
        }
        let masked = self.shared.registers().masked();
        let is_unmasked = |vector: u16| vector >= 32 || masked >> vector & 1 == 0;
        let high = self
            .queues
            .cqs()
            .any(|cq| cq.has_entries() && cq.vector.is_some_and(is_unmasked));
        if high {
            self.shared.interrupts.assert_pin();
        }
    }
}
