//! Transports between a process and a backend.
//!
//! [`open`] opens a [`Transport`]. There are two:
//!
//! * [`DeviceTransport`](device::DeviceTransport): in a VM, over `/dev/farlaneN` and the kernel
//!   driver;
//! * [`SocketTransport`](socket::SocketTransport): on the host, over the backend's UNIX socket.
//!
//! A transport carries no device's semantics: it shares memory ([`Segment`]), announces the
//! process's own memory ([`Pin`]), maps the backend's memory ([`Mapping`]), rings the backend's
//! doorbell and delivers its events.
//!
//! **Fork.** Segments and mappings are not inherited by a child process ([`Origin`]): there,
//! each operation on a transport of the parent fails with `ENODEV`.

pub mod device;
mod discover;
mod error;
mod fork;
pub mod guard;
mod map;
mod maps;
mod moved_memory;
mod owner;
mod packet;
mod pins;
mod quiet;
mod region;
mod region_ids;
mod shared_memory;
pub mod socket;
mod stop;
mod watch;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

pub use discover::{Address, DeviceInfo, SOCKET_VARIABLE, devices, tunnels};
pub use error::TransportError;
pub use fork::{Origin, PerProcess};
pub use map::Map;
pub use quiet::{spawn_quiet, with_signals_blocked};
pub use region::{Mapping, Pin, Segment, ShownFile};
pub use shared_memory::{SHARE_VARIABLE, allow_sharing};

/// What a transport knows about its device without asking the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportInfo {
    /// `FEATURE_*` of [`farlane_abi::config`].
    pub features: u32,
    /// Length of the window in bytes; zero where it is unknown or there is none.
    pub window_bytes: u64,
    /// GID of the port, where the transport knows it.
    pub gid: Option<[u8; 16]>,
}

/// What kind of memory a process pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinKind {
    /// Memory of the process.
    Memory,
    /// Whole pages of the process's memory that carry the envelopes of [`farlane_abi::tunnel`].
    Phony,
    /// Whole pages of a device's memory that the process has mapped.
    Device,
    /// All memory that the process has when it is used; address and length are zero. Only
    /// processes of the backend's own host have such pins, which pin nothing.
    AddressSpace,
}

/// A transport between one context of a process and a backend.
///
/// Regions are released by [`Segment`], [`Pin`] and [`Mapping`]; programs use those rather than
/// the methods that return bare ids.
pub trait Transport: Send + Sync + std::fmt::Debug {
    /// What the transport knows about its device.
    fn info(&self) -> TransportInfo;

    /// Allocates zeroed memory that both sides see. The first segment of a transport must be the
    /// context header.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn attach_segment(&self, length: usize) -> Result<(u32, Arc<Map>), TransportError>;

    /// Makes `length` bytes at `address` known to the backend and returns the region's id.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal (`EOPNOTSUPP` where the transport has no such pins,
    /// `EFAULT` where nothing of that kind is mapped there), or a dead device.
    ///
    /// # Safety
    /// Until the region is detached the memory stays mapped (of a [`PinKind::AddressSpace`] that
    /// part of it which requests name, while they are under way), and, if `writable`, the caller
    /// expects the backend to change it, or disks where it is [`PinKind::Phony`].
    unsafe fn attach_pin(
        &self,
        kind: PinKind,
        address: usize,
        length: usize,
        writable: bool,
    ) -> Result<u32, TransportError>;

    /// Shows the backend a file that this process has open, and returns the region's id. The file
    /// stays known while the region is attached.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal (`EOPNOTSUPP` where the transport shows no files), or
    /// a dead device.
    fn attach_file(&self, file: BorrowedFd<'_>) -> Result<u32, TransportError> {
        let _ = file;
        Err(TransportError::Refused {
            what: "Showing a file",
            errno: farlane_abi::Errno::EOPNOTSUPP,
        })
    }

    /// Takes a region away. Returns when the backend touches it no more.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn detach(&self, region: u32) -> Result<(), TransportError>;

    /// Maps host-allocated buffer `handle`: `length` bytes at `offset` of the window.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn map_buffer(&self, handle: u32, offset: u64, length: usize) -> Result<Map, TransportError>;

    /// Says that a mapping that [`map_buffer`](Self::map_buffer) made is gone.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn unmap_buffer(&self, handle: u32, offset: u64, length: usize) -> Result<(), TransportError>;

    /// Delivers event `index` to the eventfd `fd` from now on. When the device dies, every bound
    /// eventfd is signalled once.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn bind_event(&self, index: u32, fd: BorrowedFd<'_>) -> Result<(), TransportError>;

    /// Delivers event `index` no more.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn unbind_event(&self, index: u32) -> Result<(), TransportError>;

    /// Wakes a backend that has said that it sleeps.
    fn doorbell(&self);

    /// Sleeps until [`EVENT_WAKE`](farlane_abi::control::EVENT_WAKE), death of the device, a
    /// signal, or `timeout`.
    fn wait(&self, timeout: Duration);

    /// Whether the device is gone.
    fn is_dead(&self) -> bool;
}

/// Opens a transport to `device`.
///
/// # Errors
/// When the device cannot be opened, speaks another version, or refuses.
pub fn open(device: &DeviceInfo) -> Result<Arc<dyn Transport>, TransportError> {
    Ok(match &device.address {
        Address::Device(path) => Arc::new(device::DeviceTransport::open(path)?),
        Address::Socket(path) => Arc::new(socket::SocketTransport::open(path)?),
    })
}
