//! What queue pairs do, said once more: as simply as it can be said, and without anything of the
//! engine.

mod datagrams;
mod memory;

use crate::PD;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::address::{GroupGid, QpNumber};
use farlane_rdma_remoting::request::{Flush, Opcode, RecvWqe, SendWqe, SrqNumber, Target};
pub use memory::{Memory, Region, Window};
use std::collections::VecDeque;
use std::ops::Range;

/// What the completion of a good request says besides; nothing of one that has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completed {
    pub length: u32,
    /// Flags and immediate data.
    pub word: (u16, u32),
    /// Of a receive request: the queue pair that has sent the message.
    pub from: u32,
    /// Of a datagram: whence it came.
    pub route: u32,
}

/// A completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub wr_id: u64,
    pub status: u8,
    /// Number of the queue pair.
    pub qp: u32,
    pub completed: Completed,
}

/// Where a queue pair takes receive requests from.
#[derive(Clone, Debug)]
pub enum Receives {
    Own(VecDeque<RecvWqe>),
    Shared(usize),
    /// Of the shared receive queues that which a message names.
    Domain,
}

/// A shared receive queue.
pub struct SharedQueue {
    pub pd: u32,
    /// In its domain, where it is of one.
    pub number: Option<SrqNumber>,
    pub recvs: VecDeque<RecvWqe>,
    pub limit: usize,
    /// Completions of requests of a domain's queue.
    pub received: Vec<Outcome>,
    pub events: Vec<u32>,
}

impl SharedQueue {
    /// Fewer requests than its limit are told of once.
    pub fn look(&mut self) {
        if self.recvs.len() < self.limit {
            self.limit = 0;
            self.events.push(EVENT_SRQ_LIMIT_REACHED);
        }
    }
}

/// A queue pair and its queues.
pub struct QueuePair {
    pub kind: u32,
    /// Whose it is.
    pub side: usize,
    /// Whom it is connected to.
    pub peer: usize,
    pub number: QpNumber,
    pub receives: Receives,
    /// The one that a message has taken.
    pub current: Option<RecvWqe>,
    /// The shared receive queue that the last message has named.
    pub named: Option<usize>,
    /// `QPS_*`.
    pub state: u8,
    /// Of one for datagrams.
    pub qkey: u32,
    pub sends: VecDeque<SendWqe>,
    /// Completions of send requests.
    pub sent: Vec<Outcome>,
    /// Completions of receive requests.
    pub received: Vec<Outcome>,
    pub events: Vec<u32>,
    pub told_last: bool,
}

impl QueuePair {
    fn is_acknowledged(&self) -> bool {
        !matches!(self.kind, QPT_UC | QPT_UD)
    }

    fn carries(&self, opcode: Opcode) -> bool {
        match opcode {
            Opcode::Send | Opcode::SendImm => self.kind != QPT_XRC_RECV,
            Opcode::Write
            | Opcode::WriteImm
            | Opcode::SendInvalidate(_)
            | Opcode::LocalInvalidate(_)
            | Opcode::Bind(_) => !matches!(self.kind, QPT_UD | QPT_XRC_RECV),
            _ => matches!(self.kind, QPT_RC | QPT_XRC_SEND),
        }
    }

    fn answers(&self) -> bool {
        self.state == QPS_RTS || self.state == QPS_SQE
    }

    /// The byte that the GID of its port consists of.
    pub fn gid(&self) -> u8 {
        u8::try_from(self.side + 1).unwrap()
    }

    fn enter_error(&mut self) -> bool {
        std::mem::replace(&mut self.state, QPS_ERR) != QPS_ERR
    }
}

/// What becomes of a request.
enum Fate {
    Done,
    /// It waits, and fails with this status when all timers have expired; none for ever.
    Waits(Option<u8>),
    Fails(u8),
}

/// What a peer answers that refuses a request.
pub enum Refusal {
    /// It is broken, and says this.
    Fatal(u8),
    NotReady,
    /// It says nothing.
    Dropped,
}

pub struct Model {
    pub sides: Vec<Memory>,
    pub queues: Vec<SharedQueue>,
    pub qps: Vec<QueuePair>,
    /// Members of groups, in the order in which they have joined.
    pub groups: Vec<(GroupGid, usize)>,
    pub rnr_retry: u8,
    /// Rights that all queue pairs grant.
    pub access: u32,
}

/// The right that an operation of the peer needs.
fn right(opcode: Opcode) -> u32 {
    match opcode {
        Opcode::Read => ACCESS_REMOTE_READ,
        Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } => ACCESS_REMOTE_ATOMIC,
        _ => ACCESS_REMOTE_WRITE,
    }
}

impl Model {
    /// All queue pairs are reset and made ready anew.
    pub fn reconnect(&mut self) {
        for qp in &mut self.qps {
            qp.sends.clear();
            if let Receives::Own(recvs) = &mut qp.receives {
                recvs.clear();
            }
            (qp.current, qp.told_last) = (None, false);
            (qp.state, qp.qkey) = (QPS_RTS, crate::QKEYS[0]);
        }
    }

    /// Each gets as far as it can, in turns.
    pub fn run(&mut self) {
        loop {
            let mut worked = false;
            for who in 0..self.qps.len() {
                worked |= self.turn(who);
            }
            if !worked {
                return;
            }
        }
    }

    /// The same, and all timers expire.
    pub fn expire(&mut self) {
        loop {
            self.run();
            let mut expired = false;
            for who in 0..self.qps.len() {
                if self.qps[who].state != QPS_RTS || self.qps[who].sends.is_empty() {
                    continue;
                }
                if let Fate::Waits(Some(status)) = self.fate(who) {
                    self.fail(who, status);
                    expired = true;
                }
            }
            if !expired {
                return;
            }
        }
    }

    fn turn(&mut self, who: usize) -> bool {
        let mut worked = false;
        loop {
            if self.qps[who].state == QPS_ERR {
                worked |= self.flush_receives(who);
            }
            let qp = &mut self.qps[who];
            if qp.sends.is_empty() {
                return worked;
            }
            if qp.state != QPS_RTS {
                self.end_send(who, WC_STATUS_WR_FLUSH_ERR, 0);
                worked = true;
                continue;
            }
            let length = qp.sends[0].length();
            match self.fate(who) {
                Fate::Done => {
                    let length = u32::try_from(length).unwrap();
                    self.end_send(who, WC_STATUS_SUCCESS, length);
                }
                Fate::Waits(_) => return worked,
                Fate::Fails(status) => self.fail(who, status),
            }
            worked = true;
        }
    }

    fn flush_receives(&mut self, who: usize) -> bool {
        let mut worked = false;
        while self.qps[who].current.is_some() || self.take_own(who) {
            self.end_receive(who, WC_STATUS_WR_FLUSH_ERR, Completed::default());
            worked = true;
        }
        let qp = &mut self.qps[who];
        let is_shared = matches!(qp.receives, Receives::Shared(_));
        if is_shared && !std::mem::replace(&mut qp.told_last, true) {
            qp.events.push(EVENT_QP_LAST_WQE_REACHED);
        }
        worked
    }

    fn fail(&mut self, who: usize, status: u8) {
        let qp = &mut self.qps[who];
        qp.state = if qp.is_acknowledged() || qp.state == QPS_ERR {
            QPS_ERR
        } else {
            QPS_SQE
        };
        self.end_send(who, status, 0);
    }

    fn end_send(&mut self, who: usize, status: u8, length: u32) {
        let qp = &mut self.qps[who];
        if let Some(request) = qp.sends.pop_front()
            && (request.signalled || status != WC_STATUS_SUCCESS)
        {
            qp.sent.push(Outcome {
                wr_id: request.wr_id,
                status,
                qp: qp.number.get(),
                completed: Completed {
                    length,
                    ..Completed::default()
                },
            });
        }
    }

    fn end_receive(&mut self, who: usize, status: u8, completed: Completed) {
        let qp = &mut self.qps[who];
        let Some(request) = qp.current.take() else {
            return;
        };
        let outcome = Outcome {
            wr_id: request.wr_id,
            status,
            qp: qp.number.get(),
            completed,
        };
        match (&qp.receives, qp.named) {
            (Receives::Domain, Some(named)) => self.queues[named].received.push(outcome),
            _ => qp.received.push(outcome),
        }
    }

    /// Takes the next request of a queue of its own.
    fn take_own(&mut self, who: usize) -> bool {
        let qp = &mut self.qps[who];
        if let Receives::Own(recvs) = &mut qp.receives {
            qp.current = recvs.pop_front();
        }
        qp.current.is_some()
    }

    /// The shared receive queue that a message to it takes from.
    fn shared(&self, who: usize) -> Option<usize> {
        match self.qps[who].receives {
            Receives::Own(_) => None,
            Receives::Shared(queue) => Some(queue),
            Receives::Domain => self.qps[who].named,
        }
    }

    /// Sees to it that a message has a receive request.
    fn ready(&mut self, to: usize) -> Result<(), Refusal> {
        if self.qps[to].current.is_some() {
            return Ok(());
        }
        let taken = match self.shared(to) {
            None => self.take_own(to),
            Some(queue) => {
                let queue = &mut self.queues[queue];
                let taken = queue.recvs.pop_front();
                if taken.is_some() {
                    queue.look();
                }
                self.qps[to].current = taken;
                self.qps[to].current.is_some()
            }
        };
        match (taken, self.qps[to].is_acknowledged()) {
            (true, _) => Ok(()),
            (false, true) => Err(Refusal::NotReady),
            (false, false) => Err(Refusal::Dropped),
        }
    }

    /// Places of the request that a message of so many bytes has taken.
    fn open_receive(&mut self, to: usize, length: usize) -> Result<Vec<usize>, Refusal> {
        let receive = self.qps[to].current.clone().unwrap();
        if receive.elements.total() < length as u64 {
            self.spoil_receive(to, WC_STATUS_LOC_LEN_ERR);
            return Err(self.refuse(to, WC_STATUS_REM_INV_REQ_ERR, EVENT_QP_REQ_ERR));
        }
        let pd = self.shared(to).map_or(PD, |queue| self.queues[queue].pd);
        let elements = receive.elements.as_slice();
        let memory = &self.sides[self.qps[to].side];
        let Some(into) = memory.local(pd, elements, true, length as u64) else {
            // A fault of the receiver's own: it ends, whether the sender learns of it or not.
            self.end_receive(to, WC_STATUS_LOC_PROT_ERR, Completed::default());
            return Err(self.break_down(to, WC_STATUS_REM_OP_ERR, EVENT_QP_FATAL));
        };
        Ok(into)
    }

    /// The request that a message has taken fails with it; where the message is dropped and the
    /// request is nobody else's, it is there for the next one.
    fn spoil_receive(&mut self, to: usize, status: u8) {
        let is_shared = matches!(self.qps[to].receives, Receives::Shared(_));
        if self.qps[to].is_acknowledged() || is_shared {
            self.end_receive(to, status, Completed::default());
        }
    }

    fn break_down(&mut self, to: usize, status: u8, event: u32) -> Refusal {
        let qp = &mut self.qps[to];
        if qp.enter_error() {
            qp.events.push(event);
        }
        match qp.is_acknowledged() {
            true => Refusal::Fatal(status),
            false => Refusal::Dropped,
        }
    }

    /// The answer of a peer that refuses something of the requester's.
    fn refuse(&mut self, to: usize, status: u8, event: u32) -> Refusal {
        if self.qps[to].is_acknowledged() {
            return self.break_down(to, status, event);
        }
        if matches!(self.qps[to].receives, Receives::Shared(_)) {
            self.end_receive(to, status, Completed::default());
        }
        Refusal::Dropped
    }

    /// Carries out the first request of a queue pair, as far as that is possible now.
    fn fate(&mut self, who: usize) -> Fate {
        let qp = &self.qps[who];
        let (side, peer, kind) = (qp.side, qp.peer, qp.kind);
        let request = qp.sends[0].clone();
        let (opcode, length) = (request.opcode, request.length());
        if !qp.carries(opcode) {
            return Fate::Fails(WC_STATUS_LOC_QP_OP_ERR);
        }
        let atomic = matches!(
            opcode,
            Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } | Opcode::AtomicWrite
        );
        if atomic && length != 8 {
            return Fate::Fails(WC_STATUS_LOC_LEN_ERR);
        }
        let writes = matches!(
            opcode,
            Opcode::Read | Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. }
        );
        let elements = request.elements.as_slice();
        let Some(places) = self.sides[side].local(PD, elements, writes, u64::MAX) else {
            return Fate::Fails(WC_STATUS_LOC_PROT_ERR);
        };
        let memory = &mut self.sides[side];
        match opcode {
            Opcode::Bind(binding) if memory.bind(who, &binding) => return Fate::Done,
            Opcode::Bind(_) => return Fate::Fails(WC_STATUS_MW_BIND_ERR),
            Opcode::LocalInvalidate(key) if memory.invalidate(PD, None, key) => return Fate::Done,
            Opcode::LocalInvalidate(_) => return Fate::Fails(WC_STATUS_LOC_QP_OP_ERR),
            _ => {}
        }
        let own = places.iter().map(|at| memory.bytes[*at]).collect();
        let data = request.inline().map_or(own, <[u8]>::to_vec);
        if kind == QPT_UD {
            self.send_datagram(who, &request, &data);
            return Fate::Done;
        }
        if !self.qps[peer].answers() {
            return match self.qps[who].is_acknowledged() {
                true => Fate::Waits(Some(WC_STATUS_RETRY_EXC_ERR)),
                false => Fate::Done,
            };
        }
        let answer = self.address(peer, request.target);
        let answer = answer.and_then(|()| match opcode {
            Opcode::Send | Opcode::SendImm | Opcode::SendInvalidate(_) => {
                self.send(who, &request, &data)
            }
            Opcode::Flush(flush) => self.flush(who, &request, flush),
            _ => self.rdma(who, &request, &data, &places),
        });
        match answer {
            Ok(()) | Err(Refusal::Dropped) => Fate::Done,
            Err(Refusal::Fatal(status)) => Fate::Fails(status),
            Err(Refusal::NotReady) => match self.rnr_retry {
                0 => Fate::Fails(WC_STATUS_RNR_RETRY_EXC_ERR),
                7 => Fate::Waits(None),
                _ => Fate::Waits(Some(WC_STATUS_RNR_RETRY_EXC_ERR)),
            },
        }
    }

    /// A message names the shared receive queue that it is for, where it is for one of a domain.
    fn address(&mut self, to: usize, target: Target) -> Result<(), Refusal> {
        if !matches!(self.qps[to].receives, Receives::Domain) {
            return Ok(());
        }
        self.qps[to].named = match target {
            Target::SharedReceive(number) => {
                let is_meant = |queue: &SharedQueue| queue.number == Some(number);
                self.queues.iter().position(is_meant)
            }
            _ => None,
        };
        match self.qps[to].named {
            Some(_) => Ok(()),
            None => Err(self.refuse(to, WC_STATUS_REM_INV_REQ_ERR, EVENT_QP_REQ_ERR)),
        }
    }

    /// Protection domain of what a peer of this queue pair names.
    fn remote_pd(&self, to: usize) -> u32 {
        match self.qps[to].receives {
            Receives::Domain => self.shared(to).map_or(PD, |queue| self.queues[queue].pd),
            _ => PD,
        }
    }

    fn send(&mut self, who: usize, request: &SendWqe, data: &[u8]) -> Result<(), Refusal> {
        let to = self.qps[who].peer;
        self.ready(to)?;
        let into = self.open_receive(to, data.len())?;
        let (pd, side) = (self.remote_pd(to), self.qps[to].side);
        for (at, byte) in into.into_iter().zip(data) {
            self.sides[side].bytes[at] = *byte;
        }
        let mut word = (0, 0);
        if request.opcode == Opcode::SendImm {
            word = (WC_FLAG_IMM, request.immediate);
        }
        if let Opcode::SendInvalidate(key) = request.opcode {
            if !self.sides[side].invalidate(pd, Some(to), key) {
                self.spoil_receive(to, WC_STATUS_REM_INV_REQ_ERR);
                return Err(self.refuse(to, WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR));
            }
            word = (WC_FLAG_INVALIDATED, key.0);
        }
        self.arrives(who, data.len(), word);
        Ok(())
    }

    /// A message has arrived that takes a receive request.
    fn arrives(&mut self, who: usize, length: usize, word: (u16, u32)) {
        let done = Completed {
            length: u32::try_from(length).unwrap(),
            word,
            from: self.qps[who].number.get(),
            route: 0,
        };
        self.end_receive(self.qps[who].peer, WC_STATUS_SUCCESS, done);
    }

    fn rdma(
        &mut self,
        who: usize,
        request: &SendWqe,
        data: &[u8],
        places: &[usize],
    ) -> Result<(), Refusal> {
        let to = self.qps[who].peer;
        let (opcode, length) = (request.opcode, data.len());
        if opcode == Opcode::WriteImm {
            self.ready(to)?;
        }
        let right = right(opcode);
        if length > 0 {
            let (key, address) = (request.rkey, request.remote_address);
            let of = (self.remote_pd(to), to);
            let memory = &self.sides[self.qps[to].side];
            let place = memory.remote(of, key, address, length as u64, right);
            let place = place.filter(|_| self.access & right != 0);
            let Some(place) = place else {
                return Err(self.refuse(to, WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR));
            };
            let is_word = matches!(
                opcode,
                Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } | Opcode::AtomicWrite
            );
            if is_word && !address.is_multiple_of(8) {
                return Err(self.refuse(to, WC_STATUS_REM_INV_REQ_ERR, EVENT_QP_REQ_ERR));
            }
            self.move_bytes(who, opcode, data, places, place);
        }
        if opcode == Opcode::WriteImm {
            self.arrives(who, length, (WC_FLAG_IMM, request.immediate));
        }
        Ok(())
    }

    /// Nothing changes: what was written is there.
    fn flush(&mut self, who: usize, request: &SendWqe, flush: Flush) -> Result<(), Refusal> {
        let to = self.qps[who].peer;
        let of = (self.remote_pd(to), to);
        let memory = &self.sides[self.qps[to].side];
        let (key, address, right) = (request.rkey, request.remote_address, ACCESS_FLUSH_GLOBAL);
        let is_open = match flush.length {
            Some(length) => memory.remote(of, key, address, length, right).is_some(),
            None => memory.opens(of, key, right),
        };
        if is_open && !flush.is_persistent && self.access & right != 0 {
            return Ok(());
        }
        Err(self.refuse(to, WC_STATUS_REM_ACCESS_ERR, EVENT_QP_ACCESS_ERR))
    }

    fn move_bytes(
        &mut self,
        who: usize,
        opcode: Opcode,
        data: &[u8],
        places: &[usize],
        place: Range<usize>,
    ) {
        let (own, peer) = (self.qps[who].side, self.qps[self.qps[who].peer].side);
        let theirs = self.sides[peer].bytes[place.clone()].to_vec();
        let new = match opcode {
            Opcode::Read => theirs.clone(),
            Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } => {
                let old = u64::from_ne_bytes(theirs[..].try_into().unwrap());
                let new = match opcode {
                    Opcode::FetchAdd { add } => old.wrapping_add(add),
                    Opcode::CompareSwap { compare, swap } if old == compare => swap,
                    _ => old,
                };
                new.to_ne_bytes().to_vec()
            }
            _ => data.to_vec(),
        };
        self.sides[peer].bytes[place].copy_from_slice(&new);
        if right(opcode) != ACCESS_REMOTE_WRITE {
            for (to, byte) in places.iter().zip(theirs) {
                self.sides[own].bytes[*to] = byte;
            }
        }
    }
}
