//! The transport services over carriers: what they promise is the same over any.

mod wire;

use super::super::attributes::State;
use super::super::carrier::Carrier;
use super::super::local_copy::LocalCopy;
use super::*;
use crate::address::{AddressVector, AhHandle, Datagram, GroupGid, Recipients};
use crate::engine::{Budget, OPERATION_COST, Turn};
use crate::memory::{Access, MemoryRegion};
use crate::request::{Element, MemoryKey, Target as RequestTarget};
use crate::traffic::Traffic;
use farlane_abi::queue::{
    Completion, GRH_BYTES, WC_FLAG_IMM, WC_OPCODE_RECV, WC_STATUS_REM_ACCESS_ERR,
    WC_STATUS_RNR_RETRY_EXC_ERR,
};
use farlane_abi::rdma::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, QP_STATE,
    QPS_RESET, QPT_UC, QPT_UD, UC_TO_RTR, UC_TO_RTS, UD_TO_INIT, UD_TO_RTR, UD_TO_RTS,
};
use farlane_sys::sync::lock;
use farlane_zero_copy::{Pool, Region, copy_from_slice, copy_to_slice};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use wire::{Told, Wire};

const BYTES: u64 = 64 << 10;
/// Bytes of a long message, which takes several turns.
const LONG: u32 = 9000;
const ACCESS: u32 =
    ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
/// Q_Key of all.
const QKEY: u32 = 7;

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

/// A queue pair with memory.
struct Side<C: Carrier> {
    qp: SoftQp<C>,
    traffic: Arc<Traffic>,
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
        let traffic = Arc::new(Traffic::default());
        let owner = Owner {
            spec: ContextSpec {
                traffic: traffic.clone(),
                ..ContextSpec::default()
            },
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
            traffic,
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

/// Of requests that succeed the first one is timed, and each 61st after it: those that fail begin
/// none anew.
fn some_requests_are_timed<C: Made>() {
    let mut pair = Pair::<C>::new(QPT_RC);
    let timed = |pair: &Pair<C>| {
        let all = pair.a.traffic.requests.all();
        all.map(|(of, times)| (of, times.distribution().count()))
    };
    let rest = [("read", 0), ("atomic", 0), ("local", 0)];
    for n in 0_u64..130 {
        pair.carry_out(pair.request(Opcode::Write, LONG, 100));
        let expected = [[("send", 0), ("write", n / 61 + 1)].as_slice(), &rest].concat();
        assert_eq!(timed(&pair).as_slice(), expected);
    }
    let before = timed(&pair);
    // This one would be timed, and is received by nobody.
    for _ in 130..183 {
        pair.carry_out(pair.request(Opcode::Write, 8, 100));
    }
    let done = pair.carry_out(pair.request(Opcode::Send, 8, 0));
    assert_eq!(done.status, WC_STATUS_RNR_RETRY_EXC_ERR);
    assert_eq!(timed(&pair), before);
}

#[test]
fn some_requests_are_timed_over_any_carrier() {
    some_requests_are_timed::<LocalCopy>();
    some_requests_are_timed::<Wire>();
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
