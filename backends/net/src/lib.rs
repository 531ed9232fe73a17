//! A network interface of a virtual machine over vhost-user, with a limb on every NUMA node.
//!
//! * [`bits`]: wire layouts (virtio 1.2, 5.1).
//! * [`port`]: where frames come from and go to on the host.
//! * [`flow`]: which received flow belongs to which queue.
//! * [`control`]: the control queue.
//! * [`ebpf`]: small programs that the kernel runs for a port.

pub mod bits;
pub mod control;
pub mod ebpf;
pub mod flow;
pub mod port;
