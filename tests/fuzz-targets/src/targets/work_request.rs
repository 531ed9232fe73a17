//! Two queue pairs whose processes write whatever they like into their queues and completion
//! queues, connected to each other or to anybody.

mod end;

use crate::{Input, PAGE, Ram, format_all_logs};
use end::{End, Queues};
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
