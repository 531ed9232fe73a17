//! A carrier that answers later, and loses, doubles and reorders what it carries.

use super::super::*;
use crate::address::GroupGid;
use crate::counters::Counters;
use crate::engine::soft::attributes::State;
use crate::engine::soft::carrier::{
    Answer, Carrier, Failed, Message, Payload, Peer, Position, Reached, Reply, Sender, Session,
};
use crate::engine::soft::common::{Life, QpCommon};
use crate::engine::soft::datagram::{Packet, Undelivered};
use crate::engine::soft::gather::{self, Source, move_behind, read_message};
use crate::engine::soft::groups::Walk;
use crate::engine::soft::inbound::Fragment;
use crate::engine::soft::responder::Arrival;
use crate::engine::soft::target::Target;
use crate::engine::soft::transfer::{Refusal, Transfer};
use crate::engine::{Budget, Progress, Spending, Turn};
use crate::memory::{Access, MemoryRegion, Part};
use crate::request::{Element, MemoryKey};
use farlane_abi::queue::{Completion, WC_STATUS_LOC_PROT_ERR};
use farlane_abi::rdma::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, QPT_UC,
    UC_TO_RTR, UC_TO_RTS,
};
use farlane_sys::sync::lock;
use farlane_zero_copy::{Pool, Region, RegionError, copy_to_slice};
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, Weak};

pub const BYTES: u64 = 64 << 10;
pub const ACCESS: u32 =
    ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
/// Bytes of a fragment.
pub const MTU: u64 = 256;
/// Reads and atomic operations on their way.
pub const READS: u8 = 4;
/// Messages on their way.
pub const MESSAGES: usize = 16;

/// What is on its way to a responder.
#[derive(Clone)]
pub struct Sent {
    pub to: QpName,
    pub from: Sender,
    pub request: SendWqe,
    pub length: u32,
    pub at: Position,
    pub bytes: Vec<u8>,
    /// Of a read those that it asks for.
    pub count: u64,
}

/// What is on its way, and what has come.
#[derive(Default)]
pub struct Net {
    pub requests: VecDeque<Sent>,
    /// Those to each requester: on their way, and there.
    pub answers: VecDeque<(QpNumber, Reply<Vec<u8>>)>,
    pub come: HashMap<QpNumber, VecDeque<Reply<Vec<u8>>>>,
    /// No queue pair is found.
    pub is_down: bool,
    /// Bytes without an answer.
    pub most_bytes: Option<u64>,
    /// States that queue pairs have entered, and what had completed before.
    pub entered: Vec<(QpNumber, State, usize)>,
}

/// A carrier that sends, and has the answers later.
pub struct Link {
    pub net: Arc<Mutex<Net>>,
    pub fabric: Arc<Fabric>,
    pub own: Arc<Mutex<Option<QpNumber>>>,
    pub cq: Arc<LocalCompletionQueue>,
}

impl Carrier for Link {
    type Peer = Far;
    type Data = Vec<u8>;
    const IN_FLIGHT: usize = MESSAGES;

    fn bytes_in_flight(&self) -> u64 {
        lock(&self.net).most_bytes.unwrap_or(u64::MAX)
    }

    fn enter(&mut self, state: State, _: &QpAttr) {
        let completed = self.cq.len();
        if let Some(own) = *lock(&self.own) {
            lock(&self.net).entered.push((own, state, completed));
        }
    }

    /// What it sends is a copy.
    fn pause(&mut self, _: bool) {}

    fn find(&self, name: QpName) -> Option<Far> {
        let is_there = !lock(&self.net).is_down;
        is_there.then(|| Far {
            net: Arc::clone(&self.net),
            name: Some(name),
        })
    }

    fn attach(&self, group: GroupGid, member: &Arc<Target>) -> Result<(), Errno> {
        self.fabric.groups.attach(group, member)
    }

    fn detach(&self, group: GroupGid, member: &Target) -> bool {
        self.fabric.groups.detach(group, member)
    }

    fn forget(&self, member: &Target) {
        self.fabric.groups.forget(member);
    }

    fn walk(&self) -> Walk {
        self.fabric.groups.walk()
    }

    fn next_member(&self, _: GroupGid, _: Walk) -> Option<(Far, Walk)> {
        None
    }

    fn next_answer(&mut self) -> Option<Reply<Vec<u8>>> {
        let own = (*lock(&self.own))?;
        lock(&self.net).come.get_mut(&own)?.pop_front()
    }

    fn has_answer(&self) -> bool {
        let own = *lock(&self.own);
        let net = lock(&self.net);
        own.and_then(|own| net.come.get(&own))
            .is_some_and(|come| !come.is_empty())
    }

    fn timer_ended(&mut self) {}
}

/// A queue pair behind the net.
#[derive(Default)]
pub struct Far {
    pub net: Arc<Mutex<Net>>,
    pub name: Option<QpName>,
}

impl Peer for Far {
    type Weak = Option<(Weak<Mutex<Net>>, QpName)>;
    type Session<'p> = &'p Far;

    fn downgrade(&self) -> Self::Weak {
        Some((Arc::downgrade(&self.net), self.name?))
    }

    fn upgrade(weak: &Self::Weak) -> Option<Self> {
        let (net, name) = weak.as_ref()?;
        Some(Self {
            net: net.upgrade()?,
            name: Some(*name),
        })
    }

    fn session(&self) -> &Far {
        self
    }

    fn admit(&self, _: &Packet<'_>) -> Option<&Far> {
        None
    }
}

impl Session for &Far {
    fn answers(&self, _: &Sender) -> bool {
        true
    }

    fn can_receive(&self) -> bool {
        false
    }

    fn life(&self) -> Option<Life> {
        None
    }

    fn go_on(
        &mut self,
        message: &Message<'_>,
        transfer: &mut Transfer,
        budget: &mut Spending,
    ) -> Result<Reached, Refusal> {
        let offset = transfer.done;
        let count = transfer.take_fragment(message.request.opcode, MTU, budget);
        let mut bytes = Vec::new();
        if !message.request.opcode.fetches() {
            bytes.resize(usize::try_from(offset + count).unwrap(), 0);
            let source = match message.request.inline() {
                Some(inline) => Source::Inline(inline),
                None => Source::Parts(message.parts),
            };
            read_message(source, &mut bytes).map_err(|_| Refusal::Local(WC_STATUS_LOC_PROT_ERR))?;
            bytes.drain(..usize::try_from(offset).unwrap());
        }
        lock(&self.net).requests.push_back(Sent {
            to: self.name.unwrap(),
            from: *message.from,
            request: message.request.clone(),
            length: transfer.length,
            at: Position {
                message: message.sequence,
                offset,
            },
            bytes,
            count,
        });
        Ok(match transfer.is_left() {
            true => Reached::Part,
            false => Reached::Sent,
        })
    }

    fn deliver(&mut self, _: &Packet<'_>) -> Result<(), Undelivered> {
        Err(Undelivered::Dropped)
    }

    fn await_receive(&mut self, _: &QpCommon) {}

    fn complete(&mut self, _: Option<&Arrival>) {}
}

/// The bytes of a fragment, and those that go back.
pub struct Bytes<'a> {
    pub at: Position,
    pub bytes: &'a [u8],
    pub fetched: Vec<(Position, Vec<u8>)>,
}

impl Payload for Bytes<'_> {
    fn write(&mut self, to: &[Part], header: u64, offset: u64, length: u64) -> Result<(), Failed> {
        assert_eq!((offset, length), (self.at.offset, self.bytes.len() as u64));
        let counters = Counters::default();
        let source = Source::Inline(self.bytes);
        let moved = move_behind(&counters, header + offset, to, source, 0, length);
        moved.map_err(
            |(gather::Failed::Source(e) | gather::Failed::Destination(e))| Failed::Responder(e),
        )
    }

    fn read(&mut self, from: &[Part], offset: u64, length: u64) -> Result<(), Failed> {
        let mut bytes = vec![0; usize::try_from(offset + length).unwrap()];
        read_message(Source::Parts(from), &mut bytes).map_err(Failed::Responder)?;
        let behind = bytes.split_off(usize::try_from(offset).unwrap());
        let at = Position { offset, ..self.at };
        self.fetched.push((at, behind));
        Ok(())
    }

    fn operand(&mut self) -> Result<u64, RegionError> {
        Ok(u64::from_ne_bytes(self.bytes.try_into().unwrap()))
    }

    fn answer(&mut self, word: u64) -> Result<(), RegionError> {
        self.fetched.push((self.at, word.to_ne_bytes().into()));
        Ok(())
    }
}

/// A queue pair with memory.
pub struct Side {
    pub qp: SoftQp<Link>,
    pub sends: LocalQueue<SendWqe>,
    pub recvs: LocalQueue<RecvWqe>,
    pub cq: Arc<LocalCompletionQueue>,
    pub memory: Arc<MemoryTable>,
    pub region: Region,
    pub key: MemoryKey,
    pub events: Arc<Mutex<Vec<u32>>>,
}

impl Drop for Side {
    fn drop(&mut self) {
        self.qp.destroy();
    }
}

impl Side {
    pub fn new(net: &Arc<Mutex<Net>>, fabric: &Arc<Fabric>, kind: u32) -> Self {
        let buffer = Pool::separate_files(BYTES).allocate(BYTES).unwrap();
        let region = Region::from_buffer(&buffer);
        let memory = Arc::new(MemoryTable::new(4));
        let registered = memory.insert(MemoryRegion {
            pd: PdHandle(1),
            iova: 0,
            offset: 0,
            length: BYTES,
            access: Access::from_wire(ACCESS).unwrap(),
            region: region.clone(),
            owner: None,
        });
        let (sends, recvs) = (LocalQueue::default(), LocalQueue::default());
        let cq = LocalCompletionQueue::new(1024);
        let owner = Owner {
            spec: ContextSpec::default(),
            memory: Arc::clone(&memory),
        };
        let events = Arc::<Mutex<Vec<u32>>>::default();
        let told = Arc::clone(&events);
        let spec = QpSpec {
            kind,
            pd: PdHandle(1),
            depths: QpDepths::default(),
            sends: Box::new(LocalQueue::clone(&sends)),
            recvs: Receives::Own(Box::new(LocalQueue::clone(&recvs))),
            send_cq: Some(SoftCq::new(cq.clone())),
            recv_cq: Some(SoftCq::new(cq.clone())),
            signal_all: true,
            schedule: Arc::new(|| ()),
            events: Box::new(move |event| lock(&told).push(event)),
        };
        let own = Arc::<Mutex<Option<QpNumber>>>::default();
        let link = Link {
            net: Arc::clone(net),
            fabric: Arc::clone(fabric),
            own: Arc::clone(&own),
            cq: Arc::clone(&cq),
        };
        let transport = Transport::from_wire(kind).unwrap();
        let qp = SoftQp::over(link, &owner, spec, transport, fabric, MAX_QUEUE_PAIRS).unwrap();
        *lock(&own) = Some(qp.number());
        Self {
            qp,
            sends,
            recvs,
            cq,
            memory,
            region,
            key: registered.unwrap(),
            events,
        }
    }

    pub fn bytes(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        copy_to_slice(&self.region, offset, &mut bytes).unwrap();
        bytes
    }

    pub fn word(&self, offset: u64) -> u64 {
        u64::from_ne_bytes(self.bytes(offset, 8).try_into().unwrap())
    }

    pub fn receive(&self, wr_id: u64, address: u64, length: u32) {
        let mut request = RecvWqe {
            wr_id,
            ..RecvWqe::default()
        };
        let element = Element {
            address,
            length,
            lkey: self.key,
        };
        request.elements.set(&[element]).unwrap();
        self.recvs.post(request);
    }
}

/// What becomes of what is carried next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Arrives,
    Lost,
    Doubled,
    /// Behind so many others.
    Late(u8),
}

/// Two queue pairs, of which one sends.
pub struct Pair {
    pub net: Arc<Mutex<Net>>,
    pub fabric: Arc<Fabric>,
    pub a: Side,
    pub b: Side,
    pub fates: VecDeque<Fate>,
    /// Of the next turns; those behind them have no bound.
    pub budgets: VecDeque<Budget>,
    pub now: Instant,
    pub posted: u64,
}

/// Attributes of a connection.
pub fn attributes(to: &Side, qp_state: u8) -> QpAttr {
    QpAttr {
        qp_state,
        port_num: 1,
        ah_port: 1,
        is_global: 1,
        path_mtu: 3,
        qp_access_flags: ACCESS.into(),
        dest_qp_num: to.qp.number().into(),
        max_rd_atomic: READS,
        max_dest_rd_atomic: READS,
        min_rnr_timer: 1,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 3,
        ..Default::default()
    }
}

/// Connects a queue pair that is in reset.
pub fn connect_again(qp: &SoftQp<Link>, to: &Side, kind: u32) {
    let masks = match kind {
        QPT_UC => [QP_TO_INIT, UC_TO_RTR, UC_TO_RTS],
        _ => [QP_TO_INIT, QP_TO_RTR, QP_TO_RTS],
    };
    for (mask, state) in masks.into_iter().zip([QPS_INIT, QPS_RTR, QPS_RTS]) {
        qp.modify(mask, &attributes(to, state)).unwrap();
    }
}

impl Pair {
    pub fn new() -> Self {
        Self::of(QPT_RC)
    }

    pub fn of(kind: u32) -> Self {
        let (net, fabric) = (Arc::default(), Arc::default());
        let [a, b] = [(); 2].map(|()| Side::new(&net, &fabric, kind));
        for (side, to) in [(&a, &b), (&b, &a)] {
            connect_again(&side.qp, to, kind);
        }
        Self {
            net,
            fabric,
            a,
            b,
            fates: VecDeque::new(),
            budgets: VecDeque::new(),
            now: Instant::now(),
            posted: 0,
        }
    }

    /// Posts a request about so many bytes. Its number.
    pub fn post(&mut self, opcode: Opcode, local: u64, length: u32, remote: u64) -> u64 {
        self.post_as(opcode, local, length, remote, false)
    }

    pub fn post_as(
        &mut self,
        opcode: Opcode,
        local: u64,
        length: u32,
        remote: u64,
        fence: bool,
    ) -> u64 {
        let mut request = SendWqe::default();
        request.wr_id = self.posted;
        request.opcode = opcode;
        request.fence = fence;
        request.rkey = self.b.key;
        request.remote_address = remote;
        let element = Element {
            address: local,
            length,
            lkey: self.a.key,
        };
        request.elements.set(&[element]).unwrap();
        self.a.sends.post(request);
        self.posted += 1;
        self.posted - 1
    }

    /// Posts so many writes.
    pub fn post_writes(&mut self, count: u64) {
        for _ in 0..count {
            self.post(Opcode::Write, 0, 8, 0);
        }
    }

    pub fn turn(&mut self) -> Progress {
        let budget = self.budgets.pop_front().unwrap_or(Budget::UNBOUNDED);
        self.turn_within(budget)
    }

    pub fn turn_within(&mut self, budget: Budget) -> Progress {
        let turn = Turn {
            now: self.now,
            node: None,
            budget,
            until: None,
        };
        let progress = self.a.qp.progress(turn);
        self.b.qp.progress(turn);
        progress
    }

    /// Has what is on its way arrive, but for what its fate is: late ones come after others.
    pub fn carry<T: Clone>(fates: &mut VecDeque<Fate>, queue: &mut VecDeque<T>) -> Option<T> {
        loop {
            let next = queue.pop_front()?;
            match fates.pop_front().unwrap_or(Fate::Arrives) {
                Fate::Arrives => return Some(next),
                Fate::Lost => {}
                Fate::Doubled => {
                    queue.push_back(next.clone());
                    return Some(next);
                }
                Fate::Late(by) => {
                    let at = usize::from(by).min(queue.len());
                    queue.insert(at, next);
                }
            }
        }
    }

    /// Carries one request's fragment to the responder.
    pub fn carry_request(&mut self) -> bool {
        let Some(sent) = Self::carry(&mut self.fates, &mut lock(&self.net).requests) else {
            return false;
        };
        let Some(target) = self.fabric.find(sent.to) else {
            return true;
        };
        let count = match sent.request.opcode.fetches() {
            true => sent.count,
            false => sent.bytes.len() as u64,
        };
        let fragment = Fragment::new(&sent.request, sent.length, sent.at, count).unwrap();
        let mut payload = Bytes {
            at: sent.at,
            bytes: &sent.bytes,
            fetched: Vec::new(),
        };
        let (answered, life) = {
            let mut responder = target.responder();
            let answered = responder.receive(&target.common, &sent.from, &fragment, &mut payload);
            (answered, responder.life())
        };
        let reply = |answer| Reply {
            to: sent.from.life,
            from: life,
            answer,
        };
        let fetched = payload.fetched.into_iter();
        let fetched = fetched.map(|(at, bytes)| reply(Answer::Data(at, bytes)));
        let last = answered.map(|answered| reply(Answer::Acknowledgement(answered)));
        let all = fetched.chain(last).map(|reply| (sent.from.number, reply));
        lock(&self.net).answers.extend(all);
        true
    }

    /// Carries an answer to the requester.
    pub fn carry_answer(&mut self) -> bool {
        let mut net = lock(&self.net);
        let Some((to, reply)) = Self::carry(&mut self.fates, &mut net.answers) else {
            return false;
        };
        net.come.entry(to).or_default().push_back(reply);
        true
    }

    pub fn carry_all(&mut self) {
        while self.carry_request() || self.carry_answer() {}
    }

    /// Goes on until nothing happens any more, also when timers have ended. What has completed at
    /// the sender: numbers and statuses.
    pub fn settle(&mut self) -> Vec<(u64, u8)> {
        let mut idle = 0;
        while idle < 40 {
            let progress = self.turn();
            let is_idle = lock(&self.net).requests.is_empty() && lock(&self.net).answers.is_empty();
            self.carry_all();
            idle = if progress.worked || !is_idle {
                0
            } else {
                idle + 1
            };
            self.now += Duration::from_millis(20);
        }
        self.completed()
    }

    pub fn completed(&self) -> Vec<(u64, u8)> {
        let all = std::iter::from_fn(|| self.a.cq.poll());
        all.map(|done: Completion| (done.wr_id.get(), done.status))
            .collect()
    }

    /// Messages of which something is on its way to the responder.
    pub fn under_way(&self) -> Vec<u64> {
        let net = lock(&self.net);
        let mut all: Vec<_> = net.requests.iter().map(|sent| sent.at.message.0).collect();
        all.dedup();
        all
    }
}
