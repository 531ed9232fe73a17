//! The requester's half of a queue pair: carries out send requests, in order.

use super::attributes::{State, ack_timeout, rnr_delay};
use super::common::{Life, QpCommon};
use super::datagram::{MAX_DATAGRAM_BYTES, Packet, Undelivered};
use super::fabric::{Fabric, QpName};
use super::groups::Walk;
use super::responder::{Arrival, Nak, Responder, Word};
use super::target::Target;
use super::transfer::{Message, Refusal, Transfer, WORD_BYTES};
use crate::address::Recipients;
use crate::counters;
use crate::engine::{Progress, Spending, Turn, earlier};
use crate::memory::{Part, Use};
use crate::request::{Opcode, SendWqe, Target as RequestTarget};
use crate::work_queue::{QueueError, WorkSource};
use farlane_abi::queue::{
    Completion, MAX_MESSAGE_BYTES, WC_OPCODE_ATOMIC_WRITE, WC_OPCODE_BIND_WINDOW,
    WC_OPCODE_COMPARE_SWAP, WC_OPCODE_FETCH_ADD, WC_OPCODE_LOCAL_INVALIDATE, WC_OPCODE_RDMA_READ,
    WC_OPCODE_RDMA_WRITE, WC_OPCODE_SEND, WC_STATUS_LOC_LEN_ERR, WC_STATUS_LOC_PROT_ERR,
    WC_STATUS_LOC_QP_OP_ERR, WC_STATUS_MW_BIND_ERR, WC_STATUS_RETRY_EXC_ERR,
    WC_STATUS_RNR_RETRY_EXC_ERR, WC_STATUS_SUCCESS, WC_STATUS_WR_FLUSH_ERR,
};
use farlane_abi::rdma::{EVENT_QP_FATAL, EVENT_SQ_DRAINED, MULTICAST_QPN, QpAttr};
use farlane_sys::warn_limited;
use farlane_zero_copy::topology::Node;
use std::mem::discriminant;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

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
    /// Nobody has received it, and its transport does not tell: completed.
    Dropped,
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
    /// The word of an atomic operation is in use for long.
    Word,
}

/// When a word that is in use for long is looked at again.
const WORD_DELAY: Duration = Duration::from_millis(1);

/// The request at hand.
struct Active {
    transfer: Transfer,
    /// What is waited for, and until when before it counts as a retry.
    waiting: Option<(Wait, Option<Instant>)>,
    retries_left: u8,
    rnr_retries_left: u8,
    /// Of one to a group, once it has begun.
    copies: Option<Copies>,
}

/// The copies of a datagram to a group.
struct Copies {
    /// Who has had its turn.
    walk: Walk,
    /// The operation that the request is has paid for one.
    is_first_paid: bool,
}

impl Active {
    /// Whether it has to wait for another budget: a message without bytes needs no more of it, but
    /// each further copy is an operation.
    fn is_over(&self, budget: &Spending) -> bool {
        match &self.copies {
            Some(copies) if copies.is_first_paid => !budget.has_operation(),
            _ => budget.is_over() && self.transfer.is_left(),
        }
    }
}

/// State of the requester's half. Its lock comes before any responder's.
pub struct Requester {
    source: Box<dyn WorkSource<SendWqe>>,
    fabric: Arc<Fabric>,
    request: SendWqe,
    parts: Vec<Part>,
    active: Option<Active>,
    /// Whom it is connected to.
    peer_name: Option<QpName>,
    /// Found once. Does not keep the peer alive, and with it the memory of its VM.
    peer: Weak<Target>,
    life: Life,
    /// The connection has carried a message; the responder's life at that time.
    started: Option<Life>,
    /// The end of draining was told.
    drained: bool,
    /// Its queue makes no sense any more, or its completion queue has overrun.
    dead: bool,
    /// Paused: no request is carried out.
    paused: bool,
    attr: QpAttr,
}

impl Requester {
    pub fn new(source: Box<dyn WorkSource<SendWqe>>, fabric: Arc<Fabric>) -> Self {
        Self {
            source,
            fabric,
            request: SendWqe::default(),
            parts: Vec::new(),
            active: None,
            peer_name: None,
            peer: Weak::new(),
            life: Life::begin(),
            started: None,
            drained: false,
            dead: false,
            paused: false,
            attr: QpAttr::default(),
        }
    }

    /// Sets attributes that are valid, and whom they connect it to.
    pub fn set(&mut self, attr: &QpAttr, peer: Option<QpName>) {
        self.attr = *attr;
        self.peer_name = peer;
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
        self.peer_name = None;
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
    pub fn is_ready(&self, qp: &QpCommon, draining: bool) -> bool {
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
                let peer = self.peer.upgrade().or_else(|| self.find_peer());
                peer.is_some_and(|peer| {
                    let responder = peer.responder();
                    let answered = self.is_answered(qp, &peer, &responder);
                    match wait {
                        Wait::Answer => answered,
                        // Its timer says when.
                        Wait::Word => false,
                        Wait::Receiver(_) => !answered || responder.can_receive(),
                    }
                })
            }
        }
    }

    /// Carries out what is queued, within the budget of a turn. While draining no new request is
    /// begun.
    pub fn run(&mut self, qp: &QpCommon, turn: Turn, draining: bool) -> Progress {
        let mut progress = Progress::default();
        let mut budget = turn.budget.spend();
        // What it has done to a responder may have ended it: its own, or that of a peer that has
        // answered meanwhile.
        while !self.dead && !self.paused && qp.state() != State::Error {
            if self.active.is_none() {
                if draining {
                    self.tell_drained(qp);
                    break;
                }
                if !budget.has_operation() {
                    progress.more = self.source.is_ready();
                    break;
                }
                let Some(begun) = self.take(qp) else {
                    break;
                };
                budget.begin();
                progress.worked = true;
                if !begun {
                    break;
                }
            }
            let is_over = |active: &Active| active.is_over(&budget);
            if self.active.as_ref().is_some_and(is_over) {
                progress.more = true;
                break;
            }
            match self.step(qp, turn.node, &mut budget) {
                Step::Done | Step::Dropped => progress.worked = true,
                Step::More => {
                    progress.worked = true;
                    progress.more = true;
                    break;
                }
                Step::Wait(wait) => {
                    match self.wait(wait, turn.now) {
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
        }
        progress.used = budget.used();
        progress
    }

    /// Takes the next request and begins it; none is there, or it has failed.
    fn take(&mut self, qp: &QpCommon) -> Option<bool> {
        match self.source.take(&mut self.request) {
            Ok(true) => {}
            Ok(false) => return None,
            Err(QueueError::Request(e)) => {
                log::debug!("{}: bad send request: {e}", qp.number);
                self.fail(qp, WC_STATUS_LOC_QP_OP_ERR);
                return Some(false);
            }
            Err(e) => {
                warn_limited!(qp.limit, "{}: send queue given up: {e}", qp.number);
                self.die(qp);
                return Some(false);
            }
        }
        let begun = self.begin(qp);
        if let Err(status) = begun {
            self.fail(qp, status);
        }
        Some(begun.is_ok())
    }

    fn tell_drained(&mut self, qp: &QpCommon) {
        if !std::mem::replace(&mut self.drained, true) && self.attr.en_sqd_async_notify != 0 {
            (qp.events)(EVENT_SQ_DRAINED);
        }
    }

    /// Opens the local memory of the request that was just taken.
    fn begin(&mut self, qp: &QpCommon) -> Result<(), u8> {
        self.parts.clear();
        // A shared receive queue that is named is looked up by the responder.
        let is_addressed = matches!(self.request.target, RequestTarget::Datagram(_));
        if !qp.transport.carries(self.request.opcode) || is_addressed != qp.transport.is_addressed()
        {
            return Err(WC_STATUS_LOC_QP_OP_ERR);
        }
        let length = self.request.length();
        let length = u32::try_from(length).ok();
        let length = length.filter(|length| *length <= MAX_MESSAGE_BYTES);
        let length = length.ok_or(WC_STATUS_LOC_LEN_ERR)?;
        let opcode = self.request.opcode;
        if opcode.is_atomic() && length != WORD_BYTES {
            return Err(WC_STATUS_LOC_LEN_ERR);
        }
        let wanted = if opcode.fetches() {
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
                    log::debug!("{}: send request refused: {e}", qp.number);
                    WC_STATUS_LOC_PROT_ERR
                })?;
            self.parts.push(part);
        }
        self.active = Some(Active {
            transfer: Transfer::new(length),
            waiting: None,
            retries_left: self.attr.retry_cnt,
            rnr_retries_left: self.attr.rnr_retry,
            copies: None,
        });
        Ok(())
    }

    fn find_peer(&self) -> Option<Arc<Target>> {
        self.fabric.find(self.peer_name?)
    }

    /// Whether the peer answers the message at hand: a responder that was reset since the last one,
    /// or has succeeded another one, expects another sequence number. An unreliable one takes any
    /// first packet, but does not go on with a message whose beginning it does not have.
    fn is_answered(&self, qp: &QpCommon, peer: &Target, responder: &Responder) -> bool {
        let is_under_way = |active: &Active| active.transfer.done > 0;
        let expected = match self.started {
            Some(life) if qp.transport.is_acknowledged() => responder.life() == life,
            Some(life) => {
                !self.active.as_ref().is_some_and(is_under_way) || responder.life() == life
            }
            None if qp.transport.is_acknowledged() => responder.expects(self.attr.sq_psn.get()),
            None => true,
        };
        peer.common.transport == qp.transport.peer()
            && peer.common.state().responds()
            && responder.is_connected_to(qp, self.life)
            && expected
    }

    /// The peer, looked for once; none where it does not answer.
    fn peer(&mut self) -> Option<Arc<Target>> {
        if let Some(peer) = self.peer.upgrade() {
            return Some(peer);
        }
        let peer = self.find_peer()?;
        self.peer = Arc::downgrade(&peer);
        Some(peer)
    }

    /// The peer does not answer: whoever needs its answer waits for that.
    fn unanswered(&mut self, qp: &QpCommon) -> Step {
        if !qp.transport.is_acknowledged() {
            return self.dropped(qp);
        }
        qp.requesting.wait();
        Step::Wait(Wait::Answer)
    }

    /// Nobody receives the message at hand, which is sent all the same.
    fn dropped(&mut self, qp: &QpCommon) -> Step {
        log::debug!("{}: nobody receives a message", qp.number);
        if let Some(active) = self.active.take() {
            counters::count(&qp.counters.dropped, 1);
            let Transfer { done, length } = active.transfer;
            self.complete(qp, length, done);
        }
        Step::Dropped
    }

    /// Carries out the request at hand, where it concerns this side alone.
    fn local_step(&mut self, qp: &QpCommon) -> Option<Step> {
        let (outcome, status) = match self.request.opcode {
            Opcode::Bind(binding) => {
                let outcome = qp.memory.bind((qp.pd, qp.binder), &binding);
                (outcome, WC_STATUS_MW_BIND_ERR)
            }
            Opcode::LocalInvalidate(key) => {
                let outcome = qp.memory.invalidate(qp.pd, None, key);
                (outcome, WC_STATUS_LOC_QP_OP_ERR)
            }
            _ => return None,
        };
        Some(match outcome {
            Ok(()) => {
                self.complete(qp, 0, 0);
                Step::Done
            }
            Err(e) => {
                log::debug!("{}: {:?}: {e}", qp.number, self.request.opcode);
                Step::Failed(status)
            }
        })
    }

    /// Moves some of the request at hand, on a worker of `node`.
    fn step(&mut self, qp: &QpCommon, node: Option<Node>, budget: &mut Spending) -> Step {
        if qp.transport.is_addressed() {
            return self.send_datagram(qp, node, budget);
        }
        if let Some(step) = self.local_step(qp) {
            return step;
        }
        let Some(peer) = self.peer() else {
            return self.unanswered(qp);
        };
        // Held while bytes move: whoever ends the peer waits for it.
        let mut responder = peer.responder();
        if !self.is_answered(qp, &peer, &responder) {
            drop(responder);
            self.peer = Weak::new();
            return self.unanswered(qp);
        }
        let Some(active) = self.active.as_mut() else {
            return Step::Failed(WC_STATUS_LOC_QP_OP_ERR);
        };
        self.started = Some(responder.life());
        responder.hears(&peer.common, self.life);
        let mut message = Message {
            request: &self.request,
            parts: &self.parts,
            peer: &peer.common,
            responder: &mut responder,
        };
        let outcome = loop {
            match message.go_on(&mut active.transfer, budget) {
                Ok(false) if budget.goes_on() => {}
                outcome => break outcome,
            }
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
                let length = active.transfer.length;
                self.tell_transferred(node);
                self.complete(qp, length, length.into());
                self.complete_receive(qp, &peer.common, &mut responder, length);
                responder.end_message();
                Step::Done
            }
            Err(Refusal::Nak(Nak::NotReady(timer))) => {
                peer.common.receiver.wait(&qp.requesting);
                responder.await_receive(&peer.common);
                Step::Wait(Wait::Receiver(timer))
            }
            Err(Refusal::Busy) => {
                budget.looked_in_vain();
                Step::Wait(Wait::Word)
            }
            Err(Refusal::Nak(Nak::Dropped)) => self.dropped(qp),
            Err(Refusal::Nak(Nak::Fatal(status)) | Refusal::Local(status)) => Step::Failed(status),
        }
    }

    /// Sends the datagram at hand: to the one that it names, or to some of the members of a group.
    /// The receivers' work is the sender's.
    fn send_datagram(&mut self, qp: &QpCommon, node: Option<Node>, budget: &mut Spending) -> Step {
        let (RequestTarget::Datagram(datagram), Some(active)) =
            (self.request.target, self.active.as_mut())
        else {
            return Step::Failed(WC_STATUS_LOC_QP_OP_ERR);
        };
        let length = active.transfer.length;
        // IBTA C10-93.1.1: one that is longer is not sent, and that is no error.
        let Some(length) = u16::try_from(length)
            .ok()
            .filter(|_| length <= MAX_DATAGRAM_BYTES)
        else {
            return self.dropped(qp);
        };
        let packet = Packet {
            from: qp,
            own_qkey: self.attr.qkey.get(),
            datagram,
            request: &self.request,
            parts: &self.parts,
            length,
        };
        match datagram.address.to {
            Recipients::Port(destination) => {
                budget.take_whole(length.into());
                let number = datagram.number;
                let Some(peer) = self.fabric.find(QpName {
                    destination,
                    number,
                }) else {
                    return self.dropped(qp);
                };
                let Some(mut receiver) = packet.receiver(&peer) else {
                    return self.dropped(qp);
                };
                match packet.deliver(&peer.common, &mut receiver) {
                    Ok(()) => {
                        let arrival = packet.arrival();
                        self.tell_transferred(node);
                        // The sender is told first, as of a connection.
                        self.complete(qp, length.into(), length.into());
                        receiver.complete_receive(&peer.common, &arrival);
                        Step::Done
                    }
                    Err(Undelivered::Dropped) => {
                        drop(receiver);
                        self.dropped(qp)
                    }
                    Err(Undelivered::Local(status)) => Step::Failed(status),
                }
            }
            Recipients::Group(group) => {
                let is_to_group = datagram.number.get() == MULTICAST_QPN;
                let groups = &self.fabric.groups;
                let copies = active.copies.get_or_insert_with(|| Copies {
                    walk: groups.walk(),
                    is_first_paid: false,
                });
                let mut has_looked = false;
                while is_to_group && let Some((member, walk)) = groups.next(group, copies.walk) {
                    let is_over = match copies.is_first_paid {
                        true => !budget.has_operation(),
                        false => has_looked && budget.is_over(),
                    };
                    if is_over {
                        return Step::More;
                    }
                    has_looked = true;
                    copies.walk = walk;
                    // Strangers in a group use up nothing of what the sender's operator lets it do.
                    let Some(mut receiver) = packet.receiver(&member) else {
                        budget.passed_over();
                        continue;
                    };
                    if std::mem::replace(&mut copies.is_first_paid, true) {
                        budget.begin();
                    }
                    budget.take_whole(length.into());
                    match packet.deliver(&member.common, &mut receiver) {
                        Ok(()) => {
                            receiver.complete_receive(&member.common, &packet.arrival());
                            active.transfer.done += u64::from(length);
                        }
                        Err(Undelivered::Dropped) => {
                            counters::count(&qp.counters.dropped, 1);
                        }
                        Err(Undelivered::Local(status)) => return Step::Failed(status),
                    }
                }
                let moved = active.transfer.done;
                self.tell_transferred(node);
                self.complete(qp, length.into(), moved);
                Step::Done
            }
        }
    }

    /// Completes the peer's receive request, where the request at hand has consumed one.
    fn complete_receive(
        &self,
        qp: &QpCommon,
        peer: &QpCommon,
        responder: &mut Responder,
        length: u32,
    ) {
        let (request, opcode) = (&self.request, self.request.opcode);
        if opcode.consumes_receive() {
            let word = match opcode {
                Opcode::SendInvalidate(key) => Word::Invalidated(key),
                _ if opcode.has_immediate() => Word::Immediate(request.immediate),
                _ => Word::None,
            };
            let arrival = Arrival {
                from: qp.number,
                length,
                word,
                by_write: opcode == Opcode::WriteImm,
                solicited: request.solicited,
                flags: 0,
                route: 0,
            };
            responder.complete_receive(peer, &arrival);
        }
    }

    /// Counts a wait. Returns when to look again, or the status to fail with.
    fn wait(&mut self, wait: Wait, now: Instant) -> Result<Option<Instant>, u8> {
        let until = self.wait_for(wait, now)?;
        Ok(match wait {
            Wait::Word => earlier(until, Some(now + WORD_DELAY)),
            Wait::Answer | Wait::Receiver(_) => until,
        })
    }

    /// The same but for when it is to look again.
    fn wait_for(&mut self, wait: Wait, now: Instant) -> Result<Option<Instant>, u8> {
        let Some(active) = self.active.as_mut() else {
            return Ok(None);
        };
        // IBTA 9.7.5.2.8: no retry at all, not one after a while.
        if matches!(wait, Wait::Receiver(_)) && active.rnr_retries_left == 0 {
            return Err(WC_STATUS_RNR_RETRY_EXC_ERR);
        }
        let delay: Option<Duration> = match wait {
            Wait::Answer | Wait::Word => ack_timeout(self.attr.timeout),
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
            Wait::Answer | Wait::Word => (&mut active.retries_left, WC_STATUS_RETRY_EXC_ERR),
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

    /// Tells of the memory of the request at hand, which a worker of `node` has carried out, where
    /// somebody wants to know.
    fn tell_transferred(&self, node: Option<Node>) {
        let (Some(transfers), Some(worker)) = (&self.fabric.transfers, node) else {
            return;
        };
        for part in &self.parts {
            if let Some(data) = part.region.node() {
                transfers.transferred(data, worker, part.length);
            }
        }
    }

    /// Ends the request at hand, of `length` bytes, of which so many have moved, with success.
    fn complete(&mut self, qp: &QpCommon, length: u32, moved: u64) {
        self.active = None;
        self.parts.clear();
        self.source.retire();
        let opcode = self.request.opcode;
        let counter = if opcode.fetches() {
            &qp.counters.bytes_in
        } else {
            &qp.counters.bytes_out
        };
        counters::count(counter, moved);
        counters::count(&qp.counters.requests, 1);
        if self.request.signalled || qp.signal_all {
            self.push(
                qp,
                &Completion {
                    wr_id: self.request.wr_id.into(),
                    status: WC_STATUS_SUCCESS,
                    opcode: wc_opcode(opcode),
                    byte_len: length.into(),
                    qp_num: qp.number.into(),
                    src_qp: self.attr.dest_qp_num,
                    ..Default::default()
                },
            );
        }
    }

    /// Ends the request at hand with an error: none after it is carried out.
    fn fail(&mut self, qp: &QpCommon, status: u8) {
        log::debug!("{}: a request fails with status {status}", qp.number);
        qp.enter_send_error();
        counters::count(&qp.counters.failures, 1);
        self.end(qp, status);
    }

    fn end(&mut self, qp: &QpCommon, status: u8) {
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

    fn push(&mut self, qp: &QpCommon, completion: &Completion) {
        if let Err(e) = qp.send_cq.push(completion, false) {
            log::debug!("{}: {e}", qp.number);
            self.die(qp);
        }
    }

    /// Gives the queue up.
    fn die(&mut self, qp: &QpCommon) {
        self.dead = true;
        self.active = None;
        self.parts.clear();
        if qp.enter_error() {
            (qp.events)(EVENT_QP_FATAL);
        }
    }

    /// Flushes at most `most` send requests; returns how many.
    pub fn flush(&mut self, qp: &QpCommon, most: u32) -> u32 {
        let mut count = 0;
        while count < most && !self.dead {
            if self.active.is_none() {
                match self.source.take(&mut self.request) {
                    Ok(true) | Err(QueueError::Request(_)) => {}
                    Ok(false) => break,
                    Err(e) => {
                        warn_limited!(qp.limit, "{}: send queue given up: {e}", qp.number);
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

fn wc_opcode(opcode: Opcode) -> u8 {
    match opcode {
        Opcode::Send | Opcode::SendImm | Opcode::SendInvalidate(_) => WC_OPCODE_SEND,
        Opcode::Write | Opcode::WriteImm => WC_OPCODE_RDMA_WRITE,
        Opcode::Read => WC_OPCODE_RDMA_READ,
        Opcode::CompareSwap { .. } => WC_OPCODE_COMPARE_SWAP,
        Opcode::FetchAdd { .. } => WC_OPCODE_FETCH_ADD,
        Opcode::LocalInvalidate(_) => WC_OPCODE_LOCAL_INVALIDATE,
        Opcode::Bind(_) => WC_OPCODE_BIND_WINDOW,
        Opcode::AtomicWrite => WC_OPCODE_ATOMIC_WRITE,
    }
}
