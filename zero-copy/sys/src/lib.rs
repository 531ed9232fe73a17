//! System calls behind safe functions, without knowledge of virtual machines or devices.
//!
//! * [`chain()`]: an error with its causes, in one line.
//! * [`closing`]: descriptors of others, which may take for ever to close.
//! * [`eventfd`]: event descriptors that somebody else has made.
//! * [`log_limit`]: log lines that somebody else can cause.
//! * [`memory_file`]: anonymous files of memory.
//! * [`Mmap`]: memory mappings that unmap themselves.
//! * [`PciAddress`]: where a PCI function is.
//! * [`socket`]: messages with descriptors beside them.
//! * [`sync`]: locks without poison.
//! * [`thread`]: threads with names.

mod chain;
pub mod closing;
pub mod eventfd;
pub mod log_limit;
mod memory;
mod mmap;
mod pci_address;
pub mod socket;
pub mod sync;
pub mod thread;

pub use chain::chain;
pub use memory::memory_file;
pub use mmap::Mmap;
pub use pci_address::{PciAddress, PciAddressError};
