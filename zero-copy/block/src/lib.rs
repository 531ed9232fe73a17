//! Files and block devices as disks: what software disk controllers and disk backends have in
//! common, whatever their guests speak.
//!
//! * [`storage`]: files that hold a disk's blocks, opened once and for all; [`lock`]: who else must
//!   not have them.
//! * [`engine`]: the requests of a controller, step by step.
//! * [`ring`]: a worker's `io_uring`, which is also where it waits.
//! * [`syncs`]: which syncs of an open file are under way, and when one that has ended well can be
//!   believed.
//! * [`vectors`]: transfers that are over when the call returns.
//! * [`bounce`]: aligned copies, for memory that direct I/O cannot take.

pub mod bounce;
pub mod engine;
pub mod lock;
pub mod ring;
pub mod storage;
pub mod syncs;
pub mod vectors;

/// System calls of a worker, besides those of every daemon.
pub const SYSTEM_CALLS: &[libc::c_long] = &[
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_fdatasync,
];
