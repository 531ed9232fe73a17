//! A network interface of a virtual machine over vhost-user, with a worker on every NUMA node.
//!
//! * [`daemon`]: the daemon; [`options`]: the command line.
//! * [`port`]: where frames come from and go to on the host.
//! * [`interface`]: an interface; [`session`]: as a VMM's front-end sees it.
//! * [`pairs`]: queue pairs by number.
//! * `worker`: the thread of a queue pair, which moves frames; `header`: what a guest's frames ask
//!   for.
//! * `guest`: what a VM's driver has set.
//! * [`flow`]: which received flow belongs to which queue.
//! * [`control`]: the control queue.
//! * [`offload`]: checksums and segmentation in software.
//! * `ebpf`: small programs that the kernel runs for a port.
//! * [`bits`]: wire layouts (virtio 1.2, 5.1).

pub mod bits;
pub mod control;
mod counters;
pub mod daemon;
mod ebpf;
pub mod flow;
mod guest;
mod header;
pub mod interface;
pub mod offload;
pub mod options;
pub mod pairs;
pub mod port;
pub mod session;
mod worker;

pub use ebpf::BpfError;

use farlane_daemon::metrics::Metrics;
use farlane_daemon::seccomp::With;
use interface::Interface;
use std::sync::Arc;

/// Type of this backend, and what of QEMU's conventions for it is there.
pub const CAPABILITIES: farlane_daemon::options::Capabilities =
    farlane_daemon::options::Capabilities {
        kind: "net",
        features: &[],
    };

/// What the kernel is asked for besides what every daemon asks: offloads and states of interfaces,
/// and where flows go.
pub const SYSTEM_CALLS: &[With] = &[
    With {
        call: libc::SYS_bpf,
        argument: 0,
        values: ebpf::COMMANDS,
    },
    With::requests(port::tap::REQUESTS),
];

/// Loads the program that steers a tap's frames into the kernel, and drops it at once, to see
/// whether this process may.
///
/// # Errors
/// See [`BpfError`].
pub fn try_steering() -> Result<(), BpfError> {
    ebpf::TapSteering::new(pairs::PairCount(1)).map(drop)
}

const FRAME_SECONDS: &str = "Time from when a worker takes a frame from the port until the guest's \
     buffers have it (rx), or from when it looks at one of the guest until the port has it (tx).";

/// The counters of all interfaces.
#[must_use]
pub fn metrics(interfaces: &[Arc<Interface>]) -> Metrics {
    let mut metrics = Metrics::default();
    for interface in interfaces {
        let labels = [("net", &*interface.name)];
        metrics.add("farlane_net", &labels, interface.counters.samples());
        for (way, times) in interface.times.all() {
            let labels = [labels[0], ("direction", way)];
            metrics.add_times("farlane_net_frame_seconds", FRAME_SECONDS, &labels, times);
        }
        let flows = interface.flow_samples().into_iter().flatten();
        metrics.add("farlane_net", &labels, flows);
        for (way, locality) in interface.localities() {
            let labels = [labels[0], ("direction", way)];
            locality.add_to(&mut metrics, "farlane_net", &labels);
        }
    }
    metrics
}
