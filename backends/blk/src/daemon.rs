//! The daemon: disks, a thread for the VMM of each, and the tunnel for device memory.

use crate::disk::Disk;
use crate::options::{Options, SPLITS};
use crate::session::DiskDevice;
use crate::surroundings::Tuning;
use crate::tunnel::{self, Tunnel};
use crate::{CAPABILITIES, metrics, paths};
use farlane_daemon::control::Stopper;
use farlane_daemon::keys::{Socket, SocketOption};
use farlane_daemon::listener::{Kind, Listener};
use farlane_daemon::metrics::Collect;
use farlane_daemon::options::{Capabilities, DaemonOptions};
use farlane_daemon::per_node;
use farlane_daemon::periodic::every;
use farlane_daemon::reload::{Changeable, ControlOptions, Follow, Reloadable};
use farlane_daemon::run::{Daemon, Drain};
use farlane_daemon::seccomp::{SystemCalls, UNIX_SOCKETS, With};
use farlane_guest_device::control::RequestCounters;
use farlane_vhost_user::serve::{Closing, serve_until};
use farlane_zero_copy::broker;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// How often it is looked whether disks have grown or shrunk.
const LOOK_AT_SIZES: Duration = Duration::from_secs(1);

/// `farlane-blk`.
pub struct BlkDaemon {
    disks: Vec<Arc<Disk>>,
    /// That of all disks.
    tuning: Arc<Tuning>,
    /// Where each disk is served.
    listeners: Vec<Listener>,
    tunnel_socket: Option<Listener>,
    tunnel: Option<Tunnel>,
    closing: Closing,
}

impl Daemon for BlkDaemon {
    type Options = Options;

    const CAPABILITIES: Capabilities = CAPABILITIES;

    fn daemon_options(options: &Options) -> &DaemonOptions {
        &options.daemon
    }

    fn check(options: &Options) -> anyhow::Result<()> {
        options.all_disks()?;
        Ok(())
    }

    fn open(options: &Options) -> anyhow::Result<Self> {
        let disks = options.all_disks()?;
        let sockets = SocketOption::inherit_all(disks.iter().map(|disk| &disk.socket))?;
        let around = options.surroundings();
        let disks = disks.into_iter().map(|disk| Disk::open(disk.disk, &around));
        let disks = disks.collect::<Result<_, _>>()?;
        let access = &options.daemon.access;
        let listeners = Socket::listen_all(sockets, access)?;
        let tunnel_socket = match &options.tunnel {
            Some(path) => Some(Listener::bind(path, Kind::Stream, access)?),
            None => None,
        };
        Ok(Self {
            disks,
            tuning: around.tuning,
            listeners,
            tunnel_socket,
            tunnel: None,
            closing: Closing::default(),
        })
    }

    fn start(&mut self, options: &Options, _stop: &Stopper) -> anyhow::Result<Collect> {
        for disk in &self.disks {
            disk.start()?;
        }
        let disks = self.disks.clone();
        every(LOOK_AT_SIZES, "sizes", move || {
            disks.iter().for_each(|disk| disk.look_at_size());
        })?;
        let requests = Arc::new(RequestCounters::default());
        if let Some(listener) = &self.tunnel_socket {
            let serials: Vec<_> = self.disks.iter().map(|disk| disk.id()).collect();
            let tunnel = Tunnel::new(&serials, &options.device_memory)?;
            for disk in &self.disks {
                disk.open_tokens(tunnel.tokens());
            }
            tunnel::serve::start(&tunnel, listener.try_clone()?, Arc::clone(&requests))?;
            self.tunnel = Some(tunnel);
        }
        for (disk, listener) in self.disks.iter().zip(&self.listeners) {
            let (disk, socket) = (Arc::clone(disk), listener.try_clone()?);
            let closing = self.closing.clone();
            log::info!("Disk {}: waiting at {listener}", disk.serial());
            let thread = std::thread::Builder::new().name(disk.serial().to_owned());
            thread.spawn(move || {
                let name = format!("Disk {}", disk.serial());
                serve_until(&name, socket, &closing, |channel| {
                    Ok(DiskDevice::new(Arc::clone(&disk), channel))
                });
            })?;
        }
        let disks = self.disks.clone();
        Ok(Arc::new(move || metrics(&disks, &requests)))
    }

    fn system_calls(&self) -> SystemCalls {
        let failover = match self.disks.iter().any(|disk| disk.paths().fails_over()) {
            true => paths::SYSTEM_CALLS,
            false => &[],
        };
        SystemCalls::any(&[
            farlane_block::SYSTEM_CALLS,
            broker::SYSTEM_CALLS,
            per_node::SYSTEM_CALLS,
            failover,
        ])
        .with(&[UNIX_SOCKETS, With::requests(farlane_block::storage::IOCTLS)])
    }

    /// Requests that were accepted are answered; after a second signal they are for whoever comes
    /// next.
    fn end(&mut self) -> Option<Drain> {
        self.listeners.clear();
        self.tunnel_socket = None;
        let closing = self.closing.clone();
        Some(Box::new(move || closing.close()))
    }
}

/// How long requests wait for paths, and in what parts they are done.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Changes {
    path_wait: u32,
    split: u64,
}

impl Reloadable for BlkDaemon {
    type Changes = Changes;

    const CHANGEABLE: &'static [Changeable] = &[("path-wait", &[]), ("split", &[])];

    fn control_options(options: &Options) -> &ControlOptions {
        &options.control
    }

    fn changes(options: &Options) -> anyhow::Result<Changes> {
        Ok(Changes {
            path_wait: options.path_wait,
            split: options.split,
        })
    }

    fn follow(&self) -> Follow<Changes> {
        let tuning = Arc::clone(&self.tuning);
        Box::new(move |Changes { path_wait, split }| {
            if !SPLITS.contains(&split) {
                return Err(format!("Parts of {split} bytes are none"));
            }
            tuning.set(split, path_wait);
            Ok(())
        })
    }
}
