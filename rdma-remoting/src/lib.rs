//! RDMA by API remoting: the host's side.
//!
//! Bottom to top:
//!
//! * [`address`]: ports, queue pairs and groups by name;
//! * [`request`]: bytes of a work request to a typed one, once, at the edge;
//! * `ring`, [`work_queue`], [`completion_queue`], [`call_ring`]: rings in memory shared with a
//!   process;
//! * [`shared_receive_queue`]: receive requests that several queue pairs take; [`xrc`]: those that
//!   messages name; both as the embedded engine has them; `xrc_domains`, `xrc_target`: what
//!   contexts have of domains together;
//! * [`table`], [`memory`], `address_handles`: handles and memory keys, each owned by one context;
//! * [`engine`]: what carries work out; [`engine::soft`] is the embedded one;
//! * [`local`]: the same engine without remoting;
//! * [`context`], `objects`, `async_ring`: what one process owns, `shared_contexts`: what it lets
//!   others have; `verbs`: the calls on it;
//!   `turn`: a context's turn, `drr`: how much of it each has, and `round`: who has one;
//! * `worker`: the threads that give turns, `hand`: what each has at hand; [`nodes`]: those that
//!   belong to NUMA nodes;
//! * `connections`: what connects the programs of ports, by messages of their queue pairs 1;
//! * [`port`]: what a VM sees as its device, `gids`: what peers name it by, and [`peers`]: whom it
//!   may connect to; `adapter`: what
//!   ports share, [`ledger`]: how much of it each has, [`throughput`]: how much each carries out;
//!   [`server`]: all of them.

mod adapter;
pub mod address;
mod address_handles;
mod async_ring;
pub mod call_ring;
mod clock;
pub mod completion_queue;
mod connections;
pub mod context;
mod context_keys;
pub mod counters;
mod draws;
mod drr;
pub mod engine;
mod gids;
mod hand;
#[cfg(test)]
mod hand_tests;
mod inbox;
mod keys;
pub mod ledger;
pub mod local;
pub mod memory;
pub mod nodes;
mod objects;
pub mod peers;
pub mod port;
mod ready;
pub mod request;
pub mod request_times;
mod ring;
mod round;
mod schedule;
mod segment;
pub mod server;
mod shared_contexts;
pub mod shared_receive_queue;
#[cfg(test)]
mod shared_receive_queue_tests;
mod sync;
pub mod table;
#[cfg(test)]
mod testing;
pub mod throughput;
pub mod traffic;
mod turn;
mod verbs;
pub mod work_queue;
mod worker;
pub mod xrc;
mod xrc_domains;
mod xrc_target;

pub use adapter::PortError;
pub use async_ring::EventSink;
pub use clock::DeviceClock;
pub use context::{BufferMapping, Context};
pub use counters::Counters;
pub use gids::{GidPolicy, GidPrefix};
pub use ledger::{Limits, Resource, Share};
pub use peers::Peers;
pub use port::{Party, Port, PortConfig};
pub use server::{Doorbell, Server, ServerConfig, ServerError};
pub use throughput::{Rates, Throughput};
pub use traffic::Traffic;
pub use xrc_domains::FileId;
