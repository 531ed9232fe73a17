//! The receive request of the message under way, and what its completion says.

use super::{Nak, NotReady, Responder};
use crate::completion_queue::CompletionSink as _;
use crate::engine::QpNumber;
use crate::engine::soft::common::QpCommon;
use crate::engine::soft::objects::Receives;
use crate::memory::{Part, Use};
use crate::request::{MemoryKey, Opcode, SendWqe, WqeError};
use crate::traffic::Count;
use crate::work_queue::QueueError;
use farlane_abi::queue::{
    Completion, GRH_BYTES, WC_FLAG_IMM, WC_FLAG_INVALIDATED, WC_OPCODE_RECV,
    WC_OPCODE_RECV_RDMA_WITH_IMM, WC_STATUS_LOC_LEN_ERR, WC_STATUS_LOC_PROT_ERR,
    WC_STATUS_LOC_QP_OP_ERR, WC_STATUS_REM_INV_REQ_ERR, WC_STATUS_REM_OP_ERR,
    WC_STATUS_WR_FLUSH_ERR,
};
use farlane_abi::rdma::{EVENT_QP_FATAL, EVENT_QP_LAST_WQE_REACHED, EVENT_QP_REQ_ERR};
use farlane_sys::warn_limited;

/// A message that has arrived whole.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Who has sent it.
    pub from: QpNumber,
    /// Its bytes, with its header where there is room for one.
    pub length: u32,
    pub word: Word,
    /// It was an RDMA write.
    pub by_write: bool,
    pub solicited: bool,
    /// `WC_FLAG_*` besides that of the word.
    pub flags: u16,
    /// Whence it came, as [`Completion::vendor_err`] has it; zero of a connection.
    pub route: u32,
}

impl Arrival {
    /// That of a request over a connection, of `length` bytes; none where it consumes no receive
    /// request.
    pub fn of(request: &SendWqe, from: QpNumber, length: u32) -> Option<Self> {
        let opcode = request.opcode;
        opcode.consumes_receive().then(|| Self {
            from,
            length,
            word: match opcode {
                Opcode::SendInvalidate(key) => Word::Invalidated(key),
                _ if opcode.has_immediate() => Word::Immediate(request.immediate),
                _ => Word::None,
            },
            by_write: opcode == Opcode::WriteImm,
            solicited: request.solicited,
            flags: 0,
            route: 0,
        })
    }
}

/// What the completion of a receive request says besides.
#[derive(Clone, Copy, Debug)]
pub enum Word {
    None,
    /// Immediate data.
    Immediate(u32),
    /// The key that the message has invalidated.
    Invalidated(MemoryKey),
}

impl Word {
    fn flags(self) -> u16 {
        match self {
            Self::None => 0,
            Self::Immediate(_) => WC_FLAG_IMM,
            Self::Invalidated(_) => WC_FLAG_INVALIDATED,
        }
    }

    fn value(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Immediate(data) => data,
            Self::Invalidated(key) => key.0,
        }
    }
}

impl Responder {
    /// Takes the next receive request, good or bad, and gives its place back at once. `None` where
    /// there is none, or the queue is given up.
    fn take(&mut self, qp: &QpCommon) -> Option<Result<(), WqeError>> {
        let mut request = std::mem::take(&mut self.spare);
        let taken = match &mut self.receives {
            Receives::Own(source) => {
                let taken = source.take(&mut request);
                if matches!(taken, Ok(true) | Err(QueueError::Request(_))) {
                    source.retire();
                }
                taken
            }
            Receives::Shared(_) | Receives::Domain(_) => self
                .shared()
                .map_or(Ok(false), |shared| shared.take(&mut request)),
        };
        let outcome = match taken {
            Ok(true) => Ok(()),
            Err(QueueError::Request(e)) => Err(e),
            Ok(false) => {
                self.spare = request;
                return None;
            }
            Err(e) => {
                warn_limited!(qp.limit, "{}: receive queue given up: {e}", qp.number);
                self.dead = true;
                return None;
            }
        };
        self.current = Some(request);
        Some(outcome)
    }

    /// Sees to it that a receive request is at hand for the message under way.
    pub fn ready_receive(&mut self, qp: &QpCommon) -> Result<(), Nak> {
        if self.current.is_some() {
            return Ok(());
        }
        let taken = if self.dead { None } else { self.take(qp) };
        match taken {
            Some(Ok(())) => return Ok(()),
            None if !self.dead && qp.transport.is_acknowledged() => {
                return Err(Nak::NotReady(NotReady {
                    timer: self.attr.min_rnr_timer,
                    rings: self.is_rung(),
                }));
            }
            None if !self.dead => {
                qp.traffic.add([(Count::OutOfBuffer, 1)]);
                return Err(Nak::Dropped);
            }
            None => {}
            Some(Err(e)) => {
                log::debug!("{}: bad receive request: {e}", qp.number);
                self.fail_receive(qp, WC_STATUS_LOC_QP_OP_ERR);
            }
        }
        Err(self.break_down(qp, WC_STATUS_REM_OP_ERR, EVENT_QP_FATAL))
    }

    /// Opens the memory of the current receive request for a message of `length` bytes. Called
    /// once a message.
    pub fn open_receive(&mut self, qp: &QpCommon, length: u64) -> Result<(), Nak> {
        self.parts.clear();
        let pd = self.receive_pd(qp);
        let Some(request) = &self.current else {
            return Err(self.break_down(qp, WC_STATUS_REM_OP_ERR, EVENT_QP_FATAL));
        };
        if request.elements.total() < length {
            self.spoil_receive(qp, WC_STATUS_LOC_LEN_ERR);
            return Err(self.refuse(qp, WC_STATUS_REM_INV_REQ_ERR, EVENT_QP_REQ_ERR));
        }
        let mut left = length;
        for element in request.elements.as_slice() {
            // Memory that the message does not reach is not looked at: an element may be longer
            // than what is left of its region.
            let reached = left.min(element.length.into());
            left -= reached;
            if reached == 0 {
                continue;
            }
            let (key, address) = (element.lkey, element.address);
            match self
                .receive_memory(qp)
                .open(pd, key, address, reached, Use::LocalWrite)
            {
                Ok(part) => self.parts.push(part),
                Err(e) => {
                    log::debug!("{}: receive request refused: {e}", qp.number);
                    self.fail_receive(qp, WC_STATUS_LOC_PROT_ERR);
                    return Err(self.break_down(qp, WC_STATUS_REM_OP_ERR, EVENT_QP_FATAL));
                }
            }
        }
        Ok(())
    }

    /// Memory that [`open_receive`](Self::open_receive) opened.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Ends the current receive request with an error.
    pub fn fail_receive(&mut self, qp: &QpCommon, status: u8) {
        self.parts.clear();
        if let Some(request) = self.current.take() {
            if status != WC_STATUS_WR_FLUSH_ERR {
                qp.traffic.add([(Count::FailedReceives, 1)]);
            }
            self.push(
                qp,
                &Completion {
                    wr_id: request.wr_id.into(),
                    status,
                    opcode: WC_OPCODE_RECV,
                    qp_num: qp.number.into(),
                    ..Default::default()
                },
                true,
            );
            self.spare = request;
        }
    }

    /// Ends the current receive request with an error for a fault of the message that has taken it,
    /// with the status that the receiver gets (IBTA 11.6.2), whatever its peer does. A message that
    /// is dropped leaves a request of one's own to the next one.
    pub(super) fn spoil_receive(&mut self, qp: &QpCommon, status: u8) {
        if qp.transport.is_acknowledged() || matches!(self.receives, Receives::Shared(_)) {
            self.fail_receive(qp, status);
        }
    }

    /// Completes the current receive request: a whole message has arrived.
    pub fn complete_receive(&mut self, qp: &QpCommon, arrival: &Arrival) {
        self.parts.clear();
        let Some(request) = self.current.take() else {
            return;
        };
        // Of a datagram the header is no payload, of a write the bytes are counted with that.
        let bytes = match (arrival.by_write, qp.transport.is_addressed()) {
            (true, _) => 0,
            (false, true) => arrival.length.saturating_sub(GRH_BYTES),
            (false, false) => arrival.length,
        };
        qp.traffic
            .add([(Count::Receives, 1), (Count::ReceiveBytes, bytes.into())]);
        let completion = Completion {
            wr_id: request.wr_id.into(),
            opcode: if arrival.by_write {
                WC_OPCODE_RECV_RDMA_WITH_IMM
            } else {
                WC_OPCODE_RECV
            },
            flags: (arrival.word.flags() | arrival.flags).into(),
            byte_len: arrival.length.into(),
            imm: arrival.word.value().into(),
            qp_num: qp.number.into(),
            src_qp: arrival.from.into(),
            vendor_err: arrival.route.into(),
            ..Default::default()
        };
        self.spare = request;
        self.push(qp, &completion, arrival.solicited);
    }

    /// The message under way is over: what it has named is kept no longer.
    pub fn end_message(&mut self) {
        self.named = None;
    }

    fn push(&mut self, qp: &QpCommon, completion: &Completion, solicited: bool) {
        let pushed = match &self.named {
            Some(named) => named.push(completion, solicited),
            None => qp.recv_cq.push(completion, solicited),
        };
        if pushed.is_err() {
            self.dead = true;
            if qp.enter_error() {
                (qp.events)(EVENT_QP_FATAL);
            }
        }
    }

    /// Flushes at most `most` receive requests; returns how many.
    pub fn flush(&mut self, qp: &QpCommon, most: u32) -> u32 {
        let mut count = 0;
        while count < most && !self.dead {
            // What is in a shared queue is for others.
            let is_shared = !matches!(self.receives, Receives::Own(_));
            if self.current.is_none() && (is_shared || self.take(qp).is_none()) {
                break;
            }
            self.fail_receive(qp, WC_STATUS_WR_FLUSH_ERR);
            count += 1;
        }
        if self.current.is_none() {
            self.end_message();
        }
        self.tell_last(qp);
        count
    }

    /// Tells that no shared receive request is with it any more, where that is so (IBTA 11.6.3.1,
    /// Last WQE Reached).
    fn tell_last(&mut self, qp: &QpCommon) {
        let is_last = self.dead || self.current.is_none();
        let is_shared = matches!(self.receives, Receives::Shared(_));
        if is_shared && is_last && !std::mem::replace(&mut self.told_last, true) {
            (qp.events)(EVENT_QP_LAST_WQE_REACHED);
        }
    }
}
