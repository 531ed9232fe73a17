//! What threads meet by: of the standard library, where `tests/loom.rs` has loom's.

pub(crate) use farlane_sys::sync::lock;
pub(crate) use farlane_worker::wake;
pub(crate) use std::sync::{Mutex, atomic};

/// What wakes a worker.
pub(crate) type WorkerEvent = std::os::fd::OwnedFd;
