//! What is before every frame, and what the parties may agree on (virtio 1.2, 5.1.3 and 5.1.6).

use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `struct virtio_net_hdr_v1`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Header {
    /// `VIRTIO_NET_HDR_F_*`.
    pub flags: u8,
    /// `VIRTIO_NET_HDR_GSO_*`.
    pub gso_type: u8,
    /// Bytes of headers.
    pub hdr_len: U16,
    /// Bytes of payload of each segment.
    pub gso_size: U16,
    /// Where the checksum begins.
    pub csum_start: U16,
    /// Where in that it is put.
    pub csum_offset: U16,
    /// Buffers of a received frame.
    pub num_buffers: U16,
}

/// Bytes of [`Header`].
pub const HEADER_BYTES: usize = size_of::<Header>();

const _: () = assert!(HEADER_BYTES == 12);

/// Feature bits, as masks.
pub mod feature {
    use vhost::vhost_user::message::VhostUserVirtioFeatures;
    use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
    use virtio_bindings::virtio_net as net;
    use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

    /// Of virtio 1.
    pub const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
    /// Event index.
    pub const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
    /// Indirect descriptors.
    pub const INDIRECT: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
    /// Of vhost-user.
    pub const PROTOCOL: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    /// The device completes checksums.
    pub const CSUM: u64 = 1 << net::VIRTIO_NET_F_CSUM;
    /// The driver takes partial checksums.
    pub const GUEST_CSUM: u64 = 1 << net::VIRTIO_NET_F_GUEST_CSUM;
    /// Offloads towards the guest can be switched.
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << net::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
    /// The configuration has an MTU.
    pub const MTU: u64 = 1 << net::VIRTIO_NET_F_MTU;
    /// The configuration has a MAC address.
    pub const MAC: u64 = 1 << net::VIRTIO_NET_F_MAC;
    /// The device cuts TCP.
    pub const HOST_TSO: u64 = 1 << net::VIRTIO_NET_F_HOST_TSO4 | 1 << net::VIRTIO_NET_F_HOST_TSO6;
    /// The driver takes TCP uncut.
    pub const GUEST_TSO: u64 =
        1 << net::VIRTIO_NET_F_GUEST_TSO4 | 1 << net::VIRTIO_NET_F_GUEST_TSO6;
    /// A received frame may be in several buffers.
    pub const MRG_RXBUF: u64 = 1 << net::VIRTIO_NET_F_MRG_RXBUF;
    /// The configuration has the link's status.
    pub const STATUS: u64 = 1 << net::VIRTIO_NET_F_STATUS;
    /// A control queue.
    pub const CTRL_VQ: u64 = 1 << net::VIRTIO_NET_F_CTRL_VQ;
    /// Receive modes.
    pub const CTRL_RX: u64 = 1 << net::VIRTIO_NET_F_CTRL_RX;
    /// VLAN filter.
    pub const CTRL_VLAN: u64 = 1 << net::VIRTIO_NET_F_CTRL_VLAN;
    /// The driver can be asked to announce itself.
    pub const GUEST_ANNOUNCE: u64 = 1 << net::VIRTIO_NET_F_GUEST_ANNOUNCE;
    /// Several queue pairs.
    pub const MQ: u64 = 1 << net::VIRTIO_NET_F_MQ;
    /// The MAC address can be set.
    pub const CTRL_MAC_ADDR: u64 = 1 << net::VIRTIO_NET_F_CTRL_MAC_ADDR;

    /// What every session needs.
    pub const NEEDED: u64 = VERSION_1 | PROTOCOL;
    /// Nothing but frames.
    pub const PLAIN: u64 = EVENT_IDX | MAC | MTU | STATUS | MQ;
    /// What Linux asks for.
    pub const LINUX: u64 = PLAIN
        | INDIRECT
        | CSUM
        | GUEST_CSUM
        | HOST_TSO
        | GUEST_TSO
        | MRG_RXBUF
        | CTRL_VQ
        | CTRL_RX
        | CTRL_VLAN
        | CTRL_MAC_ADDR
        | CTRL_GUEST_OFFLOADS
        | GUEST_ANNOUNCE;
}
