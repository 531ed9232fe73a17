//! Requests over a connection, and those of the requester's side alone.

use super::super::carrier::{Carrier, Message, Peer as _, Reached, Sender, Session as _};
use super::super::common::QpCommon;
use super::super::fabric::QpName;
use super::super::responder::{Arrival, Nak};
use super::super::transfer::{Refusal, Transfer};
use super::waiting::Wait;
use super::{Active, Requester, Step};
use crate::engine::Spending;
use crate::request::Opcode;
use crate::traffic::Count;
use farlane_abi::queue::{WC_STATUS_LOC_QP_OP_ERR, WC_STATUS_MW_BIND_ERR};
use farlane_zero_copy::topology::Node;

impl<C: Carrier> Requester<C> {
    /// What it says of itself with the message at hand.
    pub(super) fn sender(&self, qp: &QpCommon) -> Sender {
        let is_under_way = |active: &Active| active.transfer.done > 0;
        Sender {
            number: qp.number,
            address: qp.address,
            transport: qp.transport,
            life: self.life,
            started: self.started,
            psn: self.attr.sq_psn.get(),
            is_under_way: self.active.as_ref().is_some_and(is_under_way),
        }
    }

    /// Whether the request at hand, which waits so, would get further without a timer.
    pub(super) fn has_awaited(&self, qp: &QpCommon, wait: Wait) -> bool {
        let peer = C::Peer::upgrade(&self.peer).or_else(|| self.find_peer(qp));
        peer.is_some_and(|peer| {
            let session = peer.session();
            let is_answered = session.answers(&self.sender(qp));
            match wait {
                Wait::Answer => is_answered,
                // Its timer says when.
                Wait::Word => false,
                Wait::Receiver(_) => !is_answered || session.can_receive(),
            }
        })
    }

    pub(super) fn find_peer(&self, qp: &QpCommon) -> Option<C::Peer> {
        let name = self.peer_name?;
        let destination = qp.resolve(name.destination)?;
        self.carrier.find(QpName {
            destination,
            ..name
        })
    }

    /// The peer, looked for once; none where there is none.
    pub(super) fn peer(&mut self, qp: &QpCommon) -> Option<C::Peer> {
        if let Some(peer) = C::Peer::upgrade(&self.peer) {
            return Some(peer);
        }
        let peer = self.find_peer(qp)?;
        self.peer = peer.downgrade();
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
    pub(super) fn dropped(&mut self, qp: &QpCommon) -> Step {
        log::debug!("{}: nobody receives a message", qp.number);
        if let Some(active) = self.active.take() {
            qp.traffic.add([(Count::Dropped, 1)]);
            // What was sent of it is none of the next one.
            self.unheard.0 += 1;
            let Transfer { done, length } = active.transfer;
            self.complete(qp, length, done);
        }
        Step::Dropped
    }

    /// Carries out the request at hand, where it concerns this side alone.
    pub(super) fn local_step(&mut self, qp: &QpCommon) -> Option<Step> {
        let (outcome, status) = match self.request.opcode {
            Opcode::Register(wanted) => {
                let outcome = qp.memory.register(qp.pd, &wanted);
                (outcome.map_err(|e| e.to_string()), WC_STATUS_LOC_QP_OP_ERR)
            }
            Opcode::Bind(binding) => {
                let outcome = qp.memory.bind((qp.pd, qp.binder), &binding);
                (outcome.map_err(|e| e.to_string()), WC_STATUS_MW_BIND_ERR)
            }
            Opcode::LocalInvalidate(key) => {
                let outcome = qp.memory.invalidate(qp.pd, None, key);
                (outcome.map_err(|e| e.to_string()), WC_STATUS_LOC_QP_OP_ERR)
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

    /// Moves some of the message at hand over the connection, on a worker of `node`.
    pub(super) fn send(
        &mut self,
        qp: &QpCommon,
        node: Option<Node>,
        budget: &mut Spending,
    ) -> Step {
        let Some(peer) = self.peer(qp) else {
            return self.unanswered(qp);
        };
        let from = self.sender(qp);
        let Some(active) = self.active.as_mut() else {
            return Step::Failed(WC_STATUS_LOC_QP_OP_ERR);
        };
        let message = Message {
            from: &from,
            sequence: self.unheard,
            request: &self.request,
            parts: &self.parts,
        };
        // Held while bytes move: whoever ends the peer waits for it.
        let mut session = peer.session();
        let outcome = loop {
            let outcome = session.go_on(&message, &mut active.transfer, budget);
            if !matches!(outcome, Err(Refusal::Unanswered)) {
                self.started = session.life().or(self.started);
            }
            match outcome {
                Ok(Reached::Part) if budget.goes_on() => {}
                outcome => break outcome,
            }
        };
        match outcome {
            Ok(Reached::Part) => {
                active.waiting = None;
                Step::More
            }
            // Nothing more is heard of it.
            Ok(Reached::Sent) => {
                let length = active.transfer.length;
                drop(session);
                self.unheard.0 += 1;
                self.tell_transferred(node);
                self.complete(qp, length, length.into());
                Step::Done
            }
            Ok(Reached::Arrived) => {
                // The sender is told first: when the receiver's answer is there, the completion of
                // what it answers is, as where an acknowledgement precedes the answer on the wire.
                // Programs with a completion queue of one entry rely on it.
                let length = active.transfer.length;
                let arrival = Arrival::of(&self.request, qp.number, length);
                self.tell_transferred(node);
                self.complete(qp, length, length.into());
                session.complete(arrival.as_ref());
                Step::Done
            }
            Err(Refusal::Nak(Nak::NotReady(answer))) => {
                session.await_receive(qp);
                Step::Wait(Wait::Receiver(answer))
            }
            Err(Refusal::Busy) => {
                budget.looked_in_vain();
                Step::Wait(Wait::Word)
            }
            Err(Refusal::Unanswered) => {
                drop(session);
                self.peer = Default::default();
                self.unanswered(qp)
            }
            Err(Refusal::Nak(Nak::Dropped)) => self.dropped(qp),
            Err(Refusal::Nak(Nak::Fatal(status)) | Refusal::Local(status)) => Step::Failed(status),
        }
    }
}
