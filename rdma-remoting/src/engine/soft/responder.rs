//! The responder's half of a queue pair: what a peer's requests meet.

mod receive;

pub use receive::{Arrival, Word};

use super::attributes::State;
use super::carrier::Sender;
use super::common::{Life, QpCommon};
use super::fabric::QpName;
use super::inbound::Inbound;
use super::objects::Receives;
use super::waits::Place;
use crate::memory::{Access, MemoryTable, Part, PdHandle, Use};
use crate::request::{Flush, MemoryKey, RecvWqe, Target};
use crate::shared_receive_queue::SharedReceives;
use crate::xrc::XrcReceives;
use farlane_abi::queue::{WC_STATUS_REM_ACCESS_ERR, WC_STATUS_REM_INV_REQ_ERR};
use farlane_abi::rdma::{EVENT_COMM_EST, EVENT_QP_ACCESS_ERR, EVENT_QP_REQ_ERR, QpAttr};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// What a responder answers instead of doing what was asked: a NAK (IBTA 9.7.5.2), where its
/// transport has answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nak {
    /// No receive request is posted: come back later.
    NotReady(NotReady),
    /// The connection is broken; the requester completes with this status.
    Fatal(u8),
    /// No answer: the message is dropped, and the requester does not know.
    Dropped,
}

/// A responder without a receive request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotReady {
    /// Index of the timer after which to come back.
    pub timer: u8,
    /// Who posts a receive request can be asked to ring: whoever waits for one is scheduled then.
    pub rings: bool,
}

/// State of the responder's half. Its lock comes after the requester's of any queue pair.
pub struct Responder {
    receives: Receives,
    /// The receive request that the message under way fills.
    current: Option<RecvWqe>,
    spare: RecvWqe,
    parts: Vec<Part>,
    /// Its queue makes no sense any more, or its completion queue has overrun.
    dead: bool,
    /// It was told that no shared receive request is with it any more.
    told_last: bool,
    /// Of those of its domain the one that the message under way names.
    pub(super) named: Option<Arc<XrcReceives>>,
    /// In whose list of a shared receive queue it may be.
    awaits: Option<Arc<Place>>,
    life: Life,
    /// Whom it is connected to.
    peer_name: Option<QpName>,
    /// Who has sent the first message of the peer, where one has come: the connection is with that
    /// one.
    heard: Option<Life>,
    /// Paused: no message of the peer is answered.
    paused: bool,
    pub(super) attr: QpAttr,
    /// Where it is in what its peer sends, where that numbers its messages.
    pub(super) inbound: Inbound,
}

impl Responder {
    pub fn new(receives: Receives) -> Self {
        Self {
            receives,
            current: None,
            spare: RecvWqe::default(),
            parts: Vec::new(),
            dead: false,
            told_last: false,
            named: None,
            awaits: None,
            life: Life::begin(),
            peer_name: None,
            heard: None,
            paused: false,
            attr: QpAttr::default(),
            inbound: Inbound::default(),
        }
    }

    /// Sets attributes that are valid, and whom they connect it to.
    pub fn set(&mut self, attr: &QpAttr, peer: Option<QpName>) {
        self.attr = *attr;
        self.peer_name = peer;
    }

    /// Back to the state of a new queue pair.
    pub fn reset(&mut self) {
        match &mut self.receives {
            Receives::Own(source) => source.discard(),
            Receives::Shared(_) | Receives::Domain(_) => {}
        }
        self.leave();
        self.named = None;
        self.current = None;
        self.parts.clear();
        self.dead = false;
        self.told_last = false;
        self.peer_name = None;
        self.heard = None;
        self.life = Life::begin();
        self.inbound = Inbound::default();
        self.attr = QpAttr::default();
    }

    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Whether it answers the message at hand of a requester: one that was reset since the last
    /// message, or has succeeded another one, expects another sequence number. An unreliable one
    /// takes any first packet, but does not go on with a message whose beginning it does not have.
    pub fn answers(&self, qp: &QpCommon, from: &Sender) -> bool {
        let expected = match from.started {
            Some(life) if from.transport.is_acknowledged() => self.life == life,
            Some(life) => !from.is_under_way || self.life == life,
            None if from.transport.is_acknowledged() => self.attr.rq_psn.get() == from.psn,
            None => true,
        };
        qp.transport == from.transport.peer()
            && qp.state().responds()
            && self.is_connected_to(qp, from)
            && expected
    }

    /// Whether it is connected to that peer, and answers it: a reliable one in this life of its
    /// requester, an unreliable one whose message begins anew in any (IBTA 9.8.2.2).
    fn is_connected_to(&self, qp: &QpCommon, peer: &Sender) -> bool {
        // A GID that no port had when it was set may be the peer's now.
        let is_named = |name: QpName| {
            let is_it = |destination| {
                peer.is_named_by(QpName {
                    destination,
                    ..name
                })
            };
            is_it(name.destination) || qp.resolve(name.destination).is_some_and(is_it)
        };
        !self.paused
            && self.peer_name.is_some_and(is_named)
            && (!peer.transport.is_acknowledged()
                || self.heard.is_none_or(|heard| heard == peer.life))
    }

    /// Whether this life of its peer was the last to send it a message.
    pub fn has_heard(&self, peer: &Sender) -> bool {
        self.heard == Some(peer.life)
    }

    /// Whether datagrams that have this Q_Key are for it.
    pub fn has_qkey(&self, qkey: u32) -> bool {
        self.attr.qkey.get() == qkey
    }

    /// Whether it takes no message.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Tells one life of it, from reset to reset, from another.
    pub fn life(&self) -> Life {
        self.life
    }

    /// A message of the peer comes. Its program may wait for that to make the connection ready to
    /// send (IBTA 11.6.3.1).
    pub fn hears(&mut self, qp: &QpCommon, peer: Life) {
        let is_first = self.heard.replace(peer).is_none();
        if is_first && qp.state() == State::ReadyToReceive {
            (qp.events)(EVENT_COMM_EST);
        }
    }

    /// Whether there is a receive request for a message.
    pub fn can_receive(&self) -> bool {
        !self.dead
            && (self.current.is_some()
                || match &self.receives {
                    Receives::Own(source) => source.is_ready(),
                    Receives::Shared(_) | Receives::Domain(_) => {
                        self.shared().is_some_and(|shared| shared.is_ready())
                    }
                })
    }

    /// Whether who posts receive requests can be asked to ring.
    fn is_rung(&self) -> bool {
        match &self.receives {
            Receives::Own(source) => source.rings(),
            Receives::Shared(_) | Receives::Domain(_) => {
                self.shared().is_none_or(|shared| shared.rings())
            }
        }
    }

    /// The shared receive queue that the message under way takes from.
    fn shared(&self) -> Option<&Arc<SharedReceives>> {
        match &self.receives {
            Receives::Own(_) => None,
            Receives::Shared(shared) => Some(&shared.receives),
            Receives::Domain(_) => self.named.as_ref().map(|named| named.receives()),
        }
    }

    /// A message begins that names so much: of a target of an extended reliable connection a shared
    /// receive queue of its domain.
    pub fn address(&mut self, qp: &QpCommon, target: Target) -> Result<(), Nak> {
        let Receives::Domain(domain) = &self.receives else {
            return Ok(());
        };
        self.named = match target {
            Target::SharedReceive(number) => domain.find(number),
            Target::Peer | Target::Datagram(_) => None,
        };
        match self.named {
            Some(_) => Ok(()),
            None => Err(self.refuse_queue(qp)),
        }
    }

    /// What the message under way has named.
    pub fn named(&self) -> Option<Arc<XrcReceives>> {
        self.named.clone()
    }

    /// The domain does not have what a message names, or not any more: each packet names it anew
    /// (IBTA A14, extended transport header).
    pub fn refuse_queue(&mut self, qp: &QpCommon) -> Nak {
        self.refuse(qp, WC_STATUS_REM_INV_REQ_ERR, EVENT_QP_REQ_ERR)
    }

    /// Whether there is something to [flush](Self::flush).
    pub fn has_to_flush(&self) -> bool {
        match &self.receives {
            Receives::Own(_) => self.can_receive(),
            Receives::Shared(_) => !self.told_last,
            Receives::Domain(_) => self.current.is_some(),
        }
    }

    /// Its peer waits for a receive request: whoever posts one has to know.
    pub fn await_receive(&mut self, qp: &QpCommon) {
        // What is posted to its own queue its own turn finds.
        let Some(shared) = self.shared().map(Arc::clone) else {
            return;
        };
        let place = match self.awaits.take() {
            Some(place) if place.is_of(&shared) => place,
            other => {
                // Another one than the last message has waited for.
                other.into_iter().for_each(Place::leave);
                Place::new(&shared, &qp.receiver)
            }
        };
        self.awaits.insert(place).enlist(&shared);
    }

    /// It waits for nothing any more.
    fn leave(&mut self) {
        self.awaits.take().into_iter().for_each(Place::leave);
    }

    /// The memory that its receive requests name.
    fn receive_memory<'a>(&'a self, qp: &'a QpCommon) -> &'a MemoryTable {
        match &self.receives {
            Receives::Shared(shared) => shared.memory.as_deref().unwrap_or(&qp.memory),
            Receives::Own(_) | Receives::Domain(_) => self.memory(qp),
        }
    }

    /// The memory that its peer names.
    pub fn memory<'a>(&'a self, qp: &'a QpCommon) -> &'a MemoryTable {
        match (&self.receives, &self.named) {
            (Receives::Domain(_), Some(named)) => named.memory(),
            _ => &qp.memory,
        }
    }

    /// Protection domain of the memory that its receive requests name.
    fn receive_pd(&self, qp: &QpCommon) -> PdHandle {
        self.shared().map_or(qp.pd, |shared| shared.pd())
    }

    /// Protection domain of the memory that its peer names.
    fn remote_pd(&self, qp: &QpCommon) -> PdHandle {
        match &self.receives {
            Receives::Own(_) | Receives::Shared(_) => qp.pd,
            Receives::Domain(_) => self.receive_pd(qp),
        }
    }

    /// Whether the peer has a right.
    fn grants(&self, right: fn(Access) -> bool) -> bool {
        Access::from_wire(self.attr.qp_access_flags.get()).is_some_and(right)
    }

    /// Flushes memory for a peer. All that it has written through this connection was copied by
    /// this thread, or by system calls of it, so a fence makes it visible to all. Nothing that it
    /// writes outlasts a loss of power: that is refused as a right that no memory has.
    pub fn flush_memory(
        &mut self,
        qp: &QpCommon,
        (rkey, address): (MemoryKey, u64),
        flush: Flush,
    ) -> Result<(), Nak> {
        let is_allowed = !flush.is_persistent && self.grants(Access::flush);
        let of = (self.remote_pd(qp), qp.binder);
        let wanted = Use::RemoteFlush;
        let opened = match flush.length {
            Some(length) => self
                .memory(qp)
                .open_to_peer(of, rkey, address, length, wanted),
            None => self.memory(qp).open_all_to_peer(of, rkey, wanted),
        };
        match opened {
            Ok(_) if is_allowed => {
                fence(Ordering::SeqCst);
                Ok(())
            }
            other => {
                log::debug!("{}: a flush is refused: {other:?}", qp.number);
                Err(self.refuse(qp, WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR))
            }
        }
    }

    /// Opens memory for a peer's RDMA write or read, or its atomic operation.
    pub fn open_remote(
        &mut self,
        qp: &QpCommon,
        rkey: MemoryKey,
        address: u64,
        length: u64,
        wanted: Use,
    ) -> Result<Part, Nak> {
        let allowed = match wanted {
            Use::RemoteRead => self.grants(Access::remote_read),
            Use::RemoteAtomic => self.grants(Access::remote_atomic),
            _ => self.grants(Access::remote_write),
        };
        let fetches = matches!(wanted, Use::RemoteRead | Use::RemoteAtomic);
        if fetches && self.attr.max_dest_rd_atomic == 0 {
            return Err(self.refuse(qp, WC_STATUS_REM_INV_REQ_ERR, EVENT_QP_REQ_ERR));
        }
        if !allowed {
            return Err(self.refuse(qp, WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR));
        }
        self.memory(qp)
            .open_to_peer(
                (self.remote_pd(qp), qp.binder),
                rkey,
                address,
                length,
                wanted,
            )
            .map_err(|e| {
                log::debug!("{}: peer's request refused: {e}", qp.number);
                self.refuse(qp, WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR)
            })
    }

    /// Refuses what the peer asks for. That breaks a connection with answers from this side, and
    /// says why to both. Where there is none the message is dropped, and nothing else comes of it
    /// (IBTA 9.9.3, classes C and D), but that a request which others could have had is complete
    /// (class E).
    pub fn refuse(&mut self, qp: &QpCommon, status: u8, event: u32) -> Nak {
        if qp.transport.is_acknowledged() {
            self.break_down(qp, status, event)
        } else {
            log::debug!("{}: a message is dropped, of status {status}", qp.number);
            if matches!(self.receives, Receives::Shared(_)) {
                self.fail_receive(qp, status);
            }
            Nak::Dropped
        }
    }

    /// Goes to the error state for a fault on this side, or of a peer that has to be told (IBTA
    /// 9.9.3, classes A and C).
    pub fn break_down(&self, qp: &QpCommon, status: u8, event: u32) -> Nak {
        log::debug!("{}: its peer gets status {status}", qp.number);
        if qp.enter_error() {
            (qp.events)(event);
        }
        if qp.transport.is_acknowledged() {
            Nak::Fatal(status)
        } else {
            Nak::Dropped
        }
    }

    /// Invalidates a key of this side for the peer: of a window that this queue pair has bound. Any
    /// other key ends a connection with answers (IBTA 9.9.3, class J).
    pub fn invalidate(&mut self, qp: &QpCommon, key: MemoryKey) -> Result<(), Nak> {
        let outcome = self
            .memory(qp)
            .invalidate(self.remote_pd(qp), Some(qp.binder), key);
        outcome.map_err(|e| {
            log::debug!("{}: a key is not invalidated: {e}", qp.number);
            self.spoil_receive(qp, WC_STATUS_REM_INV_REQ_ERR);
            self.refuse(qp, WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR)
        })
    }
}
