//! The requester's half of a queue pair: carries out send requests, in order.

mod connections;
mod datagrams;
mod waiting;
mod window;

use super::attributes::State;
use super::carrier::{Carrier, Peer, Sequence};
use super::common::{Life, QpCommon};
use super::fabric::QpName;
use super::opcode::{told_opcode, wc_opcode};
use super::transfer::{Transfer, WORD_BYTES};
use crate::engine::{Progress, Spending, Turn};
use crate::memory::{Part, Use};
use crate::nodes::TransferObserver;
use crate::request::{Opcode, SendWqe, Target as RequestTarget};
use crate::request_times::Sampling;
use crate::traffic::{Count, Traffic};
use crate::work_queue::{QueueError, WorkSource};
use datagrams::Copies;
use farlane_abi::queue::{
    Completion, MAX_MESSAGE_BYTES, WC_STATUS_LOC_LEN_ERR, WC_STATUS_LOC_PROT_ERR,
    WC_STATUS_LOC_QP_OP_ERR, WC_STATUS_RETRY_EXC_ERR, WC_STATUS_RNR_RETRY_EXC_ERR,
    WC_STATUS_SUCCESS, WC_STATUS_WR_FLUSH_ERR,
};
use farlane_abi::rdma::{EVENT_QP_FATAL, EVENT_SQ_DRAINED, QpAttr};
use farlane_sys::warn_limited;
use farlane_zero_copy::topology::Node;
use probe::probe;
use std::sync::Arc;
use std::time::Instant;
use waiting::Wait;
use window::Window;

/// What a step of the request at hand came to.
enum Step {
    /// Carried out and completed.
    Done,
    /// More of it in the next turn.
    More,
    /// Nothing of it in this turn: what is next of it is more than the budget.
    Unpaid,
    /// Must be tried again: what is waited for.
    Wait(Wait),
    /// Nobody has received it, and its transport does not tell: completed.
    Dropped,
    /// Failed with this status.
    Failed(u8),
}

/// What came of taking a request.
enum Taken {
    /// There is none.
    Nothing,
    /// It has begun.
    Begun,
    /// It fails with this status.
    Failed(u8),
    /// The queue makes no sense.
    GivenUp,
}

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

impl Active {
    /// Whether it has to wait for another budget: a message without bytes needs no more of it. What
    /// the next member of a group needs is known when it was looked at.
    fn is_over(&self, budget: &Spending) -> bool {
        match &self.copies {
            Some(_) => !budget.has_look(),
            None => budget.is_over() && self.transfer.is_left(),
        }
    }
}

/// State of the requester's half. Its lock comes before any responder's.
pub struct Requester<C: Carrier> {
    source: Box<dyn WorkSource<SendWqe>>,
    carrier: C,
    /// Told of what it has moved.
    transfers: Option<Arc<dyn TransferObserver>>,
    request: SendWqe,
    /// When the request at hand was taken, if it is timed.
    begun: Option<Instant>,
    sampling: Sampling,
    parts: Vec<Part>,
    active: Option<Active>,
    /// So many requests, which were posted before it went on from SQE, are flushed before others
    /// are carried out.
    to_flush: u32,
    /// Those that are on their way, where answers come later.
    window: Window,
    /// Whom it is connected to.
    peer_name: Option<QpName>,
    /// Found once. Does not keep the peer alive, and with it the memory of its VM.
    peer: <C::Peer as Peer>::Weak,
    life: Life,
    /// The connection has carried a message; the responder's life at that time.
    started: Option<Life>,
    /// Messages that were sent, where nothing is heard of them.
    unheard: Sequence,
    /// The end of draining was told.
    drained: bool,
    /// The state that the carrier knows of.
    told: State,
    /// Its queue makes no sense any more, or its completion queue has overrun.
    dead: bool,
    /// Paused: no request is carried out.
    paused: bool,
    attr: QpAttr,
}

impl<C: Carrier> Requester<C> {
    pub fn new(
        source: Box<dyn WorkSource<SendWqe>>,
        carrier: C,
        transfers: Option<Arc<dyn TransferObserver>>,
    ) -> Self {
        Self {
            source,
            carrier,
            transfers,
            request: SendWqe::default(),
            begun: None,
            sampling: Sampling::default(),
            parts: Vec::new(),
            active: None,
            to_flush: 0,
            window: Window::default(),
            peer_name: None,
            peer: Default::default(),
            life: Life::begin(),
            started: None,
            unheard: Sequence::default(),
            drained: false,
            told: State::Reset,
            dead: false,
            paused: false,
            attr: QpAttr::default(),
        }
    }

    /// Goes to a state other than Reset, with attributes that are valid, and whom they connect it
    /// to.
    pub fn set(&mut self, state: State, attr: &QpAttr, peer: Option<QpName>) {
        self.attr = *attr;
        self.told = state;
        self.carrier.enter(state, attr);
        self.peer_name = peer;
        self.peer = Default::default();
        self.drained = false;
    }

    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
        self.carrier.pause(paused);
    }

    /// Tells the carrier where it does not know of the state.
    fn tell_state(&mut self, qp: &QpCommon) {
        let state = qp.state();
        if std::mem::replace(&mut self.told, state) != state {
            self.carrier.enter(state, &self.attr);
        }
    }

    /// What its messages go by.
    pub fn carrier(&self) -> &C {
        &self.carrier
    }

    /// Back to the state of a new queue pair.
    pub fn reset(&mut self) {
        self.attr = QpAttr::default();
        self.told = State::Reset;
        self.carrier.enter(State::Reset, &self.attr);
        self.source.discard();
        self.parts.clear();
        self.active = None;
        self.to_flush = 0;
        self.window.clear();
        self.peer_name = None;
        self.peer = Default::default();
        self.life = Life::begin();
        self.started = None;
        self.unheard = Sequence::default();
        self.drained = false;
        self.dead = false;
    }

    /// It goes on from SQE: what was posted before is not sent (IBTA 10.3.1, Send Queue Error), but
    /// flushed in turns.
    pub fn go_on(&mut self) {
        self.to_flush = self.source.queued();
    }

    /// Whether it has requests to flush before it carries any out.
    pub fn has_to_flush(&self) -> bool {
        self.to_flush > 0 && !self.dead
    }

    pub fn is_active(&self) -> bool {
        self.active.is_some() || !self.window.is_empty() || self.has_to_flush()
    }

    pub fn has_work(&self) -> bool {
        !self.dead && (self.is_active() || self.source.is_ready())
    }

    /// Whether several of its requests are on their way at once.
    fn has_window(qp: &QpCommon) -> bool {
        C::IN_FLIGHT > 0 && qp.transport.is_acknowledged()
    }

    /// Whether a turn would get further without a timer.
    pub fn is_ready(&self, qp: &QpCommon, draining: bool) -> bool {
        if self.has_to_flush() {
            return true;
        }
        if self.dead || self.paused {
            return false;
        }
        if Self::has_window(qp) {
            return self.is_ready_in_window(qp, draining);
        }
        match &self.active {
            None => !draining && self.source.is_ready(),
            Some(Active { waiting: None, .. }) => true,
            Some(Active {
                waiting: Some((wait, _)),
                ..
            }) => self.has_awaited(qp, *wait),
        }
    }

    /// Carries out what is queued, within the budget of a turn. While draining no new request is
    /// begun.
    pub fn run(&mut self, qp: &QpCommon, turn: Turn, draining: bool) -> Progress {
        if Self::has_window(qp) {
            return self.run_window(qp, turn, draining);
        }
        let mut progress = Progress::default();
        let mut budget = turn.budget.spend_until(turn.until);
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
                let taken = self.take(qp);
                if matches!(taken, Taken::Nothing) {
                    break;
                }
                budget.begin();
                progress.worked = true;
                match taken {
                    Taken::Begun => {}
                    Taken::Failed(status) => {
                        self.fail(qp, status);
                        break;
                    }
                    Taken::Nothing | Taken::GivenUp => break,
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
                Step::Unpaid => {
                    progress.more = true;
                    break;
                }
                Step::Wait(wait) => {
                    match self.wait(qp, wait, turn.now) {
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

    /// Takes the next request and begins it.
    fn take(&mut self, qp: &QpCommon) -> Taken {
        match self.source.take(&mut self.request) {
            Ok(true) => {}
            Ok(false) => return Taken::Nothing,
            Err(QueueError::Request(e)) => {
                log::debug!("{}: bad send request: {e}", qp.number);
                return Taken::Failed(WC_STATUS_LOC_QP_OP_ERR);
            }
            Err(e) => {
                warn_limited!(qp.limit, "{}: send queue given up: {e}", qp.number);
                self.die(qp);
                return Taken::GivenUp;
            }
        }
        self.begun = self.sampling.begin();
        let opcode = wc_opcode(self.request.opcode);
        probe!(
            farlane,
            rdma_begin,
            qp.number.get(),
            opcode,
            self.request.length()
        );
        match self.begin(qp) {
            Ok(()) => Taken::Begun,
            Err(status) => Taken::Failed(status),
        }
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

    /// Moves some of the request at hand, on a worker of `node`.
    fn step(&mut self, qp: &QpCommon, node: Option<Node>, budget: &mut Spending) -> Step {
        if qp.transport.is_addressed() {
            return self.send_datagram(qp, node, budget);
        }
        if let Some(step) = self.local_step(qp) {
            return step;
        }
        self.send(qp, node, budget)
    }

    /// Tells of the memory of the request at hand, which a worker of `node` has carried out, where
    /// somebody wants to know.
    fn tell_transferred(&self, node: Option<Node>) {
        let (Some(transfers), Some(worker)) = (&self.transfers, node) else {
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
        probe!(
            farlane,
            rdma_end,
            qp.number.get(),
            wc_opcode(opcode),
            WC_STATUS_SUCCESS,
            moved
        );
        count_success(&qp.traffic, opcode, moved);
        let begun = self.begun.take();
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
        if let Some(begun) = begun {
            qp.traffic.requests.of(opcode).add(begun.elapsed());
        }
    }

    /// Ends the request at hand with an error: none after it is carried out.
    fn fail(&mut self, qp: &QpCommon, status: u8) {
        log::debug!("{}: a request fails with status {status}", qp.number);
        qp.enter_send_error();
        self.tell_state(qp);
        qp.traffic.add([(Count::Failed, 1)]);
        match status {
            WC_STATUS_RETRY_EXC_ERR => qp.traffic.add([(Count::RetriesExceeded, 1)]),
            WC_STATUS_RNR_RETRY_EXC_ERR => qp.traffic.add([(Count::NotReadyExceeded, 1)]),
            _ => {}
        }
        self.end(qp, status);
    }

    fn end(&mut self, qp: &QpCommon, status: u8) {
        let opcode = told_opcode(&self.request);
        probe!(farlane, rdma_end, qp.number.get(), opcode, status, 0);
        self.active = None;
        self.begun = None;
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
        self.window.clear();
        self.parts.clear();
        if qp.enter_error() {
            (qp.events)(EVENT_QP_FATAL);
        }
        self.tell_state(qp);
    }

    /// Flushes at most `most` of the send requests that it [has to flush](Self::has_to_flush);
    /// returns how many.
    pub fn flush_first_ones(&mut self, qp: &QpCommon, most: u32) -> u32 {
        let most = most.min(self.to_flush);
        let count = self.flush_some(qp, most);
        // The program may have taken some back.
        self.to_flush = if count == most {
            self.to_flush - count
        } else {
            0
        };
        count
    }

    /// Flushes at most `most` send requests; returns how many.
    pub fn flush(&mut self, qp: &QpCommon, most: u32) -> u32 {
        self.to_flush = 0;
        self.flush_some(qp, most)
    }

    fn flush_some(&mut self, qp: &QpCommon, most: u32) -> u32 {
        self.tell_state(qp);
        let mut count = 0;
        while count < most && !self.dead {
            if self.flush_first(qp, WC_STATUS_WR_FLUSH_ERR) {
                count += 1;
                continue;
            }
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

/// A request has ended in success that has moved so many bytes.
fn count_success(traffic: &Traffic, opcode: Opcode, moved: u64) {
    match opcode {
        Opcode::Send | Opcode::SendImm | Opcode::SendInvalidate(_) => {
            traffic.add([(Count::Sends, 1), (Count::SendBytes, moved)]);
        }
        Opcode::Write | Opcode::WriteImm | Opcode::AtomicWrite => {
            traffic.add([(Count::Writes, 1), (Count::WriteBytes, moved)]);
        }
        Opcode::Read => traffic.add([(Count::Reads, 1), (Count::ReadBytes, moved)]),
        Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } => {
            traffic.add([(Count::Atomics, 1)]);
        }
        Opcode::LocalInvalidate(_) | Opcode::Register(_) | Opcode::Bind(_) | Opcode::Flush(_) => {
            traffic.add([(Count::Locals, 1)])
        }
    }
}
