//! The RDMA backend: virtual RDMA devices for VMs and for processes of this host.
//!
//! * [`daemon`]: the daemon; [`options`]: the command line;
//! * [`contexts`]: the contexts of a VM, behind the device that its guest sees
//!   (`farlane-guest-device`);
//! * [`host`]: the socket for processes of this host;
//! * [`nodes`]: the workers of each NUMA node.
//!
//! What the devices do is the library's business (`farlane-rdma-remoting`).

pub mod contexts;
pub mod daemon;
pub mod host;
pub mod nodes;
pub mod options;

use farlane_daemon::metrics::{write_labelled, write_samples};
use farlane_rdma_remoting::{Port, Server};
use std::sync::Weak;

/// Type of this backend. QEMU's schema has none that fits.
pub const CAPABILITIES: farlane_daemon::options::Capabilities =
    farlane_daemon::options::Capabilities {
        kind: "rdma",
        features: &[],
    };

/// A port, and what metrics call it.
#[derive(Clone, Debug)]
pub struct NamedPort {
    /// Its label: the GID of a VM, or "host".
    pub name: String,
    /// The port, while it is there.
    pub port: Weak<Port>,
}

/// The counters, as Prometheus text.
#[must_use]
pub fn metrics_text(
    server: &Server,
    ports: &[NamedPort],
    requests: &farlane_guest_device::control::RequestCounters,
    nodes: Option<&nodes::Nodes>,
) -> String {
    let mut text = String::new();
    let samples = server.counters().samples().into_iter();
    let samples = samples.chain(requests.samples());
    write_samples(&mut text, "farlane_rdma", samples);
    let has = |named: &NamedPort| Some((named.name.clone(), named.port.upgrade()?.samples()));
    let tenants: Vec<_> = ports.iter().filter_map(has).collect();
    write_labelled(&mut text, "farlane_rdma_vm", "vm", &tenants);
    if let Some(nodes) = nodes {
        nodes.write(&mut text);
    }
    text
}
