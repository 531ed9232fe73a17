//! Configuration space of functions that are modelled in software.

use crate::capabilities::{EXPRESS, MSI, MSI_CAPABLE_SHIFT, MSI_MASKING, MSI_WIDE, MSIX, POWER};
use crate::description::{BAR_COUNT, REGION_COUNT};
use crate::registers::{
    BarType, CAPABILITIES, DEVICE, EXTENDED_BYTES, HEADER_BYTES, INTERRUPT_PIN, REVISION, STATUS,
    STATUS_CAPABILITIES, SUBSYSTEM, VENDOR, bar,
};
use crate::{Description, Interrupts, Region, RegionDescription};

/// Where the first capability stands: after the header.
const FIRST_CAPABILITY: u8 = 0x40;
const _: () = assert!(FIRST_CAPABILITY as usize == HEADER_BYTES);

/// Class, subclass and programming interface (PCI Code and ID Assignment).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassCode {
    /// Base class.
    pub base: u8,
    /// Subclass.
    pub sub: u8,
    /// Programming interface.
    pub interface: u8,
}

impl ClassCode {
    /// Mass storage, non-volatile memory, NVM Express.
    pub const NVME: Self = Self::new(0x01, 0x08, 0x02);

    /// That of these numbers.
    #[must_use]
    pub const fn new(base: u8, sub: u8, interface: u8) -> Self {
        Self {
            base,
            sub,
            interface,
        }
    }
}

/// Makes the [`Description`] of a PCI Express endpoint.
#[derive(Clone, Debug)]
pub struct Template {
    config: Vec<u8>,
    regions: Vec<RegionDescription>,
    interrupts: Interrupts,
    /// Where the pointer to the next capability is to stand.
    last_pointer: usize,
    /// Where the next capability is to stand: pointers have one byte (PCI 3.0, 6.7).
    next_capability: u8,
}

impl Template {
    /// A function without BARs; the PCI Express capability is there already.
    #[must_use]
    pub fn new(vendor: u16, device: u16, revision: u8, class: ClassCode) -> Self {
        let mut template = Self {
            config: vec![0; EXTENDED_BYTES],
            regions: vec![RegionDescription::default(); REGION_COUNT],
            interrupts: Interrupts::default(),
            last_pointer: CAPABILITIES,
            next_capability: FIRST_CAPABILITY,
        };
        template.put(VENDOR, &vendor.to_le_bytes());
        template.put(DEVICE, &device.to_le_bytes());
        template.put(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        let codes = [revision, class.interface, class.sub, class.base];
        template.put(REVISION, &codes);
        template.put(SUBSYSTEM, &vendor.to_le_bytes());
        template.put(SUBSYSTEM + 2, &device.to_le_bytes());
        template.regions[Region::Config.index()] = RegionDescription {
            size: 4096,
            readable: true,
            writable: true,
        };
        template.power_management();
        template.express();
        template
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.config[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Appends a capability: its identity, then `body`. There is no room for more than the
    /// standard ones, each once.
    fn capability<const BYTES: usize>(&mut self, id: u8, body: &[u8; BYTES]) {
        let bytes = const {
            let bytes = (2 + BYTES).next_multiple_of(4);
            assert!(bytes < 0x100);
            bytes.to_le_bytes()[0]
        };
        let pointer = self.next_capability;
        let at = usize::from(pointer);
        self.put(self.last_pointer, &[pointer]);
        self.put(at, &[id, 0]);
        self.put(at + 2, body);
        self.last_pointer = at + 1;
        self.next_capability += bytes;
    }

    /// Power management 1.2, version 3: D0 and D3hot, no reset between them.
    fn power_management(&mut self) {
        self.capability(POWER, &[0x03, 0x00, 0x08, 0x00, 0x00, 0x00]);
    }

    /// PCI Express capability, version 2, endpoint, with function-level reset
    /// (PCI Express 3.0, 7.8).
    fn express(&mut self) {
        let mut body = [0_u8; 0x3a];
        // Capabilities register: version 2, type 0 (endpoint).
        body[0] = 0x02;
        // Device capabilities: role-based error reporting, function-level reset.
        body[2..6].copy_from_slice(&0x1000_8000_u32.to_le_bytes());
        // Link capabilities and status: 8 GT/s, x4.
        body[0x0a..0x0e].copy_from_slice(&0x0000_0043_u32.to_le_bytes());
        body[0x10..0x12].copy_from_slice(&0x0043_u16.to_le_bytes());
        self.capability(EXPRESS, &body);
    }

    /// A 64-bit memory BAR at register `number` (and the next). `size` in bytes is a power of two
    /// of at least 4096.
    #[must_use]
    pub fn memory_bar(mut self, number: usize, size: u64, prefetchable: bool) -> Self {
        debug_assert!(number + 1 < BAR_COUNT && size.is_power_of_two() && size >= 4096);
        let kind = match prefetchable {
            true => BarType::PREFETCHABLE_WIDE_MEMORY,
            false => BarType::WIDE_MEMORY,
        };
        self.put(bar(number), &[kind.bits()]);
        self.regions[number] = RegionDescription {
            size,
            readable: true,
            writable: true,
        };
        self
    }

    /// MSI-X with `vectors` entries; table and pending bits at these offsets of `bar`
    /// (PCI 3.0, 6.8.2).
    #[must_use]
    pub fn msix(mut self, vectors: u16, bar: u8, table: u32, pending: u32) -> Self {
        let mut body = [0; 10];
        body[0..2].copy_from_slice(&(vectors.saturating_sub(1) & 0x7ff).to_le_bytes());
        body[2..6].copy_from_slice(&(table | u32::from(bar)).to_le_bytes());
        body[6..10].copy_from_slice(&(pending | u32::from(bar)).to_le_bytes());
        self.capability(MSIX, &body);
        self.interrupts.msix = vectors;
        self
    }

    /// MSI with so many vectors, a power of two of at most 32, 64-bit addresses and masks (PCI 3.0,
    /// 6.8.1).
    #[must_use]
    pub fn msi(mut self, vectors: u16) -> Self {
        let mut body = [0; 22];
        let [log, ..] = vectors.max(1).ilog2().to_le_bytes();
        let control = MSI_MASKING | MSI_WIDE | u16::from(log) << MSI_CAPABLE_SHIFT;
        body[0..2].copy_from_slice(&control.to_le_bytes());
        self.capability(MSI, &body);
        self.interrupts.msi = vectors;
        self
    }

    /// INTx on pin A.
    #[must_use]
    pub fn intx(mut self) -> Self {
        self.put(INTERRUPT_PIN, &[1]);
        self.interrupts.intx = 1;
        self
    }

    /// The description, called `name` for people.
    #[must_use]
    pub fn describe(self, name: String) -> Description {
        Description {
            config: self.config,
            regions: self.regions,
            interrupts: self.interrupts,
            name,
            hidden: Vec::new(),
        }
    }
}
