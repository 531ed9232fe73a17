//! A guest that writes whatever it likes into the queue of a disk and the memory around it, and a
//! VMM that does the same to the memory that tracks requests.

use crate::{Input, PAGE, Ram, format_all_logs};
use farlane_blk::per_node::steering::{MAX_PARTS, cut, single_node};
use farlane_blk::request::{HEADER_BYTES, Limits, Request, parse, parse_ranges};
use farlane_vhost_user::chain::{Chain, MAX_SEGMENTS};
use farlane_vhost_user::inflight::{Inflight, make, region_bytes};
use farlane_vhost_user::segment::{Segment, take_front, take_last_byte, total};
use farlane_vhost_user::vring::{Layout, Progress, Rings};
use farlane_zero_copy::AddressSpace;
use farlane_zero_copy::placement::{Given, NodeMap, Placement};
use farlane_zero_copy::topology::{Node, Topology};
use std::cell::RefCell;
use std::os::fd::AsFd as _;
use std::sync::Arc;

const PAGES: u64 = 16;
const SIZE: u16 = 16;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = PAGE;
const USED: u64 = 2 * PAGE;
/// Sectors of the disk.
const DISK: u64 = 1000;

struct Machine {
    ram: Ram,
    space: Arc<AddressSpace>,
    /// Every other page is on another node.
    nodes: Arc<NodeMap>,
}

impl Machine {
    fn new() -> Self {
        format_all_logs();
        let ram = Ram::new(PAGES);
        let space = AddressSpace::new();
        space
            .map(0, PAGES * PAGE, ram.file().as_fd(), 0, true)
            .expect("room");
        let given = (0..PAGES).map(|page| Given {
            start: page * PAGE,
            length: PAGE,
            node: Node(u32::from(page % 2 == 1)),
        });
        let placement = Placement::new(Arc::clone(&space), Topology::default(), given.collect());
        Self {
            ram,
            space,
            nodes: placement.map(),
        }
    }

    /// A descriptor that is not altogether improbable.
    fn descriptor(&self, input: &mut Input<'_>) {
        let index = u64::from(input.u8() % 64);
        let table = u64::from(input.u8() % 4) * PAGE;
        let mut bytes: [u8; 16] = input.array();
        if input.u8() & 1 == 0 {
            // In or near memory, short, with few flags, followed by one of the first.
            bytes[3..8].fill(0);
            bytes[2] &= 1;
            bytes[10..12].fill(0);
            bytes[12] &= 7;
            bytes[13] = 0;
            bytes[14] %= 64;
            bytes[15] = 0;
        }
        self.ram.poke(table + index * 16, &bytes);
    }

    /// Takes and judges all that is available.
    fn serve(&self, progress: &mut Progress, limits: Limits) {
        let layout = Layout {
            size: SIZE,
            descriptors: DESCRIPTORS,
            available: AVAILABLE,
            used: USED,
        };
        let rings = Rings::map(self.space.view(), &layout).expect("a queue");
        let mut chain = Chain::default();
        for _ in 0..SIZE {
            let Ok(Some(head)) = progress.take(&rings) else {
                break;
            };
            assert!(head < SIZE);
            let followed = chain.follow(&rings, head).is_ok();
            let Chain { readable, writable } = &mut chain;
            assert!(readable.len() + writable.len() <= MAX_SEGMENTS + usize::from(SIZE));
            assert!(readable.iter().chain(writable.iter()).all(|s| s.bytes > 0));
            if followed && take_last_byte(writable).is_some() {
                self.judge(readable, total(writable), limits);
            }
            progress.put(&rings, head, 1);
        }
        progress.publish(&rings);
        let _ = progress.must_tell(&rings);
        progress.ask_to_be_told(&rings);
        let _ = progress.has_more(&rings);
        progress.will_look(&rings);
    }

    fn judge(&self, readable: &mut Vec<Segment>, writable: u64, limits: Limits) {
        let view = self.space.view();
        let mut header = Vec::new();
        let mut read = |part: Segment| {
            let mut bytes = vec![0; usize::try_from(part.bytes).expect("a part of a header")];
            let _ = view.read(part.address, &mut bytes);
            header.extend(bytes);
        };
        if !take_front(readable, HEADER_BYTES as u64, &mut read) {
            return;
        }
        let header = header.try_into().expect("a header");
        let inside = |offset: u64, bytes: u64| {
            assert!(offset.is_multiple_of(512) && bytes.is_multiple_of(512));
            assert!(offset + bytes <= limits.sectors * 512);
        };
        match parse(&header, total(readable), writable, limits) {
            Ok(Request::Read(extent)) => {
                assert_eq!(u64::from(extent.bytes), writable);
                inside(extent.offset, extent.bytes.into());
            }
            Ok(Request::Write(extent)) => {
                assert_eq!(extent.bytes, total(readable));
                inside(extent.offset, extent.bytes);
                self.steer(readable);
            }
            Ok(request @ (Request::Discard | Request::WriteZeroes)) => {
                let mut bytes = vec![0; usize::try_from(total(readable)).expect("few ranges")];
                if let Some(first) = readable.first() {
                    let length = usize::try_from(first.bytes).expect("few ranges");
                    let _ = view.read(first.address, &mut bytes[..length]);
                }
                for range in parse_ranges(request, &bytes, limits).unwrap_or_default() {
                    inside(range.extent.offset, range.extent.bytes);
                }
            }
            Ok(Request::Flush | Request::GetId) | Err(_) => {}
        }
    }
}

impl Machine {
    /// Finds the nodes of a request's data.
    fn steer(&self, segments: &[Segment]) {
        let single = single_node(&self.nodes, segments);
        for (align, least) in [(512, 512), (4096, 65536)] {
            let parts = cut(&self.nodes, segments, align, least);
            let bytes = parts.iter().map(|part| part.bytes).sum::<u64>();
            assert_eq!(bytes, total(segments));
            assert!(parts.len() <= MAX_PARTS && (single.is_none() || parts.len() == 1));
            let mut at = 0;
            for part in &parts {
                assert!(at % align == 0);
                at += part.bytes;
            }
        }
    }
}

/// What a predecessor is said to have left.
fn recover(input: &mut Input<'_>) {
    let file = make(1, SIZE).expect("a memfd");
    let bytes = input.bytes(16 + 16 * usize::from(SIZE));
    rustix::io::pwrite(&file, bytes, 0).expect("room in a memfd");
    let length = region_bytes(1, SIZE);
    let map = Inflight::map(file.as_fd(), 0, length, 1, SIZE).expect("a region");
    let mut queue = map.queue(0, SIZE).expect("a queue");
    let heads = queue.recover(input.u16());
    assert!(heads.len() <= usize::from(SIZE));
    let mut once = heads.clone();
    once.sort_unstable();
    once.dedup();
    assert!(once.len() == heads.len() && once.iter().all(|&head| head < SIZE));
    for &head in &heads {
        queue.begin(head);
        queue.prepare(head);
    }
    queue.end(&heads, 7);
    assert!(queue.recover(7).is_empty());
}

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

/// Runs one input.
pub fn run(data: &[u8]) {
    MACHINE.with_borrow_mut(|machine| {
        let machine = machine.get_or_insert_with(Machine::new);
        machine.ram.clear();
        let mut input = Input::new(data);
        let limits = Limits {
            sectors: DISK,
            read_only: input.u8() & 3 == 0,
        };
        let mut progress = Progress::new(input.u8() & 1 == 0, 0, 0);
        let mut available = 0_u16;
        while !input.is_empty() {
            match input.u8() % 8 {
                0..=2 => machine.descriptor(&mut input),
                3 => {
                    let at = u64::from(input.u16());
                    machine.ram.poke(at, input.counted());
                }
                4 => {
                    // A header that may be followed.
                    let kind = *input.pick(&[0, 1, 4, 8, 11, 13, 14]);
                    let at = u64::from(input.u16());
                    machine.ram.poke(at, &[kind, 0, 0, 0, 0, 0, 0, 0]);
                    machine
                        .ram
                        .poke(at + 8, &u64::from(input.u16() % 1024).to_le_bytes());
                }
                5 => {
                    let slot = u64::from(available % SIZE);
                    machine
                        .ram
                        .poke(AVAILABLE + 4 + slot * 2, &[input.u8() % 20, 0]);
                    available = available.wrapping_add(1);
                    machine.ram.poke(AVAILABLE + 2, &available.to_le_bytes());
                }
                6 => machine.serve(&mut progress, limits),
                _ => recover(&mut input),
            }
        }
        machine.serve(&mut progress, limits);
    });
}
