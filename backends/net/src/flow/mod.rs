//! Which received flow belongs to which queue (IOctoRFS, ioctopus-asplos20, sections 3.3 and 4).
//!
//! * [`parse`](mod@parse): headers of frames.
//! * [`table`]: the flow table, what the workers ask.
//! * [`Route`]: where a frame goes next.
//! * `follow`: where a flow's process runs, told from what the guest sends.
//! * `order`: how a flow's frames stay in order while it moves.
//! * `shard`: a bounded store of flows.
//! * `hints`: steering hints, which a port is asked to follow.
//! * [`hash`]: keyed hashes, and Toeplitz.

mod follow;
pub mod hash;
mod hints;
mod key;
pub(crate) mod order;
pub mod parse;
mod route;
pub(crate) mod shard;
pub mod table;

pub use key::FlowKey;
pub use order::Span;
pub use parse::{PARSE_BYTES, Parsed, Signal, parse};
pub use route::{Route, Ticket};
pub use table::{FlowTable, Placement, Settings};
