//! `farlane-net`: serves network interfaces to a VM.

use anyhow::Context as _;
use clap::Parser as _;
use farlane_daemon::lifecycle::{Ending, Lifecycle};
use farlane_daemon::limb::{self, Limbs};
use farlane_daemon::listener::{Kind, Listener};
use farlane_daemon::{metrics, privileges, seccomp};
use farlane_net::interface::Interface;
use farlane_net::options::{HostOption, Options};
use farlane_net::port::Port;
use farlane_net::port::tap::Tap;
use farlane_net::port::xdp::{self, Xdp};
use farlane_net::session::NetDevice;
use farlane_net::watch;
use farlane_vhost_user::serve::serve;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(e) => {
            eprintln!("farlane-net: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    let lifecycle = Lifecycle::begin().context("Cannot start")?;
    let options = Options::parse();
    if options.daemon.print_capabilities {
        farlane_net::CAPABILITIES.print()?;
        return Ok(ExitCode::SUCCESS);
    }
    options.daemon.start_logging();
    let given = options.all_nets()?;
    // Inherited sockets first: as long as nothing else is open, a wrong number is noticed.
    let sockets = given.iter().map(|given| given.socket.clone().inherit());
    let sockets: Vec<_> = sockets.collect::<Result<_, _>>()?;
    // The ports before the sockets: whoever finds a socket finds an interface behind it.
    let limbs = Limbs::new(options.locality.topology());
    let mut interfaces = Vec::new();
    for net in &given {
        let port: Box<dyn Port> = match &net.host {
            HostOption::Tap(name) => Box::new(Tap::open(name, net.queues, net.mtu)?),
            HostOption::Xdp(name, mode) => {
                let node = xdp::node_of(&options.locality.sysfs(), name);
                Box::new(Xdp::open(name, net.queues, *mode, node)?)
            }
        };
        interfaces.push(Arc::new(Interface::new(
            net.id.clone(),
            port,
            net.mac.map(|mac| mac.0),
            limbs.clone(),
            options.locality.given(),
        )));
    }
    let access = &options.daemon.access;
    let listeners = sockets.into_iter().map(|socket| socket.listen(access));
    let listeners: Vec<_> = listeners.collect::<Result<_, _>>()?;
    let metrics_socket = match &options.daemon.metrics {
        Some(path) => Some(Listener::bind(path, Kind::Stream, access)?),
        None => None,
    };
    privileges::give_up(privileges::Needs::default())?;
    watch::watch(interfaces.clone())?;
    for ((interface, listener), given) in interfaces.iter().zip(&listeners).zip(&given) {
        let (interface, socket) = (Arc::clone(interface), listener.try_clone()?);
        log::info!("Interface {}: waiting at {}", interface.name, given.socket);
        std::thread::Builder::new()
            .name(interface.name.clone())
            .spawn(move || {
                let name = format!("Interface {}", interface.name);
                serve(&name, socket, |channel| {
                    NetDevice::new(Arc::clone(&interface), channel)
                })
            })?;
    }
    if let Some(listener) = &metrics_socket {
        let interfaces = interfaces.clone();
        metrics::serve(listener.try_clone()?, move || {
            farlane_net::metrics_text(&interfaces)
        })?;
    }
    let mode = options.daemon.seccomp;
    seccomp::confine(mode, limb::SYSTEM_CALLS, farlane_net::SYSTEM_CALLS)?;
    log::info!("Ready");

    let ending = lifecycle.wait();
    // Their files go.
    drop((listeners, metrics_socket));
    // Threads hold them until the process ends.
    interfaces
        .iter()
        .for_each(|interface| interface.port.give_back());
    std::process::exit(match ending {
        Ending::Asked => 0,
        Ending::Failed => 1,
    });
}
