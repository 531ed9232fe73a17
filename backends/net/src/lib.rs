//! A network interface of a virtual machine over vhost-user, with a worker on every NUMA node.
//!
//! * [`daemon`]: the daemon; `options`: the command line.
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
mod options;
pub mod pairs;
pub mod port;
pub mod session;
mod worker;

use farlane_daemon::locality;
use farlane_daemon::metrics::write_labelled;
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

/// The counters of all interfaces, as Prometheus text.
#[must_use]
pub fn metrics_text(interfaces: &[Arc<Interface>]) -> String {
    let counted: Vec<_> = interfaces
        .iter()
        .map(|interface| (interface.name.clone(), interface.counters.samples()))
        .collect();
    let mut text = String::new();
    write_labelled(&mut text, "farlane_net", "net", &counted);
    let tables: Vec<_> = interfaces
        .iter()
        .filter_map(|interface| Some((interface.name.clone(), interface.flow_samples()?)))
        .collect();
    write_labelled(&mut text, "farlane_net", "net", &tables);
    let localities: Vec<_> = interfaces.iter().flat_map(|i| i.localities()).collect();
    locality::write(&mut text, "farlane_net", &localities);
    text
}
