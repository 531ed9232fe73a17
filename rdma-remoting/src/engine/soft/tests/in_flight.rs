//! Several requests of a connection on their way at once, over a carrier that loses, doubles and
//! reorders what it carries.

use super::super::carrier::{
    Acknowledgement, Answer, Carrier, Failed, Message, Payload, Peer, Position, Reached, Reply,
    Sender, Sequence, Session,
};
use super::super::common::{Life, QpCommon};
use super::super::datagram::{Packet, Undelivered};
use super::super::gather::{self, Source, move_behind, read_message};
use super::super::groups::Walk;
use super::super::inbound::Fragment;
use super::super::responder::{Arrival, Nak};
use super::super::target::Target;
use super::super::transfer::{Refusal, Transfer};
use super::*;
use crate::address::GroupGid;
use crate::counters::Counters;
use crate::engine::{Budget, Progress, Spending, Turn};
use crate::memory::{Access, MemoryRegion, Part};
use crate::request::{Element, MemoryKey};
use farlane_abi::queue::{
    Completion, MAX_MESSAGE_BYTES, WC_STATUS_LOC_PROT_ERR, WC_STATUS_REM_ACCESS_ERR,
    WC_STATUS_RNR_RETRY_EXC_ERR, WC_STATUS_WR_FLUSH_ERR,
};
use farlane_abi::rdma::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE,
    EVENT_SQ_DRAINED, QP_EN_SQD_ASYNC_NOTIFY, QP_STATE, QPS_ERR, QPS_RESET, QPS_SQD,
};
use farlane_sys::sync::lock;
use farlane_zero_copy::{Pool, Region, RegionError, copy_from_slice, copy_to_slice};
use proptest::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, Weak};

const BYTES: u64 = 64 << 10;
const ACCESS: u32 =
    ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
/// Bytes of a fragment.
const MTU: u64 = 256;
/// Reads and atomic operations on their way.
const READS: u8 = 4;
/// Messages on their way.
const MESSAGES: usize = 16;

/// What is on its way to a responder.
#[derive(Clone)]
struct Sent {
    to: QpName,
    from: Sender,
    request: SendWqe,
    length: u32,
    at: Position,
    bytes: Vec<u8>,
    /// Of a read those that it asks for.
    count: u64,
}

/// What is on its way, and what has come.
#[derive(Default)]
struct Net {
    requests: VecDeque<Sent>,
    /// Those to each requester: on their way, and there.
    answers: VecDeque<(QpNumber, Reply<Vec<u8>>)>,
    come: HashMap<QpNumber, VecDeque<Reply<Vec<u8>>>>,
}

/// A carrier that sends, and has the answers later.
struct Link {
    net: Arc<Mutex<Net>>,
    fabric: Arc<Fabric>,
    own: Arc<Mutex<Option<QpNumber>>>,
}

impl Carrier for Link {
    type Peer = Far;
    type Data = Vec<u8>;
    const IN_FLIGHT: usize = MESSAGES;

    fn find(&self, name: QpName) -> Option<Far> {
        Some(Far {
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
struct Far {
    net: Arc<Mutex<Net>>,
    name: Option<QpName>,
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
        let count = transfer.take_fragment(MTU, budget);
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
struct Bytes<'a> {
    at: Position,
    bytes: &'a [u8],
    fetched: Vec<(Position, Vec<u8>)>,
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
struct Side {
    qp: SoftQp<Link>,
    sends: LocalQueue<SendWqe>,
    recvs: LocalQueue<RecvWqe>,
    cq: Arc<LocalCompletionQueue>,
    memory: Arc<MemoryTable>,
    region: Region,
    key: MemoryKey,
    events: Arc<Mutex<Vec<u32>>>,
}

impl Drop for Side {
    fn drop(&mut self) {
        self.qp.destroy();
    }
}

impl Side {
    fn new(net: &Arc<Mutex<Net>>, fabric: &Arc<Fabric>) -> Self {
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
            kind: QPT_RC,
            pd: PdHandle(1),
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
        };
        let transport = Transport::Reliable;
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

    fn bytes(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        copy_to_slice(&self.region, offset, &mut bytes).unwrap();
        bytes
    }

    fn word(&self, offset: u64) -> u64 {
        u64::from_ne_bytes(self.bytes(offset, 8).try_into().unwrap())
    }

    fn receive(&self, wr_id: u64, address: u64, length: u32) {
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
enum Fate {
    Arrives,
    Lost,
    Doubled,
    /// Behind so many others.
    Late(u8),
}

/// Two queue pairs, of which one sends.
struct Pair {
    net: Arc<Mutex<Net>>,
    fabric: Arc<Fabric>,
    a: Side,
    b: Side,
    fates: VecDeque<Fate>,
    now: Instant,
    posted: u64,
}

/// Attributes of a connection.
fn attributes(to: &Side, qp_state: u8) -> QpAttr {
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
fn connect_again(qp: &SoftQp<Link>, to: &Side) {
    let steps = [
        (QP_TO_INIT, QPS_INIT),
        (QP_TO_RTR, QPS_RTR),
        (QP_TO_RTS, QPS_RTS),
    ];
    for (mask, state) in steps {
        qp.modify(mask, &attributes(to, state)).unwrap();
    }
}

impl Pair {
    fn new() -> Self {
        let (net, fabric) = (Arc::default(), Arc::default());
        let [a, b] = [(); 2].map(|()| Side::new(&net, &fabric));
        for (side, to) in [(&a, &b), (&b, &a)] {
            connect_again(&side.qp, to);
        }
        Self {
            net,
            fabric,
            a,
            b,
            fates: VecDeque::new(),
            now: Instant::now(),
            posted: 0,
        }
    }

    /// Posts a request about so many bytes. Its number.
    fn post(&mut self, opcode: Opcode, local: u64, length: u32, remote: u64) -> u64 {
        self.post_as(opcode, local, length, remote, false)
    }

    fn post_as(
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
    fn post_writes(&mut self, count: u64) {
        for _ in 0..count {
            self.post(Opcode::Write, 0, 8, 0);
        }
    }

    fn turn(&mut self) -> Progress {
        let turn = Turn {
            now: self.now,
            node: None,
            budget: Budget::UNBOUNDED,
            until: None,
        };
        let progress = self.a.qp.progress(turn);
        self.b.qp.progress(turn);
        progress
    }

    /// Has what is on its way arrive, but for what its fate is: late ones come after others.
    fn carry<T: Clone>(fates: &mut VecDeque<Fate>, queue: &mut VecDeque<T>) -> Option<T> {
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
    fn carry_request(&mut self) -> bool {
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
    fn carry_answer(&mut self) -> bool {
        let mut net = lock(&self.net);
        let Some((to, reply)) = Self::carry(&mut self.fates, &mut net.answers) else {
            return false;
        };
        net.come.entry(to).or_default().push_back(reply);
        true
    }

    fn carry_all(&mut self) {
        while self.carry_request() || self.carry_answer() {}
    }

    /// Goes on until nothing happens any more, also when timers have ended. What has completed at
    /// the sender: numbers and statuses.
    fn settle(&mut self) -> Vec<(u64, u8)> {
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

    fn completed(&self) -> Vec<(u64, u8)> {
        let all = std::iter::from_fn(|| self.a.cq.poll());
        all.map(|done: Completion| (done.wr_id.get(), done.status))
            .collect()
    }

    /// Messages of which something is on its way to the responder.
    fn under_way(&self) -> Vec<u64> {
        let net = lock(&self.net);
        let mut all: Vec<_> = net.requests.iter().map(|sent| sent.at.message.0).collect();
        all.dedup();
        all
    }
}

fn succeed(numbers: std::ops::Range<u64>) -> Vec<(u64, u8)> {
    numbers.map(|number| (number, WC_STATUS_SUCCESS)).collect()
}

#[test]
fn requests_are_sent_before_those_ahead_of_them_are_answered() {
    let mut pair = Pair::new();
    let count = MESSAGES as u64 + 4;
    for at in 0..count {
        pair.post(Opcode::Write, 8 * at, 8, 8 * at);
    }
    pair.turn();
    assert_eq!(pair.under_way(), (0..MESSAGES as u64).collect::<Vec<_>>());
    assert_eq!(pair.completed(), []);
    assert_eq!(pair.a.sends.len(), 4, "others wait in their queue");
    assert_eq!(pair.settle(), succeed(0..count));
}

#[test]
fn no_more_reads_are_on_their_way_than_the_peer_takes() {
    let mut pair = Pair::new();
    for at in 0..u64::from(READS) + 2 {
        pair.post(Opcode::Read, 8 * at, 8, 8 * at);
    }
    pair.post(Opcode::Write, 800, 8, 800);
    pair.turn();
    assert_eq!(pair.under_way().len(), usize::from(READS));
    assert_eq!(pair.settle(), succeed(0..u64::from(READS) + 3));
}

#[test]
fn a_request_with_a_fence_waits_for_what_is_read_before_it() {
    let mut pair = Pair::new();
    copy_from_slice(&pair.b.region, 64, &7_u64.to_ne_bytes()).unwrap();
    pair.post(Opcode::Read, 0, 8, 64);
    pair.post_as(Opcode::Write, 0, 8, 128, true);
    pair.turn();
    assert_eq!(pair.under_way(), [0]);
    assert_eq!(pair.settle(), succeed(0..2));
    assert_eq!(pair.b.word(128), 7);
}

#[test]
fn a_refusal_lets_those_before_it_complete_and_none_behind_it() {
    let mut pair = Pair::new();
    pair.post(Opcode::Write, 0, 8, 0);
    pair.post(Opcode::Read, 8, 8, 0);
    pair.post(Opcode::Write, 0, 8, BYTES - 1);
    pair.post(Opcode::Write, 0, 8, 0);
    pair.post(Opcode::Read, 0, 8, 0);
    let expected = [
        WC_STATUS_SUCCESS,
        WC_STATUS_SUCCESS,
        WC_STATUS_REM_ACCESS_ERR,
        WC_STATUS_WR_FLUSH_ERR,
        WC_STATUS_WR_FLUSH_ERR,
    ];
    assert_eq!(pair.settle(), (0..).zip(expected).collect::<Vec<_>>());
}

#[test]
fn an_error_of_the_requesters_own_waits_for_those_before_it() {
    for is_long in [false, true] {
        let mut pair = Pair::new();
        pair.post(Opcode::Write, 0, 8, 0);
        // No memory there, or a message that no peer takes.
        let (local, length) = if is_long {
            (0, MAX_MESSAGE_BYTES + 1)
        } else {
            (BYTES, 8)
        };
        pair.post(Opcode::Write, local, length, 0);
        pair.post(Opcode::Write, 0, 8, 0);
        pair.turn();
        assert_eq!((pair.under_way(), pair.completed()), (vec![0], vec![]));
        let done = pair.settle();
        assert_eq!(done[0], (0, WC_STATUS_SUCCESS));
        assert!(
            done[1].0 == 1 && ![WC_STATUS_SUCCESS, WC_STATUS_WR_FLUSH_ERR].contains(&done[1].1)
        );
        assert_eq!(done[2..], [(2, WC_STATUS_WR_FLUSH_ERR)]);
    }
}

#[test]
fn a_receiver_that_is_not_ready_gets_the_message_when_it_is() {
    let mut pair = Pair::new();
    pair.post(Opcode::Write, 0, 8, 0);
    pair.post(Opcode::Send, 0, 600, 0);
    pair.post(Opcode::Write, 0, 8, 8);
    pair.turn();
    pair.carry_all();
    pair.turn();
    assert_eq!(pair.completed(), succeed(0..1));
    pair.b.receive(70, 4096, 600);
    assert_eq!(pair.settle(), succeed(1..3));
    let arrived: Vec<_> = std::iter::from_fn(|| pair.b.cq.poll()).collect();
    assert_eq!(arrived.len(), 1);
    assert_eq!(
        (arrived[0].wr_id.get(), arrived[0].byte_len.get()),
        (70, 600)
    );
}

#[test]
fn a_receiver_that_is_never_ready_fails_the_request_and_flushes_the_rest() {
    let mut pair = Pair::new();
    pair.post(Opcode::Send, 0, 8, 0);
    pair.post(Opcode::Write, 0, 8, 8);
    let expected = [
        (0, WC_STATUS_RNR_RETRY_EXC_ERR),
        (1, WC_STATUS_WR_FLUSH_ERR),
    ];
    assert_eq!(pair.settle(), expected);
}

#[test]
fn where_all_is_lost_the_oldest_request_fails_and_the_rest_are_flushed() {
    let mut pair = Pair::new();
    pair.post_writes(3);
    pair.fates = VecDeque::from(vec![Fate::Lost; 1000]);
    let expected = [
        (0, WC_STATUS_RETRY_EXC_ERR),
        (1, WC_STATUS_WR_FLUSH_ERR),
        (2, WC_STATUS_WR_FLUSH_ERR),
    ];
    assert_eq!(pair.settle(), expected);
}

#[test]
fn a_send_queue_is_drained_when_all_that_was_sent_is_answered() {
    let mut pair = Pair::new();
    pair.post_writes(3);
    pair.turn();
    let attr = QpAttr {
        qp_state: QPS_SQD,
        en_sqd_async_notify: 1,
        ..QpAttr::default()
    };
    pair.a
        .qp
        .modify(QP_STATE | QP_EN_SQD_ASYNC_NOTIFY, &attr)
        .unwrap();
    pair.post(Opcode::Write, 0, 8, 0);
    let is_drained = |pair: &Pair| lock(&pair.a.events).contains(&EVENT_SQ_DRAINED);
    pair.turn();
    assert!(!is_drained(&pair) && pair.a.qp.query().sq_draining == 1);
    assert_eq!(pair.settle(), succeed(0..3));
    assert!(is_drained(&pair) && pair.a.qp.query().sq_draining == 0);
    assert_eq!(pair.a.sends.len(), 1);
}

#[test]
fn what_is_on_its_way_is_flushed_in_order_and_its_answers_are_none() {
    let mut pair = Pair::new();
    pair.post_writes(4);
    pair.turn();
    pair.a
        .qp
        .modify(QP_STATE, &attributes(&pair.b, QPS_ERR))
        .unwrap();
    let flushed = (0..4).map(|number| (number, WC_STATUS_WR_FLUSH_ERR));
    assert_eq!(pair.settle(), flushed.collect::<Vec<_>>());
}

#[test]
fn memory_that_goes_before_an_answer_comes_is_the_readers_error() {
    let mut pair = Pair::new();
    pair.post(Opcode::Read, 0, 8, 0);
    pair.post(Opcode::Write, 0, 8, 0);
    pair.turn();
    pair.a.region.revoke();
    let expected = [(0, WC_STATUS_LOC_PROT_ERR), (1, WC_STATUS_WR_FLUSH_ERR)];
    assert_eq!(pair.settle(), expected);
}

#[test]
fn windows_of_memory_change_when_nothing_is_on_its_way() {
    let mut pair = Pair::new();
    pair.post(Opcode::Write, 0, 8, 0);
    let window = pair
        .a
        .memory
        .insert_window(PdHandle(1), crate::memory::WindowKind::Two);
    // Not bound yet: it ends the queue pair, behind what was sent.
    pair.post(Opcode::LocalInvalidate(window.unwrap()), 0, 0, 0);
    pair.turn();
    assert_eq!(pair.completed(), []);
    let done = pair.settle();
    assert_eq!(done[0], (0, WC_STATUS_SUCCESS));
    assert!(done.len() == 2 && done[1].1 != WC_STATUS_SUCCESS);
}

impl Pair {
    /// An answer comes to the sender.
    fn answer(&self, to: Life, from: Life, acknowledgement: Acknowledgement) {
        let answer = Answer::Acknowledgement(acknowledgement);
        let mut net = lock(&self.net);
        let come = net.come.entry(self.a.qp.number()).or_default();
        come.push_back(Reply { to, from, answer });
    }
}

#[test]
fn an_answer_to_another_life_or_to_what_was_not_sent_is_none() {
    let mut pair = Pair::new();
    let count = MESSAGES as u64;
    pair.post_writes(count + 4);
    pair.turn();
    let to = lock(&pair.net).requests[0].from.life;
    let arrived = |message| Acknowledgement::Arrived(Position::of(Sequence(message)));
    pair.answer(Life::begin(), Life::begin(), arrived(count));
    pair.turn();
    assert_eq!(pair.completed(), []);
    // The responder is known by its first answer.
    let from = Life::begin();
    pair.answer(to, from, arrived(1));
    pair.answer(to, Life::begin(), arrived(count));
    pair.answer(to, from, arrived(count + 2));
    pair.answer(
        to,
        from,
        Acknowledgement::Refused(Sequence(count + 2), Nak::Fatal(9)),
    );
    pair.turn();
    assert_eq!(pair.completed(), succeed(0..1));
}

#[test]
fn answers_of_before_a_reset_complete_nothing_after_it() {
    let mut pair = Pair::new();
    pair.post_writes(3);
    pair.turn();
    while pair.carry_request() {}
    let reset = attributes(&pair.b, QPS_RESET);
    for (side, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
        side.qp.modify(QP_STATE, &reset).unwrap();
        connect_again(&side.qp, to);
    }
    pair.post_writes(2);
    pair.turn();
    while pair.carry_answer() {}
    pair.turn();
    assert_eq!(pair.completed(), []);
    assert_eq!(pair.settle(), succeed(3..5));
}

#[test]
fn a_sender_that_is_paused_takes_its_answers_when_it_goes_on() {
    let mut pair = Pair::new();
    pair.post_writes(3);
    pair.turn();
    pair.a.qp.pause(true);
    pair.carry_all();
    pair.turn();
    assert_eq!(pair.completed(), []);
    pair.a.qp.pause(false);
    pair.turn();
    assert_eq!(pair.completed(), succeed(0..3));
}

/// An operation of a script.
#[derive(Clone, Debug)]
enum Step {
    Write { remote: u16, length: u16 },
    Read { remote: u16, length: u16 },
    Send { length: u16 },
    Add { word: u8, add: u8 },
    Swap { word: u8, compare: u8, swap: u8 },
    Store { word: u8 },
}

fn step() -> impl Strategy<Value = Step> {
    let words = 0..4_u8;
    prop_oneof![
        (0..2000_u16, 0..1000_u16).prop_map(|(remote, length)| Step::Write { remote, length }),
        (0..2000_u16, 0..1000_u16).prop_map(|(remote, length)| Step::Read { remote, length }),
        (0..1000_u16).prop_map(|length| Step::Send { length }),
        (words.clone(), 1..9_u8).prop_map(|(word, add)| Step::Add { word, add }),
        (words.clone(), 0..9_u8, 0..9_u8).prop_map(|(word, compare, swap)| Step::Swap {
            word,
            compare,
            swap
        }),
        words.prop_map(|word| Step::Store { word }),
    ]
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        6 => Just(Fate::Arrives),
        1 => Just(Fate::Lost),
        1 => Just(Fate::Doubled),
        1 => (1..8_u8).prop_map(Fate::Late),
    ]
}

/// Local memory of each step, so that none depends on when another has ended; what is received goes
/// into a part of its own, too.
const SLOT: u64 = 1024;
/// Where the words of atomic operations lie at the peer.
const WORDS: u64 = 8192;
const RECEIVED: u64 = 16384;

proptest! {
    #[test]
    fn every_request_is_carried_out_once_and_in_order_whatever_is_lost(
        steps in prop::collection::vec(step(), 1..40),
        fates in prop::collection::vec(fate(), 0..400),
        late_receives: bool,
    ) {
        let mut pair = Pair::new();
        pair.fates = fates.into();
        let first: Vec<u8> = (0..BYTES).map(|i| (i % 253) as u8).collect();
        for side in [&pair.a, &pair.b] {
            copy_from_slice(&side.region, 0, &first).unwrap();
        }
        // What each side has afterwards.
        let (mut ours, mut theirs) = (first.clone(), first);
        let mut sends = Vec::new();
        // What is read may be read again later: who changes it waits for that, by a fence (IBTA
        // 10.8.3.3, table of ordering rules).
        let mut is_read = false;
        for (at, step) in (0_u64..).zip(&steps) {
            let reads = matches!(step, Step::Read { .. });
            let fence = !reads && is_read;
            is_read = reads || (is_read && !fence);
            let local = at * SLOT;
            let (here, u) = (usize::try_from(local).unwrap(), usize::from);
            let place = |word: u8| WORDS + 8 * u64::from(word);
            let word = |memory: &[u8], word: u8| {
                let at = usize::try_from(place(word)).unwrap();
                u64::from_ne_bytes(memory[at..at + 8].try_into().unwrap())
            };
            let set = |memory: &mut [u8], word: u8, value: u64| {
                let at = usize::try_from(place(word)).unwrap();
                memory[at..at + 8].copy_from_slice(&value.to_ne_bytes());
            };
            match *step {
                Step::Write { remote, length } => {
                    pair.post_as(Opcode::Write, local, length.into(), remote.into(), fence);
                    theirs[u(remote)..][..u(length)].copy_from_slice(&ours[here..][..u(length)]);
                }
                Step::Read { remote, length } => {
                    pair.post(Opcode::Read, local, length.into(), remote.into());
                    ours[here..][..u(length)].copy_from_slice(&theirs[u(remote)..][..u(length)]);
                }
                Step::Send { length } => {
                    pair.post_as(Opcode::Send, local, length.into(), 0, fence);
                    let to = RECEIVED + SLOT * sends.len() as u64;
                    let to_here = usize::try_from(to).unwrap();
                    theirs[to_here..][..u(length)].copy_from_slice(&ours[here..][..u(length)]);
                    sends.push((at, to, u32::from(length)));
                }
                Step::Add { word: at, add } => {
                    pair.post_as(Opcode::FetchAdd { add: add.into() }, local, 8, place(at), fence);
                    let old = word(&theirs, at);
                    ours[here..][..8].copy_from_slice(&old.to_ne_bytes());
                    set(&mut theirs, at, old.wrapping_add(add.into()));
                }
                Step::Swap { word: at, compare, swap } => {
                    let (compare, swap) = (compare.into(), swap.into());
                    pair.post_as(Opcode::CompareSwap { compare, swap }, local, 8, place(at), fence);
                    let old = word(&theirs, at);
                    ours[here..][..8].copy_from_slice(&old.to_ne_bytes());
                    if old == compare {
                        set(&mut theirs, at, swap);
                    }
                }
                Step::Store { word: at } => {
                    pair.post_as(Opcode::AtomicWrite, local, 8, place(at), fence);
                    let new = u64::from_ne_bytes(ours[here..][..8].try_into().unwrap());
                    set(&mut theirs, at, new);
                }
            }
        }
        let receive = |pair: &Pair| for &(number, to, length) in &sends {
            pair.b.receive(number, to, length);
        };
        if late_receives {
            // A first turn may meet no receive request; there are retries enough for one.
            pair.turn();
            pair.carry_all();
        }
        receive(&pair);
        prop_assert_eq!(pair.settle(), succeed(0..steps.len() as u64));
        let arrived = std::iter::from_fn(|| pair.b.cq.poll());
        let arrived: Vec<_> = arrived
            .map(|done| (done.wr_id.get(), done.status, done.byte_len.get()))
            .collect();
        let expected = sends.iter().map(|&(number, _, length)| (number, 0, length));
        prop_assert_eq!(arrived, expected.collect::<Vec<_>>());
        let length = usize::try_from(BYTES).unwrap();
        prop_assert!(pair.a.bytes(0, length) == ours, "the sender's memory");
        prop_assert!(pair.b.bytes(0, length) == theirs, "the receiver's memory");
    }

    #[test]
    fn answers_that_make_no_sense_harm_nothing_but_the_connection(
        steps in prop::collection::vec((0..3_u8, 0..6_u64, 0..700_u64, 0..40_usize), 1..60),
        turns in prop::collection::vec(any::<bool>(), 60),
    ) {
        let mut pair = Pair::new();
        let number = pair.a.qp.number();
        for at in 0..8 {
            let opcode = if at % 3 == 0 { Opcode::Read } else { Opcode::Write };
            pair.post(opcode, SLOT * at, 600, 0);
        }
        pair.turn();
        let (to, from) = {
            let net = lock(&pair.net);
            (net.requests[0].from.life, Life::begin())
        };
        for (&(kind, message, offset, count), turn) in steps.iter().zip(turns) {
            let at = Position { message: Sequence(message), offset };
            let answer = match kind {
                0 => Answer::Acknowledgement(Acknowledgement::Arrived(at)),
                1 => Answer::Acknowledgement(Acknowledgement::Missing(at)),
                2 if offset % 2 == 0 => Answer::Acknowledgement(Acknowledgement::Refused(
                    at.message,
                    Nak::NotReady(1),
                )),
                _ => Answer::Data(at, vec![0; count]),
            };
            let mut net = lock(&pair.net);
            net.come.entry(number).or_default().push_back(Reply { to, from, answer });
            drop(net);
            if turn {
                pair.turn();
            }
        }
        pair.now += Duration::from_secs(1);
        let mut done = pair.completed();
        done.extend(pair.settle());
        // In order, and nothing succeeds behind what has failed.
        let numbers: Vec<_> = done.iter().map(|(number, _)| *number).collect();
        prop_assert_eq!(numbers, (0..8).collect::<Vec<_>>());
        let failed = done.iter().position(|(_, status)| *status != 0);
        if let Some(failed) = failed {
            prop_assert!(done[failed..].iter().all(|(_, status)| *status != 0));
        }
    }

    #[test]
    fn fragments_of_any_content_end_a_connection_at_most(
        fragments in prop::collection::vec(
            (0..4_u64, 0..600_u64, 0..600_u32, 0..600_u64, 0..5_u8, any::<u16>()),
            1..50,
        ),
    ) {
        let mut pair = Pair::new();
        pair.post(Opcode::Write, 0, 0, 0);
        pair.turn();
        let from = lock(&pair.net).requests.pop_front().unwrap().from;
        (0..4).for_each(|number| pair.b.receive(number, 4096, 300));
        let name = QpName {
            destination: Destination::Gid(RawGid::default()),
            number: pair.b.qp.number(),
        };
        let target = pair.fabric.find(name).unwrap();
        for (message, offset, length, count, kind, remote) in fragments {
            let mut request = SendWqe::default();
            request.opcode = match kind {
                0 => Opcode::Send,
                1 => Opcode::Write,
                2 => Opcode::Read,
                3 => Opcode::FetchAdd { add: 1 },
                _ => Opcode::AtomicWrite,
            };
            (request.rkey, request.remote_address) = (pair.b.key, remote.into());
            let at = Position { message: Sequence(message), offset };
            let Some(fragment) = Fragment::new(&request, length, at, count) else {
                continue;
            };
            let bytes = vec![1; usize::try_from(count).unwrap()];
            let mut payload = Bytes { at, bytes: &bytes, fetched: Vec::new() };
            target.responder().receive(&target.common, &from, &fragment, &mut payload);
        }
        let done: Vec<_> = std::iter::from_fn(|| pair.b.cq.poll()).collect();
        prop_assert!(done.len() <= 4);
        prop_assert!(done.iter().all(|done| done.byte_len.get() <= 300));
    }
}
