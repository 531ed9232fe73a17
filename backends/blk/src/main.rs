//! `farlane-blk`: serves disks to a VM.

use anyhow::Context as _;
use clap::Parser as _;
use farlane_blk::disk::Disk;
use farlane_blk::options::Options;
use farlane_blk::session::DiskDevice;
use farlane_blk::tunnel::{self, Tunnel};
use farlane_blk::{paths, sizes};
use farlane_daemon::lifecycle::{Ending, Lifecycle};
use farlane_daemon::listener::{Kind, Listener};
use farlane_daemon::{limb, metrics, privileges, seccomp};
use farlane_guest_device::control::RequestCounters;
use farlane_vhost_user::serve::{Closing, serve_until};
use farlane_zero_copy::broker;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(e) => {
            eprintln!("farlane-blk: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    let lifecycle = Lifecycle::begin().context("Cannot start")?;
    let options = Options::parse();
    if options.daemon.print_capabilities {
        farlane_blk::CAPABILITIES.print()?;
        return Ok(ExitCode::SUCCESS);
    }
    options.daemon.start_logging();
    let given = options.all_disks()?;
    // Inherited sockets first: as long as nothing else is open, a wrong number is noticed.
    let sockets = given.iter().map(|given| given.socket.clone().inherit());
    let sockets: Vec<_> = sockets.collect::<Result<_, _>>()?;
    // The disks before their sockets: whoever finds a socket finds a disk behind it.
    let around = options.surroundings();
    let disks = given
        .iter()
        .map(|given| Disk::open(given.disk.clone(), &around));
    let disks: Vec<Arc<Disk>> = disks.collect::<Result<_, _>>()?;
    let access = &options.daemon.access;
    let listeners = sockets.into_iter().map(|socket| socket.listen(access));
    let listeners: Vec<_> = listeners.collect::<Result<_, _>>()?;
    let tunnel_socket = match &options.tunnel {
        Some(path) => Some(Listener::bind(path, Kind::Stream, access)?),
        None => None,
    };
    let metrics_socket = match &options.daemon.metrics {
        Some(path) => Some(Listener::bind(path, Kind::Stream, access)?),
        None => None,
    };
    privileges::give_up(privileges::Needs::default())?;
    for disk in &disks {
        disk.start()?;
    }
    sizes::watch(disks.clone())?;
    let requests = Arc::new(RequestCounters::default());
    let tunnel = match &tunnel_socket {
        Some(listener) => {
            let serials: Vec<_> = disks.iter().map(|disk| disk.id()).collect();
            let tunnel = Tunnel::new(&serials, &options.device_memory)?;
            for disk in &disks {
                disk.open_tokens(tunnel.tokens());
            }
            tunnel::serve::start(&tunnel, listener.try_clone()?, Arc::clone(&requests))?;
            Some(tunnel)
        }
        None => None,
    };
    let closing = Closing::default();
    for ((disk, listener), given) in disks.iter().zip(&listeners).zip(&given) {
        let (disk, socket) = (Arc::clone(disk), listener.try_clone()?);
        let closing = closing.clone();
        log::info!("Disk {}: waiting at {}", disk.serial(), given.socket);
        std::thread::Builder::new()
            .name(disk.serial().to_owned())
            .spawn(move || {
                let name = format!("Disk {}", disk.serial());
                serve_until(&name, socket, &closing, |channel| {
                    Ok(DiskDevice::new(Arc::clone(&disk), channel))
                });
            })?;
    }
    let fails_over = disks.iter().any(|disk| disk.paths().fails_over());
    if let Some(listener) = &metrics_socket {
        metrics::serve(listener.try_clone()?, move || {
            farlane_blk::metrics_text(&disks, &requests)
        })?;
    }
    let mut calls = [farlane_block::SYSTEM_CALLS, broker::SYSTEM_CALLS].concat();
    calls.extend(limb::SYSTEM_CALLS);
    if fails_over {
        calls.extend(paths::SYSTEM_CALLS);
    }
    let requests = seccomp::With::requests(farlane_block::storage::IOCTLS);
    let with = [seccomp::UNIX_SOCKETS, requests];
    seccomp::confine(options.daemon.seccomp, &calls, &with)?;
    log::info!("Ready");

    let mut ending = lifecycle.wait();
    // Their files go.
    drop((listeners, tunnel_socket, metrics_socket));
    if ending == Ending::Asked {
        // Requests that were taken are answered; after a second signal they are for whoever comes
        // next.
        let stopper = lifecycle.stopper();
        std::thread::Builder::new()
            .name("ending".to_owned())
            .spawn(move || {
                closing.close();
                stopper.end();
            })?;
        ending = lifecycle.wait();
    }
    drop(tunnel);
    std::process::exit(match ending {
        Ending::Asked => 0,
        Ending::Failed => 1,
    });
}
