//! A process as the tunnel knows it, by hand: the device file, the header, a phony buffer and a
//! BAR.

use crate::memory::Memory;
use anyhow::{Context as _, Result, bail, ensure};
use farlane_abi::arena::OFF_DEAD;
use farlane_abi::config::FEATURE_TUNNEL;
use farlane_abi::control::{FLAG_PHONY, FLAG_WRITABLE};
use farlane_abi::ioctl::{
    Detach, IOC_DETACH, IOC_INFO, IOC_PIN, IOC_PIN_DEVICE, IOC_SEGMENT, Info, Pin, Segment,
};
use farlane_abi::tunnel::{
    DIRECTION_INTO_DEVICE, ENVELOPE_MAGIC, Envelope, OFF_EPOCH, OFF_SLOTS, SECTOR_BYTES,
    SECTORS_PER_PAGE, SLOT_ARMED, SLOT_BYTES, SLOT_KEY, SLOT_LANDED, SLOT_LENGTH, SLOT_OFFSET,
    SLOT_REGION, segment_bytes,
};
use farlane_abi::zerocopy::{FromBytes as _, FromZeros as _, IntoBytes as _};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::Ordering;

/// A page.
pub const PAGE: usize = 4096;
/// Bytes of the phony buffer.
pub const PHONY_BYTES: usize = 64 * PAGE;
const SLOTS: u32 = 256;

/// A target of one page.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// Its slot.
    pub slot: u32,
    /// Its number.
    pub sequence: u64,
    /// The device region.
    pub region: u32,
    /// Offset in the region in bytes.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// `DIRECTION_*`.
    pub direction: u32,
    /// How many epochs ago it was armed.
    pub age: u32,
}

impl Page {
    /// A page of a region that a disk is read into.
    pub fn new(slot: u32, sequence: u64, region: u32, offset: u64) -> Self {
        Self {
            slot,
            sequence,
            region,
            offset,
            length: 4096,
            direction: DIRECTION_INTO_DEVICE,
            age: 0,
        }
    }
}

/// One process.
pub struct Process {
    device: File,
    header: Memory,
    /// Its phony buffer.
    pub phony: Memory,
}

impl Process {
    /// Opens a context of the first device that tunnels.
    pub fn open() -> Result<Self> {
        for number in 0..16 {
            let path = format!("/dev/farlane{number}");
            let Ok(device) = File::options().read(true).write(true).open(path) else {
                continue;
            };
            let mut info = Info::new_zeroed();
            // SAFETY: IOC_INFO writes one `Info`.
            unsafe { ioctl(&device, IOC_INFO, &mut info)? };
            if info.features & FEATURE_TUNNEL != 0 {
                return Self::with(device);
            }
        }
        bail!("No device tunnels")
    }

    fn with(device: File) -> Result<Self> {
        let mut segment = Segment {
            length: segment_bytes(SLOTS),
            ..Segment::default()
        };
        // SAFETY: IOC_SEGMENT reads and writes one `Segment`.
        unsafe { ioctl(&device, IOC_SEGMENT, &mut segment)? };
        let length = usize::try_from(segment.length)?;
        let header = Memory::of(&device, segment.mmap_offset, length)?;
        let phony = Memory::private(PHONY_BYTES)?;
        let process = Self {
            device,
            header,
            phony,
        };
        let address = process.phony.address();
        process.pin(IOC_PIN, address, PHONY_BYTES, FLAG_WRITABLE | FLAG_PHONY)?;
        Ok(process)
    }

    fn pin(&self, number: u64, address: u64, length: usize, flags: u32) -> Result<u32> {
        let mut pin = Pin {
            address,
            length: length as u64,
            flags,
            region: 0,
        };
        // SAFETY: IOC_PIN and IOC_PIN_DEVICE read and write one `Pin`.
        unsafe { ioctl(&self.device, number, &mut pin)? };
        Ok(pin.region)
    }

    /// Registers device memory.
    pub fn register(&self, bar: &Memory, length: usize) -> Result<u32> {
        self.pin(IOC_PIN_DEVICE, bar.address(), length, FLAG_WRITABLE)
    }

    /// Registers any memory as device memory.
    pub fn register_anything(&self, address: u64, length: usize) -> Result<u32> {
        self.pin(IOC_PIN_DEVICE, address, length, FLAG_WRITABLE)
    }

    /// Takes device memory away.
    pub fn unregister(&self, region: u32) -> Result<()> {
        let mut argument = Detach {
            region,
            reserved: 0,
        };
        // SAFETY: IOC_DETACH reads one `Detach`.
        unsafe { ioctl(&self.device, IOC_DETACH, &mut argument) }
    }

    fn slot(slot: u32, field: usize) -> Result<usize> {
        Ok(OFF_SLOTS + usize::try_from(slot)? * SLOT_BYTES + field)
    }

    /// Describes a page in its slot.
    pub fn arm(&self, page: Page) -> Result<()> {
        let halves = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let word = |field, value| {
            let word = self.header.word(Self::slot(page.slot, field)?)?;
            word.store(value, Ordering::Release);
            anyhow::Ok(())
        };
        let clock = self.header.word(OFF_EPOCH)?.load(Ordering::Acquire);
        let epoch = u32::try_from(clock & 0xffff_ffff)?.wrapping_sub(page.age);
        word(SLOT_REGION, halves(page.region, page.direction))?;
        word(SLOT_OFFSET, page.offset)?;
        word(SLOT_LENGTH, halves(page.length, epoch))?;
        word(SLOT_ARMED, page.sequence)
    }

    /// The envelope of a page's first sector.
    pub fn envelope(&self, page: Page) -> Result<Envelope> {
        let word = |at| anyhow::Ok(self.header.word(at)?.load(Ordering::Acquire));
        let key = Self::slot(page.slot, SLOT_KEY)?;
        Ok(Envelope {
            magic: ENVELOPE_MAGIC.into(),
            key: [word(key)?.into(), word(key + 8)?.into()],
            sequence: page.sequence.into(),
            slot: page.slot.into(),
            sector: 0.into(),
        })
    }

    /// Puts an envelope into all sectors of phony page `at`.
    pub fn fill(&self, at: usize, envelope: Envelope) -> Result<()> {
        for (sector, offset) in (0..SECTORS_PER_PAGE).zip((at * PAGE..).step_by(SECTOR_BYTES)) {
            let envelope = Envelope {
                sector: u32::try_from(sector)?.into(),
                ..envelope
            };
            self.phony.write(offset, envelope.as_bytes())?;
        }
        Ok(())
    }

    /// Prepares phony page `at` as an honest process does.
    pub fn prepare(&self, at: usize, page: Page) -> Result<()> {
        self.arm(page)?;
        self.fill(at, self.envelope(page)?)
    }

    /// Whether the device is gone, as its driver says.
    pub fn is_dead(&self) -> Result<bool> {
        let word = self.header.word(OFF_DEAD)?.load(Ordering::Acquire);
        Ok(word & 0xffff_ffff != 0)
    }

    /// Which sectors have moved.
    pub fn landed(&self, page: Page) -> Result<u8> {
        let word = self.header.word(Self::slot(page.slot, SLOT_LANDED)?)?;
        let word = word.load(Ordering::Acquire);
        match word >> 16 == page.sequence {
            true => Ok(u8::try_from(word & 0xff)?),
            false => Ok(0),
        }
    }
}

/// An envelope as text, for another process.
pub fn print(envelope: Envelope) -> String {
    let bytes = envelope.as_bytes().iter();
    bytes.map(|byte| format!("{byte:02x}")).collect()
}

/// What [`print()`] has printed.
pub fn parse(text: &str) -> Result<Envelope> {
    ensure!(
        text.is_ascii() && text.len() == 2 * size_of::<Envelope>(),
        "{text:?} is no envelope"
    );
    let bytes = (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16));
    let bytes: Vec<u8> = bytes.collect::<Result<_, _>>()?;
    Envelope::read_from_bytes(&bytes)
        .ok()
        .context("An envelope of another length")
}

/// # Safety
/// `argument` is what ioctl `number` reads and writes.
unsafe fn ioctl<T>(device: &File, number: u64, argument: &mut T) -> Result<()> {
    let argument: *mut T = argument;
    // SAFETY: the file is open; `argument` is right for `number`, says the caller.
    match unsafe { libc::ioctl(device.as_raw_fd(), number, argument) } {
        0.. => Ok(()),
        _ => Err(std::io::Error::last_os_error())
            .with_context(|| format!("ioctl {} fails", number & 0xff)),
    }
}
