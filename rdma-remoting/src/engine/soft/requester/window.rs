//! Requests over a connection whose carrier answers later: several are on their way, and what is
//! lost is sent again from there on (IBTA 9.7.2, 9.9.2).

mod replies;

use super::super::attributes::{State, ack_timeout};
use super::super::carrier::{
    Carrier, Message, Peer as _, Position, Reached, Sequence, Session as _,
};
use super::super::common::QpCommon;
use super::super::transfer::{Refusal, Transfer};
use super::{Active, Requester, Step, Taken};
use crate::engine::{Progress, Spending, Turn, earlier};
use crate::memory::Part;
use crate::request::{Opcode, SendWqe};
use farlane_abi::width::to_u64;
use farlane_zero_copy::topology::Node;
use std::cmp::Ordering::{Equal, Greater, Less};
use std::collections::VecDeque;
use std::time::Instant;

/// Answers that are taken in a turn: others have theirs then.
const ANSWERS_IN_A_TURN: usize = 128;

/// A request that has no answer.
struct Outstanding {
    request: SendWqe,
    /// When it was taken, if it is timed.
    begun: Option<Instant>,
    parts: Vec<Part>,
    /// What of it was sent.
    transfer: Transfer,
    /// Bytes that it has fetched.
    fetched: u64,
    /// It fails when those before it have completed.
    failed: Option<u8>,
}

impl Outstanding {
    fn fetches(&self) -> bool {
        self.request.opcode.fetches()
    }

    fn length(&self) -> u64 {
        self.transfer.length.into()
    }

    /// Its answers have not all come.
    fn is_fetching(&self) -> bool {
        self.fetches() && self.fetched < self.length()
    }
}

/// The requests that have no answer, oldest first. A retry begins at one of them.
#[derive(Default)]
pub struct Window {
    requests: VecDeque<Outstanding>,
    /// The number of the first one.
    first: Sequence,
    /// Which one is sent next: those before it are on their way.
    next: usize,
    /// What was sent at most.
    sent: Position,
    /// What has arrived.
    arrived: Position,
    /// When what is on its way counts as lost.
    timer: Option<Instant>,
    /// Nothing is sent until then: the receiver was not ready.
    hold: Option<Instant>,
    retries_left: u8,
    rnr_retries_left: u8,
    /// Nobody was there to send to.
    is_stuck: bool,
    /// What was completed, to be used again.
    spare: Vec<SendWqe>,
}

impl Window {
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Where a message is of those that have no answer.
    fn index(&self, message: Sequence) -> Option<usize> {
        let at = message.0.checked_sub(self.first.0)?;
        usize::try_from(at)
            .ok()
            .filter(|at| *at < self.requests.len())
    }

    /// Whether there is such a place in a message that has no answer; of others it says nothing.
    fn has(&self, at: Position) -> bool {
        let is_inside = |index: usize| at.offset < self.requests[index].length();
        at.offset == 0 || self.index(at.message).is_none_or(is_inside)
    }

    fn sequence(&self, index: usize) -> Sequence {
        Sequence(self.first.0 + to_u64(index))
    }

    /// Whether answers to reads and atomic operations have not all come.
    fn is_fetching(&self) -> bool {
        self.requests.iter().any(Outstanding::is_fetching)
    }

    /// Reads and atomic operations that the peer may have to answer again, as it may those behind
    /// one whose answer has not come.
    fn fetching(&self) -> usize {
        let fetching = self.requests.iter().filter(|request| request.fetches());
        fetching.count()
    }

    /// Bytes that are on their way to the peer, or were asked of it, and have no answer.
    fn bytes_under_way(&self) -> u64 {
        let has_arrived = |sequence: Sequence| match sequence.cmp(&self.arrived.message) {
            Less => u64::MAX,
            Equal => self.arrived.offset,
            Greater => 0,
        };
        let under_way = |(index, one): (usize, &Outstanding)| {
            let answered = match one.fetches() {
                true => one.fetched,
                false => has_arrived(self.sequence(index)),
            };
            one.transfer.done.saturating_sub(answered)
        };
        self.requests.iter().enumerate().map(under_way).sum()
    }

    /// Nothing follows one that fails.
    fn is_closed(&self) -> bool {
        self.requests.iter().any(|one| one.failed.is_some())
    }

    /// What is to be sent again where everything before `from` has arrived there: that, or what was
    /// fetched before and has not come.
    fn resume_at(&self, from: Position) -> Position {
        let lost = self.requests.iter().position(Outstanding::is_fetching);
        let lost = lost.map(|index| Position {
            message: self.sequence(index),
            offset: self.requests[index].fetched,
        });
        lost.map_or(from, |lost| lost.min(from))
    }

    /// Sends again from there on.
    fn rewind(&mut self, to: Position) {
        let Some(at) = self.index(to.message) else {
            return;
        };
        self.next = at;
        for request in self.requests.range_mut(at..) {
            request.transfer.done = 0;
        }
        self.requests[at].transfer.done = to.offset;
    }

    /// Whether the oldest one is complete, and with which status otherwise.
    fn outcome(&self) -> Option<Result<(), u8>> {
        let first = self.requests.front()?;
        if let Some(status) = first.failed {
            return Some(Err(status));
        }
        let has_arrived = self.first < self.arrived.message;
        (has_arrived && !first.is_fetching()).then_some(Ok(()))
    }

    fn pop(&mut self) -> Option<Outstanding> {
        let first = self.requests.pop_front()?;
        self.first = Sequence(self.first.0 + 1);
        self.next = self.next.saturating_sub(1);
        Some(first)
    }
}

impl<C: Carrier> Requester<C> {
    /// [`run`](Self::run) of a connection whose carrier answers later.
    pub(super) fn run_window(&mut self, qp: &QpCommon, turn: Turn, draining: bool) -> Progress {
        let mut progress = Progress::default();
        let mut budget = turn.budget.spend_until(turn.until);
        if self.paused || self.dead {
            return progress;
        }
        self.window.is_stuck = false;
        for _ in 0..ANSWERS_IN_A_TURN {
            if !budget.has_look() {
                break;
            }
            let Some(reply) = self.carrier.next_answer() else {
                break;
            };
            budget.passed_over();
            progress.worked = true;
            self.take_reply(qp, reply, &turn);
            self.retire(qp, turn.node);
            if self.dead || qp.state() == State::Error {
                break;
            }
        }
        progress.more = self.carrier.has_answer();
        if !self.dead && qp.state() != State::Error {
            progress.worked |= self.look_at_timers(qp, turn.now);
        }
        let sends = |requester: &Self| {
            !requester.dead && qp.state() != State::Error && requester.window.hold.is_none()
        };
        while sends(self) {
            let window = &self.window;
            match window.requests.get(window.next) {
                None => match self.begin_next(qp, draining, &mut budget, &mut progress) {
                    true => continue,
                    false => break,
                },
                Some(next) if next.failed.is_some() => break,
                Some(next) if budget.is_over() && next.transfer.is_left() => {
                    progress.more = true;
                    break;
                }
                Some(_) => {}
            }
            // An answer makes room.
            let Some(room) = self.room() else {
                break;
            };
            let kept = budget.keep_back(room);
            let reached = self.send_next(qp, &mut budget, turn.now);
            budget.give_back(kept);
            let Some(reached) = reached else {
                break;
            };
            progress.worked = true;
            if reached == Reached::Part && !budget.goes_on() {
                progress.more = true;
                break;
            }
        }
        self.retire(qp, turn.node);
        progress.deadline = earlier(self.window.timer, self.window.hold);
        if self.window.is_stuck {
            qp.requesting.wait();
            progress.worked |= self.is_ready_in_window(qp, draining);
        }
        progress.used = budget.used();
        progress
    }

    /// Whether a turn would get further without a timer.
    pub(super) fn is_ready_in_window(&self, qp: &QpCommon, draining: bool) -> bool {
        let window = &self.window;
        if self.carrier.has_answer() {
            return true;
        }
        if window.is_stuck {
            let peer = self.find_peer(qp);
            return peer.is_some_and(|peer| peer.session().answers(&self.sender(qp)));
        }
        if window.hold.is_some() {
            return false;
        }
        let has_room = !window.is_closed() && window.requests.len() < C::IN_FLIGHT;
        match (window.requests.get(window.next), &self.active) {
            (Some(next), _) => next.failed.is_none() && self.room().is_some(),
            (None, Some(_)) => self.may_go(),
            (None, None) => !draining && has_room && self.source.is_ready(),
        }
    }

    /// How many bytes of the next message of the window may be sent now. Nothing where that has to
    /// wait for an answer.
    fn room(&self) -> Option<u64> {
        let window = &self.window;
        let next = window.requests.get(window.next)?;
        let most = self.carrier.bytes_in_flight().max(1);
        let room = most.saturating_sub(window.bytes_under_way());
        (room > 0 || !next.transfer.is_left()).then_some(room)
    }

    /// Whether the request that has begun may be sent now: not before what it has to wait for
    /// (IBTA 10.8.3.3), and no more reads and atomic operations than the peer takes.
    fn may_go(&self) -> bool {
        let opcode = self.request.opcode;
        match opcode {
            Opcode::Bind(_) | Opcode::LocalInvalidate(_) | Opcode::Register(_) => {
                self.window.is_empty()
            }
            _ if self.request.fence || opcode.fetches() => {
                let most = usize::from(self.attr.max_rd_atomic);
                let may_fetch = !opcode.fetches() || self.window.fetching() < most;
                may_fetch && !(self.request.fence && self.window.is_fetching())
            }
            _ => true,
        }
    }

    /// Puts the next request into the window, or carries it out where it concerns this side alone.
    /// Returns whether there was one that may go.
    fn begin_next(
        &mut self,
        qp: &QpCommon,
        draining: bool,
        budget: &mut Spending,
        progress: &mut Progress,
    ) -> bool {
        if self.active.is_none() {
            if draining {
                if self.window.is_empty() {
                    self.tell_drained(qp);
                }
                return false;
            }
            if self.window.is_closed() || self.window.requests.len() >= C::IN_FLIGHT {
                return false;
            }
            if !budget.has_operation() {
                progress.more |= self.source.is_ready();
                return false;
            }
            match self.take(qp) {
                Taken::Nothing => return false,
                Taken::Begun => {}
                Taken::Failed(status) => {
                    // After those before it.
                    self.enlist(0, Some(status));
                    progress.worked = true;
                    return false;
                }
                Taken::GivenUp => {
                    progress.worked = true;
                    return false;
                }
            }
            budget.begin();
            progress.worked = true;
        }
        if !self.may_go() {
            return false;
        }
        match self.local_step(qp) {
            Some(Step::Failed(status)) => {
                self.fail(qp, status);
                return false;
            }
            Some(_) => return true,
            None => {}
        }
        if let Some(Active { transfer, .. }) = self.active.take() {
            self.enlist(transfer.length, None);
        }
        true
    }

    /// The request at hand is the last of the window.
    fn enlist(&mut self, length: u32, failed: Option<u8>) {
        if self.window.is_empty() {
            self.reload();
        }
        let spare = self.window.spare.pop().unwrap_or_default();
        self.window.requests.push_back(Outstanding {
            request: std::mem::replace(&mut self.request, spare),
            begun: self.begun.take(),
            parts: std::mem::take(&mut self.parts),
            transfer: Transfer::new(length),
            fetched: 0,
            failed,
        });
    }

    /// All retries are left.
    fn reload(&mut self) {
        self.window.retries_left = self.attr.retry_cnt;
        self.window.rnr_retries_left = self.attr.rnr_retry;
    }

    /// Sends some of the next message. Nothing where there is nobody to send to, or it fails on
    /// this side.
    fn send_next(&mut self, qp: &QpCommon, budget: &mut Spending, now: Instant) -> Option<Reached> {
        let peer = self.peer(qp);
        let from = self.sender(qp);
        let delay = ack_timeout(self.attr.timeout);
        let window = &mut self.window;
        let (index, sequence) = (window.next, window.sequence(window.next));
        let next = window.requests.get_mut(index)?;
        if window.timer.is_none() {
            window.timer = delay.map(|delay| now + delay);
        }
        let message = Message {
            from: &from,
            sequence,
            request: &next.request,
            parts: &next.parts,
        };
        let outcome = match &peer {
            Some(peer) => peer.session().go_on(&message, &mut next.transfer, budget),
            None => Err(Refusal::Unanswered),
        };
        match outcome {
            Ok(reached) => {
                let behind = Position::behind(sequence, next.transfer.done, next.transfer.length);
                window.sent = window.sent.max(behind);
                if reached != Reached::Part {
                    window.next += 1;
                }
                Some(reached)
            }
            Err(Refusal::Local(status)) => {
                next.failed = Some(status);
                None
            }
            // Answers come later.
            Err(Refusal::Unanswered | Refusal::Nak(_) | Refusal::Busy) => {
                window.is_stuck = true;
                self.peer = Default::default();
                None
            }
        }
    }

    /// Completes the requests that are complete, in order.
    fn retire(&mut self, qp: &QpCommon, node: Option<Node>) {
        while !self.dead
            && qp.state() != State::Error
            && let Some(outcome) = self.window.outcome()
            && let Some(first) = self.window.pop()
        {
            self.at_hand(first, |requester, length| match outcome {
                Ok(()) => {
                    requester.tell_transferred(node);
                    requester.complete(qp, length, length.into());
                }
                Err(status) => requester.fail(qp, status),
            });
        }
        if self.window.is_empty() {
            (self.window.timer, self.window.hold) = (None, None);
        }
    }

    /// Ends a request of the window, which is the one at hand meanwhile.
    fn at_hand(&mut self, mut one: Outstanding, end: impl FnOnce(&mut Self, u32)) {
        let active = self.active.take();
        std::mem::swap(&mut self.request, &mut one.request);
        std::mem::swap(&mut self.begun, &mut one.begun);
        std::mem::swap(&mut self.parts, &mut one.parts);
        end(self, one.transfer.length);
        std::mem::swap(&mut self.request, &mut one.request);
        self.begun = one.begun;
        if !self.dead {
            self.parts = one.parts;
            self.active = active;
            self.window.spare.push(one.request);
        }
    }

    /// The oldest request fails.
    fn fail_first(&mut self, qp: &QpCommon, status: u8) {
        if let Some(first) = self.window.pop() {
            self.at_hand(first, |requester, _| requester.fail(qp, status));
        }
    }

    /// Flushes the oldest request of the window. Returns whether there was one.
    pub(super) fn flush_first(&mut self, qp: &QpCommon, status: u8) -> bool {
        let first = self.window.pop();
        let is_there = first.is_some();
        if let Some(first) = first {
            self.at_hand(first, |requester, _| requester.end(qp, status));
        }
        is_there
    }
}
