//! The order of one flow's frames, also while its queue changes (ioctopus-asplos20,
//! 4.2: a flow moves "only after the network stack has dequeued incoming packets on the old CPU's
//! Rx queue").
//!
//! Frames reach the workers through the queues of a port, which may begin to come from another
//! queue at any time. Two things could reorder a flow: frames that wait in two *port queues*, and
//! frames that wait in two *receive queues* of the guest.
//!
//! * **Sequencer.** One worker decides the flow's order: frames go on in the order in which it
//!   takes them. Who reads one from another port queue forwards it there, and the sequencer takes
//!   it after it has seen its own port queue empty: so whatever had come there earlier goes first.
//!   When nothing is under way any more, the worker that reads the frames becomes the sequencer.
//!   This holds as long as a port changes a flow's queue once, not twice, before its old one is
//!   read: the table asks it for a change only when the one before has been seen.
//! * **Home.** The receive queue that gets the frames. To change it, the sequencer *holds* the
//!   frames that come until the old home has drained: all frames that were forwarded have been put
//!   into the queue, the driver has consumed the last, and what it does with them is done: the
//!   guest has acknowledged the last segment, or a stated time has passed (a driver returns buffers
//!   before its network stack has seen the last frames: Linux collects them until its poll ends). A
//!   hold has a bound in time; then the flow stays, and in order.

use super::route::{Route, Ticket};
use crate::pairs::PairId;

/// How long and how many frames may be held while a flow moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldLimits {
    /// Microseconds from when the driver is seen to have consumed a flow's last frame until the
    /// next may go elsewhere, unless the guest acknowledges it.
    pub settle_us: u64,
    /// Microseconds that frames are held at most.
    pub hold_us: u64,
    /// Frames of a flow that are held at most.
    pub held: u16,
}

impl Default for HoldLimits {
    fn default() -> Self {
        Self {
            settle_us: 3_000,
            hold_us: 20_000,
            held: 512,
        }
    }
}

/// Which worker decides a flow's order, which queue gets its frames, and what is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowOrder {
    /// Once a frame has come.
    sequencer: Option<PairId>,
    /// From whom the sequencer last took a forwarded frame, with its own port queue empty.
    heard: Option<PairId>,
    /// Once a frame has come.
    home: Option<PairId>,
    target: PairId,
    /// Frames under way to the sequencer.
    via: u16,
    /// Frames under way from it to the home.
    pending: u16,
    /// Frames that the sequencer holds.
    held: u16,
    /// Position of the flow's last frame in the home.
    position: u64,
    /// When the position was first seen consumed.
    drained_at: Option<u64>,
    /// When the hold began.
    held_since: Option<u64>,
    /// End of the last segment that went to the home.
    last: Option<u32>,
    /// The guest is done with what went to the home: nothing has, or it has acknowledged the last
    /// segment.
    done: bool,
}

/// The worker that has a frame, and when.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    pub worker: PairId,
    /// Where the frame is in its own queue, if it is put there next. Of a frame that may have to
    /// wait for buffers it is not known before.
    pub next: Option<Span>,
    pub now: u64,
}

/// The used buffers of a receive queue that a frame takes, counted from its beginning, without
/// wrapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Position that the frame before it ends at.
    pub begin: u64,
    /// Position that it ends at.
    pub end: u64,
}

impl FlowOrder {
    /// A flow that is to have this home. Frames that came before it was known went into the queue
    /// of whoever read them, and are waited for as its own are.
    pub fn known(target: PairId) -> Self {
        Self {
            sequencer: None,
            heard: None,
            home: None,
            target,
            via: 0,
            pending: 0,
            held: 0,
            position: 0,
            drained_at: None,
            held_since: None,
            last: None,
            done: false,
        }
    }

    /// A flow that is to have this home, of which nothing has come that could be under way.
    pub fn placed(target: PairId) -> Self {
        Self {
            home: Some(target),
            done: true,
            ..Self::known(target)
        }
    }

    /// The queue that gets the frames now, once one has come.
    pub fn home(&self) -> Option<PairId> {
        self.home
    }

    /// The queue that is to get them.
    pub fn target(&self) -> PairId {
        self.target
    }

    /// The worker that decides the order, once a frame has come.
    pub fn sequencer(&self) -> Option<PairId> {
        self.sequencer
    }

    /// The worker that decides the order is gone, and has thrown away what it had: whoever reads
    /// the next frame does.
    pub fn release(&mut self) {
        self.sequencer = None;
        self.heard = None;
        self.via = 0;
    }

    /// Sets the queue that is to get the frames.
    pub fn aim(&mut self, target: PairId) {
        if self.target != target {
            self.target = target;
            self.held_since = None;
            self.drained_at = None;
        }
    }

    /// Whether the flow is on its way to another queue.
    pub fn is_moving(&self) -> bool {
        self.old_home().is_some()
    }

    /// The queue that the flow is moving away from.
    fn old_home(&self) -> Option<PairId> {
        self.home.filter(|home| *home != self.target)
    }

    /// Whether nothing of the flow is in anybody's hands and its last frame is consumed: it may be
    /// forgotten.
    pub fn is_idle(&self, consumed: impl Fn(PairId) -> u64) -> bool {
        let is_consumed = |home| consumed(home) >= self.position;
        self.sequencer.is_none()
            || (self.via == 0
                && self.pending == 0
                && self.held == 0
                && self.home.is_none_or(is_consumed))
    }

    /// A frame that a worker has read from its port queue.
    pub fn received(
        &mut self,
        at: Moment,
        flow: Ticket,
        limits: &HoldLimits,
        consumed: &dyn Fn(PairId) -> u64,
    ) -> Route {
        if self.home.is_none() {
            // What came before the flow was known went into the queue of whoever read it.
            self.home = Some(at.worker);
            self.position = at.next.map_or(0, |next| next.begin);
        }
        let to = *self.sequencer.get_or_insert(at.worker);
        if at.worker != to {
            let quiet = self.via == 0 && self.pending == 0 && self.held == 0;
            if !(quiet && self.heard == Some(at.worker)) {
                self.via = self.via.saturating_add(1);
                return Route::Sequence { to, flow };
            }
            self.sequencer = Some(at.worker);
        }
        self.heard = None;
        self.order(at, flow, limits, consumed)
    }

    /// A frame that was forwarded to the sequencer, which has seen its port queue empty since.
    pub fn sequenced(
        &mut self,
        at: Moment,
        flow: Ticket,
        limits: &HoldLimits,
        consumed: &dyn Fn(PairId) -> u64,
    ) -> Route {
        self.via = self.via.saturating_sub(1);
        self.heard = Some(flow.from);
        self.order(at, flow, limits, consumed)
    }

    /// A held frame, the oldest: may it go?
    pub fn retried(
        &mut self,
        at: Moment,
        flow: Ticket,
        limits: &HoldLimits,
        consumed: &dyn Fn(PairId) -> u64,
    ) -> Route {
        self.settle(at.now, limits, consumed);
        if let Some(on) = self.old_home() {
            return Route::Hold { on, flow };
        }
        self.held = self.held.saturating_sub(1);
        self.go(at, flow)
    }

    /// The home's worker has put a forwarded frame into its queue, or has thrown it away; its
    /// position.
    pub fn delivered(&mut self, position: u64) {
        self.pending = self.pending.saturating_sub(1);
        self.position = self.position.max(position);
        self.drained_at = None;
    }

    /// A frame was thrown away on this route.
    pub fn dropped(&mut self, route: &Route) {
        let count = match route {
            Route::Deliver => return,
            Route::Forward { .. } => &mut self.pending,
            Route::Sequence { .. } => &mut self.via,
            Route::Hold { .. } => &mut self.held,
        };
        *count = count.saturating_sub(1);
    }

    /// The guest has acknowledged this number.
    pub fn acknowledged(&mut self, number: u32) {
        if self
            .last
            .is_some_and(|last| number.wrapping_sub(last) < 1 << 31)
        {
            self.done = true;
        }
    }

    /// The next frame in order.
    fn order(
        &mut self,
        at: Moment,
        flow: Ticket,
        limits: &HoldLimits,
        consumed: &dyn Fn(PairId) -> u64,
    ) -> Route {
        if self.held > 0 || self.is_moving() {
            if self.held == 0 {
                self.settle(at.now, limits, consumed);
            }
            if self.held > 0 || self.is_moving() {
                let on = *self.home.get_or_insert(at.worker);
                if self.held >= limits.held {
                    self.target = on;
                }
                self.held = self.held.saturating_add(1);
                return Route::Hold { on, flow };
            }
        }
        self.go(at, flow)
    }

    fn go(&mut self, at: Moment, flow: Ticket) -> Route {
        self.drained_at = None;
        self.last = flow.end;
        self.done = false;
        let to = *self.home.get_or_insert(at.worker);
        if to == at.worker
            && let Some(next) = at.next
        {
            self.position = self.position.max(next.end);
            return Route::Deliver;
        }
        self.pending = self.pending.saturating_add(1);
        let flow = Some(flow);
        Route::Forward { to, flow }
    }

    /// Ends the move when the old home has drained, or when it has taken too long.
    fn settle(&mut self, now: u64, limits: &HoldLimits, consumed: &dyn Fn(PairId) -> u64) {
        let Some(home) = self.old_home() else {
            return;
        };
        let since = *self.held_since.get_or_insert(now);
        // Who waits for a queue that is not in use waits for nobody: what was under way there is
        // thrown away, or never taken.
        let unused = consumed(home) == u64::MAX;
        if unused || (self.pending == 0 && consumed(home) >= self.position) {
            let at = *self.drained_at.get_or_insert(now);
            if self.done || now.saturating_sub(at) >= limits.settle_us {
                self.home = Some(self.target);
                self.pending = 0;
                // Positions of one queue say nothing about another.
                self.position = 0;
                self.drained_at = None;
                self.held_since = None;
                return;
            }
        }
        if now.saturating_sub(since) >= limits.hold_us {
            self.target = home;
            self.held_since = None;
        }
    }
}

#[cfg(test)]
mod tests;
