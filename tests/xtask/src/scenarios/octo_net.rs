//! Flows whose endpoints in the guest migrate between its nodes: each is received by the limb of the node that its process is
//! on, and nothing is lost or comes out of order on the way there.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_vmkit::guest::Guest;
use farlane_vmkit::guest_program::GuestProgram;
use farlane_vmkit::guest_root::GuestFile;
use farlane_vmkit::interfaces::Server;
use farlane_vmkit::network::Network;
use farlane_vmkit::numa::Numa;
use farlane_vmkit::progress;
use farlane_vmkit::report::Report;

use super::Scenario;
use crate::conditions::{no_complaint, wait_until};
use crate::iperf::{Figures, Iperf};
use crate::net::{At, GUEST, NET, NET_TIMEOUT, NetBackend, config, connect, network, socket};
use crate::netstat::Netstat;
use crate::numa::{Locality, backend_words, per_cent};
use crate::place::{Place, Running};
use crate::run::Run;
use crate::tools::Talk;

pub const SCENARIO: Scenario = Scenario {
    name: "octo-net",
    about: "TCP and UDP flows whose endpoints migrate 1,000 times between nodes: no loss, no disorder, by the local limb",
    is_test: true,
    run,
};

/// How often each endpoint migrates, and how long it stays.
const MOVES: u32 = 1000;
const STAY: Duration = Duration::from_millis(15);

/// How long the flows last: longer than all that.
const FLOW_SECONDS: u32 = 20;

/// The program in the guest that moves others.
const MIGRATE: &str = "/usr/bin/migrate";

/// What came through which limb while processes migrated.
#[derive(Debug, Clone, Copy)]
pub struct Moved {
    /// Bytes that came through the queue of the processor that the processes were on.
    pub here: u64,
    /// Those that came through others.
    pub elsewhere: u64,
}

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let network = network(run)?;
    let numa = Numa::pair(512);
    let words = backend_words(run, &numa)?;
    let backend = run.context.nets()?.serve(run, &network, 2, &words)?;
    let [guest] = run.boot([config("a", Server::VhostUser(socket(run)), 2)
        .numa(numa)
        .files([migrator(run)?])])?;
    connect(&guest)?;
    let ends = Ends {
        network: &network,
        guest: &guest,
        backend: &backend,
    };
    ends.flows("TCP to the guest", &["-b 400M"], report)?;
    ends.flows(
        "TCP from the guest, UDP both ways",
        &["-b 200M -R", "-u -b 20M", "-u -b 20M -R"],
        report,
    )?;
    no_complaint(&guest)?;
    drop(guest);
    backend.stop()
}

/// The program that migrates others.
pub fn migrator(run: &Run<'_>) -> Result<GuestFile> {
    let program = run.path("migrate");
    let folder = run.context.workspace().root().join("tests/xtask/guest");
    GuestProgram {
        source: &folder.join("migrate.c"),
        headers: &folder,
        libraries: &[],
    }
    .build(run.context.kit()?.tree(), &program)?;
    Ok(GuestFile::new(program, MIGRATE))
}

/// The two ends of the flows.
struct Ends<'a> {
    network: &'a Network,
    guest: &'a Guest,
    backend: &'a NetBackend<'a>,
}

impl Ends<'_> {
    /// Has flows side by side whose servers, in the guest, migrate together.
    fn flows(&self, what: &str, words: &[&str], report: &mut Report) -> Result<()> {
        let before = self.counters()?;
        let placed = Locality::bytes(&self.backend.metrics()?, "net", NET)?;
        let at = At::new(self.guest);
        let mut flows = Vec::new();
        for words in words {
            let iperf = Iperf::new(GUEST, &format!("-t {FLOW_SECONDS} {words}"));
            let port = at.free_port()?;
            let server = at.spawn(&iperf.serve(port))?;
            wait_until("iperf3 listens", || at.is_listening(port))?;
            let client = Place::spawn(self.network, &iperf.ask(port))?;
            flows.push((iperf, server, client));
        }
        let moved = migrate(self.guest, "iperf3", MOVES, STAY)?;
        for (iperf, server, client) in flows {
            let figures = self.end(&iperf, server, client)?;
            report.add(
                "octo-net",
                format!("{what}: {iperf:?}"),
                format!("{figures:?}"),
            );
            if let Some(datagrams) = figures.datagrams {
                ensure!(
                    datagrams.lost == 0 && datagrams.out_of_order == 0,
                    "{what}: datagrams are lost or out of order: {datagrams:?}"
                );
            }
        }
        let after = self.counters()?;
        let locality = Locality::bytes(&self.backend.metrics()?, "net", NET)?.since(&placed);
        let local = per_cent(locality.local(), locality.total());
        let share = per_cent(moved.here, moved.here + moved.elsewhere);
        let mut disorder = 0;
        for (after, before) in after.iter().zip(&before) {
            disorder += after.since(before, "TcpExt:TCPOFOQueue")?;
        }
        let figure = format!(
            "{MOVES} moves; {disorder} segments out of order; {local} % local; {share} % of bytes received on the receiver's node"
        );
        progress::note(&format!("{what}: {figure}"));
        report.add("octo-net", what, figure);
        Ok(())
    }

    fn counters(&self) -> Result<[Netstat; 2]> {
        Ok([
            Netstat::of_guest(self.guest)?,
            Netstat::of_network(self.network)?,
        ])
    }

    fn end(
        &self,
        iperf: &Iperf,
        server: Box<dyn Running + '_>,
        client: Box<dyn Running + '_>,
    ) -> Result<Figures> {
        let asked = client.wait(NET_TIMEOUT)?;
        let served = server.wait(NET_TIMEOUT)?;
        ensure!(
            asked.success() && served.success(),
            "{iperf:?}:\n{}\n{}",
            asked.all(),
            served.all()
        );
        iperf.figures(&Talk {
            served: served.stdout,
            asked: asked.stdout,
        })
    }
}

/// Moves all processes of a name between the guest's two processors.
pub fn migrate(guest: &Guest, name: &str, moves: u32, stay: Duration) -> Result<Moved> {
    let line = format!(
        "{MIGRATE} $(pidof {name} | tr ' ' ,) eth0 {moves} {} 0 1",
        stay.as_millis()
    );
    let output = guest.spawn(&line)?.wait(NET_TIMEOUT)?;
    ensure!(output.success(), "`{line}`: {}", output.all());
    let words: Vec<&str> = output.stdout.split_whitespace().collect();
    let number = |name: &str| -> Result<u64> {
        let at = words.iter().position(|word| *word == name);
        let value = at.and_then(|at| words.get(at + 1)).context("Not said")?;
        Ok(value.parse()?)
    };
    Ok(Moved {
        here: number("here")?,
        elsewhere: number("elsewhere")?,
    })
}
