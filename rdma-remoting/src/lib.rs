//! RDMA by API remoting: the host's side.
//!
//! Bottom to top:
//!
//! * [`request`]: bytes of a work request to a typed one, once, at the edge;
//! * [`work_queue`], [`completion_queue`], [`call_ring`]: rings in memory shared with a process;
//! * [`spin`]: how either side stops polling, to be woken (`farlane_worker::wake`);
//! * [`table`], [`memory`]: handles and memory keys, each owned by one context;
//! * [`engine`]: what carries work out; [`engine::soft`] is the embedded one;
//! * [`local`]: the same engine without remoting;
//! * [`context`], `verbs`: the objects of one process and the calls on them;
//! * [`port`], [`server`]: the VMs and the threads that serve them; `round`: who has a turn, and
//!   how long; [`limbs`]: threads that belong to NUMA nodes.

pub mod call_ring;
pub mod completion_queue;
pub mod context;
pub mod counters;
pub mod engine;
pub mod ledger;
pub mod limbs;
pub mod local;
pub mod memory;
pub mod port;
pub mod request;
mod round;
pub mod server;
pub mod spin;
pub mod table;
#[cfg(test)]
mod testing;
mod verbs;
pub mod work_queue;
mod worker;

pub use context::{BufferMapping, Context, EventSink};
pub use counters::Counters;
pub use ledger::{Resource, Share};
pub use port::Port;
pub use server::{Doorbell, Server, ServerConfig, ServerError};
