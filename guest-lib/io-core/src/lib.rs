//! File I/O with device memory (spin-atc17, sections 4 and 5).
//!
//! A program registers device memory by address ([`register`]) and reads and writes files with
//! buffers in it ([`route::serve`], [`vector::serve`]); each part of a request goes through the
//! page cache, or by P2P: direct I/O through a [`tunnel`] or with the memory itself.
//! `libfarlane_io.so` puts these functions under the names of the C library.

pub mod automatic;
mod bounce;
pub mod config;
mod decide;
pub mod descriptors;
mod direct;
mod direct_fds;
pub mod disks;
mod file_id;
pub mod files;
mod fork;
mod lock;
pub mod locks;
mod log;
mod plain;
pub mod plan;
mod position;
pub mod provider;
mod ranges;
pub mod readahead;
mod region;
mod registry;
pub mod residency;
pub mod route;
mod staging;
pub mod stats;
pub mod stream;
pub mod sys;
pub mod trace;
pub mod tunnel;
pub mod vector;

pub use config::{Mode, set_mode};
pub use farlane_transport::guard;
pub use position::Position;
pub use registry::{
    RegisterError, is_registered, may_hold, may_overlap, register, register_with, unregister,
    unregister_overlapping,
};
pub use rustix::io::Errno;
pub use stats::{Totals, totals};
pub use sys::Direction;

/// Zero, or a negative error number: what the C interface returns.
#[must_use]
pub fn registry_errno(result: Result<(), RegisterError>) -> i32 {
    result.map_or_else(|error| -error.errno(), |()| 0)
}
