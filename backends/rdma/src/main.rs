//! `farlane-rdma`: serves RDMA devices to VMs and to processes of this host.

use anyhow::Context as _;
use clap::Parser as _;
use farlane_daemon::access::Access;
use farlane_daemon::lifecycle::{Ending, Lifecycle, Stopper};
use farlane_daemon::listener::{Kind, Listener};
use farlane_daemon::{limb, metrics, privileges, seccomp, vhost};
use farlane_guest_device::control::RequestCounters;
use farlane_guest_device::device::{Device, Vm};
use farlane_rdma::contexts::PortContexts;
use farlane_rdma::host::HostSocket;
use farlane_rdma::limbs::Limbs;
use farlane_rdma::options::{Options, SocketOption};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// System calls besides those of every backend: memory of processes of this host, and their ends.
const SYSTEM_CALLS: &[libc::c_long] = &[
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_open,
];

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(e) => {
            eprintln!("farlane-rdma: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    let lifecycle = Lifecycle::begin().context("Cannot start")?;
    let options = Options::parse();
    if options.daemon.print_capabilities {
        farlane_rdma::CAPABILITIES.print()?;
        return Ok(ExitCode::SUCCESS);
    }
    options.daemon.start_logging();
    options.check()?;
    let sockets = Sockets::open(&options)?;
    privileges::give_up(privileges::Needs {
        process_memory: options.host_socket.is_some(),
    })?;
    serve(&options, &sockets, &lifecycle.stopper())?;
    let calls = [SYSTEM_CALLS, limb::SYSTEM_CALLS].concat();
    seccomp::confine(options.daemon.seccomp, &calls, &[])?;
    log::info!("Ready");

    let ending = lifecycle.wait();
    // Their files go. Threads end with the process.
    drop(sockets);
    std::process::exit(match ending {
        Ending::Asked => 0,
        Ending::Failed => 1,
    });
}

/// All that somebody can connect to.
struct Sockets {
    /// In the order of the command line.
    vms: Vec<Listener>,
    host: Option<Listener>,
    metrics: Option<Listener>,
}

impl Sockets {
    /// Inherited ones first: as long as nothing else is open, a wrong number is noticed.
    fn open(options: &Options) -> anyhow::Result<Self> {
        let mut inherited = Vec::new();
        for vm in &options.vms {
            if let SocketOption::Descriptor(fd) = vm.socket {
                inherited.push(Listener::inherit(fd, Kind::Stream)?);
            }
        }
        let mut inherited = inherited.into_iter();
        let access = &options.daemon.access;
        let bind = |path: &Path, access| Listener::bind(path, Kind::Stream, access);
        let mut vms = Vec::new();
        for vm in &options.vms {
            vms.push(match &vm.socket {
                SocketOption::Path(path) => bind(path, access)?,
                SocketOption::Descriptor(_) => inherited.next().context("A socket is missing")?,
            });
        }
        Ok(Self {
            vms,
            host: match &options.host_socket {
                // For processes of this user: nobody else is served there.
                Some(path) => Some(Listener::bind(path, Kind::SeqPacket, &Access::default())?),
                None => None,
            },
            metrics: match &options.daemon.metrics {
                Some(path) => Some(bind(path, access)?),
                None => None,
            },
        })
    }
}

/// Starts all threads.
fn serve(options: &Options, sockets: &Sockets, stopper: &Stopper) -> anyhow::Result<()> {
    let topology = options.locality.topology();
    let (server, limbs) = Limbs::serve(&topology, options.locality.given(), options.workers)?;
    let mut ports = Vec::new();
    let counters = Arc::new(RequestCounters::default());
    for (vm, listener) in options.vms.iter().zip(&sockets.vms) {
        let name = format!("vm {}", vm.gid);
        let port = server.port(vm.gid.0, name.clone())?;
        ports.push(Arc::downgrade(&port));
        let device = Vm {
            name: name.clone(),
            contexts: PortContexts::with_limbs(port, Arc::clone(&server), limbs.clone()),
            window_bytes: vm.window_bytes,
            counters: Arc::clone(&counters),
        };
        let socket = listener.try_clone()?;
        log::info!("{name}: waiting at {}", vm.socket);
        std::thread::Builder::new()
            .name(name.clone())
            .spawn(move || {
                vhost::serve(&name, socket, |memory, limit| {
                    Device::new(device.clone(), memory, limit)
                })
            })?;
    }
    if let Some(listener) = &sockets.host {
        let port = server.port(options.host_gid.0, "host".to_owned())?;
        ports.push(Arc::downgrade(&port));
        let socket = HostSocket::new(
            listener.try_clone()?,
            port,
            Arc::clone(&server),
            limbs.clone(),
            Arc::clone(&counters),
        )?;
        let stopper = stopper.clone();
        log::info!("host {}: waiting for processes", options.host_gid);
        std::thread::Builder::new()
            .name("host socket".to_owned())
            .spawn(move || {
                if let Err(e) = socket.run() {
                    stopper.fail(&format!("The host socket has failed: {e}"));
                }
            })?;
    }
    if let Some(limbs) = &limbs {
        Arc::clone(limbs).follow(ports)?;
    }
    if let Some(listener) = &sockets.metrics {
        metrics::serve(listener.try_clone()?, move || {
            farlane_rdma::metrics_text(&server, &counters, limbs.as_deref())
        })?;
    }
    Ok(())
}
