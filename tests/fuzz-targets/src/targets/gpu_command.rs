//! A guest that writes whatever it likes into the registers, the queue and the video memory of the
//! software GPU, also while a command is executed, and lends it whatever system memory.

use crate::{Input, PAGE, Ram, format_all_logs};
use farlane_abi::gpu as abi;
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_gpu::GpuSource;
use farlane_gpu::still::{Still, with};
use farlane_pci::{
    AddressRange, DmaMapping, DmaTarget, Function, InterruptKind, InterruptVector, Region, Signal,
};
use std::cell::{Cell, LazyCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const MEMORY: u64 = 1 << 20;
/// System memory that the GPU may write, that it may read only, and that it knows nothing of.
const WRITABLE: u64 = 16;
const READABLE: u64 = 8;
const FOREIGN: u64 = 4;
const SYSTEM_PAGES: u64 = WRITABLE + READABLE + FOREIGN;
/// Where system memory is.
const SYSTEM: u64 = 1 << 32;
/// Where its queue is, as long as the guest behaves.
const QUEUE: u64 = 0x1_0000;
const ENTRIES: u32 = 16;
/// Commands of one turn.
const COMMANDS: usize = 64;
/// Slices of one input, after which the driver disables the device.
const SLICES: u32 = 200;
/// What the guest never lets it write.
const PATTERN: [u8; 4096] = [0x5a; 4096];

#[derive(Debug, Default)]
struct Raised(AtomicU32);

impl Signal for Raised {
    fn raise(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Machine {
    source: GpuSource,
    system: Ram,
}

thread_local! {
    static MACHINE: LazyCell<Machine> = const { LazyCell::new(|| {
        format_all_logs();
        let source = GpuSource::new(MEMORY).expect("a GPU");
        Machine { source, system: Ram::new(SYSTEM_PAGES) }
    }) };
}

/// What the guest knows.
struct Driver<'m> {
    machine: &'m Machine,
    tail: u32,
    mapped: bool,
    /// Slices that are left.
    slices: Cell<u32>,
    raised: [Arc<Raised>; 2],
}

fn set(function: &dyn Function, register: u32, value: u32) {
    let written = function.write(Region::Bar0, register.into(), &value.to_le_bytes());
    written.expect("a register");
}

fn get(function: &dyn Function, register: u32) -> u32 {
    let mut data = [0; 4];
    let read = function.read(Region::Bar0, register.into(), &mut data);
    read.expect("a register");
    u32::from_le_bytes(data)
}

fn poke(function: &dyn Function, at: u64, bytes: &[u8]) {
    let room = usize::try_from(MEMORY.saturating_sub(at)).expect("a size");
    let bytes = &bytes[..bytes.len().min(room)];
    let written = function.write(Region::Bar2, at, bytes);
    written.expect("inside of video memory");
}

fn word(function: &dyn Function, at: u64) -> u32 {
    let mut data = [0; 4];
    let read = function.read(Region::Bar2, at, &mut data);
    read.expect("inside of video memory");
    u32::from_le_bytes(data)
}

/// An offset in video memory, or near its end, or anything.
fn offset(input: &mut Input<'_>) -> u64 {
    let choice = input.u16();
    match choice >> 13 {
        7 => input.u64(),
        6 => MEMORY.wrapping_sub(u64::from(choice & 0x1fff)),
        5 => MEMORY + u64::from(choice & 0x1f),
        4 => QUEUE + u64::from(choice & 0x1fff),
        _ => u64::from(choice & 0x1fff) * 16 + u64::from(choice & 3),
    }
}

/// An address in system memory, or near a border, or anything.
fn address(input: &mut Input<'_>) -> u64 {
    let choice = input.u16();
    match choice >> 13 {
        7 => input.u64(),
        6 => u64::MAX - u64::from(choice & 0x1fff),
        5 => (SYSTEM + WRITABLE * PAGE).wrapping_sub(u64::from(choice & 0x1ff)),
        4 => (SYSTEM + (WRITABLE + READABLE) * PAGE).wrapping_sub(u64::from(choice & 0x1ff)),
        _ => SYSTEM + u64::from(choice & 0x1fff) * 8,
    }
}

fn length(input: &mut Input<'_>) -> u64 {
    let choice = input.u16();
    match choice >> 13 {
        7 => input.u64(),
        6 => u64::from(choice & 0x1fff) * 128,
        _ => u64::from(choice & 0xfff),
    }
}

impl Driver<'_> {
    fn map(&mut self, function: &dyn Function) {
        if std::mem::replace(&mut self.mapped, true) {
            return;
        }
        for (page, pages, writable) in [(0, WRITABLE, true), (WRITABLE, READABLE, false)] {
            let file = self
                .machine
                .system
                .file()
                .try_clone()
                .expect("a descriptor");
            let mapping = DmaMapping {
                range: AddressRange::new(SYSTEM + page * PAGE, pages * PAGE),
                writable,
                target: DmaTarget::File {
                    file: Arc::new(file.into()),
                    offset: page * PAGE,
                },
            };
            function.map(mapping).expect("room");
        }
    }

    fn unmap(&mut self, function: &dyn Function) {
        if std::mem::replace(&mut self.mapped, false) {
            for (page, pages) in [(0, WRITABLE), (WRITABLE, READABLE)] {
                let unmapped =
                    function.unmap(AddressRange::new(SYSTEM + page * PAGE, pages * PAGE));
                unmapped.expect("mapped");
            }
        }
    }

    fn enable(&mut self, function: &dyn Function, queue: u64, entries: u32) {
        set(function, abi::REG_CONTROL, 0);
        let [low, high] = [queue & 0xffff_ffff, queue >> 32];
        set(
            function,
            abi::REG_QUEUE_LOW,
            u32::try_from(low).expect("32 bits"),
        );
        set(
            function,
            abi::REG_QUEUE_HIGH,
            u32::try_from(high).expect("32 bits"),
        );
        set(function, abi::REG_ENTRIES, entries);
        set(function, abi::REG_CONTROL, abi::CONTROL_ENABLE);
        self.tail = 0;
    }

    /// A command that is not altogether improbable.
    fn command(input: &mut Input<'_>) -> abi::Command {
        let how = input.u8();
        if how == 0xff {
            let bytes: [u8; 64] = input.array();
            return abi::Command::read_from_bytes(&bytes).expect("any bytes");
        }
        let operation = u16::from(how % 8);
        let (source, target) = match operation {
            abi::OP_COPY_IN => (address(input), offset(input)),
            abi::OP_COPY_OUT => (offset(input), address(input)),
            _ => (offset(input), offset(input)),
        };
        let parameter = match operation {
            abi::OP_GATHER => length(input),
            _ => u64::from(input.u16() % 600),
        };
        abi::Command {
            operation: operation.into(),
            flags: u16::from(how >> 7).into(),
            count: u32::from(input.u8()).into(),
            source: source.into(),
            target: target.into(),
            length: length(input).into(),
            parameter: parameter.into(),
            table: offset(input).into(),
            capacity: u32::from(input.u8()).into(),
            reserved: Default::default(),
        }
    }

    fn submit(&mut self, function: &dyn Function, command: &abi::Command) {
        let index = u64::from(self.tail % ENTRIES);
        let at = QUEUE + abi::QUEUE_HEADER_BYTES + index * abi::COMMAND_BYTES;
        poke(function, at, command.as_bytes());
        self.tail = self.tail.wrapping_add(1);
        poke(function, QUEUE + abi::QUEUE_TAIL, &self.tail.to_le_bytes());
        set(function, abi::REG_DOORBELL, 0);
    }

    /// Patterns, their lengths first.
    fn patterns(function: &dyn Function, input: &mut Input<'_>) {
        let at = offset(input) % (MEMORY - 4096);
        let lengths: Vec<u8> = (0..input.u8() % 16).map(|_| input.u8() % 5).collect();
        let mut bytes: Vec<u8> = lengths
            .iter()
            .flat_map(|&length| u32::from(length).to_le_bytes())
            .collect();
        bytes.extend(input.counted());
        poke(function, at, &bytes);
    }

    /// Executes what there is. At each slice of a command, the guest writes a byte or two more.
    fn turn(&self, still: &mut Still<'_>, meanwhile: &[u8]) {
        let (function, slices) = (still.function(), &self.slices);
        let mut rest = Input::new(meanwhile);
        let mut writes = Vec::new();
        while !rest.is_empty() {
            writes.push((offset(&mut rest) % MEMORY, rest.array::<4>()));
        }
        let next = Cell::new(0);
        let go_on = || {
            if let Some((at, bytes)) = writes.get(next.replace(next.get() + 1)) {
                poke(function, *at, bytes);
            }
            slices.set(slices.get().saturating_sub(1));
            slices.get() > 0
        };
        still.turn(COMMANDS, &go_on);
    }

    /// What holds at all times.
    fn check(&self, function: &dyn Function) {
        assert_eq!(get(function, abi::REG_IDENTITY), abi::IDENTITY);
        assert_eq!(get(function, abi::REG_MEMORY_LOW), 1 << 20);
        let status = get(function, abi::REG_STATUS);
        assert!([0, abi::STATUS_READY, abi::STATUS_FAULT].contains(&status));
        for page in WRITABLE..SYSTEM_PAGES {
            let read: [u8; 4096] = self.machine.system.peek(page * PAGE);
            assert_eq!(read, PATTERN, "page {page} was written");
        }
    }

    fn step(&mut self, still: &mut Still<'_>, input: &mut Input<'_>) {
        match input.u8() % 12 {
            0..=3 => {
                let command = Self::command(input);
                self.submit(still.function(), &command);
            }
            4 => Self::patterns(still.function(), input),
            5 => {
                let at = offset(input) % MEMORY;
                poke(still.function(), at, input.counted());
            }
            6 => {
                let at = u64::from(input.u16()) % (WRITABLE * PAGE);
                let bytes = input.counted();
                let room = usize::try_from(WRITABLE * PAGE - at).expect("a size");
                self.machine
                    .system
                    .poke(at, &bytes[..bytes.len().min(room)]);
            }
            7 => {
                // Any access to any register, in any width.
                let region = *input.pick(&[Region::Bar0, Region::Bar2, Region::Config]);
                let at = match input.u8() % 4 {
                    0 => input.u64(),
                    _ => u64::from(input.u16()),
                };
                let bytes = input.counted();
                let _ = still.function().write(region, at, bytes);
                let mut read = vec![0; bytes.len()];
                let _ = still.function().read(region, at, &mut read);
            }
            8 => match input.u8() % 4 {
                0 => self.unmap(still.function()),
                1 => self.map(still.function()),
                2 => {
                    let (queue, entries) = (offset(input), u32::from(input.u16() % 64));
                    self.enable(still.function(), queue, entries);
                }
                _ => self.enable(still.function(), QUEUE, ENTRIES),
            },
            9 => {
                let number = u16::from(input.u8() % 3);
                let signal = self.raised.get(usize::from(number)).map(|raised| {
                    let signal: Arc<dyn Signal> = raised.clone();
                    signal
                });
                let signal = signal.filter(|_| input.u8().is_multiple_of(2));
                let kind = *input.pick(&[InterruptKind::Msix, InterruptKind::Intx]);
                if let Some(vector) = InterruptVector::new(kind, number) {
                    let _ = still.function().set_interrupt(vector, signal);
                }
            }
            _ => {
                let meanwhile = input.counted();
                self.turn(still, meanwhile);
            }
        }
    }
}

/// After all that, a GPU that is enabled anew executes a command as ever.
fn works_as_before(driver: &mut Driver<'_>, still: &mut Still<'_>) {
    driver.enable(still.function(), QUEUE, ENTRIES);
    driver.slices.set(SLICES);
    // It begins with an empty queue once it has seen that it was enabled.
    driver.turn(still, &[]);
    assert!(still.is_ready());
    poke(still.function(), 0x100, b"123456789");
    let command = abi::Command {
        operation: abi::OP_CHECKSUM.into(),
        source: 0x100.into(),
        length: 9.into(),
        ..abi::Command::default()
    };
    driver.submit(still.function(), &command);
    driver.turn(still, &[]);
    assert_eq!(word(still.function(), QUEUE + abi::QUEUE_DONE), 1);
    let mut bytes = [0; size_of::<abi::Completion>()];
    let at = QUEUE + abi::completions_offset(ENTRIES);
    let read = still.function().read(Region::Bar2, at, &mut bytes);
    read.expect("inside of video memory");
    let completion = abi::Completion::read_from_bytes(&bytes).expect("as long");
    assert_eq!(
        (completion.sequence.get(), completion.status.get()),
        (1, abi::OK)
    );
    // The check value of CRC-32C.
    assert_eq!(completion.result.get(), 0xe306_9283);
}

/// Runs one input.
pub fn run(data: &[u8]) {
    MACHINE.with(|machine| {
        machine.system.clear();
        for page in WRITABLE..SYSTEM_PAGES {
            machine.system.poke(page * PAGE, &PATTERN);
        }
        let mut driver = Driver {
            machine,
            tail: 0,
            mapped: false,
            slices: Cell::new(SLICES),
            raised: Default::default(),
        };
        let taken = with(&machine.source, |still| {
            driver.map(still.function());
            driver.enable(still.function(), QUEUE, ENTRIES);
            driver.turn(still, &[]);
            let mut input = Input::new(data);
            while !input.is_empty() {
                driver.step(still, &mut input);
            }
            driver.turn(still, &[]);
            driver.check(still.function());
            works_as_before(&mut driver, still);
            driver.check(still.function());
        });
        taken.expect("the only user");
    });
}
