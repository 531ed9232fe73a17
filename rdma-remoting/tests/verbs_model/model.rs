//! What two connected queue pairs do, said once more: as simply as it can be said, and without
//! anything of the engine.

use crate::rig::IOVA;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::request::{Binding, Element, MemoryKey, Opcode, RecvWqe, SendWqe};
use std::collections::VecDeque;
use std::ops::Range;

/// A completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub wr_id: u64,
    pub status: u8,
    /// Of one that is good.
    pub length: u32,
    /// Flags and immediate data.
    pub word: (u16, u32),
}

/// A region: all memory of its side.
pub struct Region {
    pub key: MemoryKey,
    /// In the protection domain of the queue pair.
    pub is_own: bool,
    pub access: u32,
}

/// A window; the first of a side is of type 1, the second of type 2.
#[derive(Clone)]
pub struct Window {
    key: MemoryKey,
    bound: Option<(Range<usize>, u32)>,
}

impl Window {
    pub fn free(key: MemoryKey) -> Self {
        Self { key, bound: None }
    }
}

/// One queue pair, its queues and what its program has.
pub struct Side {
    pub memory: Vec<u8>,
    pub regions: Vec<Region>,
    pub windows: Vec<Window>,
    /// Of the queue pair: `QPS_*`.
    pub state: u8,
    pub sends: VecDeque<SendWqe>,
    pub recvs: VecDeque<RecvWqe>,
    /// Completions of send requests.
    pub sent: Vec<Outcome>,
    /// Completions of receive requests.
    pub received: Vec<Outcome>,
}

/// What becomes of a request.
enum Fate {
    Done,
    /// It waits, and fails with this status when all timers have expired; none for ever.
    Waits(Option<u8>),
    Fails(u8),
}

/// What a peer answers that refuses a request.
enum Refusal {
    /// It is broken, and says this.
    Fatal(u8),
    NotReady,
    /// It says nothing.
    Dropped,
}

pub struct Model {
    pub sides: [Side; 2],
    is_reliable: bool,
    rnr_retry: u8,
    /// Rights that both queue pairs grant.
    access: u32,
}

/// The right that an operation of the peer needs.
fn right(opcode: Opcode) -> u32 {
    match opcode {
        Opcode::Read => ACCESS_REMOTE_READ,
        Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } => ACCESS_REMOTE_ATOMIC,
        _ => ACCESS_REMOTE_WRITE,
    }
}

/// Where in a memory of `size` bytes `[address, address + length)` lies.
fn range(size: usize, address: u64, length: u64) -> Option<Range<usize>> {
    let first = usize::try_from(address.checked_sub(IOVA)?).ok()?;
    let end = first.checked_add(usize::try_from(length).ok()?)?;
    (end <= size).then_some(first..end)
}

impl Side {
    fn new() -> Self {
        Self {
            memory: Vec::new(),
            regions: Vec::new(),
            windows: Vec::new(),
            state: QPS_RTS,
            sends: VecDeque::new(),
            recvs: VecDeque::new(),
            sent: Vec::new(),
            received: Vec::new(),
        }
    }

    fn region(&self, key: MemoryKey) -> Option<&Region> {
        self.regions.iter().find(|r| r.key == key && r.is_own)
    }

    /// Places of the bytes that elements name, until there are `most`.
    fn local(&self, elements: &[Element], writes: bool, mut most: u64) -> Option<Vec<usize>> {
        let mut places = Vec::new();
        for element in elements {
            if element.length == 0 || most == 0 {
                continue;
            }
            let region = self.region(element.lkey)?;
            if writes && region.access & ACCESS_LOCAL_WRITE == 0 {
                return None;
            }
            let length = most.min(element.length.into());
            places.extend(range(self.memory.len(), element.address, length)?);
            most -= length;
        }
        Some(places)
    }

    /// Places of what the peer names.
    fn remote(
        &self,
        key: MemoryKey,
        address: u64,
        length: u64,
        right: u32,
    ) -> Option<Range<usize>> {
        let place = range(self.memory.len(), address, length)?;
        if let Some(region) = self.region(key) {
            return (region.access & right != 0).then_some(place);
        }
        let window = self.windows.iter().find(|window| window.key == key)?;
        let (bound, access) = window.bound.as_ref()?;
        let is_inside = bound.start <= place.start && place.end <= bound.end;
        (access & right != 0 && is_inside).then_some(place)
    }

    fn bind(&mut self, binding: &Binding) -> bool {
        let leads = |window: &Window| window.key.0 >> 8 == binding.window.0 >> 8;
        let Some(which) = self.windows.iter().position(leads) else {
            return false;
        };
        let is_second = which == 1;
        if is_second && (self.windows[1].bound.is_some() || binding.length == 0) {
            return false;
        }
        let remote = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
        if binding.access & !(remote | ACCESS_LOCAL_WRITE) != 0 {
            return false;
        }
        let mut bound = None;
        if binding.length > 0 {
            let writes = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC;
            let mut needs = ACCESS_MW_BIND;
            if binding.access & writes != 0 {
                needs |= ACCESS_LOCAL_WRITE;
            }
            let region = self.region(binding.region);
            if region.is_none_or(|region| region.access & needs != needs) {
                return false;
            }
            let Some(place) = range(self.memory.len(), binding.address, binding.length) else {
                return false;
            };
            bound = Some((place, binding.access));
        }
        self.windows[which] = Window {
            key: binding.key,
            bound,
        };
        true
    }

    fn invalidate(&mut self, key: MemoryKey) -> bool {
        let window = &mut self.windows[1];
        let is_bound = window.key == key && window.bound.is_some();
        if is_bound {
            window.bound = None;
        }
        is_bound
    }

    fn answers(&self) -> bool {
        self.state == QPS_RTS || self.state == QPS_SQE
    }

    fn end_receive(&mut self, status: u8, length: u32, word: (u16, u32)) {
        if let Some(request) = self.recvs.pop_front() {
            self.received.push(Outcome {
                wr_id: request.wr_id,
                status,
                length,
                word,
            });
        }
    }

    fn end_send(&mut self, status: u8, length: u32) {
        if let Some(request) = self.sends.pop_front()
            && (request.signalled || status != WC_STATUS_SUCCESS)
        {
            self.sent.push(Outcome {
                wr_id: request.wr_id,
                status,
                length,
                word: (0, 0),
            });
        }
    }
}

impl Model {
    pub fn new(is_reliable: bool, rnr_retry: u8, access: u32) -> Self {
        Self {
            sides: [Side::new(), Side::new()],
            is_reliable,
            rnr_retry,
            access,
        }
    }

    pub fn reconnect(&mut self) {
        for side in &mut self.sides {
            side.sends.clear();
            side.recvs.clear();
            side.state = QPS_RTS;
        }
    }

    /// Each side gets as far as it can, in turns.
    pub fn run(&mut self) {
        while self.turn(0) | self.turn(1) {}
    }

    /// The same, and all timers expire.
    pub fn expire(&mut self) {
        loop {
            self.run();
            let mut expired = false;
            for who in 0..2 {
                if self.sides[who].state != QPS_RTS || self.sides[who].sends.is_empty() {
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
            let side = &mut self.sides[who];
            if side.state == QPS_ERR {
                worked |= !side.recvs.is_empty();
                while !side.recvs.is_empty() {
                    side.end_receive(WC_STATUS_WR_FLUSH_ERR, 0, (0, 0));
                }
            }
            if side.sends.is_empty() {
                return worked;
            }
            if side.state != QPS_RTS {
                side.end_send(WC_STATUS_WR_FLUSH_ERR, 0);
                worked = true;
                continue;
            }
            let length = side.sends[0].length();
            match self.fate(who) {
                Fate::Done => {
                    let length = u32::try_from(length).unwrap();
                    self.sides[who].end_send(WC_STATUS_SUCCESS, length);
                }
                Fate::Waits(_) => return worked,
                Fate::Fails(status) => self.fail(who, status),
            }
            worked = true;
        }
    }

    fn fail(&mut self, who: usize, status: u8) {
        self.sides[who].state = if self.is_reliable { QPS_ERR } else { QPS_SQE };
        self.sides[who].end_send(status, 0);
    }

    /// Carries out the first request of a side, as far as that is possible now.
    fn fate(&mut self, who: usize) -> Fate {
        let request = self.sides[who].sends[0].clone();
        let (opcode, length) = (request.opcode, request.length());
        let atomic = matches!(
            opcode,
            Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } | Opcode::AtomicWrite
        );
        if !self.is_reliable && (atomic || opcode == Opcode::Read) {
            return Fate::Fails(WC_STATUS_LOC_QP_OP_ERR);
        }
        if atomic && length != 8 {
            return Fate::Fails(WC_STATUS_LOC_LEN_ERR);
        }
        let writes = matches!(
            opcode,
            Opcode::Read | Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. }
        );
        let elements = request.elements.as_slice();
        let Some(places) = self.sides[who].local(elements, writes, u64::MAX) else {
            return Fate::Fails(WC_STATUS_LOC_PROT_ERR);
        };
        match opcode {
            Opcode::Bind(binding) if self.sides[who].bind(&binding) => return Fate::Done,
            Opcode::Bind(_) => return Fate::Fails(WC_STATUS_MW_BIND_ERR),
            Opcode::LocalInvalidate(key) if self.sides[who].invalidate(key) => return Fate::Done,
            Opcode::LocalInvalidate(_) => return Fate::Fails(WC_STATUS_LOC_QP_OP_ERR),
            _ => {}
        }
        if !self.sides[1 - who].answers() {
            return match self.is_reliable {
                true => Fate::Waits(Some(WC_STATUS_RETRY_EXC_ERR)),
                false => Fate::Done,
            };
        }
        let answer = match opcode {
            Opcode::Send | Opcode::SendImm | Opcode::SendInvalidate(_) => {
                self.send(who, &request, &places)
            }
            _ => self.rdma(who, &request, &places),
        };
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

    /// The answer of a peer that refuses something of the requester's.
    fn refusal(&mut self, peer: usize, status: u8) -> Refusal {
        if !self.is_reliable {
            return Refusal::Dropped;
        }
        self.sides[peer].state = QPS_ERR;
        Refusal::Fatal(status)
    }

    /// Whether the peer has a receive request.
    fn ready(&self, peer: usize) -> Result<(), Refusal> {
        match (self.sides[peer].recvs.is_empty(), self.is_reliable) {
            (false, _) => Ok(()),
            (true, true) => Err(Refusal::NotReady),
            (true, false) => Err(Refusal::Dropped),
        }
    }

    fn send(&mut self, who: usize, request: &SendWqe, places: &[usize]) -> Result<(), Refusal> {
        let peer = 1 - who;
        self.ready(peer)?;
        let receive = self.sides[peer].recvs[0].clone();
        let length = places.len();
        if receive.elements.total() < length as u64 {
            if self.is_reliable {
                self.sides[peer].end_receive(WC_STATUS_LOC_LEN_ERR, 0, (0, 0));
            }
            return Err(self.refusal(peer, WC_STATUS_REM_INV_REQ_ERR));
        }
        let elements = receive.elements.as_slice();
        let Some(into) = self.sides[peer].local(elements, true, length as u64) else {
            // A fault of the receiver's own: it ends, whether the sender learns of it or not.
            self.sides[peer].end_receive(WC_STATUS_LOC_PROT_ERR, 0, (0, 0));
            self.sides[peer].state = QPS_ERR;
            return Err(match self.is_reliable {
                true => Refusal::Fatal(WC_STATUS_REM_OP_ERR),
                false => Refusal::Dropped,
            });
        };
        for (to, from) in into.into_iter().zip(places) {
            self.sides[peer].memory[to] = self.sides[who].memory[*from];
        }
        let mut word = (0, 0);
        if request.opcode == Opcode::SendImm {
            word = (WC_FLAG_IMM, request.immediate);
        }
        if let Opcode::SendInvalidate(key) = request.opcode {
            if !self.sides[peer].invalidate(key) {
                if self.is_reliable {
                    self.sides[peer].end_receive(WC_STATUS_REM_INV_REQ_ERR, 0, (0, 0));
                }
                return Err(self.refusal(peer, WC_STATUS_REM_ACCESS_ERR));
            }
            word = (WC_FLAG_INVALIDATED, key.0);
        }
        let length = u32::try_from(length).unwrap();
        self.sides[peer].end_receive(WC_STATUS_SUCCESS, length, word);
        Ok(())
    }

    fn rdma(&mut self, who: usize, request: &SendWqe, places: &[usize]) -> Result<(), Refusal> {
        let peer = 1 - who;
        let (opcode, length) = (request.opcode, places.len());
        if opcode == Opcode::WriteImm {
            self.ready(peer)?;
        }
        let right = right(opcode);
        if length > 0 {
            let (key, address) = (request.rkey, request.remote_address);
            let place = self.sides[peer].remote(key, address, length as u64, right);
            let place = place.filter(|_| self.access & right != 0);
            let Some(place) = place else {
                return Err(self.refusal(peer, WC_STATUS_REM_ACCESS_ERR));
            };
            let is_word = matches!(
                opcode,
                Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } | Opcode::AtomicWrite
            );
            if is_word && !address.is_multiple_of(8) {
                return Err(self.refusal(peer, WC_STATUS_REM_INV_REQ_ERR));
            }
            self.move_bytes(who, opcode, places, place);
        }
        if opcode == Opcode::WriteImm {
            let (length, word) = (u32::try_from(length).unwrap(), request.immediate);
            self.sides[peer].end_receive(WC_STATUS_SUCCESS, length, (WC_FLAG_IMM, word));
        }
        Ok(())
    }

    fn move_bytes(&mut self, who: usize, opcode: Opcode, places: &[usize], place: Range<usize>) {
        let [a, b] = &mut self.sides;
        let (own, peer) = if who == 0 { (a, b) } else { (b, a) };
        let theirs = peer.memory[place.clone()].to_vec();
        let changed = match opcode {
            Opcode::Read => None,
            Opcode::CompareSwap { .. } | Opcode::FetchAdd { .. } => {
                let old = u64::from_ne_bytes(theirs[..].try_into().unwrap());
                let new = match opcode {
                    Opcode::FetchAdd { add } => old.wrapping_add(add),
                    Opcode::CompareSwap { compare, swap } if old == compare => swap,
                    _ => old,
                };
                Some(new.to_ne_bytes().to_vec())
            }
            _ => Some(places.iter().map(|at| own.memory[*at]).collect()),
        };
        match changed {
            Some(bytes) if right(opcode) == ACCESS_REMOTE_WRITE => {
                peer.memory[place].copy_from_slice(&bytes);
                return;
            }
            Some(bytes) => peer.memory[place].copy_from_slice(&bytes),
            None => {}
        }
        for (to, byte) in places.iter().zip(theirs) {
            own.memory[*to] = byte;
        }
    }
}
