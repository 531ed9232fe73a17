//! The RDMA backend: virtual RDMA devices for VMs and for processes of this host.
//!
//! * [`daemon`]: the daemon; [`options`]: the command line;
//! * [`reload`]: what of it a running daemon is told anew;
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
pub mod reload;

use farlane_daemon::metrics::{Metrics, Sample};
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

/// Which GIDs the guests of VMs have set: an entry each, of the value 1.
fn add_gids(metrics: &mut Metrics, ports: &[NamedPort]) {
    for named in ports {
        let gids = named.port.upgrade().map(|port| port.gids());
        for (index, gid) in gids.into_iter().flatten() {
            let (index, gid) = (index.to_string(), options::Gid(gid).to_string());
            let labels = [("vm", &*named.name), ("index", &index), ("gid", &gid)];
            let sample = Sample::gauge("gid", "A GID that the guest has set.", 1);
            metrics.add("farlane_rdma_vm", &labels, [sample]);
        }
    }
}

const CALL_SECONDS: &str =
    "Time from when a worker begins with a call of a process until it is answered.";

const REQUEST_SECONDS: &str = "Time from when a worker takes a send request until its completion \
     can be seen, of those that end in success; one request in 61 of each queue pair is timed.";

/// The counters.
#[must_use]
pub fn metrics(
    server: &Server,
    ports: &[NamedPort],
    requests: &farlane_guest_device::control::RequestCounters,
    nodes: Option<&nodes::Nodes>,
) -> Metrics {
    let mut metrics = Metrics::default();
    metrics.add("farlane_rdma", &[], server.samples());
    metrics.add("farlane_rdma", &[], requests.samples());
    for named in ports {
        if let Some(port) = named.port.upgrade() {
            let labels = [("vm", &*named.name)];
            metrics.add("farlane_rdma_vm", &labels, port.samples());
            let (name, help) = ("farlane_rdma_vm_call_seconds", CALL_SECONDS);
            metrics.add_times(name, help, &labels, port.call_times());
            for (operation, times) in port.request_times().all() {
                let labels = [labels[0], ("operation", operation)];
                let (name, help) = ("farlane_rdma_vm_request_seconds", REQUEST_SECONDS);
                metrics.add_times(name, help, &labels, times);
            }
        }
    }
    add_gids(&mut metrics, ports);
    if let Some(nodes) = nodes {
        nodes.add_to(&mut metrics);
    }
    metrics
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn metrics_say_which_gids_a_guest_has_set() {
        let server = Server::without_workers();
        let port = server.port([1; 16], "vm".into()).unwrap();
        let ports = [NamedPort {
            name: "10.0.0.1".into(),
            port: Arc::downgrade(&port),
        }];
        let text = || {
            let mut metrics = Metrics::default();
            add_gids(&mut metrics, &ports);
            metrics.open_metrics()
        };
        assert_eq!(text(), "# EOF\n");
        let options::Gid(gid) = "10.0.0.7".parse().unwrap();
        port.add_gid(3, gid).unwrap();
        let lines = text();
        let line = "\nfarlane_rdma_vm_gid{vm=\"10.0.0.1\",index=\"3\",gid=\"10.0.0.7\"} 1\n# EOF\n";
        assert!(lines.ends_with(line), "{lines}");
        port.close_all();
        assert_eq!(text(), "# EOF\n");
    }
}
