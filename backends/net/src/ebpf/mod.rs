//! Small programs that the kernel runs for a port.
//!
//! * [`assemble`]: an assembler.
//! * [`system`]: the system call `bpf`.
//! * [`steering`]: which queue of a tap gets a frame.
//! * [`redirect`]: frames of a NIC's queues to AF_XDP sockets.

pub mod assemble;
pub mod redirect;
pub mod steering;
pub mod system;

pub use steering::TapSteering;
pub use system::{BpfError, COMMANDS};
