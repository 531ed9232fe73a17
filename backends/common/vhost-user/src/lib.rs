//! Devices over vhost-user whose queues their own threads serve.
//!
//! * [`serve`]: one VMM after the other on a [`socket`]; [`session`]: what one has negotiated, for
//!   any [`session::Device`].
//! * [`memory`]: its memory table; [`channel`]: what a backend asks of it.
//! * `upstream`: what the `vhost` crate does not do (yet).
//! * [`vring`], [`chain`], [`segment`], [`bits`]: queues in guest memory; [`call`]: how drivers are
//!   told.
//! * [`inflight`]: requests under way, for the backend that comes next.

#[cfg(not(target_endian = "little"))]
compile_error!("Guests' queues are little-endian, and so has to be the host");

pub mod bits;
pub mod call;
pub mod chain;
pub mod channel;
mod device;
pub mod inflight;
pub mod memory;
pub mod segment;
pub mod serve;
pub mod session;
pub mod socket;
mod upstream;
pub mod vring;
