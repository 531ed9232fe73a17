//! The fuzz targets: what each does with one input.
//!
//! An input is a little program, see [`Input`]: steps that a guest or another hostile peer could
//! take, with all the bytes that it could write. Whatever it does, the backend must not panic, must
//! come to rest, must touch no memory but what was attached, and must have released everything in
//! the end. Where it can be, a target has no threads, so that an input always does the same.
//!
//! The programs in `src/bin` give these functions to libFuzzer; `tests/replay.rs` runs them over
//! the corpus.

// What fails here is a finding, or a system without memory.
#![allow(clippy::expect_used, clippy::unwrap_used)]

mod events;
mod input;
mod quiet;
mod ram;

pub use events::Raised;
pub use input::Input;
pub use quiet::format_all_logs;
pub use ram::{PAGE, Ram};

/// Nothing is left in a server of what processes had.
fn assert_nothing_left(server: &farlane_rdma_remoting::Server) {
    let counters = server.counters();
    for left in [
        &counters.contexts,
        &counters.queue_pairs,
        &counters.memory_regions,
    ] {
        assert_eq!(left.load(std::sync::atomic::Ordering::Relaxed), 0);
    }
}

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// What its program and its folder in the corpus are called.
    pub name: &'static str,
    /// Runs one input.
    pub run: fn(&[u8]),
}

pub mod targets;

pub use targets::ALL;
