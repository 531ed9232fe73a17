//! The responder's half of a queue pair: what a peer's requests meet.

use super::attributes::State;
use super::carrier::Sender;
use super::common::{Life, QpCommon};
use super::fabric::QpName;
use super::inbound::Inbound;
use super::objects::Receives;
use super::waits::Place;
use crate::completion_queue::CompletionSink as _;
use crate::engine::QpNumber;
use crate::memory::{Access, MemoryTable, Part, PdHandle, Use};
use crate::request::{Flush, MemoryKey, Opcode, RecvWqe, SendWqe, Target, WqeError};
use crate::shared_receive_queue::SharedReceives;
use crate::work_queue::QueueError;
use crate::xrc::XrcReceives;
use farlane_abi::queue::{
    Completion, WC_FLAG_IMM, WC_FLAG_INVALIDATED, WC_OPCODE_RECV, WC_OPCODE_RECV_RDMA_WITH_IMM,
    WC_STATUS_LOC_LEN_ERR, WC_STATUS_LOC_PROT_ERR, WC_STATUS_LOC_QP_OP_ERR,
    WC_STATUS_REM_ACCESS_ERR, WC_STATUS_REM_INV_REQ_ERR, WC_STATUS_REM_OP_ERR,
    WC_STATUS_WR_FLUSH_ERR,
};
use farlane_abi::rdma::{
    EVENT_COMM_EST, EVENT_QP_ACCESS_ERR, EVENT_QP_FATAL, EVENT_QP_LAST_WQE_REACHED,
    EVENT_QP_REQ_ERR, QpAttr,
};
use farlane_sys::warn_limited;
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
            None if !self.dead => return Err(Nak::Dropped),
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
    fn spoil_receive(&mut self, qp: &QpCommon, status: u8) {
        if qp.transport.is_acknowledged() || matches!(self.receives, Receives::Shared(_)) {
            self.fail_receive(qp, status);
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

    /// Completes the current receive request: a whole message has arrived.
    pub fn complete_receive(&mut self, qp: &QpCommon, arrival: &Arrival) {
        self.parts.clear();
        let Some(request) = self.current.take() else {
            return;
        };
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
