//! The device as its user has it.

use crate::GpuSource;
use crate::memory::{VideoMemory, new_file};
use farlane_abi::gpu as abi;
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_pci::{
    AddressRange, Attachment, DmaMapping, DmaTarget, Function, InterruptVector, Region, Signal,
    Source, SourceError,
};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

const MEMORY: u64 = 2 << 20;
const QUEUE: u64 = 0x1000;
const ENTRIES: u32 = 16;
const SYSTEM: u64 = 0x10_0000;

#[derive(Debug, Default)]
struct Raised {
    count: Mutex<u32>,
    changed: Condvar,
}

impl Raised {
    fn wait(&self, count: u32) {
        let mut now = self.count.lock().unwrap();
        while *now < count {
            now = self.changed.wait(now).unwrap();
        }
    }
}

impl Signal for Raised {
    fn raise(&self) {
        *self.count.lock().unwrap() += 1;
        self.changed.notify_all();
    }
}

struct Driver {
    function: Box<dyn Function>,
    memory: VideoMemory,
    tail: u32,
    raised: [Arc<Raised>; 2],
}

impl Driver {
    fn new(source: &GpuSource, attachment: &Attachment) -> Self {
        let function = source.take(attachment).unwrap();
        let raised = [Arc::new(Raised::default()), Arc::new(Raised::default())];
        for (number, raised) in (0..).zip(&raised) {
            let signal: Arc<dyn Signal> = raised.clone();
            function
                .set_interrupt(InterruptVector::Msix(number), Some(signal))
                .unwrap();
        }
        let file = Arc::clone(&attachment.areas[0].file);
        Self {
            function,
            memory: VideoMemory::new(file, MEMORY).unwrap(),
            tail: 0,
            raised,
        }
    }

    fn read(&self, register: u32) -> u32 {
        let mut data = [0; 4];
        self.function
            .read(Region::Bar0, register.into(), &mut data)
            .unwrap();
        u32::from_le_bytes(data)
    }

    fn write(&self, register: u32, value: u32) {
        self.function
            .write(Region::Bar0, register.into(), &value.to_le_bytes())
            .unwrap();
    }

    fn word(&self, at: u64) -> &AtomicU32 {
        self.memory.word(QUEUE + at).unwrap()
    }

    /// Enables it; returns the status that it comes to.
    fn enable(&mut self, entries: u32) -> u32 {
        self.write(abi::REG_QUEUE_LOW, u32::try_from(QUEUE).unwrap());
        self.write(abi::REG_ENTRIES, entries);
        self.write(abi::REG_CONTROL, abi::CONTROL_ENABLE);
        self.tail = 0;
        self.settle(|status| status != 0)
    }

    fn settle(&self, is: impl Fn(u32) -> bool) -> u32 {
        loop {
            let status = self.read(abi::REG_STATUS);
            if is(status) {
                return status;
            }
            std::thread::yield_now();
        }
    }

    fn submit(&mut self, command: &abi::Command) {
        let index = u64::from(self.tail % ENTRIES);
        let at = QUEUE + abi::QUEUE_HEADER_BYTES + index * abi::COMMAND_BYTES;
        let slot = self.memory.span(at, abi::COMMAND_BYTES).unwrap();
        self.memory.write(slot, command.as_bytes());
        self.tail += 1;
        self.word(abi::QUEUE_TAIL)
            .store(self.tail, Ordering::SeqCst);
        if self.word(abi::QUEUE_ASLEEP).load(Ordering::SeqCst) != 0 {
            self.write(abi::REG_DOORBELL, 0);
        }
    }

    fn wait(&self) -> abi::Completion {
        while self.word(abi::QUEUE_DONE).load(Ordering::Acquire) != self.tail {
            std::thread::yield_now();
        }
        let index = u64::from((self.tail - 1) % ENTRIES);
        let at = QUEUE + abi::completions_offset(ENTRIES) + index * abi::COMPLETION_BYTES;
        let mut bytes = [0; 32];
        let slot = self.memory.span(at, abi::COMPLETION_BYTES).unwrap();
        self.memory.read(slot, &mut bytes);
        let completion = abi::Completion::read_from_bytes(&bytes).unwrap();
        assert_eq!(completion.sequence.get(), self.tail);
        completion
    }

    /// Has it do what takes hours, and waits until it has begun.
    fn search_for_hours(&mut self) {
        let table: u64 = 0x8_0000;
        let patterns = abi::MAX_PATTERNS;
        let lengths = [1, 0, 0, 0].repeat(usize::try_from(patterns).unwrap());
        let bytes = u64::try_from(lengths.len()).unwrap() + u64::from(patterns);
        let slot = self.memory.span(table, bytes).unwrap();
        self.memory.write(slot, &lengths);
        for _ in 0..ENTRIES {
            self.submit(&abi::Command {
                operation: abi::OP_SEARCH.into(),
                count: patterns.into(),
                source: 0x10_0000.into(),
                target: 0x9_0000.into(),
                length: 0x10_0000.into(),
                parameter: bytes.into(),
                table: table.into(),
                capacity: 1.into(),
                ..Default::default()
            });
        }
        // The first occurrence of the first search: the byte before is a zero that was found.
        let pattern = self.memory.word(0x9_0000 + 8).unwrap();
        pattern.store(u32::MAX, Ordering::SeqCst);
        while pattern.load(Ordering::SeqCst) == u32::MAX
            && self.word(abi::QUEUE_DONE).load(Ordering::SeqCst) == 0
        {
            std::thread::yield_now();
        }
    }

    fn is_zero(&self) -> bool {
        let mut data = vec![0xff; usize::try_from(MEMORY).unwrap()];
        self.memory
            .read(self.memory.span(0, MEMORY).unwrap(), &mut data);
        data.iter().all(|&byte| byte == 0)
    }
}

fn source() -> (GpuSource, Attachment) {
    let source = GpuSource::new(MEMORY).unwrap();
    let attachment = source.attach().unwrap();
    (source, attachment)
}

fn nop(flags: u16) -> abi::Command {
    abi::Command {
        flags: flags.into(),
        ..Default::default()
    }
}

fn map(function: &dyn Function, file: &Arc<OwnedFd>, bytes: u64) {
    let file = Arc::clone(file);
    let target = DmaTarget::File { file, offset: 0 };
    let mapping = DmaMapping {
        range: AddressRange::new(SYSTEM, bytes),
        writable: true,
        target,
    };
    function.map(mapping).unwrap();
}

#[test]
fn sizes_that_a_bar_cannot_have_are_refused() {
    for bytes in [0, 4096, (1 << 20) + 1, 3 << 20, 1 << 40, u64::MAX] {
        assert!(GpuSource::new(bytes).is_err(), "{bytes}");
    }
    let source = GpuSource::new(1 << 28).unwrap();
    assert!(source.description().is_valid());
    let seen = source.description().with_msi().unwrap();
    assert_eq!((seen.interrupts.msi, seen.interrupts.msix), (2, 0));
}

#[test]
fn one_at_a_time_has_it() {
    let (source, attachment) = source();
    let driver = Driver::new(&source, &attachment);
    assert!(matches!(source.take(&attachment), Err(SourceError::Busy)));
    drop(driver);
    drop(source.take(&attachment).unwrap());
}

#[test]
fn commands_complete_in_order_and_interrupt_if_asked() {
    let (source, attachment) = source();
    let mut driver = Driver::new(&source, &attachment);
    assert_eq!(driver.enable(ENTRIES), abi::STATUS_READY);
    for round in 1..=40 {
        driver.submit(&nop(0));
        driver.submit(&nop(abi::FLAG_INTERRUPT));
        assert_eq!(driver.wait().status.get(), abi::OK);
        driver.raised[0].wait(round);
    }
    driver.submit(&nop(2));
    assert_eq!(driver.wait().status.get(), abi::BAD_COMMAND);
    assert_eq!(*driver.raised[0].count.lock().unwrap(), 40);
    assert_eq!(*driver.raised[1].count.lock().unwrap(), 0);
    let counters = source.counters();
    let value = |name| counters.iter().find(|c| c.name == name).unwrap().value;
    assert_eq!((value("gpu_commands"), value("gpu_errors")), (80, 1));
}

#[test]
fn a_device_that_sleeps_is_woken_by_the_doorbell() {
    let (source, attachment) = source();
    let mut driver = Driver::new(&source, &attachment);
    driver.enable(ENTRIES);
    for _ in 0..5 {
        while driver.word(abi::QUEUE_ASLEEP).load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        driver.submit(&nop(0));
        driver.wait();
    }
}

#[test]
fn queues_that_cannot_be_are_faults_until_it_is_enabled_anew() {
    let (source, attachment) = source();
    let mut driver = Driver::new(&source, &attachment);
    assert_eq!(driver.enable(3), abi::STATUS_FAULT);
    driver.raised[1].wait(1);
    driver.write(abi::REG_CONTROL, 0);
    driver.settle(|status| status == 0);
    assert_eq!(driver.enable(ENTRIES), abi::STATUS_READY);
    driver.word(abi::QUEUE_TAIL).store(17, Ordering::SeqCst);
    driver.write(abi::REG_DOORBELL, 0);
    driver.raised[1].wait(2);
    driver.settle(|status| status == abi::STATUS_FAULT);
    driver.write(abi::REG_CONTROL, 0);
    driver.settle(|status| status == 0);
    assert_eq!(driver.enable(ENTRIES), abi::STATUS_READY);
    driver.submit(&nop(0));
    driver.wait();
}

#[test]
fn disabling_ends_what_is_under_way() {
    let (source, attachment) = source();
    let mut driver = Driver::new(&source, &attachment);
    driver.enable(ENTRIES);
    driver.search_for_hours();
    driver.write(abi::REG_CONTROL, 0);
    driver.settle(|status| status == 0);
    assert_eq!(driver.enable(ENTRIES), abi::STATUS_READY);
    driver.submit(&nop(0));
    assert_eq!(driver.wait().status.get(), abi::OK);
}

#[test]
fn a_reset_ends_what_is_under_way_and_clears_memory() {
    let (source, attachment) = source();
    let mut driver = Driver::new(&source, &attachment);
    driver.enable(ENTRIES);
    driver.search_for_hours();
    driver.function.reset().unwrap();
    assert!(driver.is_zero());
    assert_eq!(driver.read(abi::REG_STATUS), 0);
    assert_eq!(driver.read(abi::REG_CONTROL), 0);
    // Interrupts stay.
    driver.enable(ENTRIES);
    driver.submit(&nop(abi::FLAG_INTERRUPT));
    driver.wait();
    driver.raised[0].wait(1);
}

#[test]
fn who_takes_it_finds_zeroes_whatever_was_written_before() {
    let (source, attachment) = source();
    let all = |memory: &VideoMemory| {
        let all = memory.span(0, MEMORY).unwrap();
        memory.write(all, &vec![7; usize::try_from(MEMORY).unwrap()]);
    };
    let driver = Driver::new(&source, &attachment);
    all(&driver.memory);
    let memory = driver.memory;
    drop(driver.function);
    let mut byte = [9];
    memory.read(memory.span(12345, 1).unwrap(), &mut byte);
    assert_eq!(byte, [0], "Given back, and not cleared");
    // Its holder still has it mapped.
    all(&memory);
    let driver = Driver::new(&source, &attachment);
    assert!(driver.is_zero());
}

#[test]
fn after_the_drop_nothing_is_touched_any_more() {
    let (source, attachment) = source();
    let mut driver = Driver::new(&source, &attachment);
    let file = Arc::new(new_file(0x10_0000).unwrap());
    map(&*driver.function, &file, 0x10_0000);
    driver.enable(ENTRIES);
    for _ in 0..ENTRIES {
        driver.submit(&abi::Command {
            operation: abi::OP_COPY_OUT.into(),
            flags: abi::FLAG_INTERRUPT.into(),
            target: SYSTEM.into(),
            length: 0x10_0000.into(),
            ..Default::default()
        });
    }
    let Driver {
        function, raised, ..
    } = driver;
    drop(function);
    // All that the worker works with has gone, interrupts and mappings among it.
    assert!(raised.iter().all(|raised| Arc::strong_count(raised) == 1));
}

#[test]
fn memory_that_was_taken_away_is_not_reached() {
    let (source, attachment) = source();
    let mut driver = Driver::new(&source, &attachment);
    let file = Arc::new(new_file(0x1000).unwrap());
    let system = VideoMemory::new(Arc::clone(&file), 0x1000).unwrap();
    map(&*driver.function, &file, 0x1000);
    driver.enable(ENTRIES);
    let command = abi::Command {
        operation: abi::OP_COPY_OUT.into(),
        source: 0x8_0000.into(),
        target: (SYSTEM + 1).into(),
        length: 4.into(),
        ..Default::default()
    };
    let source = driver.memory.span(0x8_0000, 4).unwrap();
    let seen = || {
        let mut data = [0; 4];
        system.read(system.span(1, 4).unwrap(), &mut data);
        data
    };
    driver.memory.write(source, &[1, 2, 3, 4]);
    driver.submit(&command);
    assert_eq!(driver.wait().status.get(), abi::OK);
    assert_eq!(seen(), [1, 2, 3, 4]);
    driver
        .function
        .unmap(AddressRange::new(SYSTEM, 0x1000))
        .unwrap();
    driver.memory.write(source, &[5; 4]);
    driver.submit(&command);
    assert_eq!(driver.wait().status.get(), abi::BAD_MEMORY);
    assert_eq!(seen(), [1, 2, 3, 4]);
}

#[test]
fn without_a_mapping_video_memory_is_reached_by_messages() {
    let source = GpuSource::new(MEMORY).unwrap();
    let function = source.take(&Attachment::default()).unwrap();
    let mut data = [0; 9];
    function.write(Region::Bar2, 77, &[3; 9]).unwrap();
    function.read(Region::Bar2, 77, &mut data).unwrap();
    assert_eq!(data, [3; 9]);
    for (region, offset) in [
        (Region::Bar2, MEMORY - 8),
        (Region::Bar2, u64::MAX),
        (Region::Bar0, abi::REGISTER_BYTES - 8),
        (Region::Config, 4090),
        (Region::Bar1, 0),
        (Region::Rom, 0),
    ] {
        assert!(function.read(region, offset, &mut data).is_err());
        assert!(function.write(region, offset, &data).is_err());
    }
    let vendor = &mut [0; 2];
    function.read(Region::Config, 0, vendor).unwrap();
    assert_eq!(u16::from_le_bytes(*vendor), abi::VENDOR);
}

#[test]
fn the_msix_table_is_masked_and_can_be_written() {
    let (source, attachment) = source();
    let driver = Driver::new(&source, &attachment);
    assert_eq!(driver.read(0x200c), 1);
    driver.write(0x2010, 0xfee0_0000);
    assert_eq!(driver.read(0x2010), 0xfee0_0000);
    driver.write(0x2020, 1);
    assert_eq!(driver.read(0x2020), 0);
    driver.write(0x3000, 1);
    assert_eq!(driver.read(0x3000), 0);
}
