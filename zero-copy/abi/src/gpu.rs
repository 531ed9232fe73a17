//! The software GPU: its registers, its queue and its commands, as a driver in user space writes
//! them.
//!
//! A PCI function with two regions. **BAR 0** has registers of 32 bits, which are trapped; BAR 2 is
//! its **video memory**, which is mapped, and a power of two bytes long. Offsets are in bytes.
//! Nothing of it is at an address of the driver's choice but what lies in video memory, and system
//! memory that copies name.
//!
//! **Queue.** The driver chooses a place in video memory for a header ([`QUEUE_HEADER_BYTES`]), a
//! ring of [`Command`]s and, after it, a ring of [`Completion`]s, each of as many entries. It
//! writes [`REG_QUEUE_LOW`], [`REG_QUEUE_HIGH`] and [`REG_ENTRIES`], sets [`CONTROL_ENABLE`] and
//! waits for [`STATUS_READY`] (or [`STATUS_FAULT`]). The words of the header are zero then. The
//! driver writes command *n* (counted from 0, modulo 2^32) into entry *n* modulo the entries,
//! stores *n* + 1 in [`QUEUE_TAIL`], issues a fence, and writes [`REG_DOORBELL`] if
//! [`QUEUE_ASLEEP`] is not zero. Commands are executed one after the other. The device writes
//! completion *n* and stores *n* + 1 in [`QUEUE_DONE`]: the fence that the driver waits for. No
//! more commands than entries may be on their way.
//!
//! **Errors** of a command are in its completion. A queue that lies outside of video memory, or a
//! tail that is too far ahead, is a fault: nothing is done until the device is disabled and enabled
//! again.
//!
//! **Reset.** Clearing [`CONTROL_ENABLE`] ends the command under way and forgets those that wait;
//! [`STATUS_READY`] tells when that has happened. A function-level reset does that and fills video
//! memory with zeroes.

use crate::wire::pod;
use zerocopy::little_endian::{U16, U32, U64};

/// PCI vendor: 1234 belongs to nobody; emulated devices use it.
pub const VENDOR: u16 = 0x1234;
/// PCI device id.
pub const DEVICE: u16 = 0xfa9b;
/// PCI base class: processing accelerator.
pub const CLASS: u8 = 0x12;

/// Read-only: [`IDENTITY`]. All ones where the device is gone.
pub const REG_IDENTITY: u32 = 0x00;
/// Read-only: [`VERSION`].
pub const REG_VERSION: u32 = 0x04;
/// Read-only: bytes of video memory, low half.
pub const REG_MEMORY_LOW: u32 = 0x08;
/// Read-only: bytes of video memory, high half.
pub const REG_MEMORY_HIGH: u32 = 0x0c;
/// `CONTROL_*`.
pub const REG_CONTROL: u32 = 0x10;
/// Read-only: `STATUS_*`.
pub const REG_STATUS: u32 = 0x14;
/// Offset of the queue in video memory, low half: a multiple of the page size. Changes while the
/// device is enabled mean nothing.
pub const REG_QUEUE_LOW: u32 = 0x18;
/// Offset of the queue in video memory, high half.
pub const REG_QUEUE_HIGH: u32 = 0x1c;
/// Entries of the queue: a power of two from [`MIN_ENTRIES`] to [`MAX_ENTRIES`].
pub const REG_ENTRIES: u32 = 0x20;
/// Write-only: any value wakes the device.
pub const REG_DOORBELL: u32 = 0x24;
/// Bytes of BAR 0: registers, a page that is not used, MSI-X table, pending bits.
pub const REGISTER_BYTES: u64 = 4 * crate::PAGE_BYTES;

/// What [`REG_IDENTITY`] reads: "FGPU".
pub const IDENTITY: u32 = 0x5550_4746;
/// What [`REG_VERSION`] reads.
pub const VERSION: u32 = 1;

/// The device executes commands.
pub const CONTROL_ENABLE: u32 = 1;
/// The queue is in use.
pub const STATUS_READY: u32 = 1;
/// The queue is outside of video memory, has a wrong number of entries, or a tail that cannot be.
pub const STATUS_FAULT: u32 = 2;

/// Fewest entries of a queue.
pub const MIN_ENTRIES: u32 = 2;
/// Most entries of a queue.
pub const MAX_ENTRIES: u32 = 4096;

/// Queue header: commands that the driver has written, a word.
pub const QUEUE_TAIL: u64 = 0x00;
/// Queue header: not zero where the device has to be woken by [`REG_DOORBELL`], a word.
pub const QUEUE_ASLEEP: u64 = 0x40;
/// Queue header: commands that are complete, a word.
pub const QUEUE_DONE: u64 = 0x80;
/// Bytes of the queue header.
pub const QUEUE_HEADER_BYTES: u64 = 0x1000;
/// Bytes of a [`Command`].
pub const COMMAND_BYTES: u64 = 64;
/// Bytes of a [`Completion`].
pub const COMPLETION_BYTES: u64 = 32;

/// MSI or MSI-X vector: a command with [`FLAG_INTERRUPT`] is complete.
pub const VECTOR_DONE: u16 = 0;
/// MSI or MSI-X vector: [`STATUS_FAULT`] has been set.
pub const VECTOR_FAULT: u16 = 1;
/// Vectors.
pub const VECTORS: u16 = 2;

/// Nothing: a fence.
pub const OP_NOP: u16 = 0;
/// `length` bytes of system memory at `source` to video memory at `target`.
pub const OP_COPY_IN: u16 = 1;
/// `length` bytes of video memory at `source` to system memory at `target`.
pub const OP_COPY_OUT: u16 = 2;
/// `length` bytes of video memory at `source` to video memory at `target`; the ranges may overlap,
/// as with `memmove`.
pub const OP_COPY: u16 = 3;
/// Finds each occurrence, also of those that overlap, of `count` patterns in `length` bytes of
/// video memory at `source`. The patterns are `parameter` bytes at `table`: a length of 32 bits for
/// each of them, and then their bytes. The first `capacity` occurrences go to `target` as
/// [`Found`], in the order of their ends. Result: how many there are; written: how many went to
/// `target`.
pub const OP_SEARCH: u16 = 4;
/// CRC-32C (RFC 3720, B.4) of `length` bytes of video memory at `source`. Result: the checksum.
pub const OP_CHECKSUM: u16 = 5;
/// Copies `count` rows of `length` bytes, of which each begins `parameter` bytes after the one
/// before, the first at `source`, to `target`, one after the other without gaps. Source and target
/// must not overlap.
pub const OP_GATHER: u16 = 6;

/// The command is followed by an interrupt on [`VECTOR_DONE`].
pub const FLAG_INTERRUPT: u16 = 1;

/// Most patterns of a search.
pub const MAX_PATTERNS: u32 = 1024;
/// Longest pattern of a search, in bytes.
pub const MAX_PATTERN_BYTES: u32 = 256;
/// Most bytes of all patterns of a search.
pub const MAX_PATTERNS_BYTES: u32 = 64 << 10;

/// Executed.
pub const OK: u32 = 0;
/// No such operation, a flag that there is not, or a reserved field that is not zero.
pub const BAD_COMMAND: u32 = 1;
/// A range that does not lie in video memory.
pub const OUT_OF_BOUNDS: u32 = 2;
/// Patterns that are none: too many, too long, empty, or not as long as said.
pub const BAD_PATTERNS: u32 = 3;
/// Source and target of a gather overlap, or its rows are wider than their distance.
pub const BAD_TILE: u32 = 4;
/// System memory that the device does not reach. A part may have been copied.
pub const BAD_MEMORY: u32 = 5;

const _: () = assert!(
    size_of::<Command>() as u64 == COMMAND_BYTES
        && size_of::<Completion>() as u64 == COMPLETION_BYTES
);

pod! {
    /// A command. Fields that its operation does not name are zero.
    pub struct Command {
        /// `OP_*`.
        pub operation: U16,
        /// `FLAG_*`.
        pub flags: U16,
        /// Number of patterns, or of rows.
        pub count: U32,
        /// Where bytes come from: an offset in video memory, or a system address.
        pub source: U64,
        /// Where they go to: the same.
        pub target: U64,
        /// Bytes.
        pub length: U64,
        /// See the operation.
        pub parameter: U64,
        /// Offset of the patterns in video memory.
        pub table: U64,
        /// Most occurrences at `target`.
        pub capacity: U32,
        /// Zero.
        pub reserved: [U32; 3],
    }
    /// What became of a command.
    pub struct Completion {
        /// The command's number plus one, as in [`QUEUE_DONE`].
        pub sequence: U32,
        /// [`OK`], or why not.
        pub status: U32,
        /// See the operation.
        pub result: U64,
        /// See the operation.
        pub written: U64,
        /// Zero.
        pub reserved: U64,
    }
    /// An occurrence of a pattern.
    pub struct Found {
        /// Where it begins, from the begin of the range that was searched, in bytes.
        pub offset: U64,
        /// Which pattern, from 0.
        pub pattern: U32,
        /// Zero.
        pub reserved: U32,
    }
}

/// Bytes of a queue.
#[must_use]
pub fn queue_bytes(entries: u32) -> u64 {
    QUEUE_HEADER_BYTES + u64::from(entries) * (COMMAND_BYTES + COMPLETION_BYTES)
}

/// Offset of the completions from the queue's begin.
#[must_use]
pub fn completions_offset(entries: u32) -> u64 {
    QUEUE_HEADER_BYTES + u64::from(entries) * COMMAND_BYTES
}
