//! What the VM kit and the agent in its guests say to each other.
//!
//! Both ends of a virtio-serial port carry frames: a little-endian `u32` length, then that many
//! bytes of one `Request` (kit to agent) or `Reply` (agent to kit). A job is named by the number
//! that the kit chose for it.

pub mod protocol;

/// The name of the virtio-serial port in the guest.
pub const PORT_NAME: &str = "farlane.agent";
