//! The requester's half of a queue pair: carries out send requests, in order.

use super::attributes::{ack_timeout, rnr_delay};
use super::gather::{Failed, Source, move_message};
use super::qp::{Life, SoftQp};
use super::responder::{Nak, Responder};
use crate::counters;
use crate::engine::Progress;
use crate::limbs;
use crate::memory::{Part, Use};
use crate::request::{Opcode, SendRequest};
use crate::work_queue::{QueueError, SendSource};
use farlane_abi::queue::{
    Completion, MAX_MESSAGE_BYTES, WC_OPCODE_RDMA_READ, WC_OPCODE_RDMA_WRITE, WC_OPCODE_SEND,
    WC_STATUS_LOC_LEN_ERR, WC_STATUS_LOC_PROT_ERR, WC_STATUS_LOC_QP_OP_ERR,
    WC_STATUS_REM_ACCESS_ERR, WC_STATUS_REM_OP_ERR, WC_STATUS_RETRY_EXC_ERR,
    WC_STATUS_RNR_RETRY_EXC_ERR, WC_STATUS_SUCCESS, WC_STATUS_WR_FLUSH_ERR,
};
use farlane_abi::rdma::{EVENT_QP_ACCESS_ERR, EVENT_QP_FATAL, EVENT_SQ_DRAINED, QpAttr};
use farlane_sys::warn_limited;
use std::mem::discriminant;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Requests that a queue pair carries out in one turn.
const REQUESTS_PER_TURN: u32 = 32;
/// Payload bytes that it moves in one turn: a longer message goes on in its next one.
const BYTES_PER_TURN: u64 = 1 << 20;
/// `rnr_retry` that means for ever.
const RNR_FOR_EVER: u8 = 7;

/// What a step of the request at hand came to.
enum Step {
    /// Carried out and completed.
    Done,
    /// More of it in the next turn.
    More,
    /// Must be tried again: what is waited for.
    Wait(Wait),
    /// Failed with this status.
    Failed(u8),
}

/// Why a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// The peer does not answer.
    Answer,
    /// The peer has no receive request; its timer's index.
    Receiver(u8),
}

/// The request at hand.
struct Active {
    /// Bytes moved.
    done: u64,
    /// Bytes in all.
    length: u64,
    /// What is waited for, and until when before it counts as a retry.
    waiting: Option<(Wait, Option<Instant>)>,
    retries_left: u8,
    rnr_retries_left: u8,
}

/// State of the requester's half. Its lock comes before any responder's.
pub struct Requester {
    source: Box<dyn SendSource>,
    request: SendRequest,
    parts: Vec<Part>,
    active: Option<Active>,
    /// Found once. Does not keep the peer alive, and with it the memory of its VM.
    peer: Weak<SoftQp>,
    life: Life,
    /// The connection has carried a message; the responder's life at that time.
    started: Option<Life>,
    /// The end of draining was told.
    drained: bool,
    /// Its queue makes no sense any more, or its completion queue has overrun.
    dead: bool,
    /// Carries out nothing.
    paused: bool,
    attr: QpAttr,
}

impl Requester {
    pub fn new(source: Box<dyn SendSource>) -> Self {
        Self {
            source,
            request: SendRequest::default(),
            parts: Vec::new(),
            active: None,
            peer: Weak::new(),
            life: Life::begin(),
            started: None,
            drained: false,
            dead: false,
            paused: false,
            attr: QpAttr::default(),
        }
    }

    pub fn set(&mut self, attr: &QpAttr) {
        self.attr = *attr;
        self.peer = Weak::new();
        self.drained = false;
    }

    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Back to the state of a new queue pair.
    pub fn reset(&mut self) {
        self.source.discard();
        self.parts.clear();
        self.active = None;
        self.peer = Weak::new();
        self.life = Life::begin();
        self.started = None;
        self.drained = false;
        self.dead = false;
        self.attr = QpAttr::default();
    }

    pub fn is_active(&self) -> bool {
        self.active.is_some()
    }

    pub fn has_work(&self) -> bool {
        !self.dead && (self.active.is_some() || self.source.is_ready())
    }

    /// Whether a turn would get further without a timer.
    pub fn is_ready(&self, qp: &SoftQp, draining: bool) -> bool {
        if self.dead || self.paused {
            return false;
        }
        match &self.active {
            None => !draining && self.source.is_ready(),
            Some(Active { waiting: None, .. }) => true,
            Some(Active {
                waiting: Some((wait, _)),
                ..
            }) => {
                let peer = self.peer.upgrade().or_else(|| self.find_peer(qp));
                peer.is_some_and(|peer| {
                    let responder = peer.responder();
                    let answered = self.is_answered(qp, &peer, &responder);
                    match wait {
                        Wait::Answer => answered,
                        Wait::Receiver(_) => !answered || responder.has_work(),
                    }
                })
            }
        }
    }

    /// Carries out what is queued, within the bounds of a turn. While draining no new request is
    /// begun.
    pub fn run(&mut self, qp: &SoftQp, now: Instant, draining: bool) -> Progress {
        let mut progress = Progress::default();
        let mut budget = BYTES_PER_TURN;
        for _ in 0..REQUESTS_PER_TURN {
            if self.dead || self.paused {
                break;
            }
            if self.active.is_none() {
                if draining {
                    self.tell_drained(qp);
                    break;
                }
                match self.source.take(&mut self.request) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(QueueError::Request(e)) => {
                        log::debug!("QP {:#x}: bad send request: {e}", qp.number);
                        progress.worked = true;
                        self.fail(qp, WC_STATUS_LOC_QP_OP_ERR);
                        break;
                    }
                    Err(e) => {
                        warn_limited!(qp.limit, "QP {:#x}: send queue given up: {e}", qp.number);
                        progress.worked = true;
                        self.die(qp);
                        break;
                    }
                }
                progress.worked = true;
                if let Err(status) = self.begin(qp) {
                    self.fail(qp, status);
                    break;
                }
            }
            match self.step(qp, &mut budget) {
                Step::Done => progress.worked = true,
                Step::More => {
                    progress.worked = true;
                    break;
                }
                Step::Wait(wait) => {
                    match self.wait(wait, now) {
                        Ok(deadline) => {
                            progress.deadline = deadline;
                            // It has said that it waits, and looks once more.
                            progress.worked |= self.is_ready(qp, draining);
                        }
                        Err(status) => {
                            progress.worked = true;
                            self.fail(qp, status);
                        }
                    }
                    break;
                }
                Step::Failed(status) => {
                    progress.worked = true;
                    self.fail(qp, status);
                    break;
                }
            }
            if budget == 0 {
                break;
            }
        }
        progress
    }

    fn tell_drained(&mut self, qp: &SoftQp) {
        if !std::mem::replace(&mut self.drained, true) && self.attr.en_sqd_async_notify != 0 {
            (qp.events)(EVENT_SQ_DRAINED);
        }
    }

    /// Opens the local memory of the request that was just taken.
    fn begin(&mut self, qp: &SoftQp) -> Result<(), u8> {
        self.parts.clear();
        let length = self.request.length();
        if length > u64::from(MAX_MESSAGE_BYTES) {
            return Err(WC_STATUS_LOC_LEN_ERR);
        }
        let wanted = if self.request.opcode == Opcode::Read {
            if self.attr.max_rd_atomic == 0 {
                return Err(WC_STATUS_LOC_QP_OP_ERR);
            }
            Use::LocalWrite
        } else {
            Use::LocalRead
        };
        for element in self.request.elements.as_slice() {
            if element.length == 0 {
                continue;
            }
            let part = qp
                .memory
                .open_element(qp.pd, element, wanted)
                .map_err(|e| {
                    log::debug!("QP {:#x}: send request refused: {e}", qp.number);
                    WC_STATUS_LOC_PROT_ERR
                })?;
            self.parts.push(part);
        }
        self.active = Some(Active {
            done: 0,
            length,
            waiting: None,
            retries_left: self.attr.retry_cnt,
            rnr_retries_left: self.attr.rnr_retry,
        });
        Ok(())
    }

    fn find_peer(&self, qp: &SoftQp) -> Option<Arc<SoftQp>> {
        qp.fabric
            .find(self.attr.dest_qp_num.get())
            .filter(|peer| peer.is_named_by(&self.attr))
    }

    /// Whether the peer answers the message at hand: a responder that was reset since the last one,
    /// or has succeeded another one, expects another sequence number.
    fn is_answered(&self, qp: &SoftQp, peer: &SoftQp, responder: &Responder) -> bool {
        let expected = match self.started {
            None => responder.expects(self.attr.sq_psn.get()),
            Some(life) => responder.life() == life,
        };
        peer.state().responds() && responder.is_connected_to(qp, self.life) && expected
    }

    /// Moves some of the request at hand.
    fn step(&mut self, qp: &SoftQp, budget: &mut u64) -> Step {
        let peer = match self.peer.upgrade() {
            Some(peer) => peer,
            None => {
                let Some(peer) = self.find_peer(qp) else {
                    qp.fabric.wait_for_answer();
                    return Step::Wait(Wait::Answer);
                };
                self.peer = Arc::downgrade(&peer);
                peer
            }
        };
        // Held while bytes move: whoever ends the peer waits for it.
        let mut responder = peer.responder();
        if !self.is_answered(qp, &peer, &responder) {
            drop(responder);
            self.peer = Weak::new();
            qp.fabric.wait_for_answer();
            return Step::Wait(Wait::Answer);
        }
        let Some(active) = self.active.as_mut() else {
            return Step::Failed(WC_STATUS_LOC_QP_OP_ERR);
        };
        self.started = Some(responder.life());
        responder.hears(&peer, self.life);
        let outcome =
            if self.request.opcode == Opcode::Send || self.request.opcode == Opcode::SendImm {
                send(
                    &self.request,
                    &self.parts,
                    active,
                    &peer,
                    &mut responder,
                    budget,
                )
            } else {
                rdma(
                    &self.request,
                    &self.parts,
                    active,
                    &peer,
                    &mut responder,
                    budget,
                )
            };
        match outcome {
            Ok(false) => {
                active.waiting = None;
                Step::More
            }
            Ok(true) => {
                // The sender is told first: when the receiver's answer is there, the completion of
                // what it answers is, as where an acknowledgement precedes the answer on the wire.
                // Programs with a completion queue of one entry rely on it.
                let length = active.length;
                self.complete(qp);
                if self.request.opcode.consumes_receive() {
                    let immediate = self
                        .request
                        .opcode
                        .has_immediate()
                        .then_some(self.request.immediate);
                    responder.complete_receive(
                        &peer,
                        qp.number,
                        length,
                        immediate,
                        self.request.opcode == Opcode::WriteImm,
                        self.request.solicited,
                    );
                }
                Step::Done
            }
            Err(Refusal::Nak(Nak::NotReady(timer))) => {
                peer.wait_for_receive();
                Step::Wait(Wait::Receiver(timer))
            }
            Err(Refusal::Nak(Nak::Fatal(status)) | Refusal::Local(status)) => Step::Failed(status),
        }
    }

    /// Counts a wait. Returns when to look again, or the status to fail with.
    fn wait(&mut self, wait: Wait, now: Instant) -> Result<Option<Instant>, u8> {
        let Some(active) = self.active.as_mut() else {
            return Ok(None);
        };
        // IBTA 9.7.5.2.8: no retry at all, not one after a while.
        if matches!(wait, Wait::Receiver(_)) && active.rnr_retries_left == 0 {
            return Err(WC_STATUS_RNR_RETRY_EXC_ERR);
        }
        let delay: Option<Duration> = match wait {
            Wait::Answer => ack_timeout(self.attr.timeout),
            Wait::Receiver(_) if self.attr.rnr_retry == RNR_FOR_EVER => None,
            Wait::Receiver(timer) => Some(rnr_delay(timer)),
        };
        let until = match active.waiting {
            // The timer runs as it was set: a peer that changes it does not begin it again.
            Some((same, until)) if discriminant(&same) == discriminant(&wait) => until,
            _ => {
                let until = delay.map(|d| now + d);
                active.waiting = Some((wait, until));
                return Ok(until);
            }
        };
        let (Some(until), Some(delay)) = (until, delay) else {
            return Ok(None);
        };
        if now < until {
            return Ok(Some(until));
        }
        let (left, status) = match wait {
            Wait::Answer => (&mut active.retries_left, WC_STATUS_RETRY_EXC_ERR),
            Wait::Receiver(_) => (&mut active.rnr_retries_left, WC_STATUS_RNR_RETRY_EXC_ERR),
        };
        *left = left.checked_sub(1).ok_or(status)?;
        if matches!(wait, Wait::Receiver(_)) && *left == 0 {
            // The last retry has met no receive request either; an answer that is missing is missed
            // when its timer has passed.
            return Err(status);
        }
        let until = now + delay;
        active.waiting = Some((wait, Some(until)));
        Ok(Some(until))
    }

    /// Tells of the request at hand by the nodes of its memory, where somebody wants to know.
    fn tell_moved(&self, qp: &SoftQp) {
        let (Some(moved), Some(limb)) = (qp.counters.moved.get(), limbs::here()) else {
            return;
        };
        for part in &self.parts {
            if let Some(data) = part.region.node() {
                moved.moved(data, limb, part.length);
            }
        }
    }

    /// Ends the request at hand with success.
    fn complete(&mut self, qp: &SoftQp) {
        let length = self.active.take().map_or(0, |a| a.length);
        self.tell_moved(qp);
        self.parts.clear();
        self.source.retire();
        let opcode = self.request.opcode;
        let counter = if opcode == Opcode::Read {
            &qp.counters.bytes_in
        } else {
            &qp.counters.bytes_out
        };
        counters::add(counter, length);
        counters::add(&qp.counters.requests, 1);
        if self.request.signalled || qp.signal_all {
            self.push(
                qp,
                &Completion {
                    wr_id: self.request.wr_id.into(),
                    status: WC_STATUS_SUCCESS,
                    opcode: wc_opcode(opcode),
                    byte_len: u32::try_from(length).unwrap_or(u32::MAX).into(),
                    qp_num: qp.number.into(),
                    src_qp: self.attr.dest_qp_num,
                    ..Default::default()
                },
            );
        }
    }

    /// Ends the request at hand with an error, and with it the connection.
    fn fail(&mut self, qp: &SoftQp, status: u8) {
        log::debug!("QP {:#x}: a request fails with status {status}", qp.number);
        qp.enter_error();
        counters::add(&qp.counters.failures, 1);
        self.end(qp, status);
    }

    fn end(&mut self, qp: &SoftQp, status: u8) {
        self.active = None;
        self.parts.clear();
        self.source.retire();
        self.push(
            qp,
            &Completion {
                wr_id: self.request.wr_id.into(),
                status,
                opcode: wc_opcode(self.request.opcode),
                qp_num: qp.number.into(),
                ..Default::default()
            },
        );
    }

    fn push(&mut self, qp: &SoftQp, completion: &Completion) {
        if let Err(e) = qp.send_cq.push(completion, false) {
            log::debug!("QP {:#x}: {e}", qp.number);
            self.die(qp);
        }
    }

    /// Gives the queue up.
    fn die(&mut self, qp: &SoftQp) {
        self.dead = true;
        self.active = None;
        self.parts.clear();
        if qp.enter_error() {
            (qp.events)(EVENT_QP_FATAL);
        }
    }

    /// Flushes at most `most` send requests; returns how many.
    pub fn flush(&mut self, qp: &SoftQp, most: u32) -> u32 {
        let mut count = 0;
        while count < most && !self.dead {
            if self.active.is_none() {
                match self.source.take(&mut self.request) {
                    Ok(true) | Err(QueueError::Request(_)) => {}
                    Ok(false) => break,
                    Err(e) => {
                        warn_limited!(qp.limit, "QP {:#x}: send queue given up: {e}", qp.number);
                        self.die(qp);
                        break;
                    }
                }
            }
            self.end(qp, WC_STATUS_WR_FLUSH_ERR);
            count += 1;
        }
        count
    }
}

/// Why a step got no further.
enum Refusal {
    /// The responder's answer.
    Nak(Nak),
    /// The requester's own fault.
    Local(u8),
}

impl From<Nak> for Refusal {
    fn from(nak: Nak) -> Self {
        Self::Nak(nak)
    }
}

/// The bytes of this turn.
fn turn(active: &Active, budget: &mut u64) -> u64 {
    let n = (active.length - active.done).min(*budget);
    *budget -= n;
    n
}

fn source<'a>(request: &'a SendRequest, parts: &'a [Part]) -> Source<'a> {
    request
        .inline()
        .map_or(Source::Parts(parts), Source::Inline)
}

/// Moves some of a send; true when all of it has arrived.
fn send(
    request: &SendRequest,
    parts: &[Part],
    active: &mut Active,
    peer: &SoftQp,
    responder: &mut Responder,
    budget: &mut u64,
) -> Result<bool, Refusal> {
    if active.done == 0 {
        responder.ready_receive(peer)?;
        responder.open_receive(peer, active.length)?;
    }
    let n = turn(active, budget);
    let moved = move_message(responder.parts(), source(request, parts), active.done, n);
    match moved {
        Ok(()) => {}
        Err(Failed::Source(e)) => {
            log::debug!("Send: local memory: {e}");
            return Err(Refusal::Local(WC_STATUS_LOC_PROT_ERR));
        }
        Err(Failed::Destination(e)) => {
            log::debug!("Send: peer's receive memory: {e}");
            responder.fail_receive(peer, WC_STATUS_LOC_PROT_ERR);
            return Err(responder
                .refuse(peer, WC_STATUS_REM_OP_ERR, EVENT_QP_FATAL)
                .into());
        }
    }
    active.done += n;
    Ok(active.done == active.length)
}

/// Moves some of an RDMA write or read; true when all of it is done.
fn rdma(
    request: &SendRequest,
    parts: &[Part],
    active: &mut Active,
    peer: &SoftQp,
    responder: &mut Responder,
    budget: &mut u64,
) -> Result<bool, Refusal> {
    let read = request.opcode == Opcode::Read;
    let first = active.done == 0;
    if first && request.opcode.consumes_receive() {
        responder.ready_receive(peer)?;
    }
    // Without bytes the key is not looked at (IBTA 9.7.4.1.1).
    if active.length == 0 {
        return Ok(true);
    }
    let n = turn(active, budget);
    let wanted = if read {
        Use::RemoteRead
    } else {
        Use::RemoteWrite
    };
    // The whole of it is checked before its first byte moves, and again each turn, since the key
    // may be gone by then.
    let remote = responder.open_remote(
        peer,
        request.rkey,
        request.remote_address,
        active.length,
        wanted,
    )?;
    let remote = std::slice::from_ref(&remote);
    let moved = if read {
        move_message(parts, Source::Parts(remote), active.done, n)
    } else {
        move_message(remote, source(request, parts), active.done, n)
    };
    let at_peer = |e| {
        log::debug!("RDMA: peer's memory: {e}");
        responder.refuse(peer, WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR)
    };
    match (moved, read) {
        (Ok(()), _) => {}
        (Err(Failed::Source(e)), true) | (Err(Failed::Destination(e)), false) => {
            return Err(at_peer(e).into());
        }
        (Err(Failed::Source(e) | Failed::Destination(e)), _) => {
            log::debug!("RDMA: local memory: {e}");
            return Err(Refusal::Local(WC_STATUS_LOC_PROT_ERR));
        }
    }
    active.done += n;
    Ok(active.done == active.length)
}

fn wc_opcode(opcode: Opcode) -> u8 {
    match opcode {
        Opcode::Send | Opcode::SendImm => WC_OPCODE_SEND,
        Opcode::Write | Opcode::WriteImm => WC_OPCODE_RDMA_WRITE,
        Opcode::Read => WC_OPCODE_RDMA_READ,
    }
}
