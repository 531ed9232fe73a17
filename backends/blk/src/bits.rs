//! Wire layout of virtio-blk (virtio 1.2, 5.2).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a sector: the unit of all addresses and sizes, whatever the size of a block.
pub const SECTOR: u64 = 512;
/// Bytes of the answer to GET_ID.
pub const ID_BYTES: usize = 20;

/// Feature bits (5.2.3, 6).
pub mod feature {
    /// `seg_max` is valid.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The device is read-only.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` is valid.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// There is a FLUSH request.
    pub const FLUSH: u64 = 1 << 9;
    /// The topology is valid.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver may switch the write cache.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// `num_queues` is valid.
    pub const MQ: u64 = 1 << 12;
    /// There is a DISCARD request.
    pub const DISCARD: u64 = 1 << 13;
    /// There is a WRITE_ZEROES request.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Types of requests (5.2.6).
pub mod kind {
    /// Read.
    pub const IN: u32 = 0;
    /// Write.
    pub const OUT: u32 = 1;
    /// Make durable.
    pub const FLUSH: u32 = 4;
    /// Tell the serial number.
    pub const GET_ID: u32 = 8;
    /// Give back.
    pub const DISCARD: u32 = 11;
    /// Zero.
    pub const WRITE_ZEROES: u32 = 13;
}

/// Flag of a range of WRITE_ZEROES: its blocks may be given back.
pub const RANGE_UNMAP: u32 = 1;

/// How a request has ended: its last byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Well.
    Ok = 0,
    /// With an error.
    IoErr = 1,
    /// There is no such request.
    Unsupp = 2,
}

/// What a request begins with.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// One of [`kind`].
    pub kind: U32,
    /// Zero.
    pub reserved: U32,
    /// The first sector.
    pub sector: U64,
}

/// A range of DISCARD or WRITE_ZEROES.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WireRange {
    /// First sector.
    pub sector: U64,
    /// Sectors.
    pub sectors: U32,
    /// [`RANGE_UNMAP`].
    pub flags: U32,
}

/// The configuration space (5.2.4).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// In sectors.
    pub capacity: U64,
    /// Not offered.
    pub size_max: U32,
    /// Most segments of a request.
    pub seg_max: U32,
    /// Not offered.
    pub geometry: [u8; 4],
    /// Bytes of a block.
    pub blk_size: U32,
    /// Two to the power of this are the blocks of a physical block.
    pub physical_block_exp: u8,
    /// Of the first block within its physical one.
    pub alignment_offset: u8,
    /// Suggested least blocks of a request.
    pub min_io_size: U16,
    /// Suggested most blocks of a request.
    pub opt_io_size: U32,
    /// 1: there is a write cache; 0: writes are durable when they are complete.
    pub writeback: u8,
    /// Zero.
    pub unused0: u8,
    /// Queues.
    pub num_queues: U16,
    /// Most sectors of a range of DISCARD.
    pub max_discard_sectors: U32,
    /// Most ranges of DISCARD.
    pub max_discard_seg: U32,
    /// Alignment of these ranges, in sectors.
    pub discard_sector_alignment: U32,
    /// Most sectors of a range of WRITE_ZEROES.
    pub max_write_zeroes_sectors: U32,
    /// Most ranges of WRITE_ZEROES.
    pub max_write_zeroes_seg: U32,
    /// Whether a range may be given back.
    pub write_zeroes_may_unmap: u8,
    /// Zero.
    pub unused1: [u8; 3],
}

const _: () = assert!(
    size_of::<Header>() == 16
        && size_of::<WireRange>() == 16
        && size_of::<Config>() == 60
        && std::mem::offset_of!(Config, writeback) == 32
);
