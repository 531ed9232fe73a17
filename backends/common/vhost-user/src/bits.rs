//! What split virtqueues are made of (virtio 1.2, 2.7), and feature bits of all devices (6).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature bits of all devices.
pub mod feature {
    /// Indirect descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Event indices.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// vhost-user's own: protocol features.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Not a legacy device.
    pub const VERSION_1: u64 = 1 << 32;
}

/// Descriptor flags (2.7.5).
pub mod desc {
    /// Another one follows.
    pub const NEXT: u16 = 1;
    /// The device writes it.
    pub const WRITE: u16 = 2;
    /// It is a table of descriptors.
    pub const INDIRECT: u16 = 4;
}

/// Flag of an available ring: no interrupts, please (2.7.6).
pub const AVAIL_NO_INTERRUPT: u16 = 1;
/// Flag of a used ring: no notifications, please (2.7.8).
pub const USED_NO_NOTIFY: u16 = 1;

/// A descriptor (2.7.5).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Descriptor {
    /// Guest-physical address.
    pub address: U64,
    /// Bytes.
    pub length: U32,
    /// See [`desc`].
    pub flags: U16,
    /// Index of the one that follows.
    pub next: U16,
}

const _: () = assert!(size_of::<Descriptor>() == 16);
