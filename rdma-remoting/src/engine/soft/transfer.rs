//! A message that comes in: what the responder's half does with it, whatever has carried it.

use super::carrier::{Failed, Payload, Sender};
use super::common::QpCommon;
use super::responder::{Nak, Responder};
use crate::engine::Spending;
use crate::memory::Use;
use crate::request::{Opcode, SendWqe};
use crate::traffic::Count;
use crate::xrc::XrcReceives;
use farlane_abi::queue::{
    WC_STATUS_LOC_PROT_ERR, WC_STATUS_LOC_QP_OP_ERR, WC_STATUS_REM_ACCESS_ERR,
    WC_STATUS_REM_INV_REQ_ERR, WC_STATUS_REM_OP_ERR,
};
use farlane_abi::rdma::{EVENT_QP_ACCESS_ERR, EVENT_QP_FATAL, EVENT_QP_REQ_ERR};
use farlane_zero_copy::{AtomicOp, RegionError};

/// Bytes of the word of an atomic operation.
pub const WORD_BYTES: u32 = 8;

/// Why a step got no further.
pub enum Refusal {
    /// The responder does not answer.
    Unanswered,
    /// The responder has answered with a NAK.
    Nak(Nak),
    /// The word of an atomic operation is in use for long. Nothing has changed.
    Busy,
    /// The requester's own memory: the status that its request completes with.
    Local(u8),
}

impl From<Nak> for Refusal {
    fn from(nak: Nak) -> Self {
        Self::Nak(nak)
    }
}

/// How far a message has come.
pub struct Transfer {
    /// Bytes moved.
    pub done: u64,
    /// Bytes of the message.
    pub length: u32,
}

impl Transfer {
    pub fn new(length: u32) -> Self {
        Self { done: 0, length }
    }

    /// Whether there are bytes to move.
    pub fn is_left(&self) -> bool {
        self.done < u64::from(self.length)
    }

    /// The bytes that it moves at once within a budget.
    fn share(&self, budget: &mut Spending) -> u64 {
        budget.take_portion(u64::from(self.length) - self.done)
    }

    /// Takes note that it has moved whole, whatever the budget: it is short.
    pub(super) fn finish(&mut self, budget: &mut Spending) {
        budget.take(self.length.into());
        self.done = self.length.into();
    }

    /// Takes note of moved bytes. Returns whether all have arrived.
    fn advance(&mut self, bytes: u64) -> bool {
        self.done += bytes;
        self.done == u64::from(self.length)
    }
}

/// A message, and who receives it.
pub struct Incoming<'a, P> {
    pub from: &'a Sender,
    pub request: &'a SendWqe,
    pub payload: P,
    pub qp: &'a QpCommon,
    pub responder: &'a mut Responder,
}

impl<P: Payload> Incoming<'_, P> {
    /// Moves bytes within a budget. Returns whether all have arrived.
    pub fn go_on(
        &mut self,
        transfer: &mut Transfer,
        budget: &mut Spending,
    ) -> Result<bool, Refusal> {
        if !self.responder.answers(self.qp, self.from) {
            return Err(Refusal::Unanswered);
        }
        self.responder.hears(self.qp, self.from.life);
        if transfer.done == 0 {
            self.responder.address(self.qp, self.request.target)?;
        }
        // Held while bytes move: whoever ends the queue waits for it.
        let named = self.responder.named();
        let held = named.as_deref().map(XrcReceives::hold);
        if matches!(held, Some(None)) {
            return Err(self.responder.refuse_queue(self.qp).into());
        }
        let arrived = self.carry_out(transfer, budget)?;
        if arrived {
            self.count(transfer.length.into());
        }
        Ok(arrived)
    }

    /// Counts a message of so many bytes that has arrived. What takes a receive request is counted
    /// with that.
    fn count(&self, bytes: u64) {
        let traffic = &self.qp.traffic;
        match self.request.opcode {
            Opcode::Write | Opcode::WriteImm | Opcode::AtomicWrite => {
                traffic.add([(Count::PeerWrites, 1), (Count::WrittenBytes, bytes)]);
            }
            Opcode::Read => traffic.add([(Count::PeerReads, 1), (Count::AnsweredBytes, bytes)]),
            Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } => {
                traffic.add([(Count::PeerAtomics, 1)]);
            }
            _ => {}
        }
    }

    fn carry_out(
        &mut self,
        transfer: &mut Transfer,
        budget: &mut Spending,
    ) -> Result<bool, Refusal> {
        match self.request.opcode {
            Opcode::Send | Opcode::SendImm => self.send(transfer, budget),
            Opcode::SendInvalidate(key) => {
                let arrived = self.send(transfer, budget)?;
                if arrived {
                    self.responder.invalidate(self.qp, key)?;
                }
                Ok(arrived)
            }
            Opcode::Write | Opcode::WriteImm | Opcode::Read => self.rdma(transfer, budget),
            Opcode::CompareSwap { compare, swap } => {
                self.fetch(transfer, budget, AtomicOp::CompareSwap { compare, swap })
            }
            Opcode::FetchAdd { add } => self.fetch(transfer, budget, AtomicOp::FetchAdd(add)),
            Opcode::AtomicWrite => self.store(transfer, budget),
            Opcode::Flush(flush) => {
                let named = (self.request.rkey, self.request.remote_address);
                self.responder.flush_memory(self.qp, named, flush)?;
                Ok(true)
            }
            // They are no messages.
            Opcode::LocalInvalidate(_) | Opcode::Bind(_) | Opcode::Register(_) => {
                Err(Refusal::Local(WC_STATUS_LOC_QP_OP_ERR))
            }
        }
    }

    fn send(&mut self, transfer: &mut Transfer, budget: &mut Spending) -> Result<bool, Refusal> {
        if transfer.done == 0 {
            self.responder.ready_receive(self.qp)?;
            self.responder
                .open_receive(self.qp, transfer.length.into())?;
        }
        let n = transfer.share(budget);
        let parts = self.responder.parts();
        match self.payload.write(parts, 0, transfer.done, n) {
            Ok(()) => Ok(transfer.advance(n)),
            Err(Failed::Requester(e)) => Err(requesters_memory(&e)),
            Err(Failed::Responder(e)) => {
                log::debug!("Send: receive memory: {e}");
                self.responder.fail_receive(self.qp, WC_STATUS_LOC_PROT_ERR);
                let (status, event) = (WC_STATUS_REM_OP_ERR, EVENT_QP_FATAL);
                Err(self.responder.break_down(self.qp, status, event).into())
            }
        }
    }

    fn rdma(&mut self, transfer: &mut Transfer, budget: &mut Spending) -> Result<bool, Refusal> {
        let read = self.request.opcode == Opcode::Read;
        if transfer.done == 0 && self.request.opcode.consumes_receive() {
            self.responder.ready_receive(self.qp)?;
        }
        // Without bytes the key is not looked at (IBTA 9.7.4.1.1).
        if transfer.length == 0 {
            return Ok(true);
        }
        let n = transfer.share(budget);
        let wanted = match read {
            true => Use::RemoteRead,
            false => Use::RemoteWrite,
        };
        // The whole of it is checked before its first byte moves, and again each turn, since the
        // key may be gone by then.
        let named = self.responder.open_remote(
            self.qp,
            self.request.rkey,
            self.request.remote_address,
            transfer.length.into(),
            wanted,
        )?;
        let named = std::slice::from_ref(&named);
        let moved = match read {
            true => self.payload.read(named, transfer.done, n),
            false => self.payload.write(named, 0, transfer.done, n),
        };
        match moved {
            Ok(()) => Ok(transfer.advance(n)),
            Err(Failed::Requester(e)) => Err(requesters_memory(&e)),
            Err(Failed::Responder(e)) => {
                log::debug!("RDMA: memory that the peer names: {e}");
                let (status, event) = (WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR);
                Err(self.responder.refuse(self.qp, status, event).into())
            }
        }
    }

    /// An operation whose word the requester gets as it was. It is carried out once: where that
    /// fails nothing has changed, and where the requester's memory has gone in between its request
    /// fails and is not tried again.
    fn fetch(
        &mut self,
        transfer: &mut Transfer,
        budget: &mut Spending,
        operation: AtomicOp,
    ) -> Result<bool, Refusal> {
        let old = self.operate(Use::RemoteAtomic, operation)?;
        let answered = self.payload.answer(old);
        answered.map_err(|e| requesters_memory(&e))?;
        transfer.finish(budget);
        Ok(true)
    }

    /// A write of a word at once.
    fn store(&mut self, transfer: &mut Transfer, budget: &mut Spending) -> Result<bool, Refusal> {
        let word = self.payload.operand().map_err(|e| requesters_memory(&e))?;
        self.operate(Use::RemoteWrite, AtomicOp::Store(word))?;
        transfer.finish(budget);
        Ok(true)
    }

    /// Carries out an operation on a word that the peer names, and returns what was there.
    fn operate(&mut self, wanted: Use, operation: AtomicOp) -> Result<u64, Refusal> {
        let address = self.request.remote_address;
        let named = self.responder.open_remote(
            self.qp,
            self.request.rkey,
            address,
            WORD_BYTES.into(),
            wanted,
        )?;
        // By its address here (IBTA 9.4.5), and by that of the memory, which may be another.
        let outcome = match address.is_multiple_of(WORD_BYTES.into()) {
            true => {
                let locks = self.responder.memory(self.qp).word_locks();
                named.region.atomic(named.offset, operation, locks)
            }
            false => Err(RegionError::Misaligned { address }),
        };
        let (status, event) = match outcome {
            Ok(old) => return Ok(old),
            Err(RegionError::Busy) => return Err(Refusal::Busy),
            Err(RegionError::Misaligned { .. }) => (WC_STATUS_REM_INV_REQ_ERR, EVENT_QP_REQ_ERR),
            Err(_) => (WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR),
        };
        log::debug!("Atomic operation: memory that the peer names: {outcome:?}");
        Err(self.responder.refuse(self.qp, status, event).into())
    }
}

/// The requester's own memory could not be accessed.
fn requesters_memory(e: &RegionError) -> Refusal {
    log::debug!("A message: memory of its requester: {e}");
    Refusal::Local(WC_STATUS_LOC_PROT_ERR)
}
