//! The seam between the transport services and what carries their messages.
//!
//! A requester keeps the order of requests, retries and RNR waits, and knows what its transport
//! service does where nobody answers. A responder knows keys, rights, receive requests and
//! completions ([`Incoming`](super::transfer::Incoming)). Neither knows how a message gets from one
//! to the other. A carrier does, and brings two halves:
//!
//! * what a requester sends through: [`Carrier`] finds a [`Peer`], which answers with a
//!   [`Session`];
//! * what a responder moves the bytes of a message by: [`Payload`].
//!
//! Where a session has the peer's answer at once, a requester has one message under way. Where it
//! sends, and answers come later ([`Carrier::next_answer`]), it has a window of them
//! ([`Carrier::IN_FLIGHT`], [`Carrier::bytes_in_flight`]): it numbers its messages, the responder
//! takes them in order ([`Responder::receive`](super::responder::Responder::receive)), and what is
//! lost is sent again from there on. So a carrier may lose fragments and answers, double them, and
//! have them come in another order.
//!
//! **Memory.** A message names memory of the requester ([`Message::parts`]). A carrier that only
//! copies has done with it when [`Session::go_on`] returns. One that sends may have it read and
//! written later, by an adapter: until it gives out the answer by which the message completes
//! ([`Carrier::next_answer`]), or is told that the message is over without one
//! ([`Carrier::enter`]), or that nothing goes on ([`Carrier::pause`]).
//!
//! [`LocalCopy`](super::local_copy::LocalCopy) has both ends in one address space: a session is the
//! responder's lock, and a payload the memory that the request names. Where the ends are on two
//! hosts, the session is what goes out and the answers that have come, and whoever takes messages
//! in finds the [`Target`] in the fabric of that host and makes an
//! [`Incoming`](super::transfer::Incoming) with a payload of what has come in.

use super::attributes::State;
use super::common::{Life, QpCommon};
use super::datagram::{Packet, Undelivered};
use super::fabric::QpName;
use super::groups::Walk;
use super::responder::{Arrival, Nak};
use super::target::Target;
use super::transfer::{Refusal, Transfer};
use super::transport::Transport;
use crate::address::GroupGid;
use crate::engine::{ManagementDatagram, PortAddress, QpNumber, Spending};
use crate::memory::Part;
use crate::request::SendWqe;
use farlane_abi::Errno;
use farlane_abi::rdma::QpAttr;
use farlane_zero_copy::RegionError;
use std::sync::Arc;

/// Finds those who receive, for one queue pair. Whoever calls holds locks of that: a carrier takes
/// none of them, and waits for nobody who does.
pub trait Carrier: Send + 'static {
    /// A queue pair that has been found.
    type Peer: Peer;
    /// Bytes that have come back.
    type Data: AsRef<[u8]>;
    /// Messages over a connection that may be without an answer; zero where their sessions answer.
    const IN_FLIGHT: usize;
    /// Bytes that may be on their way to the peer, or have been asked of it, without an answer: at
    /// least one, and a word of an atomic operation goes beyond. More of a message is not sent
    /// before an answer comes. Nobody asks where sessions answer.
    fn bytes_in_flight(&self) -> u64;
    /// The queue pair that this carries for is in that state from now on, with these attributes. It
    /// begins in Reset. Where it enters Reset (as one that is destroyed does), SQE or Error, its
    /// messages that have no answer are over: when this returns, the carrier uses memory of none of
    /// them any more, and gives out no answer to one. It is told before the first of them
    /// completes, which is later than another thread, or a peer, may have brought the queue pair
    /// there.
    fn enter(&mut self, state: State, attr: &QpAttr);
    /// The queue pair stops, or goes on. When it has stopped, the carrier uses memory of no message
    /// any more, until it goes on. What was lost by that is sent again, as what a network has lost
    /// is; answers that have come stay.
    fn pause(&mut self, paused: bool);
    /// The queue pair of this name.
    fn find(&self, name: QpName) -> Option<Self::Peer>;
    /// A management datagram of the queue pair that this carries for is for a port that has no
    /// queue pair 1. False where nobody serves such ports.
    fn manage(&self, _datagram: &ManagementDatagram<'_>) -> bool {
        false
    }
    /// The queue pair that this carries for receives what is sent to a group from now on, wherever
    /// that was sent: where other hosts have to know, they are told. Twice is as once.
    ///
    /// # Errors
    /// `ENOMEM` where it has as many memberships as it may have.
    fn attach(&self, group: GroupGid, member: &Arc<Target>) -> Result<(), Errno>;
    /// Ends that. Returns whether it was in the group.
    fn detach(&self, group: GroupGid, member: &Target) -> bool;
    /// Ends that of all groups that it is in.
    fn forget(&self, member: &Target);
    /// Those who are in a group now.
    fn walk(&self) -> Walk;
    /// The next member of a group on a walk, and the walk behind it.
    fn next_member(&self, group: GroupGid, walk: Walk) -> Option<(Self::Peer, Walk)>;
    /// The next answer that has come to the queue pair that this carries for. Whose arrival has it
    /// scheduled. Of messages of which it says that they have arrived, or were refused, and of
    /// those before one that has fetched bytes, the carrier uses the memory no more.
    fn next_answer(&mut self) -> Option<Reply<Self::Data>>;
    /// Whether there is one.
    fn has_answer(&self) -> bool;
    /// A retry timer has ended: what was sent of the message at hand has had no answer in time, or
    /// the receiver that had no request for it may have one now. It is sent again next.
    fn timer_ended(&mut self);
}

/// The queue pair at the other end.
pub trait Peer: Sized {
    /// What is kept of it from message to message; does not keep it alive.
    type Weak: Default + Send;
    /// A message to it.
    type Session<'p>: Session
    where
        Self: 'p;
    fn downgrade(&self) -> Self::Weak;
    fn upgrade(weak: &Self::Weak) -> Option<Self>;
    /// For a message over a connection.
    fn session(&self) -> Self::Session<'_>;
    /// For a datagram; `None` where that is not for it.
    fn admit(&self, packet: &Packet<'_>) -> Option<Self::Session<'_>>;
}

/// A message on its way to a peer. While it lasts, nobody else sends to that peer, and who ends the
/// peer waits.
pub trait Session {
    /// Whether the peer answers.
    fn answers(&self, from: &Sender) -> bool;
    /// Whether it has a receive request.
    fn can_receive(&self) -> bool;
    /// The life in which it has answered; none where it only sends.
    fn life(&self) -> Option<Life>;
    /// Moves bytes of the message within a budget. Without an answer the requester comes again when
    /// it is scheduled, or its timer is over.
    fn go_on(
        &mut self,
        message: &Message<'_>,
        transfer: &mut Transfer,
        budget: &mut Spending,
    ) -> Result<Reached, Refusal>;
    /// Has it receive a datagram.
    fn deliver(&mut self, packet: &Packet<'_>) -> Result<(), Undelivered>;
    /// The requester waits for a receive request.
    fn await_receive(&mut self, qp: &QpCommon);
    /// The message is over, and the requester's program knows. `arrival` is what the peer's is told
    /// where a receive request was consumed.
    fn complete(&mut self, arrival: Option<&Arrival>);
}

/// What a requester says of itself to the one that it is connected to.
#[derive(Clone, Copy, Debug)]
pub struct Sender {
    pub number: QpNumber,
    pub address: PortAddress,
    pub transport: Transport,
    pub life: Life,
    /// The life of the responder that the connection is with, once it has carried a message.
    pub started: Option<Life>,
    /// The sequence number that the first message begins at.
    pub psn: u32,
    /// Some of the message at hand has arrived.
    pub is_under_way: bool,
}

impl Sender {
    /// Whether it is the one that this names.
    pub fn is_named_by(&self, name: QpName) -> bool {
        name.number == self.number && self.address.is_named_by(name.destination)
    }
}

/// How far a message has come.
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "the carrier of today answers at once")
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// There is more of it to move.
    Part,
    /// All of it is on its way; an answer says whether it has arrived, where there are answers.
    Sent,
    /// All of it has arrived.
    Arrived,
}

/// Number of a message of a connection: how many there were before it, in this life of its
/// requester.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sequence(pub u64);

/// A place in what a requester sends over a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    pub message: Sequence,
    /// Bytes of that message before it.
    pub offset: u64,
}

impl Position {
    /// The beginning of a message.
    pub fn of(message: Sequence) -> Self {
        Self { message, offset: 0 }
    }

    /// The place behind so many bytes of a message of `length`.
    pub fn behind(message: Sequence, offset: u64, length: u32) -> Self {
        match offset < length.into() {
            true => Self { message, offset },
            false => Self::of(Sequence(message.0 + 1)),
        }
    }
}

/// How far a responder has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acknowledgement {
    /// It has carried out what lies before this place.
    Arrived(Position),
    /// So it has, and has got something that lies behind what it has not got.
    Missing(Position),
    /// It has carried out the messages before this one, and refuses this one.
    Refused(Sequence, Nak),
}

/// What comes back.
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "the carrier of today answers at once")
)]
#[derive(Clone, Copy, Debug)]
pub enum Answer<D> {
    Acknowledgement(Acknowledgement),
    /// Bytes that a message has fetched, from this place on.
    Data(Position, D),
}

/// An answer, and whose it is.
#[derive(Clone, Copy, Debug)]
pub struct Reply<D> {
    /// The life of the requester that it answers.
    pub to: Life,
    /// The life of the responder.
    pub from: Life,
    pub answer: Answer<D>,
}

/// A request over a connection.
pub struct Message<'a> {
    pub from: &'a Sender,
    /// Its number, where messages have one.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "the carrier of today answers at once")
    )]
    pub sequence: Sequence,
    pub request: &'a SendWqe,
    /// Memory of the requester that the request names. A carrier that uses it after
    /// [`Session::go_on`] has clones of it, and opens them anew for each access: what its owner has
    /// ended meanwhile does not open, and who ends it waits for who has it open.
    pub parts: &'a [Part],
}

/// Whose memory could not be accessed.
#[derive(Debug)]
pub enum Failed {
    Requester(RegionError),
    Responder(RegionError),
}

/// The bytes of a message, as the responder moves them; of a fragment those that it has of it.
pub trait Payload {
    /// Moves bytes of a send or a write, from its byte `offset` on, to memory of the responder,
    /// where the message begins behind `header` bytes.
    fn write(&mut self, to: &[Part], header: u64, offset: u64, length: u64) -> Result<(), Failed>;
    /// Moves bytes of a read from memory of the responder to the requester.
    fn read(&mut self, from: &[Part], offset: u64, length: u64) -> Result<(), Failed>;
    /// The word of an atomic write.
    fn operand(&mut self) -> Result<u64, RegionError>;
    /// Gives the requester the word that an atomic operation has fetched.
    fn answer(&mut self, word: u64) -> Result<(), RegionError>;
}
