//! Fuzz targets for everything that a hostile guest writes: the call ring, the control queue and work requests.
//!
//! `cargo xtask test --fuzz` runs each for a minute over a copy of its corpus. By hand, in this folder:
//!
//! ```text
//! cargo run --release --bin call_ring -- corpus/call_ring                  # until it finds something
//! cargo run --release --bin call_ring -- crash-...                         # what it found, again
//! cargo run --release --bin call_ring -- -merge=1 new-corpus corpus/call_ring
//! ```
//!
//! An input is a little program, see [`Input`]: steps that a guest could take, with all the bytes that it could write.
//! Whatever it does, the backend must not panic, must come to rest, must touch no memory but what was attached, and must
//! have released everything in the end. There are no threads, so that an input always does the same.

mod events;
mod input;
mod quiet;
mod ram;

pub use events::Raised;
pub use input::Input;
pub use quiet::format_all_logs;
pub use ram::{PAGE, Ram};
