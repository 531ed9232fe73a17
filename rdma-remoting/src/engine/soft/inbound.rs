//! Fragments of messages as a carrier brings them that may lose, double and reorder them: the
//! responder takes them in order, and carries each out once (IBTA 9.7.4, 9.7.5).

use super::carrier::{Acknowledgement, Failed, Payload, Position, Sender, Sequence};
use super::common::QpCommon;
use super::responder::{Arrival, Nak, Responder};
use super::transfer::{Incoming, Refusal, Transfer, WORD_BYTES};
use crate::engine::{Budget, Spending};
use crate::memory::Part;
use crate::request::{Opcode, SendWqe};
use farlane_abi::queue::{MAX_MESSAGE_BYTES, WC_STATUS_REM_INV_REQ_ERR};
use farlane_abi::rdma::EVENT_QP_REQ_ERR;
use farlane_zero_copy::RegionError;
use std::collections::VecDeque;

/// Where a responder is in what its peer sends.
#[derive(Debug, Default)]
pub struct Inbound {
    /// What it expects.
    next: Position,
    /// What the message is whose beginning it has, and its bytes: the rest is of the same.
    under_way: Option<(Opcode, u32)>,
    /// It has said what it misses, or is not ready for: what comes besides is dropped.
    has_complained: bool,
    /// Words that atomic operations have fetched, the last ones, to be answered again.
    fetched: VecDeque<(Sequence, u64)>,
}

/// Part of a request, as it came in: checked.
#[derive(Clone, Copy, Debug)]
pub struct Fragment<'a> {
    /// What is asked for; the memory of the requester is not looked at.
    request: &'a SendWqe,
    /// Bytes of the message.
    length: u32,
    at: Position,
    /// Bytes of it in this fragment: those that it has, and of a read those that it asks for.
    bytes: u64,
}

impl<'a> Fragment<'a> {
    /// So many bytes from this place on of a message of `length`. `None` where it has not so many,
    /// or there is no such message.
    pub fn new(request: &'a SendWqe, length: u32, at: Position, bytes: u64) -> Option<Self> {
        let is_inside = match length {
            0 => at.offset == 0 && bytes == 0,
            _ => bytes > 0 && u64::from(length).checked_sub(at.offset)? >= bytes,
        };
        let is_whole = length == WORD_BYTES && bytes == u64::from(WORD_BYTES);
        let is_message = match request.opcode {
            Opcode::LocalInvalidate(_) | Opcode::Bind(_) | Opcode::Register(_) => false,
            Opcode::Flush(_) => length == 0,
            opcode => !opcode.is_atomic() || is_whole,
        };
        (is_inside && is_message && length <= MAX_MESSAGE_BYTES).then_some(Self {
            request,
            length,
            at,
            bytes,
        })
    }
}

impl Transfer {
    /// Takes note that it has moved the next bytes, as many as there are of it and of `most`,
    /// within a budget. Returns how many: of an atomic operation all, whatever the budget.
    pub fn take_fragment(&mut self, of: Opcode, most: u64, budget: &mut Spending) -> u64 {
        if of.is_atomic() {
            self.finish(budget);
            return self.done;
        }
        let bytes = budget.take(most.min(u64::from(self.length) - self.done));
        self.done += bytes;
        bytes
    }
}

/// A payload, of which the word is kept that it answers.
struct Keeping<'a, P> {
    payload: &'a mut P,
    word: Option<u64>,
}

impl<P: Payload> Payload for Keeping<'_, P> {
    fn write(&mut self, to: &[Part], header: u64, offset: u64, length: u64) -> Result<(), Failed> {
        self.payload.write(to, header, offset, length)
    }

    fn read(&mut self, from: &[Part], offset: u64, length: u64) -> Result<(), Failed> {
        self.payload.read(from, offset, length)
    }

    fn operand(&mut self) -> Result<u64, RegionError> {
        self.payload.operand()
    }

    fn answer(&mut self, word: u64) -> Result<(), RegionError> {
        self.word = Some(word);
        // It is carried out: an answer that cannot go is lost, and asked for again.
        if let Err(e) = self.payload.answer(word) {
            log::debug!("An answer to an atomic operation does not go: {e}");
        }
        Ok(())
    }
}

impl Responder {
    /// Takes a fragment of a connection. What it fetches goes into `payload`; returns what is
    /// answered besides, after that: nothing where the transport has no answers.
    pub fn receive<P: Payload>(
        &mut self,
        qp: &QpCommon,
        from: &Sender,
        fragment: &Fragment<'_>,
        payload: &mut P,
    ) -> Option<Acknowledgement> {
        if !self.answers(qp, from) {
            return None;
        }
        if !qp.transport.is_acknowledged() {
            self.receive_unanswered(qp, from, fragment, payload);
            return None;
        }
        let next = self.inbound.next;
        if fragment.at > next {
            // Once, until it has come (IBTA 9.7.5.1.2).
            let is_first = !std::mem::replace(&mut self.inbound.has_complained, true);
            return is_first.then_some(Acknowledgement::Missing(next));
        }
        if fragment.at < next {
            return self.receive_again(qp, from, fragment, payload);
        }
        let is = (fragment.request.opcode, fragment.length);
        if next.offset > 0 && self.inbound.under_way != Some(is) {
            let nak = self.break_down(qp, WC_STATUS_REM_INV_REQ_ERR, EVENT_QP_REQ_ERR);
            return Some(Acknowledgement::Refused(next.message, nak));
        }
        self.inbound.under_way = Some(is);
        match self.carry_out(qp, from, fragment, payload) {
            Ok(word) => {
                self.inbound.has_complained = false;
                if self.come_behind(qp, from, fragment) {
                    self.keep(next.message, word);
                }
                Some(Acknowledgement::Arrived(self.inbound.next))
            }
            Err(Refusal::Nak(Nak::Dropped)) => None,
            Err(Refusal::Nak(nak)) => {
                self.inbound.has_complained = true;
                Some(Acknowledgement::Refused(next.message, nak))
            }
            // It comes again, when its requester misses the answer.
            Err(Refusal::Unanswered | Refusal::Busy | Refusal::Local(_)) => None,
        }
    }

    /// Takes a fragment of a connection without answers: of the message whose beginning it has, as
    /// far as nothing of it is missing, or the beginning of a later one (IBTA 9.8.2.2).
    fn receive_unanswered<P: Payload>(
        &mut self,
        qp: &QpCommon,
        from: &Sender,
        fragment: &Fragment<'_>,
        payload: &mut P,
    ) {
        if !self.has_heard(from) && fragment.at.offset == 0 {
            // Another life of its peer, which counts anew.
            self.inbound = Inbound::default();
        }
        let is = (fragment.request.opcode, fragment.length);
        let goes_on = fragment.at == self.inbound.next && self.inbound.under_way == Some(is);
        let begins = fragment.at.offset == 0 && fragment.at >= self.inbound.next;
        if !begins && !goes_on {
            return;
        }
        (self.inbound.next, self.inbound.under_way) = (fragment.at, Some(is));
        if self.carry_out(qp, from, fragment, payload).is_ok() {
            self.come_behind(qp, from, fragment);
        }
    }

    /// A fragment was carried out: goes on behind it. Returns whether its message is complete.
    fn come_behind(&mut self, qp: &QpCommon, from: &Sender, fragment: &Fragment<'_>) -> bool {
        let Position { message, offset } = fragment.at;
        let next = Position::behind(message, offset + fragment.bytes, fragment.length);
        self.inbound.next = next;
        let is_whole = next.message > message;
        if is_whole {
            let arrival = Arrival::of(fragment.request, from.number, fragment.length);
            if let Some(arrival) = arrival {
                self.complete_receive(qp, &arrival);
            }
            self.end_message();
        }
        is_whole
    }

    /// Does what a fragment asks for. Returns the word that an atomic operation has fetched.
    fn carry_out<P: Payload>(
        &mut self,
        qp: &QpCommon,
        from: &Sender,
        fragment: &Fragment<'_>,
        payload: &mut P,
    ) -> Result<Option<u64>, Refusal> {
        let mut transfer = Transfer {
            done: fragment.at.offset,
            length: fragment.length,
        };
        let mut budget = Budget::UNBOUNDED.within(fragment.bytes, 1).spend();
        let mut incoming = Incoming {
            from,
            request: fragment.request,
            payload: Keeping {
                payload,
                word: None,
            },
            qp,
            responder: self,
        };
        incoming.go_on(&mut transfer, &mut budget)?;
        Ok(incoming.payload.word)
    }

    /// Takes what it has carried out before: its answer was lost (IBTA 9.7.5.1.4).
    fn receive_again<P: Payload>(
        &mut self,
        qp: &QpCommon,
        from: &Sender,
        fragment: &Fragment<'_>,
        payload: &mut P,
    ) -> Option<Acknowledgement> {
        match fragment.request.opcode {
            Opcode::Read => {
                // It is read anew, as far as it was before: the rest is missing. The message under
                // way stays as it is.
                let Position { message, offset } = self.inbound.next;
                let most = match message == fragment.at.message {
                    true => offset - fragment.at.offset,
                    false => fragment.bytes,
                };
                let bytes = fragment.bytes.min(most);
                let fragment = &Fragment { bytes, ..*fragment };
                let named = self.named.clone();
                let outcome = self.carry_out(qp, from, fragment, payload);
                self.named = named;
                match outcome {
                    Ok(_) => {}
                    Err(Refusal::Nak(nak @ Nak::Fatal(_))) => {
                        return Some(Acknowledgement::Refused(fragment.at.message, nak));
                    }
                    Err(_) => return None,
                }
            }
            Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } => {
                let mut kept = self.inbound.fetched.iter();
                let (_, word) = kept.find(|(of, _)| *of == fragment.at.message)?;
                payload.answer(*word).ok()?;
            }
            _ => {}
        }
        Some(Acknowledgement::Arrived(self.inbound.next))
    }

    /// Keeps the word that a message has fetched.
    fn keep(&mut self, message: Sequence, word: Option<u64>) {
        let Some(word) = word else {
            return;
        };
        let most = usize::from(self.attr.max_dest_rd_atomic);
        let fetched = &mut self.inbound.fetched;
        fetched.push_back((message, word));
        let surplus = fetched.len().saturating_sub(most);
        fetched.drain(..surplus);
    }
}
