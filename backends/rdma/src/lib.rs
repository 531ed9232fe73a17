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

use farlane_daemon::metrics::{label, write_labelled, write_samples};
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
fn write_gids(text: &mut String, ports: &[NamedPort]) {
    let mut header = "# HELP farlane_rdma_vm_gid A GID that the guest has set.\n\
                      # TYPE farlane_rdma_vm_gid gauge\n";
    for named in ports {
        let gids = named.port.upgrade().map(|port| port.gids());
        for (index, gid) in gids.into_iter().flatten() {
            text.push_str(std::mem::take(&mut header));
            let labels = [
                label("vm", &named.name),
                label("index", &index.to_string()),
                label("gid", &options::Gid(gid).to_string()),
            ];
            let labels = labels.join(",");
            text.push_str(&format!("farlane_rdma_vm_gid{{{labels}}} 1\n"));
        }
    }
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
    let samples = server.samples().into_iter();
    let samples = samples.chain(requests.samples());
    write_samples(&mut text, "farlane_rdma", samples);
    let has = |named: &NamedPort| Some((named.name.clone(), named.port.upgrade()?.samples()));
    let tenants: Vec<_> = ports.iter().filter_map(has).collect();
    write_labelled(&mut text, "farlane_rdma_vm", "vm", &tenants);
    write_gids(&mut text, ports);
    if let Some(nodes) = nodes {
        nodes.write(&mut text);
    }
    text
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
            let mut text = String::new();
            write_gids(&mut text, &ports);
            text
        };
        assert_eq!(text(), "");
        let options::Gid(gid) = "10.0.0.7".parse().unwrap();
        port.add_gid(3, gid).unwrap();
        let lines = text();
        let line = "\nfarlane_rdma_vm_gid{vm=\"10.0.0.1\",index=\"3\",gid=\"10.0.0.7\"} 1\n";
        assert!(lines.ends_with(line), "{lines}");
        port.close_all();
        assert_eq!(text(), "");
    }
}
