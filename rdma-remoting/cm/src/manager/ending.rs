//! How connections end (IBTA 12.9.7, 12.9.8).

use super::Manager;
use crate::connection::{State, Timer};
use crate::event::{CallError, Event, Ports};
use crate::fields::{About, AdditionalInfo, CommId, PrivateData, RejectReason};
use crate::message::{Drep, Dreq, Message, Rej, TransactionId};
use crate::orphans::Orphan;
use crate::policy::{ANSWER_KEPT, END_TIMEOUT, REJECTIONS, bounded};
use std::time::Instant;

impl Manager {
    /// Rejects a request, or a reply.
    ///
    /// # Errors
    /// [`CallError::NoSuchId`], [`CallError::WrongState`].
    pub fn reject(
        &mut self,
        now: Instant,
        id: CommId,
        reason: RejectReason,
        private_data: PrivateData<148>,
    ) -> Result<(), CallError> {
        self.claim(id)?;
        match self.of_user(id)?.state {
            State::ReqReceived => {
                self.send_rej(id, reason, private_data);
                self.keep_answer(now, id);
                Ok(())
            }
            State::RepReceived => {
                self.send_rej(id, reason, private_data);
                self.end_of(id);
                Ok(())
            }
            State::RepSent { .. } => {
                self.send_rej(id, reason, private_data);
                self.wait_out_rejected(now, id);
                Ok(())
            }
            _ => Err(CallError::WrongState),
        }
    }

    /// Ends a connection, or answers its peer that does. One that ends already, or has ended, is
    /// left as it is.
    ///
    /// # Errors
    /// [`CallError::NoSuchId`], [`CallError::WrongState`].
    pub fn disconnect(&mut self, now: Instant, id: CommId) -> Result<(), CallError> {
        match self.of_user(id)?.state {
            State::Established => self.send_dreq(now, id),
            State::DreqReceived => {
                self.send_drep(id);
                self.wait_out(now, id);
            }
            State::DreqSent | State::Timewait | State::Ended => {}
            _ => return Err(CallError::WrongState),
        }
        Ok(())
    }

    /// Nobody uses a connection or a request any more: it ends as it must, without a word to its
    /// user.
    ///
    /// # Errors
    /// [`CallError::NoSuchId`].
    pub fn destroy(&mut self, now: Instant, id: CommId) -> Result<(), CallError> {
        self.claim(id)?;
        let consumer = RejectReason::CONSUMER_DEFINED;
        match self.of_user(id)?.state {
            State::ReqSent { .. } => {
                // Of what was not sent nobody needs to hear.
                let is_unheard = self.is_unheard(id);
                self.take_back(id);
                if !is_unheard {
                    self.send_rej(id, RejectReason::TIMEOUT, PrivateData::default());
                }
            }
            State::SidrReqSent => self.take_back(id),
            State::ReqReceived => {
                self.send_rej(id, consumer, PrivateData::default());
                self.keep_answer(now, id);
            }
            State::RepReceived => self.send_rej(id, consumer, PrivateData::default()),
            State::RepSent { .. } => {
                self.send_rej(id, consumer, PrivateData::default());
                self.wait_out_rejected(now, id);
            }
            State::Established => self.send_dreq(now, id),
            State::DreqReceived => {
                self.send_drep(id);
                self.wait_out(now, id);
            }
            State::SidrReqReceived => {
                self.send_sidr_rejection(id);
                self.keep_answer(now, id);
            }
            State::DreqSent | State::Timewait | State::Answered | State::Ended => {}
        }
        self.orphan(id);
        Ok(())
    }

    /// Has no user from now on.
    fn orphan(&mut self, id: CommId) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let (state, peer) = (connection.state, connection.peer);
        // If it was forgotten, its peer might never hear that it has ended.
        let is_ending = state == State::DreqSent || state == State::Timewait && connection.tells();
        if is_ending && self.ending.has_one_for(peer) {
            connection.orphan = Some(Orphan::Ending);
            self.ending.take(peer);
            return;
        }
        match state {
            State::DreqSent | State::Timewait | State::Answered => self.keep_for_a_while(id),
            _ if connection.unsent.is_empty() => self.remove(id),
            // It has a last word, of which its turn comes.
            _ => {
                self.end_of(id);
                self.keep_for_a_while(id);
            }
        }
    }

    /// It is no user's, and kept where there is room for it.
    fn keep_for_a_while(&mut self, id: CommId) {
        self.leave_user(id);
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let number = self.orphans.insert(connection.peer, id);
        connection.orphan = Some(Orphan::Kept(number));
        while let Some(surplus) = self.orphans.surplus() {
            self.remove(surplus);
        }
    }

    /// It does not count as one of a user any more.
    fn leave_user(&mut self, id: CommId) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        if std::mem::take(&mut connection.is_peers) {
            self.of_peers.give_back(connection.peer);
        }
        if connection.orphan == Some(Orphan::Ending) {
            connection.orphan = None;
            self.ending.give_back(connection.peer);
            self.ended.push_back(id);
        }
    }

    pub(super) fn remove(&mut self, id: CommId) {
        self.set_timer(id, None);
        self.unname(id);
        self.leave_user(id);
        if let Some(connection) = self.connections.remove(&id) {
            if let Some(Orphan::Kept(number)) = connection.orphan {
                self.orphans.remove(connection.peer, number);
            }
            self.send_the_rest(connection);
        }
    }

    /// A connection is over.
    pub(super) fn end(&mut self, id: CommId) {
        self.take_back(id);
        self.end_of(id);
        let connection = self.connections.get(&id);
        if connection.is_some_and(|one| one.orphan.is_some()) {
            self.remove(id);
        }
    }

    /// The same, but for what it has to say.
    pub(super) fn end_of(&mut self, id: CommId) {
        self.set_timer(id, None);
        self.unname(id);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.state = State::Ended;
            connection.last = None;
        }
    }

    /// A connection is over as soon as nothing of it is under way any more.
    pub(super) fn wait_out(&mut self, now: Instant, id: CommId) {
        self.unname_qpn(id);
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.state = State::Timewait;
        connection.last = None;
        let at = now + bounded(connection.under_way());
        self.take_back(id);
        self.set_timer(id, Some(Timer { at, retries: 0 }));
        if self.is_ending(id) {
            self.keep_for_a_while(id);
        }
    }

    /// The same, of one that its peer may take for established: a rejection has no answer, so it is
    /// sent several times.
    pub(super) fn wait_out_rejected(&mut self, now: Instant, id: CommId) {
        self.unname_qpn(id);
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.state = State::Timewait;
        connection.timeout = connection.timeout.min(END_TIMEOUT);
        let timer = Timer {
            at: now + connection.timeout,
            retries: REJECTIONS,
        };
        self.set_timer(id, Some(timer));
    }

    /// Nothing of it is sent again.
    pub(super) fn say_no_more(&mut self, id: CommId) {
        self.take_back(id);
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.last = None;
        if let Some(timer) = connection.timer {
            self.set_timer(
                id,
                Some(Timer {
                    retries: 0,
                    ..timer
                }),
            );
        }
    }

    /// Whether nothing of a connection that was asked for was sent.
    fn is_unheard(&self, id: CommId) -> bool {
        self.connections.get(&id).is_some_and(|connection| {
            let is_first = |timer: Timer| timer.retries == connection.max_retries;
            !connection.unsent.is_empty() && connection.timer.is_some_and(is_first)
        })
    }

    /// Whoever asks again gets the same answer.
    pub(super) fn keep_answer(&mut self, now: Instant, id: CommId) {
        self.unname_qpn(id);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.state = State::Answered;
        }
        let at = now + ANSWER_KEPT;
        self.set_timer(id, Some(Timer { at, retries: 0 }));
    }

    pub(super) fn answer_again(&mut self, now: Instant, id: CommId) {
        let connection = self.connections.get(&id);
        if connection.is_some_and(|one| one.state == State::Answered) {
            self.answer_by_last(id);
            self.keep_answer(now, id);
        }
    }

    fn send_dreq(&mut self, now: Instant, id: CommId) {
        let transaction = self.draw_transaction();
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.transaction = transaction;
        connection.timeout = connection.timeout.min(END_TIMEOUT);
        let remote_qpn = connection.terms.as_ref().map(|terms| terms.remote_qpn);
        let dreq = Dreq {
            local_comm_id: id,
            remote_comm_id: connection.remote_id.unwrap_or_default(),
            remote_qpn: remote_qpn.unwrap_or_default(),
            private_data: PrivateData::default(),
        };
        self.send_kept(id, Message::Dreq(dreq));
        self.await_answer(now, id, State::DreqSent);
    }

    fn send_drep(&mut self, id: CommId) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        let drep = Drep {
            local_comm_id: id,
            remote_comm_id: connection.remote_id.unwrap_or_default(),
            private_data: PrivateData::default(),
        };
        let (ports, transaction) = (connection.ports, connection.transaction);
        self.send(ports, transaction, Message::Drep(drep));
    }

    /// Rejects what the state says that there is.
    pub(super) fn send_rej(
        &mut self,
        id: CommId,
        reason: RejectReason,
        private_data: PrivateData<148>,
    ) {
        let guid = self.guid;
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        let about = match connection.state {
            State::ReqReceived => About::Req,
            State::RepReceived => About::Rep,
            _ => About::Other,
        };
        let info = match reason {
            // The adapter's GUID (IBTA table 109).
            RejectReason::TIMEOUT => AdditionalInfo::new(&guid.0.to_be_bytes()),
            _ => None,
        };
        let rej = Rej {
            local_comm_id: id,
            remote_comm_id: connection.remote_id.unwrap_or_default(),
            about,
            reason,
            info: info.unwrap_or_default(),
            private_data,
        };
        let rej = Message::Rej(rej);
        match connection.state {
            State::ReqReceived => self.answer_by(id, rej),
            // Of its user's own: it waits in the connection.
            _ => self.send_kept(id, rej),
        }
    }

    pub(super) fn on_dreq(
        &mut self,
        now: Instant,
        ports: Ports,
        transaction: TransactionId,
        dreq: &Dreq,
    ) {
        let id = dreq.remote_comm_id;
        let its = self.connections.get_mut(&id);
        let its = its.filter(|one| one.is_of(ports, dreq.local_comm_id));
        let Some(connection) = its else {
            // Whatever it was is over.
            let drep = Drep {
                local_comm_id: dreq.remote_comm_id,
                remote_comm_id: dreq.local_comm_id,
                private_data: PrivateData::default(),
            };
            return self.send(ports, transaction, Message::Drep(drep));
        };
        let local_qpn = connection.terms.as_ref().map(|terms| terms.local_qpn);
        if local_qpn != Some(dreq.remote_qpn) {
            return;
        }
        match connection.state {
            State::RepSent { .. } | State::RepReceived | State::Established => {
                connection.state = State::DreqReceived;
                connection.transaction = transaction;
                connection.last = None;
                self.set_timer(id, None);
                self.tell(Event::Disconnected { id });
            }
            State::DreqSent => {
                // Both end it.
                connection.transaction = transaction;
                self.send_drep(id);
                self.wait_out(now, id);
                self.tell(Event::Disconnected { id });
            }
            State::Timewait | State::Ended => {
                connection.transaction = transaction;
                self.send_drep(id);
            }
            _ => {}
        }
    }

    pub(super) fn on_drep(&mut self, now: Instant, ports: Ports, drep: &Drep) {
        let id = drep.remote_comm_id;
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        if connection.is_of(ports, drep.local_comm_id) && connection.state == State::DreqSent {
            self.wait_out(now, id);
            self.tell(Event::Disconnected { id });
        }
    }

    pub(super) fn on_rej(&mut self, now: Instant, ports: Ports, rej: &Rej) {
        let Some(id) = self.rejected(ports, rej) else {
            return;
        };
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        match connection.state {
            State::ReqSent { .. } => self.end(id),
            State::ReqReceived => self.keep_answer(now, id),
            State::RepSent { .. } | State::RepReceived | State::Established | State::DreqSent => {
                self.wait_out(now, id);
            }
            _ => return,
        }
        self.tell(Event::Rejected {
            id,
            reason: rej.reason,
            private_data: Box::new(rej.private_data),
        });
    }

    /// Which connection a peer rejects.
    fn rejected(&self, ports: Ports, rej: &Rej) -> Option<CommId> {
        if rej.remote_comm_id == CommId::default() {
            // It gives a request up, and was told no name.
            let name = (ports, rej.local_comm_id);
            return self.by_remote_id.get(&name).copied();
        }
        let connection = self.connections.get(&rej.remote_comm_id)?;
        // Who rejects a request need not have a name for it.
        let is_its = match connection.remote_id {
            None => connection.ports == ports,
            Some(_) => connection.is_of(ports, rej.local_comm_id),
        };
        is_its.then_some(rej.remote_comm_id)
    }

    /// The peer does not have a connection any more.
    pub(super) fn disconnect_stale(&mut self, now: Instant, id: CommId) {
        let connection = self.connections.get(&id);
        if connection.is_some_and(|one| one.state == State::Established) {
            self.send_dreq(now, id);
        }
    }
}
