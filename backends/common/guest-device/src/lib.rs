//! The virtio device that guests know as `/dev/farlaneN`, as a backend serves it over vhost-user.
//!
//! * [`request`]: bytes of a control request to a typed one, once, at the edge;
//!   [`ids`](farlane_abi::ids): its numbers;
//! * [`device`]: the vhost-user device of one VM, with [`control`], [`regions`] and [`events`]
//!   behind its queues; [`ring`]: those, in the VM's memory; `worker`: who serves them;
//! * [`contexts`]: what a backend makes of its guests' processes and their memory.

pub mod contexts;
pub mod control;
pub mod device;
pub mod events;
pub mod regions;
pub mod request;
pub mod ring;
mod worker;
