//! Wire layout: NVM Express 1.4. Every constant and structure cites its section or figure.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a page (CC.MPS 0, the only size offered).
pub const PAGE: u64 = 4096;
/// Bytes of a submission queue entry (figure 105).
pub const SQE_BYTES: u64 = 64;
/// Bytes of a completion queue entry (figure 121).
pub const CQE_BYTES: u64 = 16;

/// Offsets of registers in BAR 0 (3.1).
pub mod register {
    #![allow(missing_docs)]
    pub const CAP: u64 = 0x00;
    pub const VS: u64 = 0x08;
    pub const INTMS: u64 = 0x0c;
    pub const INTMC: u64 = 0x10;
    pub const CC: u64 = 0x14;
    pub const CSTS: u64 = 0x1c;
    pub const AQA: u64 = 0x24;
    pub const ASQ: u64 = 0x28;
    pub const ACQ: u64 = 0x30;
    /// The doorbells: a page, after that of the other registers.
    pub const DOORBELLS: u64 = super::PAGE;
}

/// Submission queue entry (figure 105).
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
pub struct Sqe {
    /// Opcode.
    pub opcode: u8,
    /// Bits 1:0 fused operation, bits 7:6 PRP or SGL (PSDT).
    pub flags: u8,
    /// Command identifier.
    pub cid: u16,
    /// Namespace.
    pub nsid: u32,
    /// Reserved.
    pub cdw2: u32,
    /// Reserved.
    pub cdw3: u32,
    /// Metadata pointer.
    pub mptr: u64,
    /// Data pointer: two PRP entries, or one SGL descriptor.
    pub dptr: [u64; 2],
    /// Command dword 10.
    pub cdw10: u32,
    /// Command dword 11.
    pub cdw11: u32,
    /// Command dword 12.
    pub cdw12: u32,
    /// Command dword 13.
    pub cdw13: u32,
    /// Command dword 14.
    pub cdw14: u32,
    /// Command dword 15.
    pub cdw15: u32,
}

/// Completion queue entry (figure 121).
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable,
)]
pub struct Cqe {
    /// Command-specific.
    pub dw0: u32,
    /// Reserved.
    pub dw1: u32,
    /// Head of the submission queue.
    pub sq_head: u16,
    /// The submission queue.
    pub sq_id: u16,
    /// Command identifier.
    pub cid: u16,
    /// Bit 0 phase, bits 15:1 status.
    pub status: u16,
}

/// Admin opcodes (figure 139).
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
    pub const DOORBELL_BUFFER: u8 = 0x7c;
}

/// NVM opcodes (figure 346).
pub mod nvm {
    #![allow(missing_docs)]
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const COMPARE: u8 = 0x05;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const DATASET_MANAGEMENT: u8 = 0x09;
}

/// Features (figure 271).
pub mod feature {
    #![allow(missing_docs)]
    pub const ARBITRATION: u8 = 0x01;
    pub const POWER_MANAGEMENT: u8 = 0x02;
    pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
    pub const ERROR_RECOVERY: u8 = 0x05;
    pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
    pub const NUMBER_OF_QUEUES: u8 = 0x07;
    pub const INTERRUPT_COALESCING: u8 = 0x08;
    pub const INTERRUPT_VECTOR: u8 = 0x09;
    pub const WRITE_ATOMICITY: u8 = 0x0a;
    pub const ASYNC_EVENTS: u8 = 0x0b;
    pub const TIMESTAMP: u8 = 0x0e;
    pub const HOST_BEHAVIOR: u8 = 0x16;
}

/// Log pages (figure 191).
pub mod log_page {
    #![allow(missing_docs)]
    pub const ERRORS: u8 = 0x01;
    pub const SMART: u8 = 0x02;
    pub const FIRMWARE: u8 = 0x03;
    pub const EFFECTS: u8 = 0x05;
}

/// A status field without the phase: status code in bits 7:0, type in 10:8, more in 13, do not
/// retry in 14 (figures 124 to 131).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Status(pub u16);

#[allow(missing_docs)]
impl Status {
    const MORE: u16 = 1 << 13;
    const DO_NOT_RETRY: u16 = 1 << 14;

    pub const SUCCESS: Self = Self(0);
    pub const INVALID_OPCODE: Self = Self(0x001 | Self::DO_NOT_RETRY);
    pub const INVALID_FIELD: Self = Self(0x002 | Self::DO_NOT_RETRY);
    pub const DATA_TRANSFER_ERROR: Self = Self(0x004 | Self::DO_NOT_RETRY);
    pub const INTERNAL_ERROR: Self = Self(0x006);
    pub const ABORT_REQUESTED: Self = Self(0x007);
    pub const INVALID_NAMESPACE: Self = Self(0x00b | Self::DO_NOT_RETRY);
    pub const SEQUENCE_ERROR: Self = Self(0x00c | Self::DO_NOT_RETRY);
    pub const INVALID_SGL_SEGMENT: Self = Self(0x00d | Self::DO_NOT_RETRY);
    pub const INVALID_SGL_COUNT: Self = Self(0x00e | Self::DO_NOT_RETRY);
    pub const INVALID_SGL_LENGTH: Self = Self(0x00f | Self::DO_NOT_RETRY);
    pub const INVALID_SGL_TYPE: Self = Self(0x011 | Self::DO_NOT_RETRY);
    pub const INVALID_PRP_OFFSET: Self = Self(0x013 | Self::DO_NOT_RETRY);
    pub const WRITE_PROTECTED: Self = Self(0x020 | Self::DO_NOT_RETRY);
    pub const LBA_OUT_OF_RANGE: Self = Self(0x080 | Self::DO_NOT_RETRY);
    pub const CAPACITY_EXCEEDED: Self = Self(0x081 | Self::DO_NOT_RETRY);

    pub const INVALID_CQ: Self = Self(0x100 | Self::DO_NOT_RETRY);
    pub const INVALID_QUEUE_ID: Self = Self(0x101 | Self::DO_NOT_RETRY);
    pub const INVALID_QUEUE_SIZE: Self = Self(0x102 | Self::DO_NOT_RETRY);
    pub const EVENT_LIMIT_EXCEEDED: Self = Self(0x105 | Self::DO_NOT_RETRY);
    pub const INVALID_VECTOR: Self = Self(0x108 | Self::DO_NOT_RETRY);
    pub const INVALID_LOG_PAGE: Self = Self(0x109 | Self::DO_NOT_RETRY);
    pub const INVALID_QUEUE_DELETION: Self = Self(0x10c | Self::DO_NOT_RETRY);
    pub const FEATURE_NOT_SAVEABLE: Self = Self(0x10d | Self::DO_NOT_RETRY);
    pub const FEATURE_NOT_NAMESPACE_SPECIFIC: Self = Self(0x10f | Self::DO_NOT_RETRY);

    pub const WRITE_FAULT: Self = Self(0x280);
    pub const UNRECOVERED_READ_ERROR: Self = Self(0x281);
    pub const COMPARE_FAILURE: Self = Self(0x285 | Self::DO_NOT_RETRY);

    /// The same for a completion of which there is more in the error log.
    #[must_use]
    pub fn with_more(self) -> Self {
        Self(self.0 | Self::MORE)
    }

    /// Whether it is none of the errors.
    #[must_use]
    pub fn is_success(self) -> bool {
        self == Self::SUCCESS
    }
}

/// The low 16 bits of a dword.
#[must_use]
pub fn low(dword: u32) -> u16 {
    let [a, b, ..] = dword.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// The high 16 bits of a dword.
#[must_use]
pub fn high(dword: u32) -> u16 {
    low(dword >> 16)
}

/// The low 8 bits of a dword.
#[must_use]
pub fn byte(dword: u32) -> u8 {
    dword.to_le_bytes()[0]
}

/// Two dwords as one number.
#[must_use]
pub fn quad(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}
