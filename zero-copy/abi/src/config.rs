//! The virtio device: its id, its queues and its configuration space.

use crate::wire::wire;
use zerocopy::little_endian::{U32, U64};

/// Virtio device id. No id is assigned to Farlane; 38 has no driver in Linux and is accepted by
/// QEMU's generic vhost-user device. [`MAGIC`] tells the device from anything else with this id.
pub const VIRTIO_ID: u32 = 38;

/// First field of the configuration space: "FARL".
pub const MAGIC: u32 = 0x4c52_4146;

/// Version of everything in this crate. The driver refuses to bind to another one.
pub const ABI_VERSION: u32 = 4;

/// Index of the control queue: requests of the driver, see [`crate::control`].
pub const QUEUE_CONTROL: u16 = 0;
/// Index of the event queue: buffers that the driver posts, one descriptor each, and the backend
/// fills with [`crate::control::Event`].
pub const QUEUE_EVENT: u16 = 1;
/// Index of the doorbell queue: never carries a buffer, its notification alone wakes a backend
/// that has said in shared memory that it sleeps.
pub const QUEUE_DOORBELL: u16 = 2;
/// Number of queues.
pub const QUEUES: u16 = 3;
/// Largest size of a queue in descriptors.
pub const QUEUE_SIZE: u16 = 256;

/// Id of the shared-memory region that holds host-allocated buffers.
pub const WINDOW_SHMEM_ID: u8 = 0;

/// The device has a window for host-allocated buffers.
pub const FEATURE_WINDOW: u32 = 1 << 0;
/// The backend opens the envelopes of [`crate::tunnel`]: contexts have its first segment, no call
/// ring, and nothing to wake.
pub const FEATURE_TUNNEL: u32 = 1 << 1;
/// The backend serves the verbs ([`crate::rdma`]) to a driver of the guest's kernel, too: queues as
/// [`crate::rxe`] has them, and [`OP_ADD_GID`](crate::control::OP_ADD_GID) and what follows it.
pub const FEATURE_VERBS: u32 = 1 << 2;

wire! {
    /// Configuration space. Each read is a round trip to the backend: read once, in one piece.
    pub struct Config as "farlane_config" {
        /// [`MAGIC`].
        pub magic: U32,
        /// [`ABI_VERSION`].
        pub version: U32,
        /// `FEATURE_*`.
        pub features: U32,
        /// Contexts that can be open at a time; ids are below this number.
        pub max_contexts: U32,
        /// Regions (segments and pins) that a context can have; ids are below this number.
        pub max_regions: U32,
        /// Event indices that a context can bind; indices are below this number.
        pub max_events: U32,
        /// Length of the window in bytes, zero where there is none.
        pub window_bytes: U64,
        /// GID of the port, for information.
        pub gid: [u8; 16],
        /// Tells one life of the backend's device from the next, which knows nothing of the
        /// contexts that are open; each [`Reply`](crate::control::Reply) names the one that gives
        /// it. A VMM may connect to another backend without a word to the driver.
        pub generation: U64,
        /// MAC address of the network interface that the RDMA device belongs to, zero where none is
        /// named.
        pub mac: [u8; 6],
        /// Zero.
        pub reserved: [u8; 2],
    }
}
