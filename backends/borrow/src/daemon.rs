//! The daemon: a thread for the VMM of each borrowed device.

use crate::CAPABILITIES;
use crate::metrics::{DeviceMetrics, metrics};
use crate::options::Options;
use anyhow::Context as _;
use farlane_daemon::access::Access;
use farlane_daemon::control::Stopper;
use farlane_daemon::keys::{Socket, SocketOption};
use farlane_daemon::listener::{Kind, Listener};
use farlane_daemon::metrics::Collect;
use farlane_daemon::options::{Capabilities, DaemonOptions, host_name};
use farlane_daemon::reload::{Changeable, ControlOptions, Follow, Reloadable};
use farlane_daemon::run::{Daemon, Drain};
use farlane_daemon::seccomp::{ALL_SOCKETS, NONBLOCKING, SystemCalls};
use farlane_ntb::{IvshmemNtb, Ntb};
use farlane_vfio_remote::borrower::{BorrowCounters, Borrowed, BorrowerConfig, Peers};
use farlane_vfio_remote::protocol::{Address, AddressError, Connector, TlsIdentity};
use farlane_vfio_user::{Counters, Server, Stop};
use farlane_zero_copy::broker::{self, Publisher, Subscription};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::sync::Arc;

/// System calls besides those of every backend: sessions with lenders, a new one for each VMM.
const SYSTEM_CALLS: &[libc::c_long] = &[libc::SYS_connect];

/// `farlane-borrow`.
pub struct BorrowDaemon {
    connector: Connector,
    bridges: Vec<(String, Arc<dyn Ntb>)>,
    /// Where each device is served, in the order of the command line.
    sockets: Vec<Listener>,
    /// Where the devices' memory is published.
    publish: Option<Listener>,
    /// Where other backends publish theirs.
    subscriptions: Vec<Subscription>,
    stops: Vec<Stop>,
}

impl Daemon for BorrowDaemon {
    type Options = Options;

    const CAPABILITIES: Capabilities = CAPABILITIES;

    fn daemon_options(options: &Options) -> &DaemonOptions {
        &options.daemon
    }

    fn check(options: &Options) -> anyhow::Result<()> {
        Ok(options.check()?)
    }

    fn open(options: &Options) -> anyhow::Result<Self> {
        let inherited = options.fd.iter().map(|&fd| SocketOption::Descriptor(fd));
        let made = options.socket_path.iter().cloned().map(SocketOption::Path);
        let sockets = inherited.chain(made).map(|socket| socket.inherit());
        let sockets = sockets.collect::<Result<_, _>>()?;
        Ok(Self {
            connector: connector(options)?,
            bridges: bridges(options)?,
            sockets: Socket::listen_all(sockets, &options.daemon.access)?,
            publish: match &options.publish {
                // Whoever connects can write the devices' memory: no group of VMMs, each of which
                // has another VM.
                Some(path) => Some(Listener::bind(path, Kind::SeqPacket, &Access::default())?),
                None => None,
            },
            subscriptions: Vec::new(),
            stops: Vec::new(),
        })
    }

    fn start(&mut self, options: &Options, stop: &Stopper) -> anyhow::Result<Collect> {
        let peers = self.peers(options)?;
        let windows = options.peer_windows.iter().map(|window| &window.0);
        let windows: Vec<_> = windows.cloned().collect();
        let name = options.name.clone().unwrap_or_else(host_name);
        let mut devices = Vec::new();
        for (device, socket) in options.devices.iter().zip(&self.sockets) {
            let config = BorrowerConfig {
                name: name.clone(),
                device: device.clone(),
                connector: self.connector.clone(),
                bridges: self.bridges.clone(),
                interrupts: options.interrupts.into(),
                peers: peers.clone(),
                peer_windows: windows.clone(),
            };
            let (metrics, end) = serve(config, socket, stop)?;
            devices.push(metrics);
            self.stops.push(end);
        }
        Ok(Arc::new(move || metrics(&devices)))
    }

    fn system_calls(&self) -> SystemCalls {
        SystemCalls::any(&[
            SYSTEM_CALLS,
            farlane_ntb::SYSTEM_CALLS,
            broker::SYSTEM_CALLS,
        ])
        .with(&[ALL_SOCKETS, NONBLOCKING])
    }

    /// Devices are returned when their sessions end with the process.
    fn end(&mut self) -> Option<Drain> {
        self.stops.iter().for_each(Stop::stop);
        self.subscriptions.clear();
        self.sockets.clear();
        self.publish = None;
        None
    }
}

impl BorrowDaemon {
    /// The devices of one VM as one another's peers, where that is asked for.
    fn peers(&mut self, options: &Options) -> anyhow::Result<Option<Arc<Peers>>> {
        if self.publish.is_none() && options.device_memory.is_empty() {
            return Ok(None);
        }
        let publisher = match &self.publish {
            Some(socket) => Some(Publisher::new(socket.try_clone()?)?),
            None => None,
        };
        let peers = Peers::new(publisher);
        for path in &options.device_memory {
            let subscription = peers.subscribe(path);
            let subscription =
                subscription.with_context(|| format!("Cannot subscribe to {}", path.display()))?;
            self.subscriptions.push(subscription);
        }
        Ok(Some(peers))
    }
}

/// Which lender is asked when the next VMM connects.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Changes {
    lender: String,
    /// A confined daemon asks nobody for the addresses of a name.
    places: Vec<SocketAddr>,
}

impl Reloadable for BorrowDaemon {
    type Changes = Changes;

    const CHANGEABLE: &'static [Changeable] = &[("lender", &[])];

    fn control_options(options: &Options) -> &ControlOptions {
        &options.control
    }

    fn changes(options: &Options) -> anyhow::Result<Changes> {
        Ok(Changes {
            lender: options.lender.to_string(),
            places: options.lender.resolve()?,
        })
    }

    fn follow(&self) -> Follow<Changes> {
        let connector = self.connector.clone();
        Box::new(move |Changes { lender, places }| {
            let lender: Address = lender
                .parse()
                .map_err(|e: AddressError| format!("`lender`: {e}"))?;
            let redirected = connector.redirect(lender, places);
            redirected.map_err(|e| format!("`lender`: {e}"))
        })
    }
}

fn connector(options: &Options) -> anyhow::Result<Connector> {
    let identity = match options.tls.files() {
        Some((certificate, key, authorities)) => {
            Some(TlsIdentity::load(certificate, key, authorities)?)
        }
        None => None,
    };
    Ok(Connector::new(options.lender.clone(), identity)?)
}

fn bridges(options: &Options) -> anyhow::Result<Vec<(String, Arc<dyn Ntb>)>> {
    let mut bridges: Vec<(String, Arc<dyn Ntb>)> = Vec::new();
    for window in &options.windows {
        let bridge = IvshmemNtb::open_file(&window.file)
            .with_context(|| format!("Cannot use window {}", window.name))?;
        bridges.push((window.name.clone(), bridge));
    }
    Ok(bridges)
}

/// Serves a device from a thread of its own, until the one that is returned is stopped.
fn serve(
    config: BorrowerConfig,
    socket: &Listener,
    stopper: &Stopper,
) -> anyhow::Result<(DeviceMetrics, Stop)> {
    let (name, counters) = (config.device.clone(), Counters::default());
    let (borrowed, stop) = (Arc::<BorrowCounters>::default(), Stop::default());
    let device = Borrowed::new(config, Arc::clone(&borrowed))?;
    let metrics = DeviceMetrics {
        name: name.clone(),
        messages: counters.clone(),
        borrowed,
        paths: Box::new(device.paths()),
    };
    let (socket, stopper, until) = (socket.try_clone()?, stopper.clone(), stop.clone());
    let thread = std::thread::Builder::new().name(format!("vm {name}"));
    thread.spawn(move || {
        let error = Server::serve_until(&name, socket, device, &counters, &until);
        stopper.fail(&format!("The socket of {name} has failed: {error}"));
    })?;
    Ok((metrics, stop))
}
