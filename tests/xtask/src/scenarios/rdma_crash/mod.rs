//! What dies in the middle of a transfer, and who notices: a program, a machine, the backend. The
//! rest goes on, what the dead had is released, and what comes back works again.
//!
//! Programs in guests use the device through our library, or through their kernel.

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
use self::talk::{Flow, Talk};
use crate::conditions::no_complaint;
use crate::farlane::Pair;
use crate::place::{Host, Place};
use crate::run::Run;
use crate::tools::between;
use crate::way::Way;

/// Debian's package of the programs that run on this machine.
const PACKAGES: &[&str] = &["ibverbs-utils", "perftest"];

/// Writes until it is killed.
const ENDLESS_WRITES: &str = "ib_write_bw -F -s 65536 -n 100000000";

/// What ends by itself, and must succeed.
const PING_PONG: &str = "ibv_rc_pingpong -c -n 200";

/// Through our library.
pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    all(run, Way::Library, report)
}

/// Through the guests' kernel.
pub fn stock(run: &Run<'_>, report: &mut Report) -> Result<()> {
    run.be_brief();
    all(run, Way::Kernel, report)
}

fn all(run: &Run<'_>, way: Way, report: &mut Report) -> Result<()> {
    packages::ensure(PACKAGES)?;
    let stage = Stage::new(run, way)?;
    let wire = Wire::new()?;
    let (mut pair, alone) = stage.boot(&wire)?;
    let host = stage.host()?;
    let idle = Facts::of(&stage, [&pair.a, &pair.b])?;

    program::guest_programs(&stage, &pair, &idle, report)?;
    program::starting(&stage, &pair, &idle, report)?;
    if way == Way::Library {
        program::host_programs(&stage, &pair, &host, &idle, report)?;
    }
    machine::killed(&stage, &wire, &mut pair, &host, [&alone, &idle], report)?;
    machine::reset(&stage, &pair, &idle, report)?;
    machine::driver(&stage, &pair, &idle, report)?;
    backend::killed(&stage, &mut pair, &host, &idle, report)?;

    for guest in [&pair.a, &pair.b] {
        no_complaint(guest)?;
    }
    pair.backend.stop()
}

/// Where everything happens.
struct Stage<'r> {
    run: &'r Run<'r>,
    way: Way,
    /// The sockets of both guests.
    sockets: [PathBuf; 2],
    /// The socket for processes of this machine.
    host: PathBuf,
    files: Vec<GuestFile>,
}

impl<'r> Stage<'r> {
    fn new(run: &'r Run<'r>, way: Way) -> Result<Self> {
        let farlane = run.context.farlane()?;
        let tree = run.context.kit()?.tree();
        let verbs = tree.libraries().join("libibverbs.so.1");
        let fatal = match way {
            Way::Library => {
                let libraries = [verbs, farlane.programs().join("libfarlane.so")];
                run.guest_program_with("fatal", "guest-lib/farlane/include", &libraries)?
            }
            Way::Kernel => run.guest_program_with("fatal_stock", "tests/xtask/guest", &[verbs])?,
        };
        Ok(Self {
            run,
            way,
            sockets: [run.path("a"), run.path("b")],
            host: run.path("host"),
            files: vec![GuestFile::new(fatal, "usr/bin/fatal")],
        })
    }

    /// Starts a daemon for both guests and for this machine.
    fn daemon(&self) -> Result<Backend> {
        let [a, b] = [End::A, End::B].map(|end| self.way.vm(end));
        let guests = [(&*self.sockets[0], &*a), (&*self.sockets[1], &*b)];
        let farlane = self.run.context.farlane()?;
        farlane.daemon(self.run, &guests, Some(&self.host))
    }

    /// Boots both guests; returns also how things are when the first one alone has its device.
    fn boot(&self, wire: &Wire) -> Result<(Pair, Facts)> {
        let farlane = self.run.context.farlane()?;
        let backend = self.daemon()?;
        let [a, b] = self.run.boot_pair(wire, |config, end| {
            let config = self.way.attach(farlane, config, end, &self.sockets);
            config.files(self.files.clone())
        })?;
        self.way.start(&a)?;
        let alone = Facts::of(self, [&a])?;
        self.way.start(&b)?;
        Ok((Pair { a, b, backend }, alone))
    }

    /// Boots the second guest again, after it was ended.
    fn boot_b(&self, wire: &Wire) -> Result<Guest> {
        let farlane = self.run.context.farlane()?;
        let config = VmConfig::new("b-again").wire(wire, End::B);
        let config = self.way.attach(farlane, config, End::B, &self.sockets);
        let [b] = self.run.boot([config.files(self.files.clone())])?;
        self.way.start(&b)?;
        Ok(b)
    }

    fn host(&self) -> Result<Host> {
        let programs = self.run.context.farlane()?.programs();
        Ok(Host::new(programs, &self.host, self.run.logs()))
    }

    /// Two guests talk to each other, in both directions.
    fn talk_again(&self, a: &Guest, b: &Guest) -> Result<()> {
        talk_again(self.way, a, b)
    }

    /// Two programs, a server and a client, that are in the middle of it.
    fn flowing<'a>(
        &self,
        way: Way,
        flow: Flow,
        line: &str,
        [server, client]: [&'a dyn Place; 2],
    ) -> Result<Talk<'a>> {
        Talk::flowing(self.run, flow, &way.command(line), server, client)
    }
}

/// Both talk to each other, in both directions.
fn talk_again(way: Way, a: &dyn Place, b: &dyn Place) -> Result<()> {
    let line = way.line(PING_PONG);
    between(way.over(), &line, a, b)?;
    between(way.over(), &line, b, a)?;
    Ok(())
}

/// Says what has been shown, at once and in the closing table.
fn shown(report: &mut Report, what: &str, figure: &str) {
    report.tell("crash", what, figure);
}
