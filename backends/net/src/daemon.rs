//! The daemon: interfaces, and a thread for the VMM of each.

use crate::interface::Interface;
use crate::options::{HostOption, NetOptions, Options};
use crate::pairs::PairCount;
use crate::port::Port;
use crate::port::tap::Tap;
use crate::port::xdp::{self, Xdp};
use crate::session::NetDevice;
use crate::{CAPABILITIES, SYSTEM_CALLS, metrics};
use farlane_daemon::control::Stopper;
use farlane_daemon::keys::{Socket, SocketOption};
use farlane_daemon::listener::Listener;
use farlane_daemon::metrics::Collect;
use farlane_daemon::options::{Capabilities, DaemonOptions};
use farlane_daemon::per_node::{self, WorkerNodes};
use farlane_daemon::periodic::every;
use farlane_daemon::reload::{Changeable, ControlOptions, Follow, Reloadable};
use farlane_daemon::run::{Daemon, Drain};
use farlane_daemon::seccomp::SystemCalls;
use farlane_vhost_user::serve::serve;
use std::sync::Arc;
use std::time::Duration;

/// How often it is looked whether interfaces have a link.
const LOOK_AT_LINKS: Duration = Duration::from_millis(500);

/// `farlane-net`.
pub struct NetDaemon {
    interfaces: Vec<Arc<Interface>>,
    /// Where each interface is served.
    listeners: Vec<Listener>,
}

impl Daemon for NetDaemon {
    type Options = Options;

    const CAPABILITIES: Capabilities = CAPABILITIES;

    fn daemon_options(options: &Options) -> &DaemonOptions {
        &options.daemon
    }

    fn check(options: &Options) -> anyhow::Result<()> {
        options.all_nets()?;
        Ok(())
    }

    fn open(options: &Options) -> anyhow::Result<Self> {
        let nets = options.all_nets()?;
        let sockets = SocketOption::inherit_all(nets.iter().map(|net| &net.socket))?;
        let nodes = WorkerNodes::new(options.locality.topology());
        let mut interfaces = Vec::new();
        for net in &nets {
            let interface = Interface::new(
                net.id.clone(),
                open_port(net, options)?,
                net.mac.map(|mac| mac.0),
                nodes.clone(),
                options.locality.given(),
            );
            interfaces.push(Arc::new(interface));
        }
        Ok(Self {
            interfaces,
            listeners: Socket::listen_all(sockets, &options.daemon.access)?,
        })
    }

    fn start(&mut self, _options: &Options, _stop: &Stopper) -> anyhow::Result<Collect> {
        let interfaces = self.interfaces.clone();
        every(LOOK_AT_LINKS, "links", move || {
            interfaces.iter().for_each(|interface| interface.look());
        })?;
        for (interface, listener) in self.interfaces.iter().zip(&self.listeners) {
            let (interface, socket) = (Arc::clone(interface), listener.try_clone()?);
            log::info!("Interface {}: waiting at {listener}", interface.name);
            let thread = std::thread::Builder::new().name(interface.name.clone());
            thread.spawn(move || {
                let name = format!("Interface {}", interface.name);
                serve(&name, socket, |channel| {
                    NetDevice::new(Arc::clone(&interface), channel)
                })
            })?;
        }
        let interfaces = self.interfaces.clone();
        Ok(Arc::new(move || metrics(&interfaces)))
    }

    fn system_calls(&self) -> SystemCalls {
        SystemCalls::any(&[per_node::SYSTEM_CALLS]).with(SYSTEM_CALLS)
    }

    fn end(&mut self) -> Option<Drain> {
        self.listeners.clear();
        // Threads hold them until the process ends.
        let ports = self.interfaces.iter().map(|interface| &interface.port);
        ports.for_each(|port| port.give_back());
        None
    }
}

/// Nothing but what every daemon follows: the rest is what was opened at the start.
impl Reloadable for NetDaemon {
    type Changes = ();

    const CHANGEABLE: &'static [Changeable] = &[];

    fn control_options(options: &Options) -> &ControlOptions {
        &options.control
    }

    fn changes(_options: &Options) -> anyhow::Result<()> {
        Ok(())
    }

    fn follow(&self) -> Follow<()> {
        Box::new(|()| Ok(()))
    }
}

/// What an interface is connected to.
fn open_port(net: &NetOptions, options: &Options) -> anyhow::Result<Box<dyn Port>> {
    let queues = PairCount(net.queues);
    Ok(match &net.host {
        HostOption::Tap(name) => Box::new(Tap::open(name, queues, net.mtu)?),
        HostOption::Xdp(name, mode) => {
            let node = xdp::node_of(&options.locality.sysfs(), name);
            Box::new(Xdp::open(name, queues, *mode, node)?)
        }
    })
}
