//! Plays a VM for a backend: the VMM at the other end of its vhost-user socket, and the guest's
//! driver on the virtqueues, over guest memory that is a memfd of this process.
//!
//! So a backend is tested and measured as a VM would use it, at native speed and without one. What
//! a program has in a VM as `/dev/farlaneN`, it has here as a [`VmTransport`], which the client
//! library takes as it takes any transport. Memory that the program wants to register it takes from
//! [`Vm::allocate`], because only that is the guest's; [`Vm::allocate_scattered`] gives it page by
//! page from all over the guest's memory, as a real kernel does.
//!
//! ```no_run
//! # fn main() -> Result<(), farlane_vm_front_end::guest_device::Error> {
//! use farlane_vm_front_end::guest_device::Vm;
//! let vm = Vm::connect("/run/farlane/vm0.sock".as_ref(), 256 << 20)?;
//! let transport: std::sync::Arc<dyn farlane_transport::Transport> = vm.open()?;
//! # Ok(())
//! # }
//! ```

mod driver;
mod transport;
mod vmm;

pub use crate::memory::{GuestBuffer, GuestMemory};
pub use driver::Answer;
pub use transport::VmTransport;
pub use vmm::Vm;

use crate::memory::MemoryError;
use farlane_transport::TransportError;

/// Why the play does not go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The guest's memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A queue.
    #[error(transparent)]
    Ring(#[from] crate::RingError),
    /// The vhost-user protocol failed.
    #[error("vhost-user: {what}")]
    Protocol {
        /// What was tried.
        what: &'static str,
        /// Why not.
        #[source]
        source: vhost::Error,
    },
    /// The device is not one of ours.
    #[error("The device is not Farlane's: magic {magic:#x}, version {version}")]
    Device {
        /// What it says it is.
        magic: u32,
        /// Its version.
        version: u32,
    },
    /// The device refused, or is gone.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The system failed.
    #[error("System call failed")]
    Io(#[from] std::io::Error),
}

impl From<rustix::io::Errno> for Error {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}
