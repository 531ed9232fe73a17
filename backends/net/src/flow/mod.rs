//! Which received flow belongs to which queue (IOctoRFS, ioctopus-asplos20, sections 3.3 and 4).
//!
//! * [`parse`](mod@parse): headers of frames.
//! * [`table`]: the flow table, what the workers ask.
//! * [`route`]: where a frame goes next.
//! * [`votes`]: where a flow's process runs, told from what the guest sends.
//! * [`course`]: how a flow's frames stay in order while it moves.
//! * [`shard`]: a bounded store of flows.
//! * `wishes`: what a port is asked for.
//! * [`hash`]: keyed hashes, and Toeplitz.

pub mod course;
pub mod hash;
mod key;
pub mod parse;
pub mod route;
pub mod shard;
pub mod table;
pub mod votes;
mod wishes;

pub use course::Span;
pub use key::FlowKey;
pub use parse::{PARSE_BYTES, Parsed, Signal, parse};
pub use route::{Route, Ticket};
pub use table::{FlowTable, Placement, Settings};
