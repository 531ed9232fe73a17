//! Registers of configuration space (PCI 3.0, 6.1 and 6.2).

/// Vendor ID.
pub const VENDOR: usize = 0x00;
/// Device ID.
pub const DEVICE: usize = 0x02;
/// Command register.
pub const COMMAND: usize = 0x04;
/// Status register.
pub const STATUS: usize = 0x06;
/// Revision ID, and the class code behind it.
pub const REVISION: usize = 0x08;
/// Cache line size, and the latency timer behind it.
pub const CACHE_LINE: usize = 0x0c;
/// The first base address register.
pub const BARS: usize = 0x10;
/// Subsystem vendor ID, and the subsystem ID behind it.
pub const SUBSYSTEM: usize = 0x2c;
/// Expansion ROM base address.
pub const ROM: usize = 0x30;
/// Where the first capability is.
pub const CAPABILITIES: usize = 0x34;
/// Interrupt line.
pub const INTERRUPT_LINE: usize = 0x3c;
/// Interrupt pin.
pub const INTERRUPT_PIN: usize = 0x3d;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 0x40;
/// Bytes that the capability list lies in (PCI 3.0, 6.7).
pub const CONVENTIONAL_BYTES: usize = 0x100;
/// Bytes of the configuration space of a PCI Express function (PCI Express 3.0, 7.2).
pub const EXTENDED_BYTES: usize = 0x1000;

/// [`COMMAND`]: answers at I/O ports.
pub const COMMAND_IO: u16 = 1 << 0;
/// [`COMMAND`]: answers at its memory BARs.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// [`COMMAND`]: masters the bus.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// [`COMMAND`]: answers parity errors.
pub const COMMAND_PARITY: u16 = 1 << 6;
/// [`COMMAND`]: reports system errors.
pub const COMMAND_SERR: u16 = 1 << 8;
/// [`COMMAND`]: INTx is silent.
pub const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// [`STATUS`]: there is a capability list.
pub const STATUS_CAPABILITIES: u16 = 1 << 4;

/// Where a base address register is.
#[must_use]
pub const fn bar(number: usize) -> usize {
    BARS + 4 * number
}

/// A word of configuration space; zero where there is none.
#[must_use]
pub fn word(config: &[u8], at: usize) -> u16 {
    let bytes = config.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u16::from_le_bytes(*bytes))
}

/// The type bits of a base address register (PCI 3.0, 6.2.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarType(u8);

impl BarType {
    /// Memory, at an address of 64 bits: the next register has its upper half.
    pub const WIDE_MEMORY: Self = Self(0x04);
    /// The same, in which reading changes nothing.
    pub const PREFETCHABLE_WIDE_MEMORY: Self = Self(0x0c);

    /// That of a register; that of 32-bit memory where there is none.
    #[must_use]
    pub fn of(config: &[u8], number: usize) -> Self {
        let low = config.get(bar(number)).copied().unwrap_or(0);
        Self(low & if low & 1 != 0 { 0x03 } else { 0x0f })
    }

    /// Its bits as they stand in the register.
    #[must_use]
    pub fn bits(self) -> u8 {
        self.0
    }

    /// I/O ports.
    #[must_use]
    pub fn is_io(self) -> bool {
        self.0 & 0x01 != 0
    }

    /// Memory at an address of 64 bits.
    #[must_use]
    pub fn is_wide(self) -> bool {
        !self.is_io() && self.0 & 0x06 == 0x04
    }

    /// Memory in which reading changes nothing.
    #[must_use]
    pub fn is_prefetchable(self) -> bool {
        !self.is_io() && self.0 & 0x08 != 0
    }
}
