//! Programs whose queues are rings of the user ABI of rxe, as librxe drives them.

use super::*;
use crate::testing::open_of_kernel;
use farlane_abi::arena::HEADER_SEGMENT_BYTES;
use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_abi::rxe::*;
use farlane_abi::width::{to_u64, to_usize};
use farlane_abi::zerocopy::{Immutable, IntoBytes as _};
use farlane_zero_copy::SharedMemory;
use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Duration;

mod gids;
mod hostile;
mod hostile_kernel;
mod kernel;
mod operations;
mod resizing;

/// Region of control blocks.
const CONTROLS: u32 = 1;
/// Region of the program's memory.
const MEMORY: u32 = 2;
/// Elements, and bytes of inline data, of a request.
const ELEMENTS: u32 = 2;
const INLINE: u32 = 64;

/// The process's end of a ring.
struct RingEnd {
    memory: SharedMemory,
    wire: Ring,
    layout: RingLayout,
}

impl RingEnd {
    fn word(&self, at: usize) -> u32 {
        self.memory.word(at).unwrap().load(Ordering::SeqCst)
    }

    fn set(&self, at: usize, value: u32) {
        self.memory.word(at).unwrap().store(value, Ordering::SeqCst);
    }

    /// Writes an entry and publishes it; false where the ring is full.
    fn post(&self, bytes: &[u8]) -> bool {
        let mask = self.layout.slots - 1;
        let produced = self.word(RING_OFF_PRODUCED);
        let next = (produced + 1) & mask;
        if next == self.word(RING_OFF_CONSUMED) {
            return false;
        }
        let at = RING_OFF_ENTRIES + to_usize((produced * self.layout.stride).into());
        self.memory.write_bytes(at, bytes).unwrap();
        self.set(RING_OFF_PRODUCED, next);
        true
    }

    /// Takes the next completion.
    fn poll(&self) -> Option<RxeCompletion> {
        let consumed = self.word(RING_OFF_CONSUMED);
        if consumed == self.word(RING_OFF_PRODUCED) {
            return None;
        }
        let at = RING_OFF_ENTRIES + to_usize((consumed * self.layout.stride).into());
        let completion = self.memory.read(at).unwrap();
        self.set(RING_OFF_CONSUMED, (consumed + 1) & (self.layout.slots - 1));
        Some(completion)
    }
}

/// A process of a guest whose kernel has made its queues.
struct Guest {
    _port: Arc<Port>,
    context: Arc<Context>,
    _header: SharedMemory,
    controls: SharedMemory,
    memory: SharedMemory,
    /// The next region, and the next control block.
    next: Cell<(u32, u32)>,
    pd: Handle,
    mr: Mr,
    cq: Handle,
    completions: RingEnd,
}

/// A queue pair of it.
struct Pair {
    handle: Handle,
    number: U32,
    send: RingEnd,
    recv: Option<RingEnd>,
}

fn bytes<T: farlane_abi::zerocopy::IntoBytes>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap()
}

impl Guest {
    fn start(port: &Arc<Port>) -> Self {
        Self::start_in(port, open(port, 0))
    }

    /// The kernel of the guest.
    fn start_kernel(port: &Arc<Port>) -> Self {
        Self::start_in(port, open_of_kernel(port, 1))
    }

    fn start_in(port: &Arc<Port>, context: Arc<Context>) -> Self {
        let (theirs, header) = shared("header", HEADER_SEGMENT_BYTES);
        context.attach_segment(region(0), theirs).unwrap();
        let (theirs, controls) = shared("controls", PAGE_BYTES);
        context.attach_segment(region(CONTROLS), theirs).unwrap();
        let (theirs, memory) = shared("memory", PAGE_BYTES);
        context.attach_pin(region(MEMORY), theirs).unwrap();
        let mut host = CallHost::new(&context);
        host.negotiate(VersionRange::ours()).unwrap();
        let pd = host.alloc_pd(()).unwrap();
        let access = ACCESS_LOCAL_WRITE
            | ACCESS_REMOTE_WRITE
            | ACCESS_REMOTE_READ
            | ACCESS_REMOTE_ATOMIC
            | ACCESS_MW_BIND
            | ACCESS_FLUSH_GLOBAL;
        let mr = host.reg_mr(RegMr {
            pd,
            access: access.into(),
            source: MR_SOURCE_PIN.into(),
            object: MEMORY.into(),
            length: PAGE_BYTES.into(),
            ..Default::default()
        });
        let mut guest = Self {
            _port: Arc::clone(port),
            _header: header,
            controls,
            memory,
            next: Cell::new((10, 0)),
            pd,
            mr: mr.unwrap(),
            cq: 0.into(),
            completions: Self::ring_in(&context, 9, 15, bytes::<RxeCompletion>()),
            context,
        };
        guest.cq = guest.create_cq(&guest.completions).unwrap();
        guest
    }

    fn host(&self) -> CallHost<'_> {
        CallHost::new(&self.context)
    }

    fn ring_in(context: &Context, id: u32, entries: u32, bytes: u32) -> RingEnd {
        let layout = RingLayout::new(entries, bytes, 1 << 14).unwrap();
        let (theirs, memory) = shared("ring", layout.segment_bytes());
        context.attach_segment(region(id), theirs).unwrap();
        RingEnd {
            memory,
            layout,
            wire: Ring {
                region: id.into(),
                slots: layout.slots.into(),
                stride: layout.stride.into(),
            },
        }
    }

    fn ring(&self, entries: u32, bytes: u32) -> RingEnd {
        let (id, control) = self.next.get();
        self.next.set((id + 1, control));
        Self::ring_in(&self.context, id, entries, bytes)
    }

    fn control(&self) -> ControlBlock {
        let (id, control) = self.next.get();
        self.next.set((id, control + 1));
        ControlBlock {
            region: CONTROLS.into(),
            offset: (control * u32::try_from(CONTROL_BYTES).unwrap()).into(),
        }
    }

    fn create_cq(&self, ring: &RingEnd) -> Result<Handle, Errno> {
        self.host().create_cq_ring(CreateCqRing {
            ring: ring.wire,
            control: self.control(),
            ..Default::default()
        })
    }

    fn sends(&self) -> RingEnd {
        let payload = (ELEMENTS * bytes::<Sge>()).max(INLINE);
        self.ring(7, bytes::<RxeSendEntry>() + payload)
    }

    fn receives(&self) -> RingEnd {
        self.ring(7, bytes::<RxeRecvEntry>() + ELEMENTS * bytes::<Sge>())
    }

    fn create(&self, kind: u32, send: &RingEnd, recv: Option<&RingEnd>) -> CreateQpRings {
        CreateQpRings {
            pd: self.pd,
            send_cq: self.cq,
            recv_cq: self.cq,
            qp_type: kind.into(),
            send: send.wire,
            recv: recv.map_or_else(Ring::default, |ring| ring.wire),
            control: self.control(),
            send_sge: ELEMENTS.into(),
            inline_bytes: INLINE.into(),
            recv_sge: ELEMENTS.into(),
            ..Default::default()
        }
    }

    fn pair(&self, kind: u32) -> Pair {
        let (send, recv) = (self.sends(), self.receives());
        let create = self.create(kind, &send, Some(&recv));
        let qp = self.host().create_qp_rings(create).unwrap();
        Pair {
            handle: qp.handle,
            number: qp.qp_num,
            send,
            recv: Some(recv),
        }
    }

    /// A queue pair of datagrams that is ready to send, with the Q_Key 0x1111.
    fn datagrams(&self) -> Pair {
        self.datagrams_of(QPT_UD, 0x1111)
    }

    fn datagrams_of(&self, kind: u32, qkey: u32) -> Pair {
        let pair = self.pair(kind);
        let steps = [
            (UD_TO_INIT, QPS_INIT),
            (UD_TO_RTR, QPS_RTR),
            (UD_TO_RTS, QPS_RTS),
        ];
        for (mask, qp_state) in steps {
            let attr = QpAttr {
                qp_state,
                port_num: 1,
                qkey: qkey.into(),
                ..Default::default()
            };
            self.modify(&pair, mask, attr).unwrap();
        }
        pair
    }

    fn srq(&self, ring: &RingEnd) -> Handle {
        let created = self.host().create_srq_ring(CreateSrqRing {
            pd: self.pd,
            ring: ring.wire,
            control: self.control(),
            elements: ELEMENTS.into(),
            ..Default::default()
        });
        created.unwrap().handle
    }

    fn modify(&self, qp: &Pair, mask: u32, attr: QpAttr) -> Result<(), Errno> {
        self.host().modify_qp(ModifyQp {
            qp: qp.handle,
            mask: mask.into(),
            attr,
        })
    }

    /// Connects a queue pair, reliably, to one of another program, which tries again for ever where
    /// that has no receive request.
    fn connect(&self, qp: &Pair, to: &Self, peer: &Pair, rnr_retry: u8) {
        self.connect_to(qp, (to.context.gid(), peer.number), rnr_retry, 0)
            .unwrap();
    }

    /// The same, to a queue pair of this name, from that entry of the GID table.
    fn connect_to(
        &self,
        qp: &Pair,
        (dgid, number): ([u8; 16], U32),
        rnr_retry: u8,
        sgid_index: u8,
    ) -> Result<(), Errno> {
        let access =
            ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC | ACCESS_FLUSH_GLOBAL;
        let steps = [
            (QP_TO_INIT, QPS_INIT),
            (QP_TO_RTR, QPS_RTR),
            (QP_TO_RTS, QPS_RTS),
        ];
        for (mask, qp_state) in steps {
            let attr = QpAttr {
                qp_state,
                port_num: 1,
                path_mtu: 3,
                dest_qp_num: number,
                is_global: 1,
                dgid,
                sgid_index,
                ah_port: 1,
                rnr_retry,
                min_rnr_timer: 12,
                timeout: 14,
                retry_cnt: 7,
                max_rd_atomic: 1,
                max_dest_rd_atomic: 1,
                qp_access_flags: access.into(),
                ..Default::default()
            };
            self.modify(qp, mask, attr)?;
        }
        Ok(())
    }

    /// Its kernel rings for a queue pair: there is something in its send queue.
    fn ring_for(&self, qp: &Pair) {
        let objects = self.context.objects();
        let object = objects.qps.get(qp.handle.get()).unwrap();
        let scheduled = Arc::clone(&object.scheduled);
        drop(objects);
        crate::engine::Schedule::schedule(&*scheduled);
    }

    /// An element of its memory.
    fn sge(&self, at: u64, length: u32) -> Sge {
        Sge {
            addr: at.into(),
            length: length.into(),
            lkey: self.mr.lkey,
        }
    }

    fn fill(&self, at: usize, bytes: &[u8]) {
        self.memory.write_bytes(at, bytes).unwrap();
    }

    fn read<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read_bytes(at, &mut bytes).unwrap();
        bytes
    }

    fn poll(&self) -> Option<RxeCompletion> {
        self.completions.poll()
    }

    /// Number and status of the next completion.
    fn next(&self) -> Option<(u64, u32)> {
        self.poll().map(|c| (c.wr_id.get(), c.status.get()))
    }
}

impl Pair {
    /// Posts a send request with this payload behind its head.
    fn post(&self, entry: &RxeSendEntry, payload: &[u8]) {
        let bytes = [entry.as_bytes(), payload].concat();
        assert!(self.send.post(&bytes));
    }

    fn post_recv(&self, wr_id: u64, elements: &[Sge]) {
        post_recv(self.recv.as_ref().unwrap(), wr_id, elements);
    }
}

fn post_recv(ring: &RingEnd, wr_id: u64, elements: &[Sge]) {
    let mut entry = RxeRecvEntry {
        wr_id: wr_id.into(),
        ..Default::default()
    };
    entry.dma.num_sge = u32::try_from(elements.len()).unwrap().into();
    let elements = elements.iter().flat_map(|sge| sge.as_bytes().to_vec());
    let bytes: Vec<u8> = entry.as_bytes().iter().copied().chain(elements).collect();
    assert!(ring.post(&bytes));
}

/// A signalled request of this opcode with these operands, and its elements.
fn request(
    wr_id: u64,
    opcode: u32,
    operands: &(impl farlane_abi::zerocopy::IntoBytes + Immutable),
    elements: &[Sge],
) -> (RxeSendEntry, Vec<u8>) {
    let mut entry = RxeSendEntry {
        wr: RxeSendRequest {
            wr_id: wr_id.into(),
            opcode: opcode.into(),
            send_flags: WR_FLAG_SIGNALED.into(),
            imm: 0x0102_0304.into(),
            ..Default::default()
        },
        ..Default::default()
    };
    let bytes = operands.as_bytes();
    entry.wr.operands.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
    entry.dma.num_sge = u32::try_from(elements.len()).unwrap().into();
    let elements = elements.iter().flat_map(|sge| sge.as_bytes().to_vec());
    (entry, elements.collect())
}

/// Turns of all, from this time on, until none has anything to do. Timers are not waited for.
fn run(guests: &[&Guest], now: Instant) {
    for _ in 0..1000 {
        let worked = guests.iter().filter(|g| g.context.turn_now(now).worked);
        if worked.count() == 0 {
            return;
        }
    }
    panic!("the guests do not come to rest");
}

/// Two guests with a queue pair each, connected to each other.
struct Two {
    guests: [Guest; 2],
    pairs: [Pair; 2],
    now: Cell<Instant>,
}

impl Two {
    fn connected() -> Self {
        Self::with_retries(7)
    }

    fn with_retries(rnr_retry: u8) -> Self {
        let server = Server::without_workers();
        let guests = [1, 2].map(|gid| Guest::start(&port(&server, gid)));
        let pairs = [0, 1].map(|at: usize| guests[at].pair(QPT_RC));
        for (at, to) in [(0, 1), (1, 0)] {
            guests[at].connect(&pairs[at], &guests[to], &pairs[to], rnr_retry);
        }
        Self {
            guests,
            pairs,
            now: Cell::new(Instant::now()),
        }
    }

    /// Turns until nobody has anything to do.
    fn run(&self) {
        let [a, b] = &self.guests;
        run(&[a, b], self.now.get());
    }

    /// The same, so much later.
    fn run_after(&self, delay: Duration) {
        self.now.set(self.now.get() + delay);
        self.run();
    }

    /// Posts a request to the first one's send queue, and rings.
    fn post(&self, (entry, payload): (RxeSendEntry, Vec<u8>)) {
        self.pairs[0].post(&entry, &payload);
        self.guests[0].ring_for(&self.pairs[0]);
    }

    /// The first one's only completion, once that request was carried out.
    fn carry_out(&self, request: (RxeSendEntry, Vec<u8>)) -> RxeCompletion {
        self.post(request);
        self.run();
        let completion = self.guests[0].poll().unwrap();
        assert!(self.guests[0].poll().is_none());
        completion
    }
}
