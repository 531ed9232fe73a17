//! Wire layout of virtio-net (virtio 1.2, 5.1).

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature bits (5.1.3).
pub mod feature {
    /// Device handles packets with partial checksum.
    pub const CSUM: u64 = 1 << 0;
    /// Driver handles packets with partial checksum.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// Offloads towards the driver can be reconfigured over the control queue.
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    /// Device maximum MTU reporting.
    pub const MTU: u64 = 1 << 3;
    /// Device has given MAC address.
    pub const MAC: u64 = 1 << 5;
    /// Driver can receive TSOv4.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// Driver can receive TSOv6.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// Driver can receive TSO with ECN.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// Driver can receive UFO, UDP fragmentation offload.
    pub const GUEST_UFO: u64 = 1 << 10;
    /// Device can receive TSOv4.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// Device can receive TSOv6.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// Device can receive TSO with ECN.
    pub const HOST_ECN: u64 = 1 << 13;
    /// Device can receive UFO, UDP fragmentation offload.
    pub const HOST_UFO: u64 = 1 << 14;
    /// Driver can merge receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// Configuration status field is available.
    pub const STATUS: u64 = 1 << 16;
    /// Control channel is available.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// Control channel RX mode support.
    pub const CTRL_RX: u64 = 1 << 18;
    /// Control channel VLAN filtering.
    pub const CTRL_VLAN: u64 = 1 << 19;
    /// Control channel RX extra mode support.
    pub const CTRL_RX_EXTRA: u64 = 1 << 20;
    /// Driver can send gratuitous packets.
    pub const GUEST_ANNOUNCE: u64 = 1 << 21;
    /// Device supports multiqueue with automatic receive steering.
    pub const MQ: u64 = 1 << 22;
    /// Set MAC address through control channel.
    pub const CTRL_MAC_ADDR: u64 = 1 << 23;
    /// Device supports RSS, receive-side scaling.
    pub const RSS: u64 = 1 << 60;
    /// Device reports speed and duplex.
    pub const SPEED_DUPLEX: u64 = 1 << 63;
}

/// Header of every frame, `struct virtio_net_hdr_v1` (5.1.6).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct FrameHeader {
    /// Bits of [`header_flag`].
    pub flags: u8,
    /// A type of [`gso`], perhaps with [`gso::ECN`].
    pub gso_type: u8,
    /// `hdr_len`: bytes of headers before the payload that is segmented.
    pub header_bytes: U16,
    /// `gso_size`: bytes of payload a segment.
    pub gso_size: U16,
    /// `csum_start`: the first byte that is checksummed.
    pub checksum_start: U16,
    /// `csum_offset`: where the checksum is put, from `csum_start` on.
    pub checksum_offset: U16,
    /// `num_buffers`: buffers of a received frame, with [`feature::MRG_RXBUF`] or `VERSION_1`.
    pub buffers: U16,
}

/// Flags of a frame's header.
pub mod header_flag {
    /// `NEEDS_CSUM`: the checksum is partial.
    pub const NEEDS_CSUM: u8 = 1;
    /// `DATA_VALID`: the checksum has been validated.
    pub const DATA_VALID: u8 = 2;
}

/// Segmentation types of a frame's header.
pub mod gso {
    /// No segmentation.
    pub const NONE: u8 = 0;
    /// TCP over IPv4.
    pub const TCPV4: u8 = 1;
    /// UDP fragmentation.
    pub const UDP: u8 = 3;
    /// TCP over IPv6.
    pub const TCPV6: u8 = 4;
    /// UDP segmentation.
    pub const UDP_L4: u8 = 5;
    /// Bit: the TCP header has the ECN bits of congestion control.
    pub const ECN: u8 = 0x80;
}

/// The configuration space, `struct virtio_net_config` (5.1.4).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// MAC address of the device.
    pub mac: [u8; 6],
    /// Bits of [`status`].
    pub status: U16,
    /// `max_virtqueue_pairs`: queue pairs.
    pub pairs: U16,
    /// Largest MTU that the driver may use.
    pub mtu: U16,
    /// Link speed in Mbit/s, or [`SPEED_UNKNOWN`].
    pub speed: U32,
    /// Duplex mode: 0 (half), 1 (full), 255 (unknown).
    pub duplex: u8,
    /// `rss_max_key_size`: bytes of the longest Toeplitz key.
    pub rss_key_bytes: u8,
    /// `rss_max_indirection_table_length`, in entries.
    pub rss_table_entries: U16,
    /// `supported_hash_types`.
    pub hash_types: U32,
}

/// Bits of the configuration's `status`.
pub mod status {
    /// `VIRTIO_NET_S_LINK_UP`.
    pub const LINK_UP: u16 = 1;
    /// `VIRTIO_NET_S_ANNOUNCE`: the driver is asked to announce itself.
    pub const ANNOUNCE: u16 = 2;
}

/// The link's speed is not known.
pub const SPEED_UNKNOWN: u32 = u32::MAX;
/// The link's duplex mode is not known.
pub const DUPLEX_UNKNOWN: u8 = 255;

/// Bytes of [`FrameHeader`].
pub const HEADER_BYTES: usize = size_of::<FrameHeader>();

const _: () = assert!(HEADER_BYTES == 12 && size_of::<Config>() == 24);

/// A number of 32 bits as an index or a length.
#[must_use]
pub const fn index(number: u32) -> usize {
    const { assert!(size_of::<u32>() <= size_of::<usize>()) };
    number as usize
}

/// The low 16 bits of a number.
#[must_use]
pub const fn low16(number: u64) -> u16 {
    let [a, b, ..] = number.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// The low 32 bits of a number.
#[must_use]
pub const fn low32(number: u64) -> u32 {
    let [a, b, c, d, ..] = number.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
