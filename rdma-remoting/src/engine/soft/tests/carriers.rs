//! The transport services over carriers: what they promise is the same over any.

use super::super::attributes::State;
use super::super::carrier::{
    Carrier, Failed, Message, Payload, Peer, Reached, Reply, Sender, Session,
};
use super::super::common::{Life, QpCommon};
use super::super::datagram::{Packet, Undelivered};
use super::super::gather::{self, Source, move_behind, move_message, read_message};
use super::super::groups::Walk;
use super::super::local_copy::LocalCopy;
use super::super::responder::{Arrival, Responder};
use super::super::target::Target;
use super::super::transfer::{Incoming, Refusal, Transfer};
use super::*;
use crate::address::{AddressVector, AhHandle, Datagram, GroupGid, Recipients};
use crate::counters::Counters;
use crate::engine::{Budget, OPERATION_COST, Spending, Turn};
use crate::memory::{Access, MemoryRegion, Part};
use crate::request::{Element, MemoryKey, Target as RequestTarget};
use farlane_abi::queue::{
    Completion, GRH_BYTES, WC_FLAG_IMM, WC_OPCODE_RECV, WC_STATUS_LOC_PROT_ERR,
    WC_STATUS_REM_ACCESS_ERR, WC_STATUS_RNR_RETRY_EXC_ERR,
};
use farlane_abi::rdma::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, QP_STATE,
    QPS_RESET, QPT_UC, QPT_UD, UC_TO_RTR, UC_TO_RTS, UD_TO_INIT, UD_TO_RTR, UD_TO_RTS,
};
use farlane_sys::sync::lock;
use farlane_zero_copy::{Pool, Region, RegionError, copy_from_slice, copy_to_slice};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Weak};

const BYTES: u64 = 64 << 10;
/// Bytes of a long message, which takes several turns.
const LONG: u32 = 9000;
const ACCESS: u32 =
    ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
/// Q_Key of all.
const QKEY: u32 = 7;

/// A carrier of packets: the two ends share no memory of a message. Which of the next packets are
/// lost, a bit each says.
struct Wire {
    fabric: Arc<Fabric>,
    losses: Arc<AtomicU32>,
    told: Arc<Mutex<Told>>,
}

/// What a carrier has been told of a queue pair.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    /// Groups that it is in.
    groups: Vec<GroupGid>,
    /// Retry timers that have ended.
    timers: u32,
    /// States that it has entered.
    states: Vec<State>,
    /// How often it has stopped and gone on.
    pauses: Vec<bool>,
}

/// A queue pair behind the wire.
struct Far {
    target: Arc<Target>,
    losses: Arc<AtomicU32>,
}

impl Carrier for Wire {
    type Peer = Far;
    type Data = [u8; 0];
    const IN_FLIGHT: usize = 0;

    fn bytes_in_flight(&self) -> u64 {
        0
    }

    fn enter(&mut self, state: State, _: &QpAttr) {
        lock(&self.told).states.push(state);
    }

    fn pause(&mut self, paused: bool) {
        lock(&self.told).pauses.push(paused);
    }

    fn find(&self, name: QpName) -> Option<Far> {
        let losses = Arc::clone(&self.losses);
        let target = self.fabric.find(name)?;
        Some(Far { target, losses })
    }

    fn attach(&self, group: GroupGid, member: &Arc<Target>) -> Result<(), Errno> {
        self.fabric.groups.attach(group, member)?;
        lock(&self.told).groups.push(group);
        Ok(())
    }

    fn detach(&self, group: GroupGid, member: &Target) -> bool {
        lock(&self.told).groups.retain(|other| *other != group);
        self.fabric.groups.detach(group, member)
    }

    fn forget(&self, member: &Target) {
        lock(&self.told).groups.clear();
        self.fabric.groups.forget(member);
    }

    fn next_answer(&mut self) -> Option<Reply<[u8; 0]>> {
        None
    }

    fn has_answer(&self) -> bool {
        false
    }

    fn timer_ended(&mut self) {
        lock(&self.told).timers += 1;
    }

    fn walk(&self) -> Walk {
        self.fabric.groups.walk()
    }

    fn next_member(&self, group: GroupGid, walk: Walk) -> Option<(Far, Walk)> {
        let losses = Arc::clone(&self.losses);
        let (target, walk) = self.fabric.groups.next(group, walk)?;
        Some((Far { target, losses }, walk))
    }
}

impl Peer for Far {
    type Weak = (Weak<Target>, Arc<AtomicU32>);
    type Session<'p> = Conversation<'p>;

    fn downgrade(&self) -> Self::Weak {
        (Arc::downgrade(&self.target), Arc::clone(&self.losses))
    }

    fn upgrade((target, losses): &Self::Weak) -> Option<Self> {
        let losses = Arc::clone(losses);
        let target = target.upgrade()?;
        Some(Self { target, losses })
    }

    fn session(&self) -> Conversation<'_> {
        Conversation {
            qp: &self.target.common,
            responder: self.target.responder(),
            losses: &self.losses,
        }
    }

    fn admit(&self, packet: &Packet<'_>) -> Option<Conversation<'_>> {
        Some(Conversation {
            qp: &self.target.common,
            responder: packet.receiver(&self.target)?,
            losses: &self.losses,
        })
    }
}

struct Conversation<'p> {
    qp: &'p QpCommon,
    responder: MutexGuard<'p, Responder>,
    losses: &'p AtomicU32,
}

impl Conversation<'_> {
    /// Whether this packet is lost.
    fn loses(&self) -> bool {
        let shift = |losses| Some(losses >> 1);
        let order = (Ordering::Relaxed, Ordering::Relaxed);
        let losses = self.losses.fetch_update(order.0, order.1, shift);
        losses.is_ok_and(|losses| losses & 1 != 0)
    }
}

impl Session for Conversation<'_> {
    fn answers(&self, from: &Sender) -> bool {
        self.responder.answers(self.qp, from)
    }

    fn can_receive(&self) -> bool {
        self.responder.can_receive()
    }

    fn life(&self) -> Option<Life> {
        Some(self.responder.life())
    }

    fn go_on(
        &mut self,
        message: &Message<'_>,
        transfer: &mut Transfer,
        budget: &mut Spending,
    ) -> Result<Reached, Refusal> {
        let packet = InPackets::new(message.request, message.parts)
            .map_err(|_| Refusal::Local(WC_STATUS_LOC_PROT_ERR))?;
        if self.loses() {
            return Err(Refusal::Unanswered);
        }
        let mut incoming = Incoming {
            from: message.from,
            request: message.request,
            payload: packet,
            qp: self.qp,
            responder: &mut self.responder,
        };
        let outcome = incoming.go_on(transfer, budget);
        for (offset, bytes) in incoming.payload.answers {
            let (counters, length) = (&self.qp.counters, bytes.len() as u64);
            // The message has so many bytes before those that have come back.
            let padded = [vec![0; usize::try_from(offset).unwrap()], bytes].concat();
            let source = Source::Inline(&padded);
            let moved = move_message(counters, message.parts, source, offset, length);
            moved.map_err(|_| Refusal::Local(WC_STATUS_LOC_PROT_ERR))?;
        }
        Ok(match outcome? {
            true => Reached::Arrived,
            false => Reached::Part,
        })
    }

    fn deliver(&mut self, packet: &Packet<'_>) -> Result<(), Undelivered> {
        let data = InPackets::new(packet.request, packet.parts);
        let mut data = data.map_err(|_| Undelivered::Local(WC_STATUS_LOC_PROT_ERR))?;
        if self.loses() {
            return Err(Undelivered::Dropped);
        }
        packet.deliver(&mut data, self.qp, &mut self.responder)
    }

    fn await_receive(&mut self, _: &QpCommon) {
        // Nobody tells it over a wire: its timer says when.
    }

    fn complete(&mut self, arrival: Option<&Arrival>) {
        if let Some(arrival) = arrival {
            self.responder.complete_receive(self.qp, arrival);
        }
        self.responder.end_message();
    }
}

/// A message as bytes, and those that go back.
struct InPackets {
    bytes: Vec<u8>,
    answers: Vec<(u64, Vec<u8>)>,
}

impl InPackets {
    fn new(request: &SendWqe, parts: &[Part]) -> Result<Self, RegionError> {
        let mut bytes = vec![0; usize::try_from(request.length()).unwrap()];
        let source = request
            .inline()
            .map_or(Source::Parts(parts), Source::Inline);
        read_message(source, &mut bytes)?;
        Ok(Self {
            bytes,
            answers: Vec::new(),
        })
    }
}

impl Payload for InPackets {
    fn write(&mut self, to: &[Part], header: u64, offset: u64, length: u64) -> Result<(), Failed> {
        let (counters, source) = (Counters::default(), Source::Inline(&self.bytes));
        let moved = move_behind(&counters, header, to, source, offset, length);
        moved.map_err(
            |(gather::Failed::Source(e) | gather::Failed::Destination(e))| Failed::Responder(e),
        )
    }

    fn read(&mut self, from: &[Part], offset: u64, length: u64) -> Result<(), Failed> {
        let mut bytes = vec![0; usize::try_from(offset + length).unwrap()];
        read_message(Source::Parts(from), &mut bytes).map_err(Failed::Responder)?;
        let behind = bytes.split_off(usize::try_from(offset).unwrap());
        self.answers.push((offset, behind));
        Ok(())
    }

    fn operand(&mut self) -> Result<u64, RegionError> {
        Ok(u64::from_ne_bytes(self.bytes[..8].try_into().unwrap()))
    }

    fn answer(&mut self, word: u64) -> Result<(), RegionError> {
        self.answers.push((0, word.to_ne_bytes().to_vec()));
        Ok(())
    }
}

/// A carrier as tests make it.
trait Made: Carrier {
    /// Whether it can lose messages.
    const LOSES: bool;
    fn made(fabric: &Arc<Fabric>, losses: &Arc<AtomicU32>) -> Self;
    /// What it has been told.
    fn told(&self) -> Arc<Mutex<Told>> {
        Arc::default()
    }
}

impl Made for LocalCopy {
    const LOSES: bool = false;
    fn made(fabric: &Arc<Fabric>, _: &Arc<AtomicU32>) -> Self {
        Self(Arc::clone(fabric))
    }
}

impl Made for Wire {
    const LOSES: bool = true;
    fn made(fabric: &Arc<Fabric>, losses: &Arc<AtomicU32>) -> Self {
        Self {
            fabric: Arc::clone(fabric),
            losses: Arc::clone(losses),
            told: Arc::default(),
        }
    }

    fn told(&self) -> Arc<Mutex<Told>> {
        Arc::clone(&self.told)
    }
}

/// A queue pair with memory.
struct Side<C: Carrier> {
    qp: SoftQp<C>,
    sends: LocalQueue<SendWqe>,
    recvs: LocalQueue<RecvWqe>,
    cq: Arc<LocalCompletionQueue>,
    region: Region,
    key: MemoryKey,
    told: Arc<Mutex<Told>>,
}

impl<C: Carrier> Drop for Side<C> {
    fn drop(&mut self) {
        self.qp.destroy();
    }
}

impl<C: Made> Side<C> {
    fn new(fabric: &Arc<Fabric>, losses: &Arc<AtomicU32>, kind: u32) -> Self {
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
        let cq = LocalCompletionQueue::new(64);
        let owner = Owner {
            spec: ContextSpec::default(),
            memory,
        };
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
            events: Box::new(|_| ()),
        };
        let transport = Transport::from_wire(kind).unwrap();
        let carrier = C::made(fabric, losses);
        let told = carrier.told();
        Self {
            qp: SoftQp::over(carrier, &owner, spec, transport, fabric, MAX_QUEUE_PAIRS).unwrap(),
            sends,
            recvs,
            cq,
            region,
            key: registered.unwrap(),
            told,
        }
    }

    fn fill(&self, offset: u64, bytes: &[u8]) {
        copy_from_slice(&self.region, offset, bytes).unwrap();
    }

    fn bytes(&self, offset: u64, length: u32) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        copy_to_slice(&self.region, offset, &mut bytes).unwrap();
        bytes
    }

    fn element(&self, address: u64, length: u32) -> Element {
        Element {
            address,
            length,
            lkey: self.key,
        }
    }

    fn receive(&self, address: u64, length: u32) {
        let mut request = RecvWqe::default();
        request
            .elements
            .set(&[self.element(address, length)])
            .unwrap();
        self.recvs.post(request);
    }
}

/// Two queue pairs that send to each other, and what the carrier loses next.
struct Pair<C: Carrier> {
    a: Side<C>,
    b: Side<C>,
    losses: Arc<AtomicU32>,
    now: Instant,
}

impl<C: Made> Pair<C> {
    fn new(kind: u32) -> Self {
        let (fabric, losses) = (Arc::default(), Arc::default());
        let [a, b] = [(); 2].map(|()| Side::new(&fabric, &losses, kind));
        for (side, to) in [(&a, &b), (&b, &a)] {
            let masks = match kind {
                QPT_RC => [QP_TO_INIT, QP_TO_RTR, QP_TO_RTS],
                QPT_UC => [QP_TO_INIT, UC_TO_RTR, UC_TO_RTS],
                _ => [UD_TO_INIT, UD_TO_RTR, UD_TO_RTS],
            };
            for (mask, qp_state) in masks.into_iter().zip([QPS_INIT, QPS_RTR, QPS_RTS]) {
                let attr = QpAttr {
                    qp_state,
                    port_num: 1,
                    ah_port: 1,
                    is_global: 1,
                    path_mtu: 3,
                    qkey: QKEY.into(),
                    qp_access_flags: ACCESS.into(),
                    dest_qp_num: to.qp.number().into(),
                    max_rd_atomic: 1,
                    max_dest_rd_atomic: 1,
                    min_rnr_timer: 1,
                    timeout: 14,
                    retry_cnt: 3,
                    rnr_retry: 3,
                    ..Default::default()
                };
                side.qp.modify(mask, &attr).unwrap();
            }
        }
        Self {
            a,
            b,
            losses,
            now: Instant::now(),
        }
    }

    /// Carries a request of `a` out, as many bytes a turn as a packet has. Its completion.
    fn carry_out(&mut self, request: SendWqe) -> Completion {
        self.a.sends.post(request);
        loop {
            let budget = Budget::new(2 * OPERATION_COST).within(4096, 1);
            let turn = Turn {
                now: self.now,
                node: None,
                budget,
                until: None,
            };
            self.a.qp.progress(turn);
            if let Some(completion) = self.a.cq.poll() {
                break completion;
            }
            self.now += Duration::from_millis(100);
        }
    }

    /// A request of `a` about memory at its beginning.
    fn request(&self, opcode: Opcode, length: u32, remote_address: u64) -> SendWqe {
        let mut request = SendWqe::default();
        request.opcode = opcode;
        request.rkey = self.b.key;
        request.remote_address = remote_address;
        request.immediate = 0x1234;
        let elements = [
            self.a.element(0, length / 3),
            self.a.element((length / 3).into(), length - length / 3),
        ];
        request.elements.set(&elements).unwrap();
        request
    }
}

fn pattern(seed: u8) -> Vec<u8> {
    (0..LONG).map(|i| (i % 251) as u8 ^ seed).collect()
}

/// Every operation of a reliable connection, some packets of which are lost.
fn a_reliable_connection_carries_all_out<C: Made>(lost: u32) {
    let mut pair = Pair::<C>::new(QPT_RC);
    let lose = |pair: &Pair<C>| pair.losses.store(lost, Ordering::Relaxed);

    pair.a.fill(0, &pattern(1));
    lose(&pair);
    let done = pair.carry_out(pair.request(Opcode::Write, LONG, 100));
    assert_eq!(done.status, WC_STATUS_SUCCESS);
    assert_eq!(pair.b.bytes(100, LONG), pattern(1));

    pair.b.fill(300, &pattern(2));
    lose(&pair);
    let done = pair.carry_out(pair.request(Opcode::Read, LONG, 300));
    assert_eq!(done.status, WC_STATUS_SUCCESS);
    assert_eq!(pair.a.bytes(0, LONG), pattern(2));

    pair.b.receive(20_000, LONG);
    lose(&pair);
    let done = pair.carry_out(pair.request(Opcode::SendImm, LONG, 0));
    assert_eq!(done.status, WC_STATUS_SUCCESS);
    let arrived = pair.b.cq.poll().unwrap();
    let told = (arrived.opcode, arrived.flags.get(), arrived.imm.get());
    assert_eq!(told, (WC_OPCODE_RECV, WC_FLAG_IMM, 0x1234));
    assert_eq!(pair.b.bytes(20_000, LONG), pattern(2));

    pair.b.fill(0, &5_u64.to_ne_bytes());
    lose(&pair);
    let done = pair.carry_out(pair.request(Opcode::FetchAdd { add: 2 }, 8, 0));
    assert_eq!(done.status, WC_STATUS_SUCCESS);
    assert_eq!(pair.a.bytes(0, 8), 5_u64.to_ne_bytes());
    assert_eq!(pair.b.bytes(0, 8), 7_u64.to_ne_bytes());
    let done = pair.carry_out(pair.request(Opcode::AtomicWrite, 8, 16));
    assert_eq!(done.status, WC_STATUS_SUCCESS);
    assert_eq!(pair.b.bytes(16, 8), 5_u64.to_ne_bytes());

    // Nobody receives, however often it is tried.
    let done = pair.carry_out(pair.request(Opcode::Send, LONG, 0));
    assert_eq!(done.status, WC_STATUS_RNR_RETRY_EXC_ERR);
}

#[test]
fn a_reliable_connection_is_one_over_any_carrier() {
    a_reliable_connection_carries_all_out::<LocalCopy>(0);
    a_reliable_connection_carries_all_out::<Wire>(0);
    a_reliable_connection_carries_all_out::<Wire>(0b1101);
}

#[test]
fn a_reliable_connection_gives_up_where_a_carrier_loses_all() {
    let mut pair = Pair::<Wire>::new(QPT_RC);
    pair.losses.store(u32::MAX, Ordering::Relaxed);
    let done = pair.carry_out(pair.request(Opcode::Write, LONG, 0));
    assert_eq!(done.status, WC_STATUS_RETRY_EXC_ERR);
    // Before each of the three retries.
    assert_eq!(lock(&pair.a.told).timers, 3);
}

#[test]
fn a_carrier_is_told_of_the_groups_that_a_queue_pair_is_in() {
    let pair = Pair::<Wire>::new(QPT_UD);
    let groups = [1, 2, 3].map(|last| {
        let mut gid = [0xff; 16];
        gid[15] = last;
        GroupGid::new(gid).unwrap()
    });
    let told = || lock(&pair.a.told).groups.clone();
    for group in groups {
        pair.a.qp.attach(group).unwrap();
    }
    assert_eq!(told(), groups);
    pair.a.qp.detach(groups[1]).unwrap();
    assert_eq!(told(), [groups[0], groups[2]]);
    assert!(pair.a.qp.detach(groups[1]).is_err());
    pair.a.qp.destroy();
    assert_eq!(told(), []);
}

#[test]
fn a_carrier_is_told_of_the_states_of_its_queue_pair() {
    use State::{Error, Init, ReadyToReceive, ReadyToSend, Reset, SendError};
    let states = |pair: &Pair<Wire>| std::mem::take(&mut lock(&pair.a.told).states);
    for (kind, after_error) in [(QPT_RC, Error), (QPT_UC, SendError)] {
        let mut pair = Pair::<Wire>::new(kind);
        assert_eq!(states(&pair), [Init, ReadyToReceive, ReadyToSend]);
        pair.a.qp.pause(true);
        pair.a.qp.pause(false);
        assert_eq!(lock(&pair.a.told).pauses, [true, false]);
        let mut request = pair.request(Opcode::Write, 8, 0);
        let beyond = pair.a.element(BYTES, 8);
        request.elements.set(&[beyond]).unwrap();
        pair.carry_out(request);
        assert_eq!(states(&pair), [after_error]);
        let reset = QpAttr {
            qp_state: QPS_RESET,
            ..QpAttr::default()
        };
        pair.a.qp.modify(QP_STATE, &reset).unwrap();
        assert_eq!(states(&pair), [Reset]);
        pair.a.qp.destroy();
        assert_eq!(states(&pair), [Reset]);
    }
}

fn a_refusal_reaches_the_requester<C: Made>() {
    let mut pair = Pair::<C>::new(QPT_RC);
    let done = pair.carry_out(pair.request(Opcode::Write, LONG, BYTES - 1));
    assert_eq!(done.status, WC_STATUS_REM_ACCESS_ERR);
}

#[test]
fn the_responder_checks_what_it_is_asked_for_over_any_carrier() {
    a_refusal_reaches_the_requester::<LocalCopy>();
    a_refusal_reaches_the_requester::<Wire>();
}

/// What an unreliable service sends is sent, whether or not it arrives.
fn nobody_learns_of_what_is_lost<C: Made>(kind: u32) {
    let mut pair = Pair::<C>::new(kind);
    let length = 3000;
    let header = if kind == QPT_UD { GRH_BYTES } else { 0 };
    let mut request = pair.request(Opcode::SendImm, length, 0);
    if kind == QPT_UD {
        request.target = RequestTarget::Datagram(Datagram {
            handle: AhHandle::default(),
            address: AddressVector {
                to: Recipients::Port(Destination::Gid(RawGid::default())),
                sl: 0,
                flow_label: 0,
                traffic_class: 0,
                hop_limit: 1,
                source: None,
            },
            number: pair.b.qp.number(),
            qkey: QKEY,
        });
    }
    pair.a.fill(0, &pattern(3));
    pair.b.receive(100, LONG);
    if C::LOSES {
        pair.losses.store(1, Ordering::Relaxed);
        let done = pair.carry_out(request.clone());
        assert_eq!(done.status, WC_STATUS_SUCCESS);
        assert!(pair.b.cq.poll().is_none());
    }
    assert_eq!(pair.carry_out(request).status, WC_STATUS_SUCCESS);
    let arrived = pair.b.cq.poll().unwrap();
    assert_eq!(arrived.byte_len.get(), header + length);
    let expected = &pattern(3)[..3000];
    assert_eq!(pair.b.bytes(100 + u64::from(header), length), expected);
}

#[test]
fn unreliable_services_are_so_over_any_carrier() {
    for kind in [QPT_UC, QPT_UD] {
        nobody_learns_of_what_is_lost::<LocalCopy>(kind);
        nobody_learns_of_what_is_lost::<Wire>(kind);
    }
}
