//! The daemon: a thread for the VMM of each VM, and one for processes of this host.

use crate::contexts::PortContexts;
use crate::host::HostSocket;
use crate::nodes::Nodes;
use crate::options::{Gid, HostOptions, Mac, Options, VmOptions};
use crate::reload::Terms;
use crate::{CAPABILITIES, NamedPort, metrics};
use farlane_daemon::access::Access;
use farlane_daemon::control::Stopper;
use farlane_daemon::keys::{Socket, SocketOption};
use farlane_daemon::listener::{Kind, Listener};
use farlane_daemon::metrics::Collect;
use farlane_daemon::options::{Capabilities, DaemonOptions};
use farlane_daemon::per_node;
use farlane_daemon::privileges::Needs;
use farlane_daemon::run::{Daemon, Drain};
use farlane_daemon::seccomp::SystemCalls;
use farlane_guest_device::control::RequestCounters;
use farlane_guest_device::device::{FarlaneDevice, Vm};
use farlane_rdma_remoting::{Port, PortConfig, Server};
use farlane_vhost_user::serve::serve;
use std::sync::Arc;

/// System calls besides those of every backend: memory of processes of this host, and their ends.
const SYSTEM_CALLS: &[libc::c_long] = &[
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_open,
];

/// `farlane-rdma`.
pub struct RdmaDaemon {
    /// Where each VM's VMM connects, in the order of the command line.
    vms: Vec<Listener>,
    /// Where processes of this host connect.
    host: Option<Listener>,
    /// What is told anew of each.
    pub(crate) terms: Terms,
}

/// What serves the contexts of all ports.
struct Service {
    server: Arc<Server>,
    nodes: Option<Arc<Nodes>>,
    counters: Arc<RequestCounters>,
}

impl Daemon for RdmaDaemon {
    type Options = Options;

    const CAPABILITIES: Capabilities = CAPABILITIES;

    fn daemon_options(options: &Options) -> &DaemonOptions {
        &options.daemon
    }

    fn check(options: &Options) -> anyhow::Result<()> {
        Ok(options.check()?)
    }

    fn open(options: &Options) -> anyhow::Result<Self> {
        farlane_daemon::heap::keep_little();
        let sockets = SocketOption::inherit_all(options.vms.iter().map(|vm| &vm.socket))?;
        Ok(Self {
            vms: Socket::listen_all(sockets, &options.daemon.access)?,
            host: match &options.host_socket {
                // Who may connect is let in by what the kernel says of each, besides.
                Some(host) => {
                    let (access, others) = (Access::default(), &host.admission);
                    let (users, groups) = (&others.users, &others.groups);
                    let kind = Kind::SeqPacket;
                    let path = &host.path;
                    Some(Listener::bind_for(path, kind, &access, users, groups)?)
                }
                None => None,
            },
            terms: Terms::default(),
        })
    }

    fn needs(&self) -> Needs {
        Needs {
            process_memory: self.host.is_some(),
        }
    }

    fn start(&mut self, options: &Options, stop: &Stopper) -> anyhow::Result<Collect> {
        let topology = options.locality.topology();
        let (server, nodes) = Nodes::serve(&topology, options.locality.given(), options.workers)?;
        let service = Service {
            server,
            nodes,
            counters: Arc::default(),
        };
        let mut ports = Vec::new();
        for (vm, listener) in options.vms.iter().zip(&self.vms) {
            let port = Arc::downgrade(&serve_vm(&service, vm, listener)?);
            self.terms.vms.push(port.clone());
            ports.push(NamedPort {
                name: vm.gid.to_string(),
                port,
            });
        }
        if let (Some(host), Some(listener)) = (&options.host_socket, &self.host) {
            let port = serve_host(&service, options.host_gid, host, listener, stop)?;
            self.terms.host = Some(Arc::downgrade(&port));
            ports.push(NamedPort {
                name: "host".to_owned(),
                port: Arc::downgrade(&port),
            });
        }
        if let Some(nodes) = &service.nodes {
            let ports = ports.iter().map(|named| named.port.clone());
            Arc::clone(nodes).follow(ports.collect())?;
        }
        Ok(Arc::new(move || {
            let Service {
                server,
                nodes,
                counters,
            } = &service;
            metrics(server, &ports, counters, nodes.as_deref())
        }))
    }

    fn system_calls(&self) -> SystemCalls {
        SystemCalls::any(&[SYSTEM_CALLS, per_node::SYSTEM_CALLS])
    }

    fn end(&mut self) -> Option<Drain> {
        self.vms.clear();
        self.host = None;
        None
    }
}

/// Serves a VM's VMM from a thread of its own.
fn serve_vm(service: &Service, vm: &VmOptions, listener: &Listener) -> anyhow::Result<Arc<Port>> {
    let name = format!("vm {}", vm.gid);
    let server = Arc::clone(&service.server);
    let port = server.port_with(vm.gid.0, name.clone(), vm.port.clone())?;
    let device = Vm {
        name: name.clone(),
        contexts: PortContexts::with_nodes(
            Arc::clone(&port),
            server,
            service.nodes.clone(),
            vm.mac.map_or([0; 6], |Mac(bytes)| bytes),
        ),
        window_bytes: vm.window_bytes,
        counters: Arc::clone(&service.counters),
    };
    let socket = listener.try_clone()?;
    log::info!("{name}: waiting at {listener}");
    let thread = std::thread::Builder::new().name(name.clone());
    thread.spawn(move || {
        serve(&name, socket, |channel| {
            FarlaneDevice::new(device.clone(), channel)
        })
    })?;
    Ok(port)
}

/// Serves processes of this host from a thread of its own.
fn serve_host(
    service: &Service,
    gid: Gid,
    host: &HostOptions,
    listener: &Listener,
    stop: &Stopper,
) -> anyhow::Result<Arc<Port>> {
    let server = &service.server;
    let config = PortConfig {
        on_demand: true,
        ..host.port.clone()
    };
    let port = server.port_with(gid.0, "host".to_owned(), config)?;
    let socket = HostSocket::new(
        listener.try_clone()?,
        host.admission.clone(),
        Arc::clone(&port),
        Arc::clone(&service.server),
        service.nodes.clone(),
        Arc::clone(&service.counters),
    )?;
    let stop = stop.clone();
    log::info!("host {gid}: waiting for processes");
    let thread = std::thread::Builder::new().name("host socket".to_owned());
    thread.spawn(move || {
        if let Err(e) = socket.run() {
            stop.fail(&format!("The host socket has failed: {e}"));
        }
    })?;
    Ok(port)
}
