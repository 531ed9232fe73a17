//! What is to be sent.
//!
//! What a connection sends again until it is answered waits in the connection, which has one place
//! among those that have something to send: none of it is lost, and each has its turn, however
//! often programs and peers have the manager send. What answers a message, for which peers ask
//! again, has places that peers share: what is beyond a peer's share is lost.

use super::Manager;
use crate::connection::{Connection, State};
use crate::event::{Ports, Transmit};
use crate::fields::{CommId, Gid};
use crate::message::{Datagram, Mad, Message, TransactionId};
use crate::shares::Shares;
use std::collections::{BTreeMap, VecDeque};

/// Messages that a connection sends again, and that were not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Unsent {
    /// Its place among those that have some, while it has.
    place: u64,
    /// A request or its answer, that it is ready, and that it ends: few.
    messages: Vec<Datagram>,
}

impl Unsent {
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }
}

/// Who has something to send.
#[derive(Debug)]
pub(super) struct Outbox {
    /// Connections, in the order of their turns.
    due: BTreeMap<u64, CommId>,
    /// How many places were given.
    places: u64,
    /// Answers, each with whose share it is of, and last words of what was forgotten, which are of
    /// none.
    answers: VecDeque<(Option<Gid>, Transmit)>,
    shares: Shares,
    /// How many last words there are, and may be.
    last_words: usize,
    most_last_words: usize,
    answer_next: bool,
}

impl Outbox {
    /// With so many answers, and last words, at most.
    pub(super) fn new(answers: usize, last_words: usize) -> Self {
        Self {
            due: BTreeMap::new(),
            places: 0,
            answers: VecDeque::new(),
            shares: Shares::new(answers),
            last_words: 0,
            most_last_words: last_words,
            answer_next: false,
        }
    }

    fn add(&mut self, id: CommId, unsent: &mut Unsent, datagram: Datagram) {
        if unsent.is_empty() {
            self.line_up(id, unsent);
        }
        // One is all that most have, and it is soon sent.
        unsent.messages.reserve_exact(1);
        unsent.messages.push(datagram);
    }

    fn line_up(&mut self, id: CommId, unsent: &mut Unsent) {
        self.places += 1;
        unsent.place = self.places;
        self.due.insert(unsent.place, id);
    }

    fn drop_all(&mut self, unsent: &mut Unsent) -> Vec<Datagram> {
        if !unsent.is_empty() {
            self.due.remove(&unsent.place);
        }
        std::mem::take(&mut unsent.messages)
    }

    fn answer(&mut self, peer: Gid, answer: Transmit) {
        if self.shares.has_one_for(peer) {
            self.shares.take(peer);
            self.answers.push_back((Some(peer), answer));
        }
    }

    fn say_at_last(&mut self, word: Transmit) {
        if self.last_words < self.most_last_words {
            self.last_words += 1;
            self.answers.push_back((None, word));
        }
    }

    fn next_answer(&mut self) -> Option<Transmit> {
        let (peer, answer) = self.answers.pop_front()?;
        match peer {
            Some(peer) => self.shares.give_back(peer),
            None => self.last_words -= 1,
        }
        Some(answer)
    }
}

impl Manager {
    /// What is to be sent next.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.outbox.answer_next = !self.outbox.answer_next;
        if self.outbox.answer_next {
            let answer = self.outbox.next_answer();
            answer.or_else(|| self.next_of_connections())
        } else {
            let own = self.next_of_connections();
            own.or_else(|| self.outbox.next_answer())
        }
    }

    fn next_of_connections(&mut self) -> Option<Transmit> {
        let (_, id) = self.outbox.due.pop_first()?;
        let connection = self.connections.get_mut(&id)?;
        let (ports, unsent) = (connection.ports, &mut connection.unsent);
        let datagram = Box::new(unsent.messages.remove(0));
        if unsent.is_empty() {
            unsent.messages = Vec::new();
            if connection.state == State::Ended && connection.orphan.is_some() {
                self.remove(id);
            }
        } else {
            self.outbox.line_up(id, unsent);
        }
        Some(Transmit { ports, datagram })
    }

    /// How many have something to be sent.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.outbox.due.len() + self.outbox.answers.len()
    }

    /// Whether something is to be sent.
    #[must_use]
    pub fn has_transmits(&self) -> bool {
        self.waiting() > 0
    }

    /// Answers a message.
    pub(super) fn send(&mut self, ports: Ports, transaction: TransactionId, message: Message) {
        let mad = Mad {
            transaction,
            message,
        };
        self.queue_answer(ports, Box::new(mad.write()));
    }

    fn queue_answer(&mut self, ports: Ports, datagram: Box<Datagram>) {
        let peer = self.peer(ports);
        self.outbox.answer(peer, Transmit { ports, datagram });
    }

    /// Sends a message that is kept, to be sent again.
    pub(super) fn send_kept(&mut self, id: CommId, message: Message) {
        if self.keep(id, message) {
            self.send_last(id);
        }
    }

    /// Answers by a message that is kept, for who asks again.
    pub(super) fn answer_by(&mut self, id: CommId, message: Message) {
        if self.keep(id, message) {
            self.answer_by_last(id);
        }
    }

    fn keep(&mut self, id: CommId, message: Message) -> bool {
        let Some(connection) = self.connections.get_mut(&id) else {
            return false;
        };
        let mad = Mad {
            transaction: connection.transaction,
            message,
        };
        connection.last = Some(Box::new(mad.write()));
        true
    }

    /// Sends the last message, to a peer that has asked again.
    pub(super) fn answer_by_last(&mut self, id: CommId) {
        let connection = self.connections.get(&id);
        if let Some((connection, last)) = connection.and_then(|c| Some((c, c.last.as_ref()?))) {
            let (ports, last) = (connection.ports, last.clone());
            self.queue_answer(ports, last);
        }
    }

    /// Sends the last message, in the connection's turn.
    pub(super) fn send_last(&mut self, id: CommId) {
        if let Some(connection) = self.connections.get_mut(&id)
            && let Some(datagram) = &connection.last
        {
            let datagram = **datagram;
            self.outbox.add(id, &mut connection.unsent, datagram);
        }
    }

    /// Sends nothing more of what was not taken yet.
    pub(super) fn take_back(&mut self, id: CommId) {
        if let Some(connection) = self.connections.get_mut(&id) {
            self.outbox.drop_all(&mut connection.unsent);
        }
    }

    /// A connection is forgotten. What it has to say is sent where its peer would not come to know
    /// it otherwise: one that was given up before it was made the peer asks for.
    pub(super) fn send_the_rest(&mut self, mut connection: Connection) {
        let ports = connection.ports;
        let unsent = self.outbox.drop_all(&mut connection.unsent);
        if connection.state != State::Ended {
            for datagram in unsent {
                let datagram = Box::new(datagram);
                self.outbox.say_at_last(Transmit { ports, datagram });
            }
        }
    }
}
