//! A VM whose processes have tokens.

use farlane_abi::PAGE_BYTES;
use farlane_abi::ids::{ContextId, RegionId};
use farlane_abi::tunnel::{
    DIRECTION_INTO_DEVICE, Disk, ENVELOPE_MAGIC, Envelope, OFF_EPOCH, OFF_SLOTS, SLOT_ARMED,
    SLOT_BYTES, SLOT_KEY, SLOT_LANDED, SLOT_LENGTH, SLOT_OFFSET, SLOT_REGION, segment_bytes,
};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_zero_copy::tokens::{Direction, Opened, TokenError, Tokens};
use farlane_zero_copy::{AddressSpace, Mapping, SharedMemory};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub const SLOTS: u32 = 512;
pub const RAM_BYTES: u64 = 64 * PAGE_BYTES;
/// Guest-physical address of device memory, in two runs with a hole between them.
pub const DEVICE: u64 = 0x10_0000_0000;
pub const DEVICE_PAGES: u64 = 16;
/// Where the phony buffer lies, and how long it is.
pub const PHONY: u64 = 8 * PAGE_BYTES;
pub const PHONY_PAGES: u64 = 16;
pub const PIN: u32 = 7;
pub const REGION: u32 = 9;

pub fn context(number: u32) -> ContextId {
    ContextId::new(number).unwrap()
}

pub fn region(number: u32) -> RegionId {
    RegionId::new(number).unwrap()
}

pub fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

/// A VM with two processes, 0 and 1; 0 has a phony buffer and all device memory.
pub struct Vm {
    pub ram: Arc<AddressSpace>,
    pub device: Arc<AddressSpace>,
    pub tokens: Arc<Tokens>,
    pub processes: [SharedMemory; 2],
}

/// What a process puts into one page.
#[derive(Clone, Copy)]
pub struct Page {
    pub slot: u32,
    pub sequence: u64,
    /// In device memory.
    pub offset: u64,
    pub length: u32,
    pub direction: u32,
}

impl Page {
    pub fn new(slot: u32, offset: u64) -> Self {
        Self {
            slot,
            sequence: 1,
            offset,
            length: 4096,
            direction: DIRECTION_INTO_DEVICE,
        }
    }
}

pub fn slot_at(slot: u32, field: usize) -> usize {
    OFF_SLOTS + usize::try_from(slot).unwrap() * SLOT_BYTES + field
}

impl Vm {
    pub fn new() -> Self {
        let ram = AddressSpace::new();
        ram.map(0, RAM_BYTES, memory(RAM_BYTES).as_fd(), 0, true)
            .unwrap();
        let device = AddressSpace::new();
        let fd = memory(DEVICE_PAGES * PAGE_BYTES);
        let half = DEVICE_PAGES / 2 * PAGE_BYTES;
        device.map(DEVICE, half, fd.as_fd(), 0, true).unwrap();
        device
            .map(DEVICE + 2 * half, half, fd.as_fd(), half, true)
            .unwrap();
        let mut disk = Disk::default();
        disk.serial[..2].copy_from_slice(b"d0");
        let tokens = Tokens::new(Arc::clone(&device), vec![disk]);
        let processes = [0, 1].map(|id| {
            tokens.open_context(context(id)).unwrap();
            let bytes = segment_bytes(SLOTS);
            let header = memory(bytes);
            let map = || SharedMemory::new(Mapping::new(header.as_fd(), 0, bytes, true).unwrap());
            tokens.set_header(context(id), map()).unwrap();
            map()
        });
        tokens
            .add_phony(
                context(0),
                region(PIN),
                &[(PHONY, PHONY_PAGES * PAGE_BYTES)],
            )
            .unwrap();
        let runs = [(DEVICE, half), (DEVICE + 2 * half, half)];
        tokens
            .add_device(context(0), region(REGION), &runs, true)
            .unwrap();
        Self {
            ram,
            device,
            tokens,
            processes,
        }
    }

    /// Arms a slot of process 0.
    pub fn arm(&self, page: Page) {
        let header = &self.processes[0];
        let word = |field, value: u64| header.write(slot_at(page.slot, field), &value).unwrap();
        let epoch = header.word(OFF_EPOCH).unwrap().load(Ordering::Acquire);
        word(
            SLOT_REGION,
            u64::from(REGION) | u64::from(page.direction) << 32,
        );
        word(SLOT_OFFSET, page.offset);
        word(SLOT_LENGTH, u64::from(page.length) | u64::from(epoch) << 32);
        word(SLOT_ARMED, page.sequence);
    }

    pub fn envelope(&self, process: usize, page: Page, sector: u32) -> Envelope {
        let key: [u64; 2] = self.processes[process]
            .read(slot_at(page.slot, SLOT_KEY))
            .unwrap();
        Envelope {
            magic: ENVELOPE_MAGIC.into(),
            key: key.map(Into::into),
            sequence: page.sequence.into(),
            slot: page.slot.into(),
            sector: sector.into(),
        }
    }

    /// Puts the envelopes of process `process` into a phony page.
    pub fn fill(&self, process: usize, at: u64, page: Page) {
        for sector in 0..8 {
            let envelope = self.envelope(process, page, sector);
            let at = PHONY + at * PAGE_BYTES + u64::from(sector) * 512;
            self.ram.view().write(at, envelope.as_bytes()).unwrap();
        }
    }

    pub fn prepare(&self, at: u64, page: Page) {
        self.arm(page);
        self.fill(0, at, page);
    }

    pub fn open_with(
        &self,
        direction: Direction,
        segments: &[(u64, u64)],
    ) -> Result<Option<Opened>, TokenError> {
        self.tokens.open(&self.ram.view(), direction, segments)
    }

    pub fn open(&self, segments: &[(u64, u64)]) -> Result<Opened, TokenError> {
        self.open_with(Direction::IntoDevice, segments)
            .map(Option::unwrap)
    }

    pub fn landed(&self, slot: u32) -> u64 {
        self.processes[0].read(slot_at(slot, SLOT_LANDED)).unwrap()
    }

    /// Bytes of device memory as the process counts them.
    pub fn device_bytes(&self, offset: u64, length: usize) -> Vec<u8> {
        let half = DEVICE_PAGES / 2 * PAGE_BYTES;
        (offset..)
            .take(length)
            .map(|at| {
                let mut byte = [0];
                let address = if at < half {
                    DEVICE + at
                } else {
                    DEVICE + half + at
                };
                self.device.view().read(address, &mut byte).unwrap();
                byte[0]
            })
            .collect()
    }
}

/// Plays the disk: its bytes go where the request says.
pub fn read_disk(opened: Opened, bytes: &[u8]) {
    let mut rest = bytes;
    for &(base, length) in opened.runs() {
        let (part, after) = rest.split_at(length);
        // SAFETY: `opened` keeps `length` bytes at `base` mapped; nobody else looks at them now.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), base, length) };
        rest = after;
    }
    assert!(rest.is_empty());
    opened.landed();
}
