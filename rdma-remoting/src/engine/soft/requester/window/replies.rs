//! What has come back, and what has not in time.

use crate::engine::Turn;
use crate::engine::soft::attributes::{State, ack_timeout, rnr_delay};
use crate::engine::soft::carrier::{Acknowledgement, Answer, Carrier, Position, Reply, Sequence};
use crate::engine::soft::common::QpCommon;
use crate::engine::soft::gather::{Source, move_behind};
use crate::engine::soft::requester::Requester;
use crate::engine::soft::requester::waiting::RNR_FOR_EVER;
use crate::engine::soft::responder::{Nak, NotReady};
use farlane_abi::queue::{
    WC_STATUS_LOC_PROT_ERR, WC_STATUS_RETRY_EXC_ERR, WC_STATUS_RNR_RETRY_EXC_ERR,
};
use farlane_abi::width::to_u64;
use std::time::Instant;

impl<C: Carrier> Requester<C> {
    /// Begins again where a timer has ended. Returns whether one has.
    pub(super) fn look_at_timers(&mut self, qp: &QpCommon, now: Instant) -> bool {
        let has_ended = |timer: Option<Instant>| timer.is_some_and(|timer| timer <= now);
        if has_ended(self.window.hold) {
            self.window.hold = None;
            self.carrier.timer_ended();
            return true;
        }
        if self.window.hold.is_some() || !has_ended(self.window.timer) {
            return false;
        }
        self.retry(qp, now);
        true
    }

    /// Something is lost: sends again what has not arrived, if that may be tried once more.
    fn retry(&mut self, qp: &QpCommon, now: Instant) {
        let Some(left) = self.window.retries_left.checked_sub(1) else {
            return self.fail_first(qp, WC_STATUS_RETRY_EXC_ERR);
        };
        self.window.retries_left = left;
        self.window.timer = ack_timeout(self.attr.timeout).map(|delay| now + delay);
        self.carrier.timer_ended();
        let first = Position::of(self.window.first);
        let resume = self.window.resume_at(self.window.arrived.max(first));
        self.window.rewind(resume);
    }

    /// Everything before `to` has arrived, says the peer. Returns whether it can have, and whether
    /// that is new.
    fn advance(&mut self, to: Position, now: Instant) -> (bool, bool) {
        let window = &mut self.window;
        if to > window.sent || !window.has(to) {
            return (false, false);
        }
        if to <= window.arrived {
            return (true, false);
        }
        window.arrived = to;
        // What was to be sent again need not be.
        let arrived = to.message.0.saturating_sub(window.first.0);
        let arrived = usize::try_from(arrived).unwrap_or(usize::MAX);
        if window.next < arrived {
            window.next = arrived.min(window.requests.len());
        }
        if let Some(request) = window.requests.get_mut(arrived)
            && window.next == arrived
            && request.transfer.done < to.offset
        {
            request.transfer.done = to.offset;
        }
        window.hold = None;
        self.got_on(now);
        (true, true)
    }

    /// Something new has come: the timer of the rest begins, and all retries are left.
    fn got_on(&mut self, now: Instant) {
        let window = &mut self.window;
        let is_waiting = window.arrived < window.sent || window.is_fetching();
        let delay = ack_timeout(self.attr.timeout).filter(|_| is_waiting);
        window.timer = delay.map(|delay| now + delay);
        self.reload();
    }

    /// Takes what has come back. An answer to another life, or about what was not sent, is none.
    pub(super) fn take_reply(&mut self, qp: &QpCommon, reply: Reply<C::Data>, turn: &Turn) {
        let now = turn.now;
        let is_other = |started| started != reply.from;
        if reply.to != self.life || self.started.is_some_and(is_other) {
            return;
        }
        self.started = Some(reply.from);
        match reply.answer {
            Answer::Data(at, bytes) => self.take_data(qp, at, bytes.as_ref(), now),
            Answer::Acknowledgement(Acknowledgement::Arrived(to)) => {
                self.has_come_to(to, now);
            }
            Answer::Acknowledgement(Acknowledgement::Missing(at)) => {
                if let Some(false) = self.has_come_to(at, now)
                    && self.window.hold.is_none()
                    && at == self.window.arrived
                    && at < self.window.sent
                {
                    self.retry(qp, now);
                }
            }
            Answer::Acknowledgement(Acknowledgement::Refused(message, nak)) => {
                self.take_refusal(qp, message, nak, turn);
            }
        }
    }

    /// Everything before `to` has arrived: where that is new and something that it has fetched has
    /// not come, it is lost, and is fetched again. Returns whether it was; `None` for nonsense.
    fn has_come_to(&mut self, to: Position, now: Instant) -> Option<bool> {
        let (is_sense, is_new) = self.advance(to, now);
        let resume = self.window.resume_at(to);
        let is_lost = is_new && resume < to;
        if is_lost {
            self.window.rewind(resume);
        }
        is_sense.then_some(is_lost)
    }

    fn take_data(&mut self, qp: &QpCommon, at: Position, bytes: &[u8], now: Instant) {
        let window = &mut self.window;
        let Some(index) = window.index(at.message) else {
            return;
        };
        let one = &mut window.requests[index];
        let count = to_u64(bytes.len());
        let behind = at.offset.saturating_add(count);
        let is_next = one.is_fetching() && at.offset == one.fetched && one.failed.is_none();
        let place = Position::behind(at.message, behind, one.transfer.length);
        if !is_next || count == 0 || behind > one.length() || place > window.sent {
            return;
        }
        let source = Source::Inline(bytes);
        match move_behind(&qp.counters, at.offset, &one.parts, source, 0, count) {
            Ok(()) => {
                one.fetched = behind;
                self.got_on(now);
            }
            Err(e) => {
                log::debug!("{}: memory for what was read: {e:?}", qp.number);
                one.failed = Some(WC_STATUS_LOC_PROT_ERR);
            }
        }
        // It has taken things in order: so has everything before this arrived.
        self.has_come_to(place, now);
    }

    fn take_refusal(&mut self, qp: &QpCommon, message: Sequence, nak: Nak, turn: &Turn) {
        let now = turn.now;
        let at = Position::of(message);
        // One that has been accepted meanwhile, or was not sent, is not refused.
        if at < Position::of(self.window.arrived.message) || at >= self.window.sent {
            return;
        }
        let Some(is_lost) = self.has_come_to(at, now) else {
            return;
        };
        if let (Nak::Fatal(status), Some(index)) = (nak, self.window.index(message)) {
            self.window.requests[index].failed.get_or_insert(status);
        }
        self.retire(qp, turn.node);
        if is_lost || self.window.first != message || self.dead || qp.state() == State::Error {
            return;
        }
        match nak {
            // It has failed, where it was the oldest.
            Nak::Dropped | Nak::Fatal(_) => {}
            Nak::NotReady(_) if self.window.hold.is_some() => {}
            Nak::NotReady(NotReady { timer, .. }) => {
                if self.attr.rnr_retry != RNR_FOR_EVER {
                    let Some(left) = self.window.rnr_retries_left.checked_sub(1) else {
                        return self.fail_first(qp, WC_STATUS_RNR_RETRY_EXC_ERR);
                    };
                    self.window.rnr_retries_left = left;
                }
                self.window.rewind(at);
                self.window.hold = Some(now + rnr_delay(timer));
                self.window.timer = None;
            }
        }
    }
}
