//! A guest that writes whatever it likes into the queues, registers and doorbells of an NVMe
//! controller, and into the memory that those point at.

use crate::{Input, PAGE, Ram, format_all_logs};
use farlane_abi::width::{to_u64, to_usize};
use farlane_nvme::still::{Still, parse};
use farlane_nvme::{Backing, NvmeConfig, NvmeSource};
use farlane_pci::{AddressRange, DmaMapping, DmaTarget, Region, Source as _};
use std::cell::RefCell;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

/// Memory that the controller may write, that it may read only, and that it knows nothing of.
const WRITABLE: u64 = 48;
const READABLE: u64 = 8;
const FOREIGN: u64 = 8;
const PAGES: u64 = WRITABLE + READABLE + FOREIGN;
/// Where the admin queues are, of as many entries each, and where I/O queues are.
const ADMIN_SQ: u64 = 0;
const ADMIN_CQ: u64 = PAGE;
const IO_QUEUES: u64 = 2 * PAGE;
const ENTRIES: u32 = 16;
/// Bytes of the namespace that has a file.
const DISK: u64 = 64 << 10;

/// Registers (NVMe 1.4, 3.1).
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;
const ENABLE: u32 = 0x0046_0001;

/// What stays from input to input.
struct Machine {
    ram: Ram,
    controller: Still,
    /// Tails of the admin queue and two others, as the guest has them.
    tails: [u32; 3],
    mapped: bool,
    _source: NvmeSource,
}

impl Machine {
    fn new() -> Self {
        format_all_logs();
        let ram = Ram::new(PAGES);
        let disk =
            rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&disk, DISK).expect("a memfd that can grow");
        let mut config = NvmeConfig::new("fuzz", "FUZZ");
        let file = Backing::File {
            path: format!("/proc/self/fd/{}", disk.as_raw_fd()).into(),
            read_only: false,
        };
        config.namespaces = vec![Backing::Null { bytes: 1 << 30 }.into(), file.into()];
        config.io_queues = 2;
        let source = NvmeSource::open(config).expect("a controller");
        let controller = Still::take(&source).expect("the only one");
        let _ = source.counters();
        let mut machine = Self {
            ram,
            controller,
            tails: [0; 3],
            mapped: false,
            _source: source,
        };
        machine.map();
        machine
    }

    fn map(&mut self) {
        if std::mem::replace(&mut self.mapped, true) {
            return;
        }
        for (page, pages, writable) in [(0, WRITABLE, true), (WRITABLE, READABLE, false)] {
            let file = self.ram.file().try_clone().expect("a descriptor");
            let mapping = DmaMapping {
                range: AddressRange::new(page * PAGE, pages * PAGE),
                writable,
                target: DmaTarget::File {
                    file: Arc::new(file.into()),
                    offset: page * PAGE,
                },
            };
            self.controller.function().map(mapping).expect("room");
        }
    }

    fn unmap(&mut self) {
        // It waits for what is in flight, which goes on in this thread only.
        self.settle();
        if std::mem::replace(&mut self.mapped, false) {
            let function = self.controller.function();
            function
                .unmap(AddressRange::new(0, WRITABLE * PAGE))
                .expect("mapped");
            function
                .unmap(AddressRange::new(WRITABLE * PAGE, READABLE * PAGE))
                .expect("mapped");
        }
    }

    fn settle(&mut self) {
        self.controller.settle().expect("a ring that works");
    }

    fn write(&self, offset: u64, data: &[u8]) {
        // What is outside is refused, and that is fine.
        let _ = self.controller.function().write(Region::Bar0, offset, data);
    }

    fn set(&self, offset: u64, value: u32) {
        self.write(offset, &value.to_le_bytes());
    }

    fn status(&self) -> u32 {
        let mut data = [0; 4];
        let read = self
            .controller
            .function()
            .read(Region::Bar0, CSTS, &mut data);
        read.expect("a register");
        u32::from_le_bytes(data)
    }

    fn disable(&mut self) {
        self.set(CC, 0);
        self.settle();
        // Neither ready nor failed; a shutdown stays one.
        assert_eq!(self.status() & 0b11, 0);
    }

    fn enable(&mut self) {
        self.disable();
        self.set(AQA, (ENTRIES - 1) * 0x1_0001);
        self.write(ASQ, &ADMIN_SQ.to_le_bytes());
        self.write(ACQ, &ADMIN_CQ.to_le_bytes());
        self.set(CC, ENABLE);
        self.settle();
        self.tails = [0; 3];
    }

    /// Where a queue is: submission and completion.
    fn place(queue: usize) -> (u64, u64) {
        match to_u64(queue) {
            0 => (ADMIN_SQ, ADMIN_CQ),
            n => {
                let sq = IO_QUEUES + (n - 1) * 2 * PAGE;
                (sq, sq + PAGE)
            }
        }
    }

    fn push(&mut self, queue: usize, command: &[u8; 64]) {
        let (sq, _) = Self::place(queue);
        self.ram
            .poke(sq + u64::from(self.tails[queue]) * 64, command);
        self.tails[queue] = (self.tails[queue] + 1) % ENTRIES;
        let at = DOORBELLS + to_u64(queue) * 8;
        self.set(at, self.tails[queue]);
        // Everything that was answered has been seen.
        for queue in 0..3 {
            let at = DOORBELLS + queue * 8 + 4;
            self.set(at, self.tails[to_usize(queue)]);
        }
    }

    /// Commands that create a queue pair.
    fn create(&mut self, queue: usize) {
        let id = u8::try_from(queue).expect("one of three");
        let (sq, cq) = Self::place(queue);
        for (opcode, address) in [(5, cq), (1, sq)] {
            let mut command = [0; 64];
            command[0] = opcode;
            command[24..32].copy_from_slice(&address.to_le_bytes());
            command[40] = id;
            command[42..44].copy_from_slice(&15_u16.to_le_bytes());
            command[44] = 1;
            command[46] = id;
            self.push(0, &command);
        }
        self.tails[queue] = 0;
        self.settle();
    }

    /// A command that is not altogether improbable.
    fn command(input: &mut Input<'_>) -> [u8; 64] {
        let mut command: [u8; 64] = [0; 64];
        let how = input.u8();
        if how & 1 == 0 {
            command = input.array();
        } else {
            let opcodes = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 0x7c, 0x80];
            command[0] = *input.pick(&opcodes);
            command[1] = input.u8();
            command[4] = input.u8() % 4;
            for at in [24, 32] {
                let address = input.u64();
                command[at..at + 8].copy_from_slice(&address.to_le_bytes());
            }
            let dwords = input.bytes(24);
            command[40..40 + dwords.len()].copy_from_slice(dwords);
        }
        if how & 2 == 0 {
            // Addresses in or near memory.
            for at in [24, 32] {
                command[at + 3..at + 7].fill(0);
                command[at + 2] &= 7;
                if how & 4 == 0 {
                    command[at] = 0;
                    command[at + 1] &= 0xf0;
                }
            }
        }
        command
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 12 {
            0 | 1 => {
                let command = Self::command(input);
                self.push(0, &command);
            }
            2..=5 => {
                let command = Self::command(input);
                let queue = 1 + usize::from(input.u8() % 2);
                self.push(queue, &command);
            }
            6 => self.create(1 + usize::from(input.u8() % 2)),
            7 => {
                let offset = u64::from(input.u16());
                let data = input.counted();
                self.write(offset, data);
                let mut read = vec![0; data.len()];
                let _ = self
                    .controller
                    .function()
                    .read(Region::Bar0, offset, &mut read);
            }
            8 => {
                let doorbell = DOORBELLS + u64::from(input.u8() % 8) * 4;
                self.set(doorbell, input.u32());
            }
            9 => {
                let at = u64::from(input.u32()) % (WRITABLE * PAGE);
                let bytes = input.counted();
                let room = to_usize(WRITABLE * PAGE - at);
                self.ram.poke(at, &bytes[..bytes.len().min(room)]);
            }
            10 => match input.u8() % 4 {
                0 => self.unmap(),
                1 => self.map(),
                2 => self.enable(),
                _ => self.set(CC, input.u32()),
            },
            _ => self.settle(),
        }
    }
}

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let _ = parse(data, data.get(64..).unwrap_or_default());
    MACHINE.with_borrow_mut(|machine| {
        let machine = machine.get_or_insert_with(Machine::new);
        machine.disable();
        machine.ram.clear();
        machine.map();
        machine.enable();
        let mut input = Input::new(data);
        while !input.is_empty() {
            machine.step(&mut input);
        }
        machine.settle();
        machine.disable();
        for page in WRITABLE..PAGES {
            assert!(machine.ram.is_zero(page), "page {page} was written");
        }
        // It can be used as before.
        machine.map();
        machine.enable();
        assert_eq!(machine.status(), 1);
    });
}
