//! `farlane-borrow`: makes PCIe devices of other hosts devices of this host's virtual machines.

use anyhow::Context as _;
use clap::Parser as _;
use farlane_borrow::options::Options;
use farlane_daemon::access::Access;
use farlane_daemon::lifecycle::{Ending, Lifecycle, Stopper};
use farlane_daemon::listener::{Kind, Listener};
use farlane_daemon::metrics::{self, Sample, write_labelled};
use farlane_daemon::options::host_name;
use farlane_daemon::seccomp::With;
use farlane_daemon::{privileges, seccomp};
use farlane_ntb::{IvshmemNtb, Ntb};
use farlane_vfio_remote::borrower::{BorrowCounters, Borrowed, BorrowerConfig, PeerPath, Peers};
use farlane_vfio_remote::link::{Connector, TlsIdentity};
use farlane_vfio_user::{Counters, Server, Stop};
use farlane_zero_copy::broker::{self, Publisher, Subscription};
use farlane_zero_copy::fault;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// System calls besides those of every backend: links to lenders, made anew for each monitor.
const SYSTEM_CALLS: &[libc::c_long] = &[libc::SYS_connect];
/// The same, with certain arguments.
const SYSTEM_CALLS_WITH: &[With] = &[seccomp::ALL_SOCKETS, seccomp::NONBLOCKING];

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(e) => {
            eprintln!("farlane-borrow: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    let lifecycle = Lifecycle::begin().context("Cannot start")?;
    let options = Options::parse();
    if options.daemon.print_capabilities {
        farlane_borrow::CAPABILITIES.print()?;
        return Ok(ExitCode::SUCCESS);
    }
    options.daemon.start_logging();
    options.check()?;
    // Before anything else is open, so that a wrong number is noticed.
    let mut sockets = Vec::new();
    for &fd in &options.fd {
        sockets.push(Listener::inherit(fd, Kind::Stream)?);
    }
    let connector = connector(&options)?;
    let bridges = bridges(&options)?;
    let access = &options.daemon.access;
    for path in &options.socket_path {
        sockets.push(Listener::bind(path, Kind::Stream, access)?);
    }
    let metrics_socket = match &options.daemon.metrics {
        Some(path) => Some(Listener::bind(path, Kind::Stream, access)?),
        None => None,
    };
    let publish_socket = match &options.publish {
        // Whoever connects can write the devices' memory: no group of VMMs, each of which has
        // another VM.
        Some(path) => Some(Listener::bind(path, Kind::SeqPacket, &Access::default())?),
        None => None,
    };
    privileges::give_up(privileges::Needs::default())?;
    fault::install().context("Cannot guard against files that shrink")?;
    let (peers, subscriptions) = peers(&options, publish_socket.as_ref())?;
    let peer_windows: Vec<_> = options.peer_windows.iter().map(|w| w.0.clone()).collect();
    let name = options.name.clone().unwrap_or_else(host_name);
    let mut devices = Vec::new();
    for (device, socket) in options.devices.iter().zip(&sockets) {
        let config = BorrowerConfig {
            name: name.clone(),
            device: device.clone(),
            connector: connector.clone(),
            bridges: bridges.clone(),
            interrupts: options.interrupts.into(),
            peers: peers.clone(),
            peer_windows: peer_windows.clone(),
        };
        devices.push(serve(config, socket, &lifecycle.stopper())?);
    }
    let stops: Vec<_> = devices.iter().map(|served| served.stop.clone()).collect();
    if let Some(listener) = &metrics_socket {
        metrics::serve(listener.try_clone()?, move || metrics_text(&devices))?;
    }
    let calls = [
        SYSTEM_CALLS,
        farlane_ntb::SYSTEM_CALLS,
        broker::SYSTEM_CALLS,
    ]
    .concat();
    seccomp::confine(options.daemon.seccomp, &calls, SYSTEM_CALLS_WITH)?;
    log::info!("Ready");

    let ending = lifecycle.wait();
    stops.iter().for_each(Stop::stop);
    // Their files go. Devices are returned when their links end with the process.
    drop((subscriptions, sockets, metrics_socket, publish_socket));
    std::process::exit(match ending {
        Ending::Asked => 0,
        Ending::Failed => 1,
    });
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

/// The devices of one VM as one another's peers, where that is asked for.
fn peers(
    options: &Options,
    socket: Option<&Listener>,
) -> anyhow::Result<(Option<Arc<Peers>>, Vec<Subscription>)> {
    if socket.is_none() && options.device_memory.is_empty() {
        return Ok((None, Vec::new()));
    }
    let publisher = match socket {
        Some(socket) => Some(Publisher::new(socket.try_clone()?)?),
        None => None,
    };
    let peers = Peers::new(publisher);
    let mut subscriptions = Vec::new();
    for path in &options.device_memory {
        let subscription = peers.subscribe(path);
        subscriptions
            .push(subscription.with_context(|| format!("Cannot subscribe to {}", path.display()))?);
    }
    Ok((Some(peers), subscriptions))
}

/// By which paths a device reaches others: (path, stretches of memory).
type Paths = Box<dyn Fn() -> Vec<(PeerPath, u64)> + Send + Sync>;

/// What one device counts.
struct Served {
    name: String,
    messages: Counters,
    stop: Stop,
    borrowed: Arc<BorrowCounters>,
    paths: Paths,
}

/// Serves a device from a thread of its own.
fn serve(config: BorrowerConfig, socket: &Listener, stopper: &Stopper) -> anyhow::Result<Served> {
    let (device_name, borrowed) = (config.device.clone(), Arc::<BorrowCounters>::default());
    let device = Borrowed::new(config, Arc::clone(&borrowed))?;
    let served = Served {
        name: device_name,
        messages: Counters::default(),
        stop: Stop::default(),
        borrowed,
        paths: Box::new(device.paths()),
    };
    let (name, counters, stop) = (
        served.name.clone(),
        served.messages.clone(),
        served.stop.clone(),
    );
    let (socket, stopper) = (socket.try_clone()?, stopper.clone());
    std::thread::Builder::new()
        .name(format!("vm {name}"))
        .spawn(move || {
            let error = Server::serve_until(&name, socket, device, &counters, &stop);
            stopper.fail(&format!("The socket of {name} has failed: {error}"));
        })?;
    Ok(served)
}

/// The counters, as Prometheus text.
fn metrics_text(devices: &[Served]) -> String {
    let things: Vec<_> = devices
        .iter()
        .map(|served| {
            let messages = served.messages.values();
            let borrowed = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let samples = [
                (
                    "reads",
                    "Accesses that the monitor trapped: reads.",
                    messages.reads,
                ),
                (
                    "writes",
                    "Accesses that the monitor trapped: writes.",
                    messages.writes,
                ),
                (
                    "other_messages",
                    "Other messages of the monitor.",
                    messages.other,
                ),
                ("refused", "Messages that were refused.", messages.refused),
                (
                    "dma_reads",
                    "Reads of memory by messages.",
                    messages.dma_reads,
                ),
                (
                    "dma_writes",
                    "Writes of memory by messages.",
                    messages.dma_writes,
                ),
                (
                    "connections",
                    "Monitors that have connected.",
                    messages.connections,
                ),
                (
                    "forwarded",
                    "Accesses to registers that went to the lender.",
                    borrowed(&served.borrowed.forwarded),
                ),
                ("leases", "Leases taken.", borrowed(&served.borrowed.leases)),
                (
                    "lost",
                    "Leases that ended without the monitor's doing.",
                    borrowed(&served.borrowed.lost),
                ),
                (
                    "held",
                    "Whether the device is held now: 0 or 1.",
                    borrowed(&served.borrowed.held),
                ),
            ];
            let paths = (served.paths)();
            let by = |path| {
                let found = paths.iter().find(|(other, _)| *other == path);
                found.map_or(0, |&(_, count)| count)
            };
            let peers = [
                (
                    "peers_same_lender",
                    "Stretches of other devices that the lender maps itself.",
                    by(PeerPath::SameLender),
                ),
                (
                    "peers_local",
                    "Stretches of other devices that are shown as memory of this host.",
                    by(PeerPath::Local),
                ),
                (
                    "peers_window",
                    "Stretches of other devices behind a window of the lender.",
                    by(PeerPath::Window),
                ),
                (
                    "peers_messages",
                    "Stretches of other devices that are reached by messages.",
                    by(PeerPath::Messages),
                ),
            ];
            let samples = samples.into_iter().chain(peers);
            let samples = samples.map(|(name, help, value)| Sample { name, help, value });
            (served.name.clone(), samples.collect())
        })
        .collect();
    let mut text = String::new();
    write_labelled(&mut text, "farlane_borrow", "device", &things);
    text
}
