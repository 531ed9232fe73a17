//! Plays a VM for a backend, without a VM and at native speed: its VMM at the other end of the
//! socket, and its drivers, over guest memory that is a memfd of this process.
//!
//! * [`guest_device`]: the virtio device of `farlane-rdma`, `/dev/farlaneN` in a VM;
//! * [`net`]: a network interface over vhost-user;
//! * [`nvme`]: a polled NVMe driver, in process or over a vfio-user socket;
//! * [`vfio_user`]: a vfio-user client that says whatever it is told to.
//!
//! The program `farlane-blk-driver` plays a VM with a vhost-user disk, `farlane-vm-driver` one with
//! any of these devices.

pub mod guest_device;
pub mod memory;
pub mod net;
pub mod nvme;
mod ring;
pub mod vfio_user;

pub use ring::RingError;

/// A length, offset or index in this process.
fn to_usize(value: impl Into<u64>) -> usize {
    farlane_abi::width::to_usize(value.into())
}

/// The low half of a word.
fn low(word: u32) -> u16 {
    let [a, b, _, _] = word.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// The high half.
fn high(word: u32) -> u16 {
    low(word >> 16)
}

/// Where a ring is, as a backend has answered `GET_VRING_BASE`: an index of 16 bits.
fn ring_index(base: u32) -> std::io::Result<u16> {
    u16::try_from(base).map_err(|_| std::io::Error::other(format!("A ring is at {base:#x}")))
}
