//! Two processes of a VM that write whatever they like into phony pages and into their slots, and
//! disks whose requests come from there in any pieces, while memory is taken away and processes
//! come and go.

use crate::{Input, PAGE, Ram, format_all_logs};
use farlane_abi::ids::{ContextId, RegionId};
use farlane_abi::tunnel::{
    DIRECTION_INTO_DEVICE, DIRECTION_OUT_OF_DEVICE, Disk, ENVELOPE_MAGIC, Envelope, OFF_SLOTS,
    SECTOR_BYTES, SLOT_ARMED, SLOT_BYTES, SLOT_KEY, SLOT_LANDED, SLOT_LENGTH, SLOT_OFFSET,
    SLOT_REGION, segment_bytes,
};
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_zero_copy::tokens::{Direction, Opened, Tokens};
use farlane_zero_copy::{AddressSpace, Mapping, SharedMemory};
use std::cell::LazyCell;
use std::collections::HashSet;
use std::os::fd::AsFd as _;
use std::sync::Arc;

/// Pages of the VM. Each process has a phony buffer in them, with other pages around.
const PAGES: u64 = 32;
const PHONY: [u64; 2] = [4, 16];
const PHONY_PAGES: u64 = 8;
/// Guest-physical address of the device memory, half of it each process's.
const DEVICE: u64 = 1 << 36;
const DEVICE_PAGES: u64 = 16;
const HALF: u64 = DEVICE_PAGES / 2 * PAGE;
/// Slots that are used.
const SLOTS: u32 = 8;
const REGION: u32 = 1;
const PIN: u32 = 2;
const SECTOR: u64 = SECTOR_BYTES as u64;

/// What stays from input to input.
struct Machine {
    ram: Ram,
    space: Arc<AddressSpace>,
    device: Ram,
    headers: [Ram; 2],
}

thread_local! {
    static MACHINE: LazyCell<Machine> = const { LazyCell::new(|| {
        format_all_logs();
        let ram = Ram::new(PAGES);
        let space = AddressSpace::new();
        space.map(0, PAGES * PAGE, ram.file().as_fd(), 0, true).expect("room");
        let header = || Ram::new(segment_bytes(0) / PAGE);
        Machine { ram, space, device: Ram::new(DEVICE_PAGES), headers: [header(), header()] }
    }) };
}

fn context(id: usize) -> ContextId {
    let number = u32::try_from(id).ok().and_then(ContextId::new);
    number.expect("one of two")
}

fn region(number: u32) -> RegionId {
    RegionId::new(number).expect("one of two")
}

/// What one run of the target knows.
struct World<'a> {
    machine: &'a Machine,
    device: Arc<AddressSpace>,
    tokens: Arc<Tokens>,
    headers: [Option<SharedMemory>; 2],
    /// Which phony buffers there are.
    phony: [bool; 2],
    /// Sectors of tokens that were opened: process, slot, key, number, sector.
    used: HashSet<(usize, u32, [u64; 2], u64, u64)>,
    /// Requests under way.
    open: Vec<Opened>,
}

impl World<'_> {
    fn open_process(&mut self, id: usize) {
        let context = context(id);
        if self.tokens.open_context(context).is_err() {
            return;
        }
        let file = self.machine.headers[id].file();
        let map = || {
            let mapping = Mapping::new(file.as_fd(), 0, segment_bytes(0), true);
            SharedMemory::new(mapping.expect("a mapping"))
        };
        self.tokens.set_header(context, map()).expect("a header");
        self.headers[id] = Some(map());
    }

    fn attach(&mut self, id: usize, writable: bool) {
        let context = context(id);
        let start = DEVICE + id as u64 * HALF;
        // Two runs, in the other order.
        let runs = [(start + PAGE, HALF - PAGE), (start, PAGE)];
        let _ = self.tokens.add_device(context, region(REGION), &runs, writable);
        let pages = [(PHONY[id] * PAGE, PHONY_PAGES * PAGE)];
        if self.tokens.add_phony(context, region(PIN), &pages).is_ok() {
            self.phony[id] = true;
        }
    }

    fn slot_word(&self, id: usize, slot: u32, field: usize, value: u64) {
        if let Some(header) = &self.headers[id] {
            let at = OFF_SLOTS + usize::try_from(slot).expect("64 bits") * SLOT_BYTES + field;
            header.write(at, &value).expect("a slot");
        }
    }

    fn key(&self, id: usize, slot: u32) -> [u64; 2] {
        let at = OFF_SLOTS + usize::try_from(slot).expect("64 bits") * SLOT_BYTES + SLOT_KEY;
        self.headers[id]
            .as_ref()
            .map_or([0; 2], |header| header.read(at).expect("a slot"))
    }

    /// Whose phony page lies there.
    fn owner(&self, address: u64) -> Option<usize> {
        (0..2).find(|&id| {
            let start = PHONY[id] * PAGE;
            self.phony[id] && (start..start + PHONY_PAGES * PAGE).contains(&address)
        })
    }

    /// Opens a request and checks all that it was given.
    fn request(&mut self, direction: Direction, segments: &[(u64, u64)]) {
        let view = self.machine.space.view();
        let Ok(Some(opened)) = self.tokens.open(&view, direction, segments) else {
            return;
        };
        let wanted: u64 = segments.iter().map(|s| s.1).sum();
        let given: u64 = opened.runs().iter().map(|r| r.1 as u64).sum();
        let refused: u64 = opened.refused().iter().map(|r| r.1).sum();
        assert_eq!(wanted, given, "a request of another length");
        assert!(refused == 0 || opened.why_refused().is_some());
        let is_refused = |done: u64| {
            let mut refused = opened.refused().iter();
            refused.any(|&(start, length)| (start..start + length).contains(&done))
        };
        // No token is used then.
        let suspended = self.tokens.is_suspended();
        assert!(!suspended || opened.tunnelled_bytes() == 0);
        let mut done = 0;
        let mut owners = [false; 2];
        for &(address, length) in segments {
            let mut at = address;
            while at < address + length {
                let piece = (PAGE - at % PAGE).min(address + length - at);
                if let Some(owner) = self.owner(at)
                    && !is_refused(done)
                    && !suspended
                {
                    owners[owner] = true;
                    self.use_up(owner, at, piece);
                }
                done += piece;
                at += piece;
            }
        }
        self.check_runs(&opened, owners);
        self.open.push(opened);
    }

    fn use_up(&mut self, owner: usize, at: u64, piece: u64) {
        let bytes = self.machine.ram.peek::<{ size_of::<Envelope>() }>(at);
        let envelope = Envelope::read_from_bytes(&bytes).expect("as long");
        assert_eq!(envelope.magic, ENVELOPE_MAGIC);
        let key = envelope.key.map(|word| word.get());
        for sector in at % PAGE / SECTOR..(at % PAGE + piece) / SECTOR {
            let token = (
                owner,
                envelope.slot.get(),
                key,
                envelope.sequence.get(),
                sector,
            );
            assert!(self.used.insert(token), "opened twice: {token:?}");
        }
    }

    /// Device memory is that of the processes whose phony pages the request has.
    fn check_runs(&self, opened: &Opened, owners: [bool; 2]) {
        let view = self.device.view();
        let mut tunnelled = 0;
        for &(base, length) in opened.runs() {
            for (id, owns) in owners.iter().enumerate() {
                let _ = view.resolve(DEVICE + id as u64 * HALF, HALF, false, |first, bytes| {
                    let half = first.addr()..first.addr() + bytes;
                    let run = base.addr()..base.addr() + length;
                    let common = run
                        .end
                        .min(half.end)
                        .saturating_sub(run.start.max(half.start));
                    assert!(common == 0 || *owns, "memory of another process");
                    tunnelled += common as u64;
                });
            }
        }
        // What was taken away meanwhile is not in the view.
        assert!(tunnelled <= opened.tunnelled_bytes());
    }
}

fn step(world: &mut World<'_>, input: &mut Input<'_>) {
    let id = usize::from(input.u8() % 2);
    let context = context(id);
    let slot = u32::from(input.u8()) % SLOTS;
    match input.u8() % 16 {
        // A token that is right but for one word.
        0..=3 => {
            let page = PHONY[id] + u64::from(input.u8()) % PHONY_PAGES;
            let sequence = u64::from(input.u8());
            let direction = *input.pick(&[DIRECTION_INTO_DEVICE, DIRECTION_OUT_OF_DEVICE]);
            world.slot_word(
                id,
                slot,
                SLOT_REGION,
                u64::from(REGION) | u64::from(direction) << 32,
            );
            world.slot_word(id, slot, SLOT_OFFSET, u64::from(input.u16()));
            let length = u64::from(input.u8() % 9) * SECTOR;
            world.slot_word(id, slot, SLOT_LENGTH, length | u64::from(input.u8()) << 32);
            world.slot_word(id, slot, SLOT_ARMED, sequence);
            // Perhaps the other process's key.
            let from = usize::from(input.u8() == 1) ^ id;
            let key = world.key(from, slot);
            for sector in 0..8u32 {
                let envelope = Envelope {
                    magic: ENVELOPE_MAGIC.into(),
                    key: key.map(Into::into),
                    sequence: sequence.into(),
                    slot: slot.into(),
                    sector: sector.into(),
                };
                let at = page * PAGE + u64::from(sector) * SECTOR;
                world.machine.ram.poke(at, envelope.as_bytes());
            }
        }
        4 => {
            let at = u64::from(input.u32()) % (PAGES * PAGE);
            world.machine.ram.poke(at, input.counted());
        }
        5 => {
            let field = *input.pick(&[
                SLOT_KEY,
                SLOT_ARMED,
                SLOT_REGION,
                SLOT_OFFSET,
                SLOT_LENGTH,
                SLOT_LANDED,
            ]);
            let value = input.u64();
            world.slot_word(id, slot, field, value);
        }
        6..=9 => {
            let direction = *input.pick(&[Direction::IntoDevice, Direction::OutOfDevice]);
            let count = 1 + usize::from(input.u8() % 4);
            let segments: Vec<_> = (0..count)
                .map(|_| {
                    let at = u64::from(input.u16()) % (PAGES * PAGE / SECTOR);
                    let odd = u64::from(input.u8() == 1);
                    let length = 1 + u64::from(input.u8()) % 40;
                    (at * SECTOR + odd, length * SECTOR)
                })
                .collect();
            world.request(direction, &segments);
        }
        10 => {
            if !world.open.is_empty() {
                let at = usize::from(input.u8()) % world.open.len();
                let opened = world.open.swap_remove(at);
                if !input.u8().is_multiple_of(4) {
                    opened.landed();
                }
            }
        }
        11 => world.tokens.tick(),
        // Whoever takes away or suspends waits for requests under way, and here is nobody to end
        // them meanwhile.
        12 => match input.u8() % 2 {
            0 => {
                world.open.clear();
                world.tokens.suspend();
            }
            _ => world.tokens.resume(),
        },
        13 => {
            world.open.clear();
            let _ = world.tokens.detach(context, region(REGION));
            if input.u8().is_multiple_of(2) {
                let _ = world.tokens.detach(context, region(PIN));
                world.phony[id] = false;
            }
        }
        14 => {
            world.open.clear();
            let _ = world.tokens.close_context(context);
            world.phony[id] = false;
            // Another process, with other keys.
            world.used.retain(|token| token.0 != id);
            world.open_process(id);
        }
        _ => {
            let writable = !input.u8().is_multiple_of(4);
            world.attach(id, writable);
            if input.u8() == 1 {
                world.open.clear();
                let _ = world.device.unmap(DEVICE, 2 * HALF);
            }
        }
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    MACHINE.with(|machine| {
        machine.ram.clear();
        machine.headers.iter().for_each(Ram::clear);
        let device = AddressSpace::of_devices();
        let file = machine.device.file().as_fd();
        device.map(DEVICE, 2 * HALF, file, 0, true).expect("room");
        let mut world = World {
            machine,
            tokens: Tokens::new(Arc::clone(&device), vec![Disk::default()]),
            device,
            headers: [None, None],
            phony: [false; 2],
            used: HashSet::new(),
            open: Vec::new(),
        };
        for id in 0..2 {
            world.open_process(id);
            world.attach(id, true);
        }
        let mut input = Input::new(data);
        while !input.is_empty() {
            step(&mut world, &mut input);
        }
        world.open.clear();
        world.tokens.close_all();
        assert!(world.tokens.is_empty());
    });
}
