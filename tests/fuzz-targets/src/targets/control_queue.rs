//! The driver of a VM that writes whatever it likes into its control and its event queue, and a VMM
//! that stops the queues and takes memory away meanwhile.

use crate::{Input, PAGE, Ram, assert_nothing_left, format_all_logs};
use farlane_abi::control::{Extent, MAX_CONTEXTS, MAX_SHARED_PIECES, Reply, Request};
use farlane_abi::ids::ContextId;
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_guest_device::control::{Control, MapWindow, RequestCounters};
use farlane_guest_device::events::EventQueue;
use farlane_guest_device::request::{ContextRequest, ControlRequest, HostRequest, parse, parse_host};
use farlane_guest_device::ring::{Ring, VmMemory};
use farlane_rdma::contexts::PortContexts;
use farlane_rdma_remoting::{Port, Server};
use farlane_vhost_user::channel::Channel;
use farlane_vhost_user::session::Setup;
use farlane_vhost_user::vring::Layout;
use farlane_zero_copy::{AddressSpace, Pool};
use std::cell::{Cell, LazyCell};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_memory::GuestMemoryMmap;

/// Pages of the VM.
const PAGES: u64 = 64;
/// Bytes in its first part; the second one begins at [`SECOND`].
const HALF: u64 = PAGES / 2 * PAGE;
/// Guest address of the second part.
const SECOND: u64 = 1 << 20;
/// Bytes of the pool.
const POOL_BYTES: u64 = 16 * PAGE;

/// A queue of this size, which lies in a page of its own.
const QUEUE_SIZE: u16 = 16;
const AVAIL: u64 = 0x400;
const USED: u64 = 0x800;
const CONTROL_PAGE: u64 = 1;
const EVENT_PAGE: u64 = 2;
/// Where requests are written, and their replies.
const REQUEST: u64 = 3 * PAGE;
const REPLY: u64 = 8 * PAGE;
/// From here on, nothing that the queues need.
const FREE: u64 = 9 * PAGE;
/// Contexts that get turns.
const CONTEXTS: u32 = 4;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// What stays from input to input.
struct Machine {
    ram: Ram,
    memory: VmMemory,
    space: Arc<AddressSpace>,
}

thread_local! {
    static MACHINE: LazyCell<Machine> = const { LazyCell::new(|| {
        format_all_logs();
        let ram = Ram::new(PAGES);
        let memory = VmMemory::new(table(&ram, 0));
        Machine { ram, memory, space: AddressSpace::new() }
    }) };
}

/// A memory table, one of several.
fn table(ram: &Ram, which: u8) -> GuestMemoryMmap {
    match which % 4 {
        0 => ram.parts(&[(0, 0, HALF), (SECOND, HALF, HALF)]),
        1 => ram.parts(&[(0, 0, HALF)]),
        // The same first part, and the second one at another place, and in two.
        2 => ram.parts(&[(0, 0, HALF), (HALF, HALF, HALF / 2), (HALF * 2, HALF, HALF)]),
        _ => ram.parts(&[(0, 0, CONTROL_PAGE * PAGE + AVAIL + 4)]),
    }
}

/// A VMM.
struct Vmm<'a> {
    control: &'a Control,
    /// How it answers the next time that it is asked to map the window.
    mood: Cell<u8>,
}

impl MapWindow for Vmm<'_> {
    fn map_window(&self, pool: &Pool) -> io::Result<()> {
        assert_eq!(pool.window_bytes(), POOL_BYTES);
        match self.mood.get() % 4 {
            0 | 1 => Ok(()),
            2 => Err(io::ErrorKind::Other.into()),
            _ => {
                // The guest resets its device while the VMM is asked.
                self.control.reset();
                Ok(())
            }
        }
    }
}

/// The driver's end of a queue.
struct Driver<'a> {
    ram: &'a Ram,
    page: u64,
    next_descriptor: u16,
    next_avail: u16,
}

impl Driver<'_> {
    fn at(&self, offset: u64) -> u64 {
        self.page * PAGE + offset
    }

    /// Makes a chain of descriptors available: (address, bytes, flags besides `NEXT`).
    fn post(&mut self, chain: &[(u64, u32, u16)]) {
        let head = self.next_descriptor;
        for (i, &(address, length, flags)) in chain.iter().enumerate() {
            let index = self.next_descriptor;
            self.next_descriptor = (index + 1) % QUEUE_SIZE;
            let more = if i + 1 < chain.len() { NEXT } else { 0 };
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&address.to_le_bytes());
            bytes[8..12].copy_from_slice(&length.to_le_bytes());
            bytes[12..14].copy_from_slice(&(flags | more).to_le_bytes());
            bytes[14..].copy_from_slice(&self.next_descriptor.to_le_bytes());
            self.ram.poke(self.at(u64::from(index) * 16), &bytes);
        }
        let slot = u64::from(self.next_avail % QUEUE_SIZE);
        self.ram
            .poke(self.at(AVAIL + 4 + slot * 2), &head.to_le_bytes());
        self.next_avail = self.next_avail.wrapping_add(1);
        self.ram
            .poke(self.at(AVAIL + 2), &self.next_avail.to_le_bytes());
    }

    /// Chains that were given back.
    fn used(&self) -> u16 {
        u16::from_le_bytes(self.ram.peek(self.at(USED + 2)))
    }
}

struct Scene<'a> {
    machine: &'a Machine,
    port: Arc<Port>,
    control: &'a Control,
    events: Arc<EventQueue>,
    vmm: Vmm<'a>,
    driver: Driver<'a>,
    listener: Driver<'a>,
    /// The driver has done nothing to the control queue that a good one does not do.
    honest: bool,
    /// The memory ends in the middle of the control queue.
    short: bool,
    now: Instant,
}

impl<'a> Scene<'a> {
    /// A queue as the VMM sets it up when the guest's driver has come.
    fn ring(&self, addresses: [u64; 3], event_index: bool) -> Option<Ring> {
        let [descriptors, available, used] = addresses;
        let layout = Layout {
            size: QUEUE_SIZE,
            descriptors,
            available,
            used,
        };
        let setup = Setup {
            event_index,
            ..Setup::new(0, Arc::clone(&self.machine.space), layout)
        };
        Ring::start(&self.machine.memory, &setup).ok()
    }

    fn start(&self, page: u64, event_index: bool) -> Option<Ring> {
        let at = page * PAGE;
        self.machine.ram.poke(at, &[0; 4096]);
        self.ring([at, at + AVAIL, at + USED], event_index)
    }

    fn restart(&mut self, event_idx: bool) {
        let machine = self.machine;
        // None where the memory ends before.
        if let Some(ring) = self.start(CONTROL_PAGE, event_idx) {
            self.control.start(ring, false);
        }
        if let Some(ring) = self.start(EVENT_PAGE, event_idx) {
            self.events.start(ring);
        }
        let driver = |page| Driver {
            ram: &machine.ram,
            page,
            next_descriptor: 0,
            next_avail: 0,
        };
        self.driver = driver(CONTROL_PAGE);
        self.listener = driver(EVENT_PAGE);
        self.honest = !self.short;
    }

    fn serve(&self) {
        self.control.serve(&self.vmm);
    }

    fn change_memory(&mut self, which: u8) {
        let table = table(&self.machine.ram, which);
        self.machine
            .memory
            .lock()
            .expect("no panic before")
            .replace(table.clone());
        let _ = self.machine.space.replace_ram(&table);
        self.short = which % 4 == 3;
        self.honest &= !self.short;
    }

    /// The bytes of a request whose fields the input chooses.
    fn request(input: &mut Input<'_>) -> Vec<u8> {
        let op = input.u8() % 12;
        let context = *input.pick(&[0, 1, 2, 3, MAX_CONTEXTS - 1, MAX_CONTEXTS, u32::MAX]);
        let (kind, region) = (input.u8(), input.u8());
        let small = kind & 0x10 != 0;
        // Places of the VM's memory, or anything.
        let place = |input: &mut Input<'_>| {
            if small {
                u64::from(input.u8()) * PAGE
            } else {
                input.u64()
            }
        };
        let extents: Vec<Extent> = (0..kind >> 5)
            .map(|_| Extent {
                address: place(input).into(),
                length: place(input).into(),
            })
            .collect();
        let count = u32::try_from(extents.len()).expect("a few");
        let request = Request {
            op: u32::from(op).into(),
            context: context.into(),
            region: u32::from(region).into(),
            kind: u32::from(kind & 3).into(),
            flags: u32::from(kind >> 2 & 3).into(),
            extents: count.into(),
            address: place(input).into(),
            length: place(input).into(),
        };
        let mut bytes = request.as_bytes().to_vec();
        for extent in &extents {
            bytes.extend_from_slice(extent.as_bytes());
        }
        bytes
    }

    /// Posts a request, cut in two, and has it served.
    fn ask(&mut self, bytes: &[u8], input: &mut Input<'_>) {
        if let Ok(ControlRequest::Context(context, request)) = parse(bytes) {
            assert!(context.get() < MAX_CONTEXTS);
            if let ContextRequest::Attach { extents, .. }
            | ContextRequest::AttachMore { extents, .. } = request
            {
                self.honest &= extents.iter().all(|&(address, _)| address >= FREE);
            }
        }
        if let Ok(request) = parse_host(bytes) {
            assert!(request.descriptors() <= MAX_SHARED_PIECES as usize);
            if let HostRequest::Share { new, pieces } = request {
                let sum: u64 = pieces.iter().map(|piece| piece.1).sum();
                assert!(sum == new.length && !pieces.is_empty());
            }
        }
        let bytes = &bytes[..bytes.len().min(4 * 4096)];
        self.machine.ram.poke(REQUEST, bytes);
        let cut = bytes.len().min(input.u8().into());
        let length = |bytes: usize| u32::try_from(bytes).expect("a few pages");
        let room = if input.u8() < 240 {
            length(size_of::<Reply>())
        } else {
            input.u8().into()
        };
        let mut chain = Vec::new();
        for (start, bytes) in [(0, cut), (cut, bytes.len() - cut)] {
            if bytes > 0 {
                chain.push((REQUEST + start as u64, length(bytes), 0));
            }
        }
        if room > 0 || chain.is_empty() {
            chain.push((REPLY, room, WRITE));
        }
        const SEEN: [u8; 4] = [0xee; 4];
        self.machine.ram.poke(REPLY, &SEEN);
        self.driver.post(&chain);
        self.serve();
        if self.vmm.mood.get() % 4 == 3 {
            // A request during which the device was reset is never given back; a driver starts its
            // queue anew then.
            self.honest &= self.driver.used() == self.driver.next_avail;
        } else if self.honest {
            assert_eq!(
                self.driver.used(),
                self.driver.next_avail,
                "every request is given back"
            );
            if room == length(size_of::<Reply>()) {
                let reply = self.machine.ram.peek::<{ size_of::<Reply>() }>(REPLY);
                let reply = Reply::read_from_bytes(&reply).expect("any bytes");
                assert!(reply.status.get() < 4096, "an error number");
            }
        }
    }

    fn turns(&mut self, input: &mut Input<'_>) {
        for _ in 0..=input.u8() % 16 {
            let worked = (0..CONTEXTS)
                .filter_map(|id| self.port.context(ContextId::new(id)?).ok())
                .fold(false, |worked, context| {
                    worked | context.turn_now(self.now).worked
                });
            if !worked {
                break;
            }
        }
        self.now += Duration::from_nanos(input.magnitude() % (1 << 40));
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 13 {
            0 | 1 => {
                let bytes = Self::request(input);
                self.ask(&bytes, input);
            }
            2 => {
                let count = input.u16();
                let bytes = input.bytes(count.into());
                self.ask(bytes, input);
            }
            3 => {
                let page = *input.pick(&[CONTROL_PAGE, EVENT_PAGE]);
                let at = page * PAGE + u64::from(input.u16()) % 0xa00;
                self.machine.ram.poke(at, input.counted());
                self.honest = false;
                self.serve();
                self.events.flush();
            }
            4 => {
                // Anywhere: context headers, queues, requests.
                let at = FREE + u64::from(input.u8()) * PAGE + u64::from(input.u16()) % PAGE;
                self.machine.ram.poke(at, input.counted());
            }
            5 => {
                let room = u32::from(input.u8() % 32);
                let at = u64::from(input.u8()) * PAGE;
                self.honest &= at >= FREE;
                self.listener.post(&[(at, room, WRITE)]);
                self.events.flush();
            }
            6 => self.events.flush(),
            7 => self.turns(input),
            8 => self.control.reset(),
            9 => self.change_memory(input.u8()),
            10 => {
                let event_idx = input.u8() % 2 == 1;
                self.control.stop();
                self.events.stop();
                self.restart(event_idx);
            }
            11 => self.vmm.mood.set(input.u8()),
            _ => {
                // The VMM takes the queue away, or puts it anywhere.
                self.honest = false;
                self.control.stop();
                if input.u8() % 3 == 2 {
                    let at = |input: &mut Input<'_>| u64::from(input.u16()) << 4;
                    let addresses = [at(input), at(input), at(input)];
                    if let Some(ring) = self.ring(addresses, false) {
                        self.control.start(ring, input.u8().is_multiple_of(2));
                    }
                }
                self.serve();
            }
        }
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    MACHINE.with(|machine| {
        machine.ram.clear();
        let server = Server::without_workers();
        let port = server.port([7; 16], "vm".into()).expect("a new GID");
        let events = EventQueue::new();
        let control = Control::new(
            "vm".into(),
            PortContexts::new(Arc::clone(&port), Arc::clone(&server)),
            Arc::clone(&events),
            Arc::new(RequestCounters::default()),
            Channel::new(Arc::default()),
            1,
        );
        let mut input = Input::new(data);
        let pool = Pool::shared_window(POOL_BYTES).expect("a memfd");
        let flags = input.u8();
        if flags & 1 == 0 {
            control.set_window(Arc::clone(&pool));
        }
        let driver = |page| Driver {
            ram: &machine.ram,
            page,
            next_descriptor: 0,
            next_avail: 0,
        };
        let mut scene = Scene {
            machine,
            port,
            control: &control,
            events: Arc::clone(&events),
            vmm: Vmm {
                control: &control,
                mood: Cell::new(0),
            },
            driver: driver(CONTROL_PAGE),
            listener: driver(EVENT_PAGE),
            honest: true,
            short: false,
            now: Instant::now(),
        };
        scene.change_memory(0);
        scene.restart(flags & 2 != 0);
        while !input.is_empty() {
            scene.step(&mut input);
        }
        control.end();
        events.stop();
        machine.space.clear();
        assert_nothing_left(&server);
        assert_eq!(pool.used(), 0);
    });
}
