//! Plays a VM with a network interface for a vhost-user-net backend: its VMM at the other end of
//! the socket, and its driver on the virtqueues, at native speed and without a VM.
//!
//! The VM has two ranges of memory of the same size, the lower at address 0 and the upper at 4 GiB,
//! so that they can be on two nodes ([`Nic::memory_ranges`] says where they are). Rings and buffers
//! of queue pair `i` are in range `i % 2`.
//!
//! ```no_run
//! # fn main() -> Result<(), farlane_vm_front_end::net::Error> {
//! use farlane_vm_front_end::net::{Nic, Options};
//! use std::time::Duration;
//! let options = Options { pairs: 2, ..Options::default() };
//! let mut nic = Nic::connect("/run/net.sock".as_ref(), &options)?;
//! nic.send(0, &[0xff; 60])?;
//! while let Some((queue, frame)) = nic.receive(Duration::from_millis(100))? {
//!     println!("queue {queue}: {} bytes", frame.bytes.len());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Each [`Tx`] and [`Rx`] may be used by a thread of its own ([`Nic::pairs`]); [`Vmm`] stops,
//! starts and connects again meanwhile.

mod control;
pub mod frame;
mod header;
mod memory;
mod nic;
mod rx;
mod tx;
mod vmm;

pub use control::ControlQueue;
pub use header::{HEADER_BYTES, Header, feature};
pub use memory::{Range, bind};
pub use nic::{Nic, Options, Pair};
pub use rx::{Received, Rx};
pub use tx::{Frame, Tx};
pub use vmm::{Config, Vmm};

/// Why the play does not go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The guest's memory.
    #[error(transparent)]
    Memory(#[from] crate::memory::MemoryError),
    /// The vhost-user protocol failed.
    #[error("vhost-user: {what}")]
    Protocol {
        /// What was tried.
        what: &'static str,
        /// Why not.
        #[source]
        source: vhost::Error,
    },
    /// The device lacks a feature that is needed.
    #[error("The device lacks features {0:#x}")]
    Features(u64),
    /// The device has too few queue pairs.
    #[error("The device has {has} queue pairs of {wanted}")]
    Pairs {
        /// What it has.
        has: u64,
        /// What is wanted.
        wanted: u16,
    },
    /// A queue.
    #[error(transparent)]
    Ring(#[from] crate::RingError),
    /// The device breaks the rules of a network interface.
    #[error("The device breaks the rules: {0}")]
    Device(String),
    /// A frame is larger than the buffers.
    #[error("A frame of {0} bytes does not fit")]
    Large(usize),
    /// The device takes nothing any more.
    #[error("The device has done nothing for {0:?}")]
    Stuck(std::time::Duration),
    /// There is no control queue.
    #[error("The device has no control queue")]
    NoControl,
    /// The system failed.
    #[error("System call failed")]
    Io(#[from] std::io::Error),
}

impl From<rustix::io::Errno> for Error {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}
