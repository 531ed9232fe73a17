//! Plays a VM for a backend, without a VM and at native speed: its VMM at the other end of the
//! socket, and its drivers, over guest memory that is a memfd of this process.
//!
//! * [`guest_device`]: the virtio device of `farlane-rdma`, `/dev/farlaneN` in a VM;
//! * [`net`]: a network interface over vhost-user;
//! * [`nvme`]: a polled NVMe driver, in process or over a vfio-user socket;
//! * [`vfio_user`]: a vfio-user client that says whatever it is told to.
//!
//! The program `farlane-blk-driver` plays a VM with a vhost-user disk.

pub mod guest_device;
pub mod memory;
pub mod net;
pub mod nvme;
mod ring;
pub mod vfio_user;

pub use ring::RingError;

fn to_usize(value: impl TryInto<usize>) -> usize {
    // This crate is for 64-bit hosts, like the devices it plays with.
    value.try_into().unwrap_or(usize::MAX)
}
