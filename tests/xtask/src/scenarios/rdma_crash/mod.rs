//! What dies in the middle of a transfer, and who notices: a program, a machine, the backend. The
//! rest goes on, what the dead had is released, and what comes back works again.

mod backend;
mod facts;
mod machine;
mod program;
pub mod talk;
mod watcher;

use std::path::PathBuf;

use anyhow::Result;
use farlane_kit::backend::Backend;
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::packages;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::wire::{End, Wire};

use self::facts::Facts;
use crate::conditions::no_complaint;
use crate::farlane::{Pair, wait_device};
use crate::place::{Host, Over, Place};
use crate::run::Run;
use crate::tools::between;

/// Debian's package of the programs that run on this machine.
const PACKAGES: &[&str] = &["ibverbs-utils", "perftest"];

/// Writes until it is killed.
const ENDLESS_WRITES: &str = "ib_write_bw -F -s 65536 -n 100000000";

/// What ends by itself, and must succeed.
const PING_PONG: &str = "ibv_rc_pingpong -g 0 -c -n 200";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    packages::ensure(PACKAGES)?;
    let stage = Stage::new(run)?;
    let wire = Wire::new()?;
    let mut pair = stage.boot(&wire)?;
    let host = stage.host()?;
    let idle = Facts::of(run, [&pair.a, &pair.b])?;

    program::guest_programs(run, &pair, &idle, report)?;
    program::starting(run, &pair, &idle, report)?;
    program::host_programs(run, &pair, &host, &idle, report)?;
    machine::killed(&stage, &wire, &mut pair, &host, &idle, report)?;
    machine::reset(run, &pair, &idle, report)?;
    machine::driver(run, &pair, &idle, report)?;
    backend::killed(&stage, &mut pair, &host, report)?;

    for guest in [&pair.a, &pair.b] {
        no_complaint(guest)?;
    }
    pair.backend.stop()
}

/// Where everything happens.
struct Stage<'r> {
    run: &'r Run<'r>,
    /// The sockets of both guests.
    sockets: [PathBuf; 2],
    /// The socket for processes of this machine.
    host: PathBuf,
    files: Vec<GuestFile>,
}

impl<'r> Stage<'r> {
    fn new(run: &'r Run<'r>) -> Result<Self> {
        let farlane = run.context.farlane()?;
        let tree = run.context.kit()?.tree();
        let libraries = [
            tree.libraries().join("libibverbs.so.1"),
            farlane.programs().join("libfarlane.so"),
        ];
        let fatal = run.guest_program_with("fatal", "guest-lib/farlane/include", &libraries)?;
        Ok(Self {
            run,
            sockets: [run.path("a"), run.path("b")],
            host: run.path("host"),
            files: vec![GuestFile::new(fatal, "usr/bin/fatal")],
        })
    }

    /// Starts a daemon for both guests and for this machine.
    fn daemon(&self) -> Result<Backend> {
        let guests = [
            (self.sockets[0].as_path(), "10.0.0.1"),
            (self.sockets[1].as_path(), "10.0.0.2"),
        ];
        let farlane = self.run.context.farlane()?;
        farlane.daemon(self.run, &guests, Some(&self.host))
    }

    fn boot(&self, wire: &Wire) -> Result<Pair> {
        let farlane = self.run.context.farlane()?;
        let backend = self.daemon()?;
        let [a, b] = self.run.boot_pair(wire, |config, end| {
            let config = farlane.attach(config, end, &self.sockets);
            config.files(self.files.clone())
        })?;
        wait_device(&a)?;
        wait_device(&b)?;
        Ok(Pair { a, b, backend })
    }

    /// Boots the second guest again, after it was ended.
    fn boot_b(&self, wire: &Wire) -> Result<Guest> {
        let farlane = self.run.context.farlane()?;
        let config = VmConfig::new("b-again").wire(wire, End::B);
        let config = farlane.attach(config, End::B, &self.sockets);
        let [b] = self.run.boot([config.files(self.files.clone())])?;
        wait_device(&b)?;
        Ok(b)
    }

    fn host(&self) -> Result<Host> {
        let programs = self.run.context.farlane()?.programs();
        Ok(Host::new(programs, &self.host, self.run.logs()))
    }
}

/// Both talk to each other, in both directions.
fn talk_again(a: &dyn Place, b: &dyn Place) -> Result<()> {
    between(Over::Farlane, PING_PONG, a, b)?;
    between(Over::Farlane, PING_PONG, b, a)?;
    Ok(())
}

/// Says what has been shown, at once and in the closing table.
fn shown(report: &mut Report, what: &str, figure: &str) {
    report.tell("crash", what, figure);
}
