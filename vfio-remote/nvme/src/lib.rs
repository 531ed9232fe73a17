//! An NVMe 1.4 controller over files and block devices.
//!
//! [`NvmeSource`] opens what holds the namespaces; a function that is taken from it is the
//! controller in use: the driver writes registers, a worker thread reads commands from the
//! driver's queues and moves bytes straight between files and the driver's memory.
//!
//! * `bits`, `cmds`: wire layout, and commands parsed from it.
//! * `data`: where a command's data lies: physical region pages, scatter gather lists.
//! * `registers`, `doorbells`: what the driver touches.
//! * `ids`: which queue or namespace is meant.
//! * `queue`: ring mechanics.
//! * `controller`: the worker.
//! * `remote`: for memory that is not mapped.
//! * `error_log`: what has failed.
//! * `uuid`: identifiers that are nobody else's.
//! * `namespace`: where blocks are; [`farlane_block`] moves them.
//!
//! The numbers of sections and figures in the comments are those of NVM Express 1.4.

#[cfg(not(target_endian = "little"))]
compile_error!("NVMe structures are little-endian, and so has to be the host");

pub mod bits;
mod cmds;
mod config;
mod controller;
mod counters;
mod data;
mod doorbells;
mod error_log;
mod features;
mod function;
mod identify;
mod ids;
mod namespace;
mod queue;
mod registers;
mod remote;
mod shared;
mod source;
#[doc(hidden)]
pub mod still;
mod uuid;

use farlane_block::{bounce, ring, syncs, vectors};

pub use config::{
    Backing, BlockSize, Cache, Doorbells, Host, MAX_IO_QUEUES, MAX_NAMESPACES, NamespaceConfig,
    NvmeConfig, NvmeError,
};
/// Requests of `ioctl` that a controller makes.
pub use farlane_block::storage::IOCTLS;
pub use source::NvmeSource;
