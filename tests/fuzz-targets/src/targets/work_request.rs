//! Two queue pairs whose processes write whatever they like into their queues and completion
//! queues, connected to each other or to anybody.

use crate::{Input, PAGE, Ram, format_all_logs};
use farlane_abi::queue::{
    CQ_OFF_ARMED, CQ_OFF_CONSUMED, CQ_OFF_ENTRIES, CQ_OFF_PRODUCED, Completion, CqLayout,
    FLUSH_OF_REGION, MAX_INLINE_BYTES, MAX_SGE, OP_BIND_WINDOW, OP_COMPARE_SWAP, OP_FETCH_ADD,
    OP_FLUSH, OP_LOCAL_INVALIDATE, OP_SEND_INVALIDATE, QP_OFF_ENTRIES, QP_OFF_RECV_CONSUMED,
    QP_OFF_RECV_PRODUCED, QP_OFF_SEND_CONSUMED, QP_OFF_SEND_PRODUCED, QpLayout, RecvEntry,
    SEND_TAIL, SendEntry, SendTail, Sge, SrqLayout, WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{
    ACCESS_FLUSH_GLOBAL, ACCESS_LOCAL_WRITE, ACCESS_MW_BIND, ACCESS_REMOTE_ATOMIC,
    ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, MULTICAST_QPN, QP_STATE, QP_TO_INIT, QP_TO_RTR,
    QP_TO_RTS, QPS_INIT, QPS_RESET, QPS_RTR, QPS_RTS, QPT_RC, QPT_UC, QPT_UD, QPT_XRC_RECV,
    QPT_XRC_SEND, QpAttr, UC_TO_RTR, UC_TO_RTS, UD_TO_INIT, UD_TO_RTR, UD_TO_RTS, VerbsVersion,
    XRC_TARGET_TO_RTS,
};
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_rdma_remoting::DeviceClock;
use farlane_rdma_remoting::address::{
    AddressVector, AhHandle, Destination, GroupGid, QpNumber, Recipients,
};
use farlane_rdma_remoting::completion_queue::SharedCompletionQueue;
use farlane_rdma_remoting::engine::soft::{SoftCq, SoftEngine, SoftSrq};
use farlane_rdma_remoting::engine::{
    ContextSpec, EngineContext as _, EngineQp, PortAddress, QpDepths, QpSpec, Receives,
};
use farlane_rdma_remoting::memory::{Access, MemoryRegion, MemoryTable, PdHandle, WindowKind};
use farlane_rdma_remoting::request::{
    Addressing, MemoryKey, RecvWqe, ResolveAddress, SendFormat, SendWqe, SrqNumber,
    WorkRequest as _,
};
use farlane_rdma_remoting::shared_receive_queue::SharedReceives;
use farlane_rdma_remoting::work_queue::{addressed_queues, shared_receive_queue};
use farlane_rdma_remoting::xrc::XrcDomain;
use farlane_zero_copy::{AddressSpace, Region, SharedMemory};
use std::cell::{LazyCell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages of one end: a queue pair, its completion queue, and memory.
const END_PAGES: u64 = 16;
const QP_PAGES: u64 = 4;
const CQ_PAGE: u64 = 4;
/// Of the queue pair's pages the one that holds a shared receive queue, where it has one.
const SRQ_PAGE: u64 = 3;
/// Entries of that, and elements of each.
const SRQ: (u32, u32) = (4, 2);
/// Memory regions: (first page, pages, rights, protection domain). Pages in between are in none.
const REGIONS: [(u64, u64, u32, u32); 4] = [
    (6, 2, EVERYTHING, 1),
    (9, 1, ACCESS_LOCAL_WRITE, 1),
    (11, 1, ACCESS_REMOTE_READ | ACCESS_MW_BIND, 1),
    (13, 2, EVERYTHING, 2),
];
const EVERYTHING: u32 = ACCESS_LOCAL_WRITE
    | ACCESS_REMOTE_WRITE
    | ACCESS_REMOTE_READ
    | ACCESS_REMOTE_ATOMIC
    | ACCESS_MW_BIND
    | ACCESS_FLUSH_GLOBAL;
/// Memory windows: their kinds and protection domains.
const WINDOWS: [(WindowKind, u32); 3] = [
    (WindowKind::One, 1),
    (WindowKind::Two, 1),
    (WindowKind::One, 2),
];
/// Pages that no request may write: in no region, in one without the right, or in another
/// protection domain.
const UNTOUCHED: [u64; 8] = [5, 8, 10, 11, 12, 13, 14, 15];
/// The first page of a region starts, and its last one ends, so many bytes inside of the page.
const MARGIN: usize = 24;
/// Address of the byte of a region's first page, in work requests.
const IOVA: u64 = 0x1_0000;
/// Of the ports of both ends.
const LIDS: [u16; 2] = [1, 2];

/// What stays from input to input.
struct Machine {
    ram: Ram,
    space: Arc<AddressSpace>,
    segments: [[SharedMemory; 3]; 2],
}

thread_local! {
    static COMPLETED: RefCell<BTreeSet<Completed>> = const { RefCell::new(BTreeSet::new()) };
    static MACHINE: LazyCell<Machine> = const { LazyCell::new(|| {
        format_all_logs();
        let ram = Ram::new(2 * END_PAGES);
        let space = AddressSpace::new();
        space.replace_ram(&ram.whole()).expect("memory with a file");
        let segment = |page: u64, pages: u64| {
            let region = Region::from_guest(&space, &[(page * PAGE, pages * PAGE)], true);
            region.and_then(|region| region.stitch()).expect("whole pages")
        };
        let of = |base| {
            let queues = segment(base, QP_PAGES);
            [queues, segment(base + CQ_PAGE, 1), segment(base + SRQ_PAGE, 1)]
        };
        let segments = [0, END_PAGES].map(of);
        Machine { ram, space, segments }
    }) };
}

/// A request that was carried out: transport service type of its queue pair, operation and flags of
/// its completion.
pub type Completed = (u32, u8, u16);

/// What requests of inputs of this thread were carried out.
#[must_use]
pub fn completed() -> BTreeSet<Completed> {
    COMPLETED.with_borrow(Clone::clone)
}

/// Where both ends take receive requests from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Queues {
    Own,
    Shared,
    /// The second one: of a domain.
    Extended,
}

/// What the first handles name: each end's port in both ways, and a group that both are in.
struct Handles;

impl ResolveAddress for Handles {
    fn resolve(&self, handle: u32) -> Option<(AhHandle, AddressVector)> {
        let to = match handle {
            1 => Recipients::Port(Destination::Gid([0; 16])),
            2 => Recipients::Port(Destination::Gid([1; 16])),
            3 => Recipients::Port(Destination::Lid(LIDS[1])),
            5 => Recipients::Port(Destination::Lid(LIDS[0])),
            4 => Recipients::Group(group()),
            _ => return None,
        };
        let address = AddressVector {
            to,
            sl: 0,
            flow_label: 0,
            traffic_class: 0,
            hop_limit: 1,
        };
        Some((AhHandle::default(), address))
    }
}

fn group() -> GroupGid {
    GroupGid::new([0xff; 16]).expect("a multicast address")
}

/// A process with its queue pair.
struct End<'a> {
    ram: &'a Ram,
    /// Its first page.
    base: u64,
    /// Transport service type.
    kind: u32,
    layout: QpLayout,
    qp: Arc<dyn EngineQp>,
    table: Arc<MemoryTable>,
    /// Keys of its memory, and the memory.
    keys: Vec<(MemoryKey, Region)>,
    /// Keys that lead to its windows.
    windows: Vec<MemoryKey>,
    /// Its shared receive queue.
    shared: Option<Arc<SharedReceives>>,
    /// The domain that it is in, and the number there.
    domain: Option<(Arc<XrcDomain>, SrqNumber)>,
    /// Of its completion queue.
    cqes: u32,
}

/// A shared receive queue of one end.
fn shared(machine: &Machine, index: u8) -> Arc<SharedReceives> {
    let [.., memory] = &machine.segments[usize::from(index)];
    let queue = shared_receive_queue(memory, &srq_layout()).expect("a page");
    SharedReceives::new(Box::new(queue), PdHandle(1), Box::new(|_| ()))
}

fn srq_layout() -> SrqLayout {
    SrqLayout::new(SRQ.0, SRQ.1).expect("a small queue")
}

impl<'a> End<'a> {
    fn new(
        machine: &'a Machine,
        engine: &SoftEngine,
        index: u8,
        kind: u32,
        (layout, receives_from): (QpLayout, Queues),
        cqes: u32,
        signal_all: bool,
    ) -> Self {
        let base = u64::from(index) * END_PAGES;
        let table = Arc::new(MemoryTable::new(8));
        let keys = REGIONS.iter().map(|&(page, pages, access, pd)| {
            let start = (base + page) * PAGE + MARGIN as u64;
            let length = pages * PAGE - 2 * MARGIN as u64;
            let access = Access::from_wire(access).expect("known rights");
            let writable = access.local_write();
            let region =
                Region::from_guest(&machine.space, &[(start, length)], writable).expect("memory");
            let memory = MemoryRegion {
                pd: PdHandle(pd),
                iova: IOVA,
                offset: 0,
                length,
                access,
                region: region.clone(),
                owner: None,
            };
            memory.check().expect("a region of its own length");
            (table.insert(memory).expect("room"), region)
        });
        let keys = keys.collect();
        let windows = WINDOWS.map(|(kind, pd)| table.insert_window(PdHandle(pd), kind));
        let windows = windows.map(|window| window.expect("room")).into();
        let [queues, completions, _] = &machine.segments[usize::from(index)];
        let addressing = match kind {
            QPT_UD => Addressing::Handles(Arc::new(Handles)),
            QPT_XRC_SEND => Addressing::Domain,
            _ => Addressing::Connected,
        };
        let both = addressed_queues(queues, &layout, addressing);
        let (sends, recvs) = both.expect("a segment that is long enough");
        let cq_layout = CqLayout::new(cqes).expect("a small queue");
        let nothing = || Box::new(|| ()) as Box<dyn Fn() + Send + Sync>;
        let cq = SharedCompletionQueue::new(
            completions.clone(),
            &cq_layout,
            &DeviceClock::default(),
            Some(nothing()),
            nothing(),
        );
        let cq = Arc::new(cq.expect("a segment that is long enough"));
        let is_shared = receives_from == Queues::Shared || kind == QPT_XRC_RECV;
        let shared = is_shared.then(|| shared(machine, index));
        let domain = (kind == QPT_XRC_RECV).then(|| {
            let domain = Arc::<XrcDomain>::default();
            let receives = shared.as_ref().expect("one of the domain");
            let number = domain.add(receives, &table, Arc::clone(&cq) as _);
            (domain, number)
        });
        let receives = match (&domain, &shared) {
            (Some((domain, _)), _) => Receives::Domain(Arc::clone(domain) as _),
            (None, Some(shared)) => Receives::Shared(SoftSrq::of(shared)),
            (None, None) => Receives::Own(Box::new(recvs)),
        };
        let context = ContextSpec {
            address: PortAddress {
                gid: [index; 16],
                lid: LIDS[usize::from(index)],
            },
            ..ContextSpec::default()
        };
        let context = engine.open_over(context, Arc::clone(&table));
        let qp = context.create_qp(QpSpec {
            kind,
            pd: PdHandle(1),
            depths: QpDepths::default(),
            sends: Box::new(sends),
            recvs: receives,
            send_cq: Some(SoftCq::new(cq.clone())),
            recv_cq: Some(SoftCq::new(cq)),
            signal_all,
            schedule: Arc::new(|| ()),
            events: Box::new(|_| ()),
        });
        let qp = qp.expect("a queue pair");
        if kind == QPT_UD {
            qp.attach(group()).expect("room in a group");
        }
        Self {
            ram: &machine.ram,
            base,
            kind,
            layout,
            qp,
            table,
            keys,
            windows,
            shared,
            domain,
            cqes: cq_layout.entries,
        }
    }

    /// Takes note of what its completion queue says.
    fn note(&self) {
        for at in 0..u64::from(self.cqes) {
            let entry = self.cq_word(CQ_OFF_ENTRIES) + at * size_of::<Completion>() as u64;
            let bytes = self.ram.peek::<{ size_of::<Completion>() }>(entry);
            let completion = Completion::read_from_bytes(&bytes).expect("any bytes");
            if completion.wr_id != 0 && completion.status == WC_STATUS_SUCCESS {
                let what = (self.kind, completion.opcode, completion.flags.get());
                COMPLETED.with_borrow_mut(|all| all.insert(what));
            }
        }
    }

    fn at(&self, offset: usize) -> u64 {
        self.base * PAGE + offset as u64
    }

    fn word(&self, offset: usize) -> u32 {
        self.ram.peek_word(self.at(offset))
    }

    fn cq_word(&self, offset: usize) -> u64 {
        self.at(offset) + CQ_PAGE * PAGE
    }

    fn modify(&self, state: u8, mask: u32, attr: QpAttr) {
        let attr = QpAttr {
            qp_state: state,
            ..attr
        };
        let _ = self.qp.modify(mask | QP_STATE, &attr);
    }

    /// Takes it from any state to one in which it talks to `to`, as far as that is possible.
    fn connect(&self, to: u32, input: &mut Input<'_>) {
        let (bits, timers) = (input.u8(), input.u8());
        let own = usize::from(self.base != 0);
        let port = if to == self.qp.number().get() {
            own
        } else {
            1 - own
        };
        let (to_init, to_rtr, to_rts) = match self.kind {
            QPT_UC => (QP_TO_INIT, UC_TO_RTR, UC_TO_RTS),
            QPT_UD => (UD_TO_INIT, UD_TO_RTR, UD_TO_RTS),
            QPT_XRC_SEND => (QP_TO_INIT, UC_TO_RTR, QP_TO_RTS),
            QPT_XRC_RECV => (QP_TO_INIT, QP_TO_RTR, XRC_TARGET_TO_RTS),
            _ => (QP_TO_INIT, QP_TO_RTR, QP_TO_RTS),
        };
        self.modify(QPS_RESET, 0, QpAttr::default());
        let attr = QpAttr {
            port_num: 1,
            qp_access_flags: (u32::from(!bits & 7) | ACCESS_REMOTE_ATOMIC | ACCESS_FLUSH_GLOBAL)
                .into(),
            ..QpAttr::default()
        };
        self.modify(QPS_INIT, to_init, attr);
        let attr = QpAttr {
            path_mtu: 3,
            dest_qp_num: to.into(),
            dlid: LIDS[port].into(),
            max_dest_rd_atomic: !bits >> 3 & 1,
            min_rnr_timer: timers & 31,
            rq_psn: u32::from(bits >> 7).into(),
            ..QpAttr::default()
        };
        self.modify(QPS_RTR, to_rtr, attr);
        let attr = QpAttr {
            max_rd_atomic: !bits >> 4 & 1,
            timeout: timers >> 3,
            retry_cnt: timers >> 5,
            rnr_retry: timers & 7,
            ..QpAttr::default()
        };
        self.modify(QPS_RTS, to_rts, attr);
    }

    /// A key of `of`, or one that is near it.
    fn key(of: &Self, input: &mut Input<'_>) -> u32 {
        let choice = input.u8();
        let (key, _) = of.keys[usize::from(choice) % of.keys.len()];
        key.0 ^ u32::from(choice >> 5)
    }

    /// The same where windows have keys, too.
    fn any_key(of: &Self, input: &mut Input<'_>) -> u32 {
        if of.layout.version == VerbsVersion::V1 {
            return Self::key(of, input);
        }
        let choice = input.u8();
        let at = usize::from(choice) % (of.keys.len() + of.windows.len());
        let key = match of.keys.get(at) {
            Some((key, _)) => *key,
            None => of.windows[at - of.keys.len()],
        };
        key.0 ^ u32::from(choice >> 5)
    }

    fn address(input: &mut Input<'_>) -> u64 {
        let choice = input.u16();
        match choice >> 13 {
            7 => input.u64(),
            6 => IOVA.wrapping_sub(u64::from(choice & 63)),
            _ => IOVA + u64::from(choice & 0x1fff),
        }
    }

    fn length(input: &mut Input<'_>) -> u32 {
        let choice = input.u16();
        match choice >> 13 {
            7 => input.u32(),
            _ => u32::from(choice & 0x1fff),
        }
    }

    fn elements(&self, count: u8, input: &mut Input<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..count.min(17) {
            let sge = Sge {
                addr: Self::address(input).into(),
                length: Self::length(input).into(),
                lkey: Self::key(self, input).into(),
            };
            bytes.extend_from_slice(sge.as_bytes());
        }
        bytes
    }

    /// Writes an entry where the next one belongs, and says that it is there.
    fn post(&self, produced: usize, first: usize, entries: u32, stride: usize, bytes: &[u8]) {
        let word = self.word(produced);
        let index = usize::try_from(word & (entries - 1)).expect("a small queue");
        self.ram.poke(
            self.at(first + index * stride),
            &bytes[..bytes.len().min(stride)],
        );
        self.ram.poke_word(self.at(produced), word.wrapping_add(1));
    }

    fn post_send(&self, peer: &Self, input: &mut Input<'_>) {
        let opcodes = match self.layout.version {
            VerbsVersion::V1 => 6,
            VerbsVersion::V2 | VerbsVersion::V3 => OP_FLUSH + 1,
        };
        let (opcode, flags, sges) = (input.u8() % opcodes, input.u8() % 32, input.u8() % 18);
        // Operations on the peer's memory that have operands.
        let has_operands = matches!(opcode, OP_COMPARE_SWAP | OP_FETCH_ADD | OP_FLUSH);
        // Which side's keys the operation names.
        let (own, named) = match opcode {
            OP_BIND_WINDOW => (self, self),
            OP_LOCAL_INVALIDATE => (self, peer),
            _ => (peer, peer),
        };
        let imm = match opcode {
            OP_BIND_WINDOW | OP_LOCAL_INVALIDATE | OP_SEND_INVALIDATE => Self::any_key(own, input),
            _ => 2,
        };
        let head = SendEntry {
            wr_id: 1.into(),
            opcode,
            flags,
            num_sge: u16::from(sges).into(),
            imm: imm.into(),
            remote_addr: Self::address(input).into(),
            rkey: Self::any_key(named, input).into(),
            inline_bytes: match &peer.domain {
                // Their operands leave no other place for the number.
                Some((_, number)) if has_operands => {
                    (number.get() ^ u32::from(input.u8() >> 7)).into()
                }
                _ => u32::from(input.u8()).into(),
            },
        };
        let mut bytes = head.as_bytes().to_vec();
        if self.layout.version > VerbsVersion::V1 && flags & SEND_TAIL != 0 {
            let tail = match self.kind {
                QPT_UD => {
                    let numbers = [self.qp.number(), peer.qp.number()].map(QpNumber::get);
                    let numbers = [numbers[0], numbers[1], MULTICAST_QPN, 0];
                    let (handle, qkey) = (input.u8() % 6, input.u8() % 2);
                    SendTail::datagram(handle.into(), *input.pick(&numbers), qkey.into())
                }
                QPT_XRC_SEND if opcode != OP_BIND_WINDOW && !has_operands => {
                    let number = peer.domain.as_ref().map_or(0, |(_, number)| number.get());
                    SendTail {
                        a: u64::from(number ^ u32::from(input.u8() >> 7)).into(),
                        b: 0.into(),
                    }
                }
                _ if opcode == OP_FLUSH => {
                    let (length, what) = (Self::length(input), u64::from(input.u8()));
                    SendTail {
                        a: u64::from(length).into(),
                        b: (((what >> 7) * u64::from(FLUSH_OF_REGION)) << 32 | what & 7).into(),
                    }
                }
                _ => {
                    let access = u64::from(input.u8() & 63) << 32;
                    SendTail {
                        a: Self::address(input).into(),
                        b: (access | u64::from(Self::any_key(self, input))).into(),
                    }
                }
            };
            bytes.extend_from_slice(tail.as_bytes());
        }
        bytes.extend(self.elements(sges, input));
        let layout = self.layout;
        self.post(
            QP_OFF_SEND_PRODUCED,
            QP_OFF_ENTRIES,
            layout.send_entries,
            layout.send_stride,
            &bytes,
        );
    }

    fn post_recv(&self, input: &mut Input<'_>) {
        let sges = input.u8() % 18;
        let head = RecvEntry {
            wr_id: 3.into(),
            num_sge: u32::from(sges).into(),
            ..RecvEntry::default()
        };
        let mut bytes = head.as_bytes().to_vec();
        bytes.extend(self.elements(sges, input));
        let layout = self.layout;
        if self.shared.is_some() {
            let page = usize::try_from(SRQ_PAGE * PAGE).expect("a few pages");
            let srq = srq_layout();
            let (produced, first) = (page + QP_OFF_RECV_PRODUCED, page + QP_OFF_ENTRIES);
            self.post(produced, first, srq.entries, srq.stride, &bytes);
            return;
        }
        self.post(
            QP_OFF_RECV_PRODUCED,
            layout.recv_offset(),
            layout.recv_entries,
            layout.recv_stride,
            &bytes,
        );
    }

    /// What a backend must never have done.
    fn check(&self) {
        for page in UNTOUCHED {
            assert!(
                self.ram.is_zero(self.base + page),
                "page {page} has changed"
            );
        }
        for (page, pages, ..) in REGIONS {
            let start = (self.base + page) * PAGE;
            let before = self.ram.peek::<MARGIN>(start);
            let after = self
                .ram
                .peek::<MARGIN>(start + pages * PAGE - MARGIN as u64);
            assert_eq!(
                [before, after],
                [[0; MARGIN]; 2],
                "beyond the region of page {page}"
            );
        }
    }
}

struct Scene<'a> {
    ends: [End<'a>; 2],
    now: Instant,
}

impl Scene<'_> {
    fn turn(&self) -> bool {
        let [a, b] = &self.ends;
        let worked = a.qp.progress(self.now.into()).worked | b.qp.progress(self.now.into()).worked;
        let shared = self.ends.iter().filter_map(|end| end.shared.as_ref());
        let told = shared.filter(|shared| shared.pass_on()).count();
        worked | (told > 0)
    }

    /// Gives turns until neither has anything to do any more, and so a worker would sleep. An entry
    /// takes at most so many turns as its elements have megabytes.
    fn rest(&self) {
        for _ in 0..2000 {
            if !self.turn() {
                for end in &self.ends {
                    assert!(!end.qp.is_ready(), "a turn leaves work undone");
                }
                return;
            }
        }
        panic!("no rest");
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let op = input.u8();
        let who = usize::from(op >> 7);
        let (end, peer) = (&self.ends[who], &self.ends[1 - who]);
        match op % 16 {
            0 | 1 => end.post_send(peer, input),
            2 | 3 => end.post_recv(input),
            4 => {
                // Anything, anywhere in its queues.
                let at = usize::from(input.u16())
                    % usize::try_from(QP_PAGES * PAGE).expect("a few pages");
                let bytes = input.counted();
                let room = usize::try_from(QP_PAGES * PAGE).expect("a few pages") - at;
                end.ram.poke(end.at(at), &bytes[..bytes.len().min(room)]);
            }
            5 => {
                let word = *input.pick(&[
                    QP_OFF_SEND_PRODUCED,
                    QP_OFF_RECV_PRODUCED,
                    QP_OFF_SEND_CONSUMED,
                    QP_OFF_RECV_CONSUMED,
                ]);
                let by = u32::from(input.u8());
                end.ram
                    .poke_word(end.at(word), end.word(word).wrapping_add(by));
            }
            6 => {
                let produced = end.ram.peek_word(end.cq_word(CQ_OFF_PRODUCED));
                let consumed = produced.wrapping_sub(input.u8().into());
                end.ram.poke_word(end.cq_word(CQ_OFF_CONSUMED), consumed);
                end.ram
                    .poke_word(end.cq_word(CQ_OFF_ARMED), input.u8().into());
            }
            7 => {
                self.turn();
            }
            8 => self.now += Duration::from_nanos(input.magnitude() % (1 << 40)),
            9 => self.rest(),
            10 => {
                let to = [
                    peer.qp.number().get(),
                    end.qp.number().get(),
                    peer.qp.number().get() ^ 1,
                    0,
                ];
                end.connect(*input.pick(&to), input);
            }
            11 => end.modify(
                input.u8() % 8,
                input.u32(),
                QpAttr {
                    en_sqd_async_notify: 1,
                    ..QpAttr::default()
                },
            ),
            12 => {
                let (key, region) = &end.keys[usize::from(input.u8()) % end.keys.len()];
                match input.u8() {
                    255 => {
                        let window = &end.windows[usize::from(input.u8()) % end.windows.len()];
                        let _ = end.table.remove_window(*window);
                    }
                    even if even.is_multiple_of(2) => {
                        end.table.remove(*key);
                    }
                    _ => region.revoke(),
                }
            }
            13 => {
                let attr = end.qp.query();
                let _ = end.qp.modify(0, &attr);
            }
            14 => match &end.domain {
                Some((domain, number)) if input.u8().is_multiple_of(2) => domain.remove(*number),
                _ => end.qp.destroy(),
            },
            _ => {
                self.turn();
                self.now += Duration::from_nanos(input.magnitude() % (1 << 40));
            }
        }
    }
}

fn format(version: VerbsVersion) -> SendFormat {
    SendFormat {
        version,
        addressing: Addressing::Connected,
    }
}

/// The parsers alone, which must find no more in an entry than there is.
fn parse(entry: &[u8]) {
    let mut send = SendWqe::default();
    for version in [VerbsVersion::V1, VerbsVersion::V2, VerbsVersion::V3] {
        if send.parse_as(&format(version), entry).is_err() {
            continue;
        }
        let elements = send.elements.as_slice().len();
        assert!(elements <= MAX_SGE as usize);
        assert!(size_of::<SendEntry>() + elements * size_of::<Sge>() <= entry.len());
        if let Some(inline) = send.inline() {
            assert!(inline.len() <= MAX_INLINE_BYTES as usize && elements == 0);
            assert_eq!(send.length(), inline.len() as u64);
        }
    }
    let mut recv = RecvWqe::default();
    if recv.parse(entry).is_ok() {
        let elements = recv.elements.as_slice().len();
        assert!(elements <= MAX_SGE as usize);
        assert!(size_of::<RecvEntry>() + elements * size_of::<Sge>() <= entry.len());
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    parse(data);
    MACHINE.with(|machine| {
        machine.ram.clear();
        let mut input = Input::new(data);
        let sizes = input.u8();
        let wide = sizes & 0x80 != 0;
        let cqes = 1 << (sizes >> 4 & 7).min(6);
        let flags = input.u8();
        let version = match flags & 8 {
            0 => VerbsVersion::V1,
            _ => VerbsVersion::V3,
        };
        let layout = QpLayout::of(
            version,
            1 << (sizes & 3),
            if wide { 16 } else { 2 },
            if wide { 200 } else { 0 },
            1 << (sizes >> 2 & 3),
            if wide { 16 } else { 2 },
        );
        let layout = layout.expect("a small layout");
        let engine = SoftEngine::new();
        let receives_from = match flags >> 5 {
            1 => Queues::Shared,
            2 if flags & 24 == 8 => Queues::Extended,
            _ => Queues::Own,
        };
        let end = |index| {
            let is_unreliable = flags >> index & 2 != 0;
            let kind = match is_unreliable {
                _ if flags & 24 == 24 => QPT_UD,
                _ if receives_from == Queues::Extended && index == 0 => QPT_XRC_SEND,
                _ if receives_from == Queues::Extended => QPT_XRC_RECV,
                true => QPT_UC,
                false => QPT_RC,
            };
            let queues = (layout, receives_from);
            End::new(machine, &engine, index, kind, queues, cqes, index == 1)
        };
        let mut scene = Scene {
            ends: [end(0), end(1)],
            now: Instant::now(),
        };
        let [a, b] = &scene.ends;
        if flags & 1 == 0 {
            a.connect(b.qp.number().get(), &mut Input::new(&[0, 0x2f]));
            b.connect(a.qp.number().get(), &mut Input::new(&[0, 0x2f]));
        }
        while !input.is_empty() {
            scene.step(&mut input);
        }
        scene.rest();
        scene.ends.iter().for_each(End::note);
        // Whatever is retried a limited number of times ends.
        for _ in 0..20 {
            scene.now += Duration::from_secs(10_000);
            scene.rest();
        }
        for end in &scene.ends {
            end.check();
            end.qp.destroy();
            if let Some(shared) = &end.shared {
                shared.close();
            }
            for (_, region) in &end.keys {
                region.revoke();
            }
        }
    });
}
