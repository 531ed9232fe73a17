//! A message between two queue pairs: its bytes move from one's memory to the other's.

use super::common::QpCommon;
use super::gather::{Failed, Source, move_message, read_message};
use super::responder::{Nak, Responder};
use crate::engine::Spending;
use crate::memory::{Part, Use};
use crate::request::{Opcode, SendWqe};
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
    fn finish(&mut self, budget: &mut Spending) {
        budget.take(self.length.into());
        self.done = self.length.into();
    }

    /// Takes note of moved bytes. Returns whether all have arrived.
    fn advance(&mut self, bytes: u64) -> bool {
        self.done += bytes;
        self.done == u64::from(self.length)
    }
}

/// A request and its two ends.
pub struct Message<'a> {
    pub request: &'a SendWqe,
    /// Memory of the requester that the request names.
    pub parts: &'a [Part],
    pub peer: &'a QpCommon,
    pub responder: &'a mut Responder,
}

impl<'a> Message<'a> {
    /// Moves bytes within a budget. Returns whether all have arrived.
    pub fn go_on(
        &mut self,
        transfer: &mut Transfer,
        budget: &mut Spending,
    ) -> Result<bool, Refusal> {
        if transfer.done == 0 {
            self.responder.address(self.peer, self.request.target)?;
        }
        // Held while bytes move: whoever ends the queue waits for it.
        let named = self.responder.named();
        let held = named.as_deref().map(XrcReceives::hold);
        if matches!(held, Some(None)) {
            return Err(self.responder.refuse_queue(self.peer).into());
        }
        match self.request.opcode {
            Opcode::Send | Opcode::SendImm => self.send(transfer, budget),
            Opcode::SendInvalidate(key) => {
                let arrived = self.send(transfer, budget)?;
                if arrived {
                    self.responder.invalidate(self.peer, key)?;
                }
                Ok(arrived)
            }
            Opcode::Write | Opcode::WriteImm | Opcode::Read => self.rdma(transfer, budget),
            Opcode::CompareSwap { compare, swap } => {
                self.fetch(transfer, budget, AtomicOp::CompareSwap { compare, swap })
            }
            Opcode::FetchAdd { add } => self.fetch(transfer, budget, AtomicOp::FetchAdd(add)),
            Opcode::AtomicWrite => self.store(transfer, budget),
            // They are no messages.
            Opcode::LocalInvalidate(_) | Opcode::Bind(_) => {
                Err(Refusal::Local(WC_STATUS_LOC_QP_OP_ERR))
            }
        }
    }

    fn source(&self) -> Source<'a> {
        let inline = self.request.inline();
        inline.map_or(Source::Parts(self.parts), Source::Inline)
    }

    fn send(&mut self, transfer: &mut Transfer, budget: &mut Spending) -> Result<bool, Refusal> {
        if transfer.done == 0 {
            self.responder.ready_receive(self.peer)?;
            self.responder
                .open_receive(self.peer, transfer.length.into())?;
        }
        let n = transfer.share(budget);
        let counters = &self.peer.counters;
        let parts = self.responder.parts();
        match move_message(counters, parts, self.source(), transfer.done, n) {
            Ok(()) => Ok(transfer.advance(n)),
            Err(Failed::Source(e)) => {
                log::debug!("Send: local memory: {e}");
                Err(Refusal::Local(WC_STATUS_LOC_PROT_ERR))
            }
            Err(Failed::Destination(e)) => {
                log::debug!("Send: peer's receive memory: {e}");
                self.responder
                    .fail_receive(self.peer, WC_STATUS_LOC_PROT_ERR);
                let (status, event) = (WC_STATUS_REM_OP_ERR, EVENT_QP_FATAL);
                Err(self.responder.break_down(self.peer, status, event).into())
            }
        }
    }

    fn rdma(&mut self, transfer: &mut Transfer, budget: &mut Spending) -> Result<bool, Refusal> {
        let read = self.request.opcode == Opcode::Read;
        if transfer.done == 0 && self.request.opcode.consumes_receive() {
            self.responder.ready_receive(self.peer)?;
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
        let remote = self.responder.open_remote(
            self.peer,
            self.request.rkey,
            self.request.remote_address,
            transfer.length.into(),
            wanted,
        )?;
        let remote = std::slice::from_ref(&remote);
        let counters = &self.peer.counters;
        let moved = match read {
            true => move_message(
                counters,
                self.parts,
                Source::Parts(remote),
                transfer.done,
                n,
            ),
            false => move_message(counters, remote, self.source(), transfer.done, n),
        };
        match (moved, read) {
            (Ok(()), _) => Ok(transfer.advance(n)),
            (Err(Failed::Source(e)), true) | (Err(Failed::Destination(e)), false) => {
                log::debug!("RDMA: peer's memory: {e}");
                let (status, event) = (WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR);
                Err(self.responder.refuse(self.peer, status, event).into())
            }
            (Err(Failed::Source(e) | Failed::Destination(e)), _) => {
                log::debug!("RDMA: local memory: {e}");
                Err(Refusal::Local(WC_STATUS_LOC_PROT_ERR))
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
        let old = self.operate(Use::RemoteAtomic, operation)?.to_ne_bytes();
        let (counters, length) = (&self.peer.counters, WORD_BYTES.into());
        let moved = move_message(counters, self.parts, Source::Inline(&old), 0, length);
        moved.map_err(|(Failed::Source(e) | Failed::Destination(e))| {
            log::debug!("Atomic operation: local memory: {e}");
            Refusal::Local(WC_STATUS_LOC_PROT_ERR)
        })?;
        transfer.finish(budget);
        Ok(true)
    }

    /// A write of a word at once.
    fn store(&mut self, transfer: &mut Transfer, budget: &mut Spending) -> Result<bool, Refusal> {
        let mut word = u64::default().to_ne_bytes();
        read_message(self.source(), &mut word).map_err(|e| {
            log::debug!("Atomic write: local memory: {e}");
            Refusal::Local(WC_STATUS_LOC_PROT_ERR)
        })?;
        let operation = AtomicOp::Store(u64::from_ne_bytes(word));
        self.operate(Use::RemoteWrite, operation)?;
        transfer.finish(budget);
        Ok(true)
    }

    /// Carries out an operation on a word of the peer's memory, and returns what was there.
    fn operate(&mut self, wanted: Use, operation: AtomicOp) -> Result<u64, Refusal> {
        let address = self.request.remote_address;
        let remote = self.responder.open_remote(
            self.peer,
            self.request.rkey,
            address,
            WORD_BYTES.into(),
            wanted,
        )?;
        // By its address at the peer (IBTA 9.4.5), and by that of the memory, which may be another.
        let outcome = match address.is_multiple_of(WORD_BYTES.into()) {
            true => {
                let locks = self.peer.memory.word_locks();
                remote.region.atomic(remote.offset, operation, locks)
            }
            false => Err(RegionError::Misaligned { address }),
        };
        let (status, event) = match outcome {
            Ok(old) => return Ok(old),
            Err(RegionError::Busy) => return Err(Refusal::Busy),
            Err(RegionError::Misaligned { .. }) => (WC_STATUS_REM_INV_REQ_ERR, EVENT_QP_REQ_ERR),
            Err(_) => (WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR),
        };
        log::debug!("Atomic operation: peer's memory: {outcome:?}");
        Err(self.responder.refuse(self.peer, status, event).into())
    }
}
