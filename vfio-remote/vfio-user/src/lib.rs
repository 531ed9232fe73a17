//! A vfio-user server: a device outside of the VMM.
//!
//! The protocol is that of QEMU's `docs/interop/vfio-user.rst`, version 0.1, over UNIX stream
//! sockets; peers are QEMU's `vfio-user-pci`, Cloud Hypervisor's `--user-device` and SPDK. A device
//! implements [`Device`] and is served by [`Server::serve`], one thread each, so that a client that
//! is slow or stuck holds nobody else.
//!
//! ```no_run
//! # use farlane_vfio_user::{Device, Server};
//! # fn example(device: impl Device) -> std::io::Result<()> {
//! let listener = std::os::unix::net::UnixListener::bind("/run/device.sock")?;
//! return Err(Server::serve("device", listener.into(), device));
//! # }
//! ```
//!
//! # What a client can do
//!
//! Nothing but what [`Device`] describes: what enters is taken apart by [`parse`] into a
//! [`Request`] or refused. A command that is refused is answered by an error and changes nothing. A
//! header that cannot be right ends the connection, as does a message that is not finished within
//! ten seconds, and a client that has not negotiated within as long. Memory is bounded by
//! [`MAX_TRANSFER_BYTES`] for the message, and [`MAX_DMA_MAPS`] entries.
//!
//! # What is not there
//!
//! Migration, dirty page tracking, and the second socket for messages to the client: they are not
//! offered, and refused.

mod capabilities;
mod client;
mod counters;
mod device;
mod mappings;
mod reply;
mod request;
mod server;
mod session;
mod socket;
mod stop;
pub mod wire;

pub use capabilities::{Capabilities, CapabilitiesError};
pub use client::{ANSWER_TIMEOUT, AccessPause, Client, ClientError};
pub use counters::{CounterValues, Counters};
pub use device::{
    Device, DeviceInfo, DmaMap, IoFd, IoFdKind, IrqAction, IrqInfo, IrqRequest, MAX_IRQ_TYPES,
    MAX_REGIONS, MapArea, RegionInfo,
};
pub use reply::Reply;
pub use request::{IrqData, IrqsRequest, MapRequest, Request, RequestError, Writes, parse};
pub use rustix::io::Errno;
pub use server::Server;
pub use session::{Next, Session};
pub use stop::Stop;

/// Page size of DMA mappings, and of areas that are mapped.
pub const PAGE_BYTES: u64 = 4096;
/// Most bytes of data in one message: the protocol's default.
pub const MAX_TRANSFER_BYTES: u32 = 1 << 20;
/// Most mappings of a client's memory at a time.
pub const MAX_DMA_MAPS: usize = 4096;
/// Most descriptors that the server asks a client to send in one message: QEMU allows no more to be
/// stated.
pub const MAX_MESSAGE_FDS: usize = 16;
/// Most descriptors that are taken in one message: what the kernel allows (`SCM_MAX_FD`). Cloud
/// Hypervisor sends an eventfd for each vector at once, however many were agreed.
pub const MAX_RECEIVED_FDS: usize = 253;
/// Most areas of a region that can be mapped.
pub const MAX_AREAS: usize = 64;
