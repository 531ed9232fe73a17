//! Two processes of two VMs that write whatever they like into their context headers, queues and
//! call rings, and whose kernels attach and detach whatever they like meanwhile. The first one is
//! its VM's kernel itself.

use crate::{Input, PAGE, Raised, Ram, assert_nothing_left, format_all_logs};
use farlane_abi::arena::{
    CALL_PAYLOAD_BYTES, CALL_SLOT_BYTES, CALL_SLOTS, CallHeader, HEADER_SEGMENT_BYTES,
    OFF_CALL_COMPLETED, OFF_CALL_RING, OFF_CALL_SUBMITTED, OFF_DEAD,
};
use farlane_abi::ids::{ContextId, RegionId};
use farlane_abi::queue::{QP_OFF_ENTRIES, QP_OFF_RECV_PRODUCED, QP_OFF_SEND_PRODUCED};
use farlane_abi::rdma::{
    CmAccept, CmConnect, DeregMr, ImportMr, ModifyQp, OpenQp, QP_STATE, QP_TO_INIT, QP_TO_RTR,
    QP_TO_RTS, QPS_INIT, QPS_RTR, QPS_RTS, Qp, QpAttr, ReregMr,
};
use farlane_abi::zerocopy::little_endian::U32;
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_rdma_remoting::{Context, FileId, Port, Server};
use farlane_zero_copy::{AddressSpace, Pool, Region};
use std::cell::{LazyCell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Each of the two has one context.
const CONTEXT: ContextId = ContextId::new(0).expect("the first one");
/// Pages of each of the two processes, see [`Guest::attach`].
const GUEST_PAGES: u64 = 32;
/// Pages that are never attached.
const GUARDS: [u64; 3] = [0, GUEST_PAGES, 2 * GUEST_PAGES];
const PAGES: u64 = 2 * GUEST_PAGES + 1;
/// Bytes of the pool.
const POOL_BYTES: u64 = 16 * PAGE;

/// Call numbers whose arguments or results hold numbers that an input cannot know.
const REG_MR: u32 = 7;
const DEREG_MR: u32 = 8;
const CREATE_QP: u32 = 11;
const MODIFY_QP: u32 = 12;
const CREATE_QP_EX: u32 = 19;
const ALLOC_MW: u32 = 30;
const DEALLOC_MW: u32 = 31;
const REREG_MR: u32 = 33;
const ALLOC_NULL_MR: u32 = 38;
const OPEN_QP: u32 = 44;
const IMPORT_MR: u32 = 48;
const CREATE_QP_RINGS: u32 = 51;
const ALLOC_FAST_MR: u32 = 55;
const DEREG_IMPORTED_MR: u32 = 49;
const CM_CONNECT: u32 = 59;
const CM_ACCEPT: u32 = 60;

/// What stays from input to input.
struct Machine {
    ram: Ram,
    space: Arc<AddressSpace>,
    /// All memory of the first one's VM, whose kernel it is.
    own: Arc<AddressSpace>,
}

thread_local! {
    static CARRIED_OUT: RefCell<BTreeSet<u32>> = const { RefCell::new(BTreeSet::new()) };
    static MACHINE: LazyCell<Machine> = const { LazyCell::new(|| {
        format_all_logs();
        let ram = Ram::new(PAGES);
        let space = AddressSpace::new();
        space.replace_ram(&ram.whole()).expect("memory with a file");
        let own = AddressSpace::new();
        let pages = (GUEST_PAGES - 1) * PAGE;
        own.replace_ram(&ram.parts(&[(PAGE, PAGE, pages)])).expect("memory with a file");
        Machine { ram, space, own }
    }) };
}

/// Numbers of the calls that inputs of this thread have made, and that were carried out.
#[must_use]
pub fn carried_out() -> BTreeSet<u32> {
    CARRIED_OUT.with_borrow(Clone::clone)
}

/// A process and its VM.
struct Guest<'a> {
    machine: &'a Machine,
    port: Arc<Port>,
    pool: Arc<Pool>,
    context: Arc<Context>,
    /// Its first page.
    base: u64,
    submitted: u32,
}

struct Scene<'a> {
    guests: [Guest<'a>; 2],
    /// Numbers of all queue pairs that were made.
    numbers: Vec<(u32, usize)>,
    /// Handles of all registrations and windows that were made, which nobody can guess.
    registrations: Vec<u32>,
    now: Instant,
}

impl<'a> Guest<'a> {
    fn new(machine: &'a Machine, server: &Arc<Server>, index: u8) -> Self {
        let port = server
            .port([index; 16], format!("vm{index}"))
            .expect("a new GID");
        let pool = if index == 0 {
            Pool::shared_window(POOL_BYTES).expect("a memfd")
        } else {
            Pool::separate_files(POOL_BYTES)
        };
        let context = Self::open(&port, &pool, index == 0);
        let base = 1 + u64::from(index) * GUEST_PAGES;
        let guest = Self {
            machine,
            port,
            pool,
            context,
            base,
            submitted: 0,
        };
        guest.attach();
        guest
    }

    fn open(port: &Arc<Port>, pool: &Arc<Pool>, is_kernel: bool) -> Arc<Context> {
        let pool = Some(Arc::clone(pool));
        let opened = match is_kernel {
            true => port.open_of_kernel(CONTEXT, Arc::new(Raised), pool),
            false => port.open(CONTEXT, Arc::new(Raised), pool),
        };
        opened.expect("no context is open")
    }

    fn is_kernel(&self) -> bool {
        self.base == 1
    }

    /// What a well-behaved process starts with: a header, four segments, three pins and a file.
    fn attach(&self) {
        let page = |n: u64| (self.base + n) * PAGE;
        let segment = |id, first, pages| {
            self.attach_segment(id, &[(page(first), pages * PAGE)])
                .expect("a good segment");
        };
        segment(0, 0, 8);
        segment(1, 8, 1);
        segment(2, 9, 1);
        segment(3, 10, 2);
        self.attach_segment(4, &[(page(13), PAGE), (page(12), PAGE)])
            .expect("a good segment");
        let pin = |id, extents: &[(u64, u64)], writable| {
            self.attach_pin(id, extents, writable).expect("a good pin");
        };
        pin(
            5,
            &[
                (page(16) + 0x123, PAGE - 0x123),
                (page(18), 2 * PAGE),
                (page(17), 0x80),
            ],
            true,
        );
        pin(6, &[(page(21) + 7, 100), (page(22), PAGE)], false);
        pin(7, &[(page(24), 4 * PAGE)], true);
        let file = RegionId::new(8).expect("a small number");
        let shown = self.context.attach_file(file, FileId(0, 1));
        shown.expect("a file");
        if self.is_kernel() {
            let all = RegionId::new(9).expect("a small number");
            let own = &self.machine.own;
            let memory = Region::all_of_guest(own, true).expect("some memory");
            let attached = self.context.attach_all_memory(all, memory, Arc::clone(own));
            attached.expect("a kernel's");
        }
    }

    fn attach_segment(&self, id: u32, extents: &[(u64, u64)]) -> Result<(), ()> {
        let region = Region::from_guest(&self.machine.space, extents, true).map_err(drop)?;
        let id = RegionId::new(id).ok_or(())?;
        self.context.attach_segment(id, region).map_err(drop)
    }

    fn attach_pin(&self, id: u32, extents: &[(u64, u64)], writable: bool) -> Result<(), ()> {
        let region = Region::from_guest(&self.machine.space, extents, writable).map_err(drop)?;
        let id = RegionId::new(id).ok_or(())?;
        self.context.attach_pin(id, region).map_err(drop)
    }

    fn ram(&self) -> &Ram {
        &self.machine.ram
    }

    /// Address of a byte of its header.
    fn header(&self, offset: usize) -> u64 {
        self.base * PAGE + offset as u64
    }

    fn slot(&self, index: u32) -> u64 {
        let index = usize::try_from(index % CALL_SLOTS).expect("a small number");
        self.header(OFF_CALL_RING + index * CALL_SLOT_BYTES)
    }

    fn submit(&mut self, number: u32, length: u32, bytes: &[u8]) {
        let at = self.slot(self.submitted);
        let head = CallHeader {
            number: number.into(),
            length: length.into(),
            ..CallHeader::default()
        };
        self.ram().poke(at, head.as_bytes());
        self.ram().poke(at + size_of::<CallHeader>() as u64, bytes);
        self.submitted = self.submitted.wrapping_add(1);
        self.ram()
            .poke_word(self.header(OFF_CALL_SUBMITTED), self.submitted);
    }

    fn is_dead(&self) -> bool {
        self.ram().peek_word(self.header(OFF_DEAD)) != 0
    }

    fn completed(&self) -> u32 {
        self.ram().peek_word(self.header(OFF_CALL_COMPLETED))
    }

    /// The answer to the last call.
    fn answer(&self) -> (CallHeader, [u8; CALL_PAYLOAD_BYTES]) {
        let at = self.slot(self.submitted.wrapping_sub(1));
        let head = self.ram().peek::<{ size_of::<CallHeader>() }>(at);
        let head = CallHeader::read_from_bytes(&head).expect("any bytes");
        (head, self.ram().peek(at + size_of::<CallHeader>() as u64))
    }

    fn close(&mut self) {
        self.port.close(CONTEXT).expect("an open context");
    }

    fn reopen(&mut self) {
        self.close();
        // A process that starts finds its memory zeroed.
        for page in 0..HEADER_SEGMENT_BYTES / PAGE {
            self.ram().poke((self.base + page) * PAGE, &[0; 4096]);
        }
        self.context = Self::open(&self.port, &self.pool, self.is_kernel());
        self.submitted = 0;
        self.attach();
    }
}

impl Scene<'_> {
    /// Makes a call and reads its answer. Like a guest that behaves, and gets what it asks for or
    /// an error.
    fn call(&mut self, who: usize, number: u32, args: &[u8]) {
        let guest = &mut self.guests[who];
        guest.submit(number, u32::try_from(args.len()).expect("a slot"), args);
        self.turn(who);
        let guest = &self.guests[who];
        if guest.is_dead() || guest.completed() != guest.submitted {
            return;
        }
        let (head, result) = guest.answer();
        assert!(head.length.get() as usize <= CALL_PAYLOAD_BYTES);
        assert!(
            head.status == 0 || head.length == 0,
            "an error has no result"
        );
        if head.status != 0 || head.number != number {
            return;
        }
        CARRIED_OUT.with_borrow_mut(|calls| calls.insert(number));
        match number {
            CREATE_QP | CREATE_QP_EX | OPEN_QP | CREATE_QP_RINGS => {
                let (qp, _) = Qp::read_from_prefix(&result).expect("a slot");
                self.numbers.push((qp.qp_num.get(), who));
            }
            REG_MR | ALLOC_MW | ALLOC_NULL_MR | ALLOC_FAST_MR => {
                // All begin with it.
                let (handle, _) = U32::read_from_prefix(&result).expect("a slot");
                self.registrations.push(handle.get());
            }
            _ => {}
        }
    }

    /// Number `index` that was given, where the index is one.
    fn number(&self, index: u32) -> u32 {
        let known = usize::try_from(index)
            .ok()
            .and_then(|index| self.numbers.get(index));
        known.map_or(index, |(number, _)| *number)
    }

    /// Handle of registration `index`, where the index is one.
    fn registration(&self, index: u32) -> u32 {
        let known = usize::try_from(index)
            .ok()
            .and_then(|index| self.registrations.get(index));
        known.map_or(index, |handle| *handle)
    }

    fn any_call(&mut self, who: usize, number: u32, args: &[u8]) {
        if number == MODIFY_QP
            && let Ok(mut args) = ModifyQp::read_from_bytes(args)
        {
            args.attr.dest_qp_num = self.number(args.attr.dest_qp_num.get()).into();
            self.call(who, number, args.as_bytes());
        } else if number == OPEN_QP
            && let Ok(mut args) = OpenQp::read_from_bytes(args)
        {
            args.qp_num = self.number(args.qp_num.get()).into();
            self.call(who, number, args.as_bytes());
        } else if number == CM_CONNECT
            && let Ok(mut args) = CmConnect::read_from_bytes(args)
        {
            args.qp_num = self.number(args.qp_num.get()).into();
            self.call(who, number, args.as_bytes());
        } else if number == CM_ACCEPT
            && let Ok(mut args) = CmAccept::read_from_bytes(args)
        {
            args.qp_num = self.number(args.qp_num.get()).into();
            self.call(who, number, args.as_bytes());
        } else if number == REREG_MR
            && let Ok(mut args) = ReregMr::read_from_bytes(args)
        {
            args.mr = self.registration(args.mr.get()).into();
            self.call(who, number, args.as_bytes());
        } else if number == IMPORT_MR
            && let Ok(mut args) = ImportMr::read_from_bytes(args)
        {
            args.mr = self.registration(args.mr.get()).into();
            self.call(who, number, args.as_bytes());
        } else if number == DEREG_IMPORTED_MR
            && let Ok(mut args) = DeregMr::read_from_bytes(args)
        {
            args.mr = self.registration(args.mr.get()).into();
            self.call(who, number, args.as_bytes());
        } else if matches!(number, DEREG_MR | DEALLOC_MW)
            && let Ok(handle) = U32::read_from_bytes(args)
        {
            let handle = U32::from(self.registration(handle.get()));
            self.call(who, number, handle.as_bytes());
        } else {
            self.call(who, number, args);
        }
    }

    /// What it takes to connect a queue pair.
    fn connect(&mut self, who: usize, input: &mut Input<'_>) {
        let qp = u32::from(input.u8());
        let to = self.number(input.u8().into());
        let owner = self.numbers.iter().find(|(number, _)| *number == to);
        let port = owner.map_or(0, |(_, who)| u8::try_from(*who).expect("two"));
        let bits = input.u8();
        let timers = input.u8();
        let modify = |mask: u32, attr: QpAttr| ModifyQp {
            qp: qp.into(),
            mask: (mask | QP_STATE).into(),
            attr,
        };
        let init = QpAttr {
            qp_state: QPS_INIT,
            port_num: 1,
            qp_access_flags: u32::from(bits & 7).into(),
            ..QpAttr::default()
        };
        let rtr = QpAttr {
            qp_state: QPS_RTR,
            path_mtu: 3,
            dest_qp_num: to.into(),
            is_global: 1,
            dgid: [port; 16],
            max_dest_rd_atomic: bits >> 3 & 1,
            min_rnr_timer: timers & 31,
            rq_psn: u32::from(bits >> 7).into(),
            ..QpAttr::default()
        };
        let rts = QpAttr {
            qp_state: QPS_RTS,
            max_rd_atomic: bits >> 4 & 1,
            timeout: timers >> 3,
            retry_cnt: timers >> 5,
            rnr_retry: timers & 7,
            ..QpAttr::default()
        };
        let steps = [
            modify(QP_TO_INIT, init),
            modify(QP_TO_RTR, rtr),
            modify(QP_TO_RTS, rts),
        ];
        for step in steps {
            self.call(who, MODIFY_QP, step.as_bytes());
        }
    }

    /// Puts bytes into an entry of a segment that may hold a queue pair, and moves a producer word.
    fn post(&mut self, who: usize, input: &mut Input<'_>) {
        let guest = &self.guests[who];
        let segment = (guest.base + 8 + u64::from(input.u8() % 6)) * PAGE;
        let entry = u64::from(input.u8()) * 16;
        guest
            .ram()
            .poke(segment + QP_OFF_ENTRIES as u64 + entry, input.counted());
        let word =
            segment + *input.pick(&[QP_OFF_SEND_PRODUCED as u64, QP_OFF_RECV_PRODUCED as u64]);
        let by = u32::from(input.u8());
        guest
            .ram()
            .poke_word(word, guest.ram().peek_word(word).wrapping_add(by));
    }

    /// A region of any pages of the guest, cut as the input likes.
    fn attach(&mut self, who: usize, input: &mut Input<'_>) {
        let guest = &self.guests[who];
        let (id, kind) = (u32::from(input.u8()), input.u8());
        let extents: Vec<(u64, u64)> = (0..=input.u8() % 4)
            .map(|_| {
                let page = guest.base + u64::from(input.u8()) % (GUEST_PAGES - 1);
                let (offset, length) = (u64::from(input.u16()) % PAGE, u64::from(input.u16()));
                let room = (guest.base + GUEST_PAGES - 1 - page) * PAGE - offset;
                (page * PAGE + offset, length.clamp(1, room))
            })
            .collect();
        let _ = match kind % 3 {
            0 => guest.attach_segment(id, &extents),
            kind => guest.attach_pin(id, &extents, kind == 1),
        };
    }

    fn window(&mut self, who: usize, input: &mut Input<'_>) {
        let (handle, unmap) = (input.u8().into(), input.u8() % 2 == 1);
        let (offset, length) = (u64::from(input.u8()) * PAGE, u64::from(input.u8()) * PAGE);
        let context = &self.guests[who].context;
        if unmap {
            let _ = context.window_unmap(handle, offset, length);
        } else if let Ok(mapping) = context.window_map(handle, offset, length) {
            assert_eq!((mapping.offset(), mapping.length()), (offset, length));
        }
    }

    /// Gives a process one turn.
    fn turn(&self, who: usize) -> bool {
        self.guests[who].context.turn_now(self.now).worked
    }

    /// Gives turns until nobody has anything to do any more, and so the worker would sleep.
    fn rest(&self) {
        for _ in 0..4096 {
            if !self.turn(0) & !self.turn(1) {
                for guest in &self.guests {
                    assert!(!guest.context.has_work(), "a turn leaves work undone");
                }
                return;
            }
        }
        panic!("no rest");
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let op = input.u8() % 12;
        let who = usize::from(input.u8() % 2);
        match op {
            0 | 1 => {
                let number = u32::from(input.u8());
                let args = input.counted();
                self.any_call(who, number, args);
            }
            2 => {
                let (number, length) = (input.u32(), input.u32());
                let bytes = input.counted();
                self.guests[who].submit(number, length, bytes);
            }
            3 => {
                let guest = &mut self.guests[who];
                guest.submitted = guest.submitted.wrapping_add(input.u16().into());
                guest
                    .ram()
                    .poke_word(guest.header(OFF_CALL_SUBMITTED), guest.submitted);
            }
            4 => {
                let guest = &self.guests[who];
                let page = guest.base + u64::from(input.u8()) % (GUEST_PAGES - 1);
                let at = page * PAGE + u64::from(input.u16()) % PAGE;
                let bytes = input.counted();
                let room = usize::try_from((page + 1) * PAGE - at).expect("a page");
                guest.ram().poke(at, &bytes[..bytes.len().min(room)]);
            }
            5 => {
                self.turn(who);
                self.now += Duration::from_nanos(input.magnitude() % (1 << 40));
            }
            6 => self.rest(),
            7 => self.connect(who, input),
            8 => self.post(who, input),
            9 => self.attach(who, input),
            10 => match input.u8() {
                255 => self.guests[who].reopen(),
                region => {
                    let region = RegionId::new(region.into()).expect("a small number");
                    let _ = self.guests[who].context.detach(region);
                }
            },
            _ => self.window(who, input),
        }
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    MACHINE.with(|machine| {
        machine.ram.clear();
        let server = Server::without_workers();
        let mut scene = Scene {
            guests: [
                Guest::new(machine, &server, 0),
                Guest::new(machine, &server, 1),
            ],
            numbers: Vec::new(),
            registrations: Vec::new(),
            now: Instant::now(),
        };
        let mut input = Input::new(data);
        while !input.is_empty() {
            scene.step(&mut input);
        }
        scene.rest();
        let [mut a, mut b] = scene.guests;
        a.close();
        b.context.turn_now(scene.now);
        b.close();
        assert_nothing_left(&server);
        assert_eq!((a.pool.used(), b.pool.used()), (0, 0));
        for page in GUARDS {
            assert!(machine.ram.is_zero(page), "page {page} was never attached");
        }
    });
}
