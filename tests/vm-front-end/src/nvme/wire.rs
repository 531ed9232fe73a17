//! Commands as the controller reads them (NVMe 1.4, figure 105).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A submission queue entry.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
pub struct Command {
    /// Opcode, flags, and the identifier, which the queue fills in.
    pub opcode: u8,
    /// Fused operation and the kind of data pointer.
    pub flags: u8,
    /// Identifier.
    pub cid: u16,
    /// Namespace.
    pub nsid: u32,
    /// Reserved, and the metadata pointer.
    pub reserved: [u64; 2],
    /// Data pointer.
    pub data: [u64; 2],
    /// Dwords 10 to 15.
    pub dwords: [u32; 6],
}

/// Admin opcodes.
pub mod admin {
    #![allow(missing_docs)]
    pub const DELETE_SQ: u8 = 0x00;
    pub const CREATE_SQ: u8 = 0x01;
    pub const GET_LOG_PAGE: u8 = 0x02;
    pub const DELETE_CQ: u8 = 0x04;
    pub const CREATE_CQ: u8 = 0x05;
    pub const IDENTIFY: u8 = 0x06;
    pub const ABORT: u8 = 0x08;
    pub const SET_FEATURES: u8 = 0x09;
    pub const GET_FEATURES: u8 = 0x0a;
    pub const ASYNC_EVENT: u8 = 0x0c;
    pub const FORMAT: u8 = 0x80;
    pub const DOORBELL_BUFFER: u8 = 0x7c;
}

/// I/O opcodes.
pub mod io {
    #![allow(missing_docs)]
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const COMPARE: u8 = 0x05;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const DATASET_MANAGEMENT: u8 = 0x09;
}

impl Command {
    /// A command with nothing but an opcode and a namespace.
    #[must_use]
    pub fn new(opcode: u8, nsid: u32) -> Self {
        Self {
            opcode,
            nsid,
            ..Self::default()
        }
    }

    /// A command that moves `blocks` (1 to 65536) blocks from `lba` on.
    #[must_use]
    pub fn blocks(opcode: u8, nsid: u32, lba: u64, blocks: u32) -> Self {
        let [low, high] = halves(lba);
        let mut command = Self::new(opcode, nsid);
        command.dwords[..3].copy_from_slice(&[low, high, blocks.wrapping_sub(1) & 0xffff]);
        command
    }

    /// With these physical region pages.
    #[must_use]
    pub fn prp(mut self, first: u64, second: u64) -> Self {
        self.data = [first, second];
        self
    }

    /// With this scatter gather list descriptor.
    #[must_use]
    pub fn sgl(mut self, address: u64, length: u32, kind: u8) -> Self {
        self.flags |= 0x40;
        self.data = [address, u64::from(length) | u64::from(kind) << 60];
        self
    }

    /// With this dword, 10 to 15.
    #[must_use]
    pub fn dword(mut self, number: usize, value: u32) -> Self {
        if let Some(dword) = number.checked_sub(10).and_then(|i| self.dwords.get_mut(i)) {
            *dword = value;
        }
        self
    }
}

/// Low and high half.
pub(crate) fn halves(value: u64) -> [u32; 2] {
    let bytes = value.to_le_bytes();
    let half = |at: usize| bytes[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
    [half(0), half(4)]
}
