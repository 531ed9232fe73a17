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
//! [`LocalCopy`](super::local_copy::LocalCopy) has both ends in one address space: a session is the
//! responder's lock, and a payload the memory that the request names. Where the ends are on two
//! hosts, the session is what goes out and the answers that have come, and whoever takes messages
//! in finds the [`Target`](super::target::Target) in the fabric of that host and makes an
//! [`Incoming`](super::transfer::Incoming) with a payload of what has come in.

use super::common::{Life, QpCommon};
use super::datagram::{Packet, Undelivered};
use super::fabric::QpName;
use super::groups::Walk;
use super::responder::Arrival;
use super::target::Target;
use super::transfer::{Refusal, Transfer};
use crate::address::GroupGid;
use crate::engine::Spending;
use crate::memory::Part;
use crate::request::SendWqe;
use farlane_abi::Errno;
use farlane_zero_copy::RegionError;
use std::sync::Arc;

/// Finds those who receive.
pub trait Carrier: Send + 'static {
    /// A queue pair that has been found.
    type Peer: Peer;
    /// The queue pair of this name.
    fn find(&self, name: QpName) -> Option<Self::Peer>;
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
    fn answers(&self, from: &Sender<'_>) -> bool;
    /// Whether it has a receive request.
    fn can_receive(&self) -> bool;
    /// The life in which it has answered.
    fn life(&self) -> Life;
    /// Moves bytes of the message within a budget. Returns whether all have arrived. Without an
    /// answer the requester comes again when it is scheduled, or its timer is over.
    fn go_on(
        &mut self,
        message: &Message<'_>,
        transfer: &mut Transfer,
        budget: &mut Spending,
    ) -> Result<bool, Refusal>;
    /// Has it receive a datagram.
    fn deliver(&mut self, packet: &Packet<'_>) -> Result<(), Undelivered>;
    /// The requester waits for a receive request.
    fn await_receive(&mut self, qp: &QpCommon);
    /// The message is over, and the requester's program knows. `arrival` is what the peer's is told
    /// where a receive request was consumed.
    fn complete(&mut self, arrival: Option<&Arrival>);
}

/// What a requester says of itself to the one that it is connected to.
pub struct Sender<'a> {
    pub qp: &'a QpCommon,
    pub life: Life,
    /// The life of the responder that the connection is with, once it has carried a message.
    pub started: Option<Life>,
    /// The sequence number that the first message begins at.
    pub psn: u32,
    /// Some of the message at hand has arrived.
    pub is_under_way: bool,
}

/// A request over a connection.
pub struct Message<'a> {
    pub from: &'a Sender<'a>,
    pub request: &'a SendWqe,
    /// Memory of the requester that the request names.
    pub parts: &'a [Part],
}

/// Whose memory could not be accessed.
#[derive(Debug)]
pub enum Failed {
    Requester(RegionError),
    Responder(RegionError),
}

/// The bytes of a message, as the responder moves them.
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
