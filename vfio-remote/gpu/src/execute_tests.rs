//! The engines against a model.

use crate::command::{Command, Request};
use crate::counters::Counters;
use crate::execute::{Engine, SLICE_BYTES, Stop};
use crate::memory::{VideoMemory, new_file};
use crate::queue::Results;
use farlane_abi::gpu as abi;
use farlane_pci::{AddressRange, DmaMapping, DmaSpace, DmaTarget, RemoteMemory};
use proptest::prelude::*;
use std::cell::Cell;
use std::sync::{Arc, Mutex};

const MEMORY: usize = 2 << 20;
/// System memory: a mapped range, and after it one that is reached by messages.
const SYSTEM: u64 = 0x10_0000;
const MAPPED: usize = 0x8_0000;
const REMOTE: usize = 0x4_0000;

fn bytes(length: usize) -> u64 {
    u64::try_from(length).unwrap()
}

#[derive(Debug)]
struct Messages(Mutex<Vec<u8>>);

impl Messages {
    fn at(address: u64) -> usize {
        usize::try_from(address - SYSTEM).unwrap() - MAPPED
    }
}

impl RemoteMemory for Messages {
    fn read(&self, address: u64, data: &mut [u8]) -> std::io::Result<()> {
        let at = Self::at(address);
        data.copy_from_slice(&self.0.lock().unwrap()[at..at + data.len()]);
        Ok(())
    }

    fn write(&self, address: u64, data: &[u8]) -> std::io::Result<()> {
        let at = Self::at(address);
        self.0.lock().unwrap()[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }
}

struct Bench {
    memory: VideoMemory,
    dma: Arc<DmaSpace>,
    counters: Counters,
}

impl Bench {
    /// Both memories with contents.
    fn new() -> (Self, Vec<u8>, Vec<u8>) {
        let file = Arc::new(new_file(bytes(MEMORY)).unwrap());
        let memory = VideoMemory::new(file, bytes(MEMORY)).unwrap();
        let dma = DmaSpace::new();
        let map = |address, length, target| {
            let length = bytes(length);
            let writable = true;
            dma.map(&DmaMapping {
                range: AddressRange::new(address, length),
                writable,
                target,
            })
            .unwrap();
        };
        let file = Arc::new(new_file(bytes(MAPPED)).unwrap());
        map(SYSTEM, MAPPED, DmaTarget::File { file, offset: 0 });
        let remote = Arc::new(Messages(Mutex::new(vec![0; REMOTE])));
        map(SYSTEM + bytes(MAPPED), REMOTE, DmaTarget::Remote(remote));
        let byte = |i: usize| (i.wrapping_mul(0x9e37_79b9) >> 8).to_le_bytes()[0];
        let video: Vec<u8> = (0..MEMORY).map(byte).collect();
        let system: Vec<u8> = (0..MAPPED + REMOTE).map(|i| byte(i) ^ 0x55).collect();
        memory.write(memory.span(0, bytes(MEMORY)).unwrap(), &video);
        dma.write(SYSTEM, &system).unwrap();
        let counters = Counters::default();
        let bench = Self {
            memory,
            dma,
            counters,
        };
        (bench, video, system)
    }

    fn execute(&self, raw: &abi::Command, go_on: &dyn Fn() -> bool) -> Result<Results, Stop> {
        let command = Request::parse(raw, bytes(MEMORY)).command?;
        let mut engine = Engine {
            memory: &self.memory,
            dma: &self.dma,
            counters: &self.counters,
            go_on,
            scratch: Vec::new(),
            patterns: None,
        };
        engine.execute(&command)
    }

    fn video(&self) -> Vec<u8> {
        let mut data = vec![0; MEMORY];
        let all = self.memory.span(0, bytes(MEMORY)).unwrap();
        self.memory.read(all, &mut data);
        data
    }

    fn system(&self) -> Vec<u8> {
        let mut data = vec![0; MAPPED + REMOTE];
        self.dma.read(SYSTEM, &mut data).unwrap();
        data
    }
}

fn copy(operation: u16, source: u64, target: u64, length: usize) -> abi::Command {
    abi::Command {
        operation: operation.into(),
        source: source.into(),
        target: target.into(),
        length: bytes(length).into(),
        ..Default::default()
    }
}

/// A length, small or longer than a slice, and two offsets at which it fits.
fn ranges(first: usize, second: usize) -> impl Strategy<Value = (usize, usize, usize)> {
    let longest = first.min(second);
    let length = prop_oneof![0_usize..5000, 0..longest, Just(2 * SLICE_BYTES)];
    let length = length.prop_map(move |length| length.min(longest));
    length.prop_flat_map(move |length| (0..=first - length, 0..=second - length, Just(length)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn video_memory_is_copied_as_by_memmove((from, to, length) in ranges(MEMORY, MEMORY)) {
        let (bench, mut video, system) = Bench::new();
        let command = copy(abi::OP_COPY, bytes(from), bytes(to), length);
        prop_assert!(bench.execute(&command, &|| true).is_ok());
        video.copy_within(from..from + length, to);
        prop_assert!(bench.video() == video);
        prop_assert!(bench.system() == system);
    }

    #[test]
    fn system_memory_is_copied_in((from, to, length) in ranges(MAPPED + REMOTE, MEMORY)) {
        let (bench, mut video, system) = Bench::new();
        let command = copy(abi::OP_COPY_IN, SYSTEM + bytes(from), bytes(to), length);
        prop_assert!(bench.execute(&command, &|| true).is_ok());
        video[to..to + length].copy_from_slice(&system[from..from + length]);
        prop_assert!(bench.video() == video);
        prop_assert!(bench.system() == system);
    }

    #[test]
    fn system_memory_is_copied_out((from, to, length) in ranges(MEMORY, MAPPED + REMOTE)) {
        let (bench, video, mut system) = Bench::new();
        let command = copy(abi::OP_COPY_OUT, bytes(from), SYSTEM + bytes(to), length);
        prop_assert!(bench.execute(&command, &|| true).is_ok());
        system[to..to + length].copy_from_slice(&video[from..from + length]);
        prop_assert!(bench.video() == video);
        prop_assert!(bench.system() == system);
    }

    #[test]
    fn no_command_reaches_beyond_memory(
        operation in 0_u16..7, fields: [u64; 5], count: u32, capacity: u32,
        shift in prop::array::uniform5(0_u32..64),
    ) {
        // Numbers of every size; a fault would end the test.
        let field = |i: usize| fields[i] >> shift[i];
        let raw = abi::Command {
            operation: operation.into(),
            source: field(0).into(),
            target: field(1).into(),
            length: field(2).into(),
            parameter: field(3).into(),
            table: field(4).into(),
            count: (count >> (shift[0] % 32)).into(),
            capacity: (capacity >> (shift[1] % 32)).into(),
            ..Default::default()
        };
        let (bench, ..) = Bench::new();
        let turns = Cell::new(0);
        let _ = bench.execute(&raw, &|| {
            turns.set(turns.get() + 1);
            turns.get() < 1000
        });
    }
}

#[test]
fn memory_that_is_not_reached_is_an_error() {
    let (bench, ..) = Bench::new();
    let end = SYSTEM + bytes(MAPPED + REMOTE);
    for (operation, source, target) in [
        (abi::OP_COPY_IN, end - 10, 0),
        (abi::OP_COPY_OUT, 0, end - 10),
        (abi::OP_COPY_IN, u64::MAX - 5, 0),
        (abi::OP_COPY_OUT, 0, 0),
    ] {
        let result = bench.execute(&copy(operation, source, target, 11), &|| true);
        let Err(Stop::Failed(error)) = result else {
            panic!("{result:?}");
        };
        assert_eq!(error.status(), abi::BAD_MEMORY);
    }
}

/// The longest search that there can be: each byte ends as many occurrences as there are patterns.
fn longest_search(bench: &Bench) -> abi::Command {
    let all = bench.memory.span(0, bytes(MEMORY)).unwrap();
    bench.memory.write(all, &vec![0; MEMORY]);
    let patterns = abi::MAX_PATTERNS;
    let mut table = Vec::new();
    for _ in 0..patterns {
        table.extend(1_u32.to_le_bytes());
    }
    table.resize(table.len() + 1024, 0);
    bench.memory.write(all, &table);
    abi::Command {
        operation: abi::OP_SEARCH.into(),
        count: patterns.into(),
        source: bytes(table.len()).into(),
        length: bytes(MEMORY - table.len()).into(),
        parameter: bytes(table.len()).into(),
        ..Default::default()
    }
}

#[test]
fn the_longest_commands_end_when_they_are_told_to() {
    let (bench, ..) = Bench::new();
    let search = longest_search(&bench);
    let rows = abi::Command {
        operation: abi::OP_GATHER.into(),
        count: (1 << 20).into(),
        target: (1 << 20).into(),
        length: 1.into(),
        parameter: 1.into(),
        ..Default::default()
    };
    for raw in [
        search,
        rows,
        copy(abi::OP_COPY, 0, 5, MEMORY - 5),
        copy(abi::OP_CHECKSUM, 0, 0, MEMORY),
    ] {
        let command = Request::parse(&raw, bytes(MEMORY)).command;
        assert!(!matches!(command, Err(_) | Ok(Command::Nop)), "{command:?}");
        let turns = Cell::new(0);
        let few = || {
            turns.set(turns.get() + 1);
            turns.get() < 4
        };
        assert_eq!(bench.execute(&raw, &few), Err(Stop::Ended), "{command:?}");
        assert_eq!(turns.get(), 4);
    }
}

#[test]
fn a_byte_can_end_as_many_occurrences_as_there_are_patterns() {
    let (bench, ..) = Bench::new();
    let mut search = longest_search(&bench);
    search.length = 3.into();
    let results = bench.execute(&search, &|| true).unwrap();
    assert_eq!(results.result, 3 * u64::from(abi::MAX_PATTERNS));
    assert_eq!(results.written, 0);
}

#[test]
fn patterns_that_are_none_are_refused() {
    let (bench, ..) = Bench::new();
    let tables: [(u32, &[u8]); 5] = [
        (1, &[0, 0, 0, 0]),
        (1, &[2, 0, 0, 0, 1]),
        (1, &[1, 0, 0, 0, 1, 2]),
        (1, &[1, 1, 0, 0, 1]),
        (2, &[1, 0, 0, 0, 1]),
    ];
    for (count, table) in tables {
        let all = bench.memory.span(0, bytes(MEMORY)).unwrap();
        bench.memory.write(all, table);
        let raw = abi::Command {
            operation: abi::OP_SEARCH.into(),
            count: count.into(),
            length: 100.into(),
            parameter: bytes(table.len()).into(),
            ..Default::default()
        };
        let result = bench.execute(&raw, &|| true);
        let Err(Stop::Failed(error)) = result else {
            panic!("{table:?}: {result:?}");
        };
        assert_eq!(error.status(), abi::BAD_PATTERNS);
    }
}

#[test]
fn checksums_are_crc32c() {
    let (bench, ..) = Bench::new();
    // RFC 3720, B.4: 32 bytes of zeroes.
    let all = bench.memory.span(0, bytes(MEMORY)).unwrap();
    bench.memory.write(all, &[0; 32]);
    let command = copy(abi::OP_CHECKSUM, 0, 0, 32);
    let results = bench.execute(&command, &|| true).unwrap();
    assert_eq!(results.result, 0x8a91_36aa);
}

#[test]
fn patterns_that_have_changed_are_looked_for_anew() {
    let (bench, ..) = Bench::new();
    let mut engine = Engine {
        memory: &bench.memory,
        dma: &bench.dma,
        counters: &bench.counters,
        go_on: &|| true,
        scratch: Vec::new(),
        patterns: None,
    };
    let all = bench.memory.span(0, bytes(MEMORY)).unwrap();
    let raw = |count: u32, table: u64| abi::Command {
        operation: abi::OP_SEARCH.into(),
        count: count.into(),
        source: 100.into(),
        length: 6.into(),
        parameter: table.into(),
        ..Default::default()
    };
    let mut search = |table: &[u8], count| {
        bench.memory.write(all, table);
        bench.memory.write(all.part(100, 6), b"\x01\x02a\x01\x02b");
        let raw = raw(count, bytes(table.len()));
        let command = Request::parse(&raw, bytes(MEMORY)).command.unwrap();
        engine.execute(&command).unwrap().result
    };
    assert_eq!(search(b"\x01\0\0\0a", 1), 1);
    assert_eq!(search(b"\x01\0\0\0a", 1), 1);
    assert_eq!(search(b"\x01\0\0\0\x01", 1), 2);
    // The same bytes as one pattern, and as two.
    assert_eq!(search(b"\x05\0\0\0\x01\0\0\0\x02", 1), 0);
    assert_eq!(search(b"\x01\0\0\0\x01\0\0\0\x01\x02", 2), 4);
}
