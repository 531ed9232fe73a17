//! Wire layout of virtio-net (virtio 1.2, 5.1).

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature bits (5.1.3).
pub mod feature {
    /// The device takes frames with a partial checksum.
    pub const CSUM: u64 = 1 << 0;
    /// The driver takes frames with a partial checksum.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// Offloads towards the guest can be switched.
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    /// `mtu` is valid.
    pub const MTU: u64 = 1 << 3;
    /// `mac` is valid.
    pub const MAC: u64 = 1 << 5;
    /// The driver takes TCP segments over IPv4 that are to be cut.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// Over IPv6.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// With ECN.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// UDP (whole datagrams).
    pub const GUEST_UFO: u64 = 1 << 10;
    /// The device takes TCP segments over IPv4 that are to be cut.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// Over IPv6.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// With ECN.
    pub const HOST_ECN: u64 = 1 << 13;
    /// UDP (whole datagrams).
    pub const HOST_UFO: u64 = 1 << 14;
    /// Received frames may be spread over several buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// `status` is valid.
    pub const STATUS: u64 = 1 << 16;
    /// There is a control queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// Receive modes.
    pub const CTRL_RX: u64 = 1 << 18;
    /// VLAN filter.
    pub const CTRL_VLAN: u64 = 1 << 19;
    /// More receive modes.
    pub const CTRL_RX_EXTRA: u64 = 1 << 20;
    /// The driver can be asked to announce itself.
    pub const GUEST_ANNOUNCE: u64 = 1 << 21;
    /// Several queue pairs.
    pub const MQ: u64 = 1 << 22;
    /// The MAC address can be set over the control queue.
    pub const CTRL_MAC_ADDR: u64 = 1 << 23;
    /// Receive-side scaling.
    pub const RSS: u64 = 1 << 60;
    /// Speed and duplex are valid.
    pub const SPEED_DUPLEX: u64 = 1 << 63;
}

/// Header of every frame, `struct virtio_net_hdr_v1` (5.1.6).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct FrameHeader {
    /// [`header_flag`].
    pub flags: u8,
    /// [`gso`].
    pub gso_type: u8,
    /// Bytes of headers before the payload that is cut.
    pub header_bytes: U16,
    /// Bytes of payload of a segment.
    pub gso_size: U16,
    /// Where the checksum begins.
    pub checksum_start: U16,
    /// Where in that it is put.
    pub checksum_offset: U16,
    /// Buffers of a received frame, with [`feature::MRG_RXBUF`] or `VERSION_1`.
    pub buffers: U16,
}

/// Flags of a frame's header.
pub mod header_flag {
    /// The checksum is to be completed.
    pub const NEEDS_CSUM: u8 = 1;
    /// The checksum is right.
    pub const DATA_VALID: u8 = 2;
}

/// How a frame is to be cut.
pub mod gso {
    /// Not at all.
    pub const NONE: u8 = 0;
    /// TCP over IPv4.
    pub const TCPV4: u8 = 1;
    /// UDP, whole datagrams.
    pub const UDP: u8 = 3;
    /// TCP over IPv6.
    pub const TCPV6: u8 = 4;
    /// UDP, by segments.
    pub const UDP_L4: u8 = 5;
    /// With ECN.
    pub const ECN: u8 = 0x80;
}

/// The configuration space, `struct virtio_net_config` (5.1.4).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// The address.
    pub mac: [u8; 6],
    /// [`status`].
    pub status: U16,
    /// Queue pairs.
    pub pairs: U16,
    /// Bytes of payload of the largest frame.
    pub mtu: U16,
    /// In Mbit/s, or [`SPEED_UNKNOWN`].
    pub speed: U32,
    /// One of 0 (half), 1 (full), 255 (unknown).
    pub duplex: u8,
    /// Most bytes of a key of receive-side scaling.
    pub rss_key_bytes: u8,
    /// Most entries of its table.
    pub rss_table_entries: U16,
    /// Its kinds of hashes.
    pub hash_types: U32,
}

/// Bits of `status`.
pub mod status {
    /// There is a link.
    pub const LINK_UP: u16 = 1;
    /// The driver is to announce itself.
    pub const ANNOUNCE: u16 = 2;
}

/// There is no such thing as a speed.
pub const SPEED_UNKNOWN: u32 = u32::MAX;
/// Nor as a duplex mode.
pub const DUPLEX_UNKNOWN: u8 = 255;

/// Bytes of [`FrameHeader`].
pub const HEADER_BYTES: usize = size_of::<FrameHeader>();

const _: () = assert!(HEADER_BYTES == 12 && size_of::<Config>() == 24);

/// A length in 64 bits.
#[must_use]
pub const fn wide(length: usize) -> u64 {
    const { assert!(size_of::<usize>() <= size_of::<u64>()) };
    length as u64
}

/// A number of 32 bits as an index or a length.
#[must_use]
pub const fn index(number: u32) -> usize {
    const { assert!(size_of::<u32>() <= size_of::<usize>()) };
    number as usize
}
