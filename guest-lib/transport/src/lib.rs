//! The way from a process to a backend.
//!
//! [`Link`] is what a transport offers; [`open`] opens one. There are two:
//!
//! * [`DeviceLink`](device::DeviceLink): in a VM, over `/dev/farlaneN` and the kernel driver;
//! * [`SocketLink`](socket::SocketLink): on the host, over the backend's UNIX socket.
//!
//! A link carries no device's semantics: it shares memory ([`Segment`]), announces the process's
//! own memory ([`Pin`]), maps the backend's memory ([`Mapping`]), rings the backend's doorbell and
//! delivers its events.
//!
//! **Fork.** Segments and mappings are not inherited by a child process ([`Origin`]): there,
//! each operation on a link of the parent fails with `ENODEV`.

pub mod device;
mod discover;
mod error;
mod fork;
pub mod guard;
mod map;
mod packet;
mod quiet;
mod region;
mod region_ids;
pub mod socket;
mod watch;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

pub use discover::{Address, DeviceInfo, SOCKET_VARIABLE, devices, tunnels};
pub use error::LinkError;
pub use fork::Origin;
pub use map::Map;
pub use quiet::{spawn_quiet, with_signals_blocked};
pub use region::{Mapping, Pin, Segment};

/// What a link knows about its device without asking the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkInfo {
    /// `FEATURE_*` of [`farlane_abi::config`].
    pub features: u32,
    /// Length of the window in bytes; zero where it is unknown or there is none.
    pub window_bytes: u64,
    /// GID of the port, where the link knows it.
    pub gid: Option<[u8; 16]>,
}

/// A transport between one context of a process and a backend.
///
/// Regions are released by [`Segment`], [`Pin`] and [`Mapping`]; programs use those rather than
/// the methods that return bare ids.
pub trait Link: Send + Sync + std::fmt::Debug {
    /// What the link knows about its device.
    fn info(&self) -> LinkInfo;

    /// Allocates zeroed memory that both sides see. The first segment of a link must be the
    /// context header.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn attach_segment(&self, length: usize) -> Result<(u32, Arc<Map>), LinkError>;

    /// Makes `length` bytes of this process's memory at `address` known to the backend and
    /// returns the region's id.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    ///
    /// # Safety
    /// Until the region is detached the memory stays mapped, and, if `writable`, the caller
    /// expects the backend to change it.
    unsafe fn attach_pin(
        &self,
        address: usize,
        length: usize,
        writable: bool,
    ) -> Result<u32, LinkError>;

    /// Makes `length` bytes at `address`, both multiples of the page size, known as memory whose
    /// pages carry the envelopes of [`farlane_abi::tunnel`], and returns the region's id.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    ///
    /// # Safety
    /// Until the region is detached the memory stays mapped, and the caller expects disks to change
    /// it.
    unsafe fn attach_phony(&self, _address: usize, _length: usize) -> Result<u32, LinkError> {
        Err(refused("Pinning phony memory"))
    }

    /// Makes `length` bytes at `address`, both multiples of the page size, known as memory of a
    /// device that this process has mapped, and returns the region's id.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal (when nothing of a device is mapped there), or a dead
    /// device.
    ///
    /// # Safety
    /// If `writable`, the caller expects the backend to change it.
    unsafe fn attach_device(
        &self,
        _address: usize,
        _length: usize,
        _writable: bool,
    ) -> Result<u32, LinkError> {
        Err(refused("Pinning device memory"))
    }

    /// Takes a region away. Returns when the backend touches it no more.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn detach(&self, region: u32) -> Result<(), LinkError>;

    /// Maps host-allocated buffer `handle`: `length` bytes at `offset` of the window.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn map_buffer(&self, handle: u32, offset: u64, length: usize) -> Result<Map, LinkError>;

    /// Says that a mapping that [`map_buffer`](Self::map_buffer) made is gone.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn unmap_buffer(&self, handle: u32, offset: u64, length: usize) -> Result<(), LinkError>;

    /// Delivers event `index` to the eventfd `fd` from now on. When the device dies, every bound
    /// eventfd is signalled once.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn bind_event(&self, index: u32, fd: BorrowedFd<'_>) -> Result<(), LinkError>;

    /// Delivers event `index` no more.
    ///
    /// # Errors
    /// The backend's or the kernel's refusal, or a dead device.
    fn unbind_event(&self, index: u32) -> Result<(), LinkError>;

    /// Wakes a backend that has said that it sleeps.
    fn doorbell(&self);

    /// Sleeps until [`EVENT_WAKE`](farlane_abi::control::EVENT_WAKE), death of the device, a
    /// signal, or `timeout`.
    fn wait(&self, timeout: Duration);

    /// Whether the device is gone.
    fn is_dead(&self) -> bool;
}

/// What a link says to an operation that its transport has not.
fn refused(what: &'static str) -> LinkError {
    let errno = farlane_abi::Errno::EOPNOTSUPP;
    LinkError::Refused { what, errno }
}

/// Opens a link to `device`.
///
/// # Errors
/// When the device cannot be opened, speaks another version, or refuses.
pub fn open(device: &DeviceInfo) -> Result<Arc<dyn Link>, LinkError> {
    Ok(match &device.address {
        Address::Device(path) => Arc::new(device::DeviceLink::open(path)?),
        Address::Socket(path) => Arc::new(socket::SocketLink::open(path)?),
    })
}
