//! A file with a volatile write cache, for tests of durability.
//!
//! What a test reads back from an ordinary file comes out of the page cache, whether or not the
//! code under test has flushed it. [`VolatileDisk`] serves one file through FUSE instead and keeps
//! a [`Log`] of the requests that the kernel sends for it: `FUSE_WRITE` and `FUSE_FALLOCATE` with
//! their bytes, and `FUSE_FSYNC` as a barrier. From the log it makes the [image](Log::image) that a
//! power loss at any point would have left: all that was flushed, and of the rest nothing,
//! everything, or a subset, as a disk may have written back what it liked. This is what
//! dm-log-writes does for block devices, without a kernel module.
//!
//! * A write with `O_DSYNC` among its flags (also one with `RWF_DSYNC`) is durable by itself, as
//!   one with FUA is; it makes no earlier write durable.
//! * The file bypasses the page cache (`FOPEN_DIRECT_IO`): each write of the code under test is a
//!   request, and a completed one is in the log.
//! * [`History`] notes what a driver was told is durable, and finds it in the images of all later
//!   points; a [`Load`] does so for a random load of a [`Device`].
//! * Requests can be made to [fail](VolatileDisk::fail), to [write fewer
//!   bytes](VolatileDisk::shorten_writes) than they were asked to, or, flushes, reads and closes
//!   only, to [wait](VolatileDisk::hold_flushes).
//!
//! It needs `/dev/fuse` and the right to mount; without them [`VolatileDisk::new`] fails. The mount
//! is in a mount namespace of the calling thread and its children, so that it is gone with them,
//! also when they are killed.

mod disk;
mod history;
mod load;
mod log;
mod namespace;
mod server;

pub use disk::VolatileDisk;
pub use history::{Attempt, Checked, History};
pub use load::{Device, LOAD_BYTES, Load, Request};
pub use log::{Caches, Entry, Log, PowerLoss, SECTOR};
pub use server::Operation;
