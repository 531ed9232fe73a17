//! Doorbells: as messages or in a shared page, or in memory of the driver (NVMe 1.4, 7.13).

use super::Controller;
use crate::bits::{PAGE, Status};
use crate::ids::{CqId, SqId};
use crate::queue::{CompletionQueue, SubmissionQueue};
use farlane_pci::DmaView;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Shadow doorbells of I/O queues, and what the driver compares them with before it rings.
#[derive(Clone, Copy, Debug)]
pub struct Shadow {
    doorbells: u64,
    events: u64,
}

impl Shadow {
    fn tail(view: &DmaView, page: u64, queue: SqId) -> Option<&AtomicU32> {
        view.word(page + u64::from(queue.get()) * 8).ok()
    }

    fn head(view: &DmaView, page: u64, queue: CqId) -> Option<&AtomicU32> {
        view.word(page + u64::from(queue.get()) * 8 + 4).ok()
    }
}

impl Controller {
    /// Doorbell Buffer Config.
    pub(super) fn set_shadow(&mut self, doorbells: u64, events: u64) -> Result<(), Status> {
        let view = self.view();
        let mapped = |page: u64| {
            page.is_multiple_of(PAGE) && view.resolve(page, PAGE, true, |_, _| ()).is_ok()
        };
        // Memory that is reached by messages cannot be polled.
        if !mapped(doorbells) || !mapped(events) || doorbells == events {
            return Err(Status::INVALID_FIELD);
        }
        self.shadow = Some(Shadow { doorbells, events });
        for queue in self.queues.io_sq_ids() {
            self.adopt_tail(queue);
        }
        for queue in self.queues.io_cq_ids() {
            self.adopt_head(queue);
        }
        Ok(())
    }

    /// The shadow of a queue's tail continues from its doorbell.
    pub(super) fn adopt_tail(&mut self, queue: SqId) {
        let view = self.view();
        if let (Some(shadow), Some(sq)) = (self.shadow, self.queues.sq_mut(queue)) {
            if let Some(word) = Shadow::tail(&view, shadow.doorbells, queue) {
                word.store(self.shared.doorbells.tail(queue), Ordering::Release);
            }
            sq.event = None;
        }
    }

    /// Likewise, of a completion queue's head.
    pub(super) fn adopt_head(&mut self, queue: CqId) {
        let view = self.view();
        if let (Some(shadow), Some(cq)) = (self.shadow, self.queues.cq(queue)) {
            if let Some(word) = Shadow::head(&view, shadow.doorbells, queue) {
                word.store(self.shared.doorbells.head(queue), Ordering::Release);
            }
            if let Some(word) = Shadow::head(&view, shadow.events, queue) {
                word.store(cq.behind(), Ordering::Release);
            }
        }
    }

    /// A queue's tail as the driver has it. While its shadow is not in memory nothing is new.
    pub(super) fn driver_tail(&mut self, queue: SqId) -> u32 {
        let Some(shadow) = self.shadow.filter(|_| !queue.is_admin()) else {
            return self.shared.doorbells.tail(queue);
        };
        if let Some(word) = Shadow::tail(&self.view(), shadow.doorbells, queue) {
            return word.load(Ordering::Acquire);
        }
        self.queues.sq(queue).map_or(0, SubmissionQueue::tail)
    }

    /// A queue's head as the driver has it, likewise.
    pub(super) fn driver_head(&mut self, queue: CqId) -> u32 {
        let Some(shadow) = self.shadow.filter(|_| !queue.is_admin()) else {
            return self.shared.doorbells.head(queue);
        };
        if let Some(word) = Shadow::head(&self.view(), shadow.doorbells, queue) {
            return word.load(Ordering::Acquire);
        }
        self.queues.cq(queue).map_or(0, CompletionQueue::head)
    }

    /// Tells the driver to ring when it passes `index` with a tail.
    fn set_event(&mut self, queue: SqId, index: u32) {
        let view = self.view();
        if let (Some(shadow), Some(sq)) = (self.shadow, self.queues.sq_mut(queue))
            && let Some(word) = Shadow::tail(&view, shadow.events, queue)
        {
            word.store(index, Ordering::Relaxed);
            sq.event = Some(index);
        }
    }

    /// The driver need not ring while this thread looks: the index that it compares with stays
    /// behind. It is moved on only now and then, because each store costs the driver a cache miss.
    pub(super) fn follow_tail(&mut self, queue: SqId) {
        let Some(sq) = self.queues.sq(queue) else {
            return;
        };
        let lags = sq.event.is_none_or(|e| sq.distance(e) > sq.entries() / 2);
        if self.shadow.is_some() && !queue.is_admin() && lags {
            let behind = sq.behind();
            self.set_event(queue, behind);
        }
    }

    /// Has the driver ring for whatever comes next. Afterwards one has to look once more.
    pub(super) fn arm_doorbells(&mut self) {
        if self.shadow.is_none() {
            return;
        }
        for queue in self.queues.io_sq_ids() {
            if let Some(sq) = self.queues.sq(queue) {
                let tail = sq.tail();
                self.set_event(queue, tail);
            }
        }
        for queue in self.queues.io_cq_ids() {
            let waiting = match self.queues.cq(queue) {
                Some(cq) if !cq.backlog.is_empty() => Some(cq.head()),
                _ => None,
            };
            if let Some(head) = waiting {
                self.set_head_event(queue, head);
            }
        }
        // The driver writes its tail, then reads the index; this is the other side of that.
        fence(Ordering::SeqCst);
    }

    pub(super) fn disarm_doorbells(&mut self) {
        if self.shadow.is_none() {
            return;
        }
        for queue in self.queues.io_sq_ids() {
            if let Some(sq) = self.queues.sq(queue) {
                let behind = sq.behind();
                self.set_event(queue, behind);
            }
        }
    }

    /// Tells the driver to ring when it passes `index` with a head.
    pub(super) fn set_head_event(&mut self, queue: CqId, index: u32) {
        if let Some(shadow) = self.shadow
            && let Some(word) = Shadow::head(&self.view(), shadow.events, queue)
        {
            word.store(index, Ordering::Relaxed);
        }
    }

    /// Whether a doorbell has been written that has not been seen, or one has been seen that has
    /// not been followed: the pin's level is looked at last in a turn, and with it the driver's
    /// heads, which may have made room for completions that wait.
    pub(super) fn doorbells_rang(&mut self) -> bool {
        if self.state != super::State::Running {
            return false;
        }
        let mut submission = self.queues.sq_ids();
        let mut completion = self.queues.cq_ids();
        submission.any(|queue| self.has_new_tail(queue))
            || completion.any(|queue| self.has_new_head(queue))
    }

    fn has_new_tail(&mut self, queue: SqId) -> bool {
        let tail = match self.queues.sq(queue) {
            Some(sq) if !sq.bad_tail => sq.tail(),
            _ => return false,
        };
        self.driver_tail(queue) != tail
    }

    /// Of a queue with completions that wait for room; also where it has room already.
    fn has_new_head(&mut self, queue: CqId) -> bool {
        let waiting = self.queues.cq(queue).filter(|cq| !cq.backlog.is_empty());
        let Some(cq) = waiting else {
            return false;
        };
        let (head, bad_head) = (cq.head(), cq.bad_head);
        !cq.is_full() || !bad_head && self.driver_head(queue) != head
    }
}
