//! A polled NVMe driver in user space, for tests and measurements at native speed.
//!
//! It shares the wire layout with the controller that it drives, and nothing else: ring mechanics
//! are written here once more, from the specification (NVM Express 1.4).
//!
//! * [`Transport`]: how registers are reached: [`InProcess`], over a
//!   [`Function`](farlane_pci::Function); [`Socket`], over a vfio-user socket, by the `vfio_user`
//!   crate's client.
//! * [`Memory`]: the memory of the machine that the driver plays.
//! * [`Driver`]: the controller, enabled, with its admin queue; [`Queue`]: a pair of I/O queues.

mod driver;
mod in_process;
mod memory;
mod queue;
mod socket;
mod transport;
mod wire;

pub use driver::{Driver, DriverError};
pub use farlane_nvme::bits::nvm as io;
pub use in_process::InProcess;
pub use memory::Memory;
pub use queue::{Completion, Queue};
pub use socket::Socket;
pub use transport::{Register, Transport};
pub use wire::{Command, admin};
