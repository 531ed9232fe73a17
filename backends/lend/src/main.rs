//! `farlane-lend`: lends PCIe devices of this host to virtual machines of others.

use anyhow::Context as _;
use clap::Parser as _;
use farlane_daemon::lifecycle::{Ending, Lifecycle};
use farlane_daemon::listener::{Kind, Listener};
use farlane_daemon::seccomp::With;
use farlane_daemon::{metrics, privileges, seccomp};
use farlane_lend::options::{Command, Options};
use farlane_lend::setup::{self, Setup};
use farlane_lend::{ask, metrics_text};
use std::process::ExitCode;
use std::sync::Arc;

/// System calls of the NVMe controller and of links, besides those of every backend.
const SYSTEM_CALLS: &[libc::c_long] = &[
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_fdatasync,
];
/// The same of a lender that connects to others.
const CONNECTING: &[libc::c_long] = &[libc::SYS_connect];
/// The same, with certain arguments.
const SYSTEM_CALLS_WITH: &[With] = &[
    seccomp::NONBLOCKING,
    With::requests(farlane_vfio::IOCTLS),
    With::requests(farlane_nvme::IOCTLS),
];
const CONNECTING_WITH: &[With] = &[seccomp::ALL_SOCKETS];

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(e) => {
            eprintln!("farlane-lend: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    let options = Options::parse();
    match &options.command {
        Some(Command::List { lender, json }) => {
            ask::list(lender, *json)?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(Command::Revoke { device, lender }) => {
            ask::revoke(lender, device)?;
            return Ok(ExitCode::SUCCESS);
        }
        None => {}
    }
    let lifecycle = Lifecycle::begin().context("Cannot start")?;
    if options.daemon.print_capabilities {
        farlane_lend::CAPABILITIES.print()?;
        return Ok(ExitCode::SUCCESS);
    }
    options.daemon.start_logging();
    let Setup {
        lender,
        acceptors,
        sockets,
        connects,
    } = setup::open(&options)?;
    let metrics_socket = match &options.daemon.metrics {
        Some(path) => Some(Listener::bind(path, Kind::Stream, &options.daemon.access)?),
        None => None,
    };
    privileges::give_up(privileges::Needs::default())?;
    if let Some(listener) = &metrics_socket {
        let lender = Arc::clone(&lender);
        metrics::serve(listener.try_clone()?, move || metrics_text(&lender))?;
    }
    for (address, acceptor) in acceptors {
        let lender = Arc::clone(&lender);
        log::info!("Waiting for borrowers at {address}");
        std::thread::Builder::new()
            .name("listener".to_owned())
            .spawn(move || lender.serve(&acceptor))?;
    }
    let (connecting, connecting_with) = match connects {
        true => (CONNECTING, CONNECTING_WITH),
        false => (&[][..], &[][..]),
    };
    let with: Vec<With> = [SYSTEM_CALLS_WITH, connecting_with].concat();
    let calls = [
        SYSTEM_CALLS,
        connecting,
        farlane_ntb::SYSTEM_CALLS,
        farlane_vfio::SYSTEM_CALLS,
    ]
    .concat();
    seccomp::confine(options.daemon.seccomp, &calls, &with)?;
    log::info!("Ready");

    let ending = lifecycle.wait();
    // Their files go. Devices stop with the process.
    drop((sockets, metrics_socket));
    std::process::exit(match ending {
        Ending::Asked => 0,
        Ending::Failed => 1,
    });
}
