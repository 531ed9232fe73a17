//! Address tunnelling: how a request for a disk names device memory (spin-atc17, section 5.1).
//!
//! A process does direct I/O with a **phony buffer**: ordinary pinned memory
//! ([`FLAG_PHONY`](crate::control::FLAG_PHONY)) whose sectors each carry an [`Envelope`] in place
//! of data. The guest's file system and block layer pass it on; the backend of the disk knows the
//! phony pages by their addresses, opens the envelope and moves the data to or from device memory
//! ([`KIND_DEVICE`](crate::control::KIND_DEVICE)).
//!
//! The first segment of a context of such a backend
//! ([`FEATURE_TUNNEL`](crate::config::FEATURE_TUNNEL)) is laid out so:
//!
//! | offset | written by | what |
//! |---|---|---|
//! | [`OFF_DEAD`](crate::arena::OFF_DEAD) | guest kernel | not zero: the backend is gone |
//! | [`OFF_EPOCH`] | backend | a clock that counts seconds, from 1 |
//! | [`OFF_SLOT_COUNT`] | backend | slots that there are; zero until they can be used |
//! | [`OFF_DISK_COUNT`] | backend | entries of the list of disks |
//! | [`OFF_DISKS`] | backend | [`Disk`]s whose requests are opened |
//! | [`OFF_SLOTS`] | both | slots of [`SLOT_BYTES`] |
//!
//! **Token.** A slot holds what one page of one request is for. Its key is random and the
//! backend's; the process puts the key and a sequence number of its own, higher than any before in
//! this slot, into the envelopes of one page, describes the target in the slot, and stores the
//! number in [`SLOT_ARMED`] last. The pair is a token: each sector of it can be used once; it ends
//! when the process disarms the slot, when [`TOKEN_EPOCHS`] have passed, and when all its sectors
//! have been used, for then the slot gets another key. It is good for this context, this region,
//! these bytes and this direction only.
//!
//! **Receipt.** When bytes of a sector have moved, the backend sets the sector's bit in
//! [`SLOT_LANDED`], before it completes the request. What has no receipt after the request went
//! another way: its bytes are in the phony page, or were taken from it. A sector without a receipt
//! that still carries its envelope after a read is no data: a device that was reset meanwhile
//! writes no receipts.

use crate::wire::pod;
use zerocopy::little_endian::{U32, U64};

/// The clock.
pub const OFF_EPOCH: usize = 0x100;
/// Number of slots.
pub const OFF_SLOT_COUNT: usize = 0x140;
/// Number of disks.
pub const OFF_DISK_COUNT: usize = 0x180;
/// First disk.
pub const OFF_DISKS: usize = 0x200;
/// First slot.
pub const OFF_SLOTS: usize = 0x1000;

/// Most disks.
pub const MAX_DISKS: usize = 64;
/// Bytes of a slot.
pub const SLOT_BYTES: usize = 64;
/// Most slots of a context.
pub const MAX_SLOTS: u32 = 16384;

/// Slot: two words of key (backend).
pub const SLOT_KEY: usize = 0;
/// Slot: the sequence number that is armed, or zero (process). Below 2^48.
pub const SLOT_ARMED: usize = 16;
/// Slot: the device region in the low half, `DIRECTION_*` in the high one (process).
pub const SLOT_REGION: usize = 24;
/// Slot: offset of the page's first byte in the region, in bytes (process).
pub const SLOT_OFFSET: usize = 32;
/// Slot: bytes, a multiple of [`SECTOR_BYTES`] up to a page, in the low half, the epoch in which it
/// was armed in the high one (process).
pub const SLOT_LENGTH: usize = 40;
/// Slot: the sequence number times 2^16, and a bit for each sector that has moved (backend).
pub const SLOT_LANDED: usize = 48;

/// The sectors are written to device memory: a read of the disk.
pub const DIRECTION_INTO_DEVICE: u32 = 1;
/// The sectors are read from device memory: a write of the disk.
pub const DIRECTION_OUT_OF_DEVICE: u32 = 2;

/// Bytes of a sector: the smallest piece into which a request can be cut.
pub const SECTOR_BYTES: usize = 512;
/// Sectors of a page.
pub const SECTORS_PER_PAGE: usize = 8;
/// Seconds that a token lives.
pub const TOKEN_EPOCHS: u32 = 30;
/// First sequence number that is none.
pub const SEQUENCE_END: u64 = 1 << 48;
/// First word of an envelope: "FARLENVL".
pub const ENVELOPE_MAGIC: u64 = 0x4c56_4e45_4c52_4146;

const _: () = assert!(
    OFF_DISKS + MAX_DISKS * size_of::<Disk>() <= OFF_SLOTS
        && OFF_SLOTS as u64 + MAX_SLOTS as u64 * SLOT_BYTES as u64
            <= crate::control::MAX_SEGMENT_BYTES
        && SECTOR_BYTES as u64 * SECTORS_PER_PAGE as u64 == crate::PAGE_BYTES
        && size_of::<Envelope>() <= SECTOR_BYTES
);

pod! {
    /// What stands at the beginning of each sector of a phony page.
    pub struct Envelope {
        /// [`ENVELOPE_MAGIC`].
        pub magic: U64,
        /// The slot's key.
        pub key: [U64; 2],
        /// The sequence number.
        pub sequence: U64,
        /// The slot.
        pub slot: U32,
        /// Which sector of its page this is.
        pub sector: U32,
    }
    /// A disk whose requests are opened.
    pub struct Disk {
        /// What the disk answers to `VIRTIO_BLK_T_GET_ID`: its serial number, zeroes after it.
        pub serial: [u8; 20],
        /// Zero.
        pub reserved: [u8; 12],
    }
}

/// Length in bytes of a first segment with `slots` slots: at least what every first segment has.
#[must_use]
pub fn segment_bytes(slots: u32) -> u64 {
    let bytes = OFF_SLOTS as u64 + u64::from(slots) * SLOT_BYTES as u64;
    bytes.max(crate::arena::HEADER_SEGMENT_BYTES)
}
