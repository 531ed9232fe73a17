//! Flows whose endpoints in the guest migrate between its nodes: each is received by the limb of the node that its process is
//! on, and nothing is lost or comes out of order on the way there.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_vmkit::guest::Guest;
use farlane_vmkit::guest_program::GuestProgram;
use farlane_vmkit::guest_root::GuestFile;
use farlane_vmkit::interfaces::Server;
use farlane_vmkit::network::Network;
use farlane_vmkit::numa::Numa;
use farlane_vmkit::process::Process;
use farlane_vmkit::progress;
use farlane_vmkit::report::Report;

use super::Scenario;
use crate::conditions::{no_complaint, wait_until};
use crate::iperf::{Figures, Iperf, figure};
use crate::net::{At, GUEST, NET, NET_TIMEOUT, NetBackend, TAP, config, connect, network, socket};
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

/// Of each hundred bytes that come to the guest, so many at least are moved by the limb of the node where they lie.
const LOCAL: u64 = 99;

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
        &["-b 200M -R", "-u -b 10M", "-u -b 10M -R"],
        report,
    )?;
    no_complaint(&guest)?;
    drop(guest);
    backend.stop()
}

/// A stream whose receiver migrates every 100 ms, and what each limb moves meanwhile, as it happens.
pub fn show(run: &Run<'_>, report: &mut Report) -> Result<()> {
    const MIGRATIONS: u32 = 80;
    const PAUSE: Duration = Duration::from_millis(100);
    let workspace = run.context.workspace();
    workspace.build(&["farlane-topology"])?;
    let network = network(run)?;
    let numa = Numa::pair(512);
    let words = backend_words(run, &numa)?;
    let backend = run.context.nets()?.serve(run, &network, 2, &words)?;
    let [guest] = run.boot([config("a", Server::VhostUser(socket(run)), 2)
        .numa(numa)
        .files([migrator(run)?])])?;
    connect(&guest)?;
    let at = At::new(&guest);
    let iperf = Iperf::new(GUEST, "-t 10 -b 400M");
    let port = at.free_port()?;
    let server = at.spawn(&iperf.serve(port))?;
    wait_until("iperf3 listens", || at.is_listening(port))?;
    let client = Place::spawn(&network, &iperf.ask(port))?;
    let mut watch = Command::new(workspace.built("farlane-topology")?);
    watch.arg("watch").arg(backend.metrics_socket());
    watch.args(["--seconds", "8", "--interval-ms", "100"]);
    let mut watch = Process::spawn("farlane-topology", watch)?;
    let moved = migrate(&guest, "iperf3", MIGRATIONS, PAUSE)?;
    let ended = watch.wait(NET_TIMEOUT)?;
    ensure!(
        ended.is_some_and(|status| status.success()),
        "farlane-topology failed"
    );
    let (asked, served) = (client.wait(NET_TIMEOUT)?, server.wait(NET_TIMEOUT)?);
    ensure!(asked.success() && served.success(), "{}", asked.all());
    let locality = Locality::bytes(&backend.metrics()?, "net", NET)?;
    report.add(
        "farlane-net",
        format!("iperf3, its receiver on another node every 100 ms, {MIGRATIONS} times"),
        format!(
            "{} % moved by the limb of their node, {} % received on the program's node",
            per_cent(locality.local(), locality.total()),
            per_cent(moved.here, moved.here + moved.elsewhere)
        ),
    );
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

/// What has been counted up to some time.
struct Counters {
    stacks: [Netstat; 2],
    /// Frames that the tap had no room for.
    tap_dropped: i64,
    locality: Locality,
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
        let mut lost = 0;
        for (iperf, server, client) in flows {
            let figures = self.end(&iperf, server, client)?;
            report.add("iperf3", iperf.words(), figure(&figures));
            if let Some(datagrams) = figures.datagrams {
                ensure!(
                    datagrams.out_of_order == 0 && datagrams.lost < datagrams.all,
                    "{what}: datagrams are lost or out of order: {datagrams:?}"
                );
                lost += i64::try_from(datagrams.lost)?;
            }
        }
        let after = self.counters()?;
        let (mut disorder, mut late) = (0, after.tap_dropped - before.tap_dropped);
        for (after, before) in after.stacks.iter().zip(&before.stacks) {
            disorder += after.since(before, "TcpExt:TCPOFOQueue")?;
            late += after.since(before, "Udp:RcvbufErrors")?;
        }
        let locality = after.locality.since(&before.locality);
        let local = per_cent(locality.local(), locality.total());
        let share = per_cent(moved.here, moved.here + moved.elsewhere);
        let figure = format!(
            "{MOVES} moves: {disorder} segments out of order, {lost} datagrams lost, {late} of them by programs that did not \
             read in time; {local} % of bytes moved by the limb of their node, {share} % received on the program's node"
        );
        progress::note(&format!("{what}: {figure}"));
        report.add("octo-net", what, figure);
        ensure!(
            disorder == 0,
            "{what}: {disorder} segments are out of order"
        );
        ensure!(
            lost <= late,
            "{what}: {lost} datagrams are lost, and programs have missed only {late}"
        );
        if words.iter().all(|words| !words.contains("-R")) {
            ensure!(
                local >= LOCAL,
                "{what}: only {local} % is local: {locality:?}"
            );
        }
        Ok(())
    }

    fn counters(&self) -> Result<Counters> {
        let dropped = format!("/sys/class/net/{TAP}/statistics/tx_dropped");
        Ok(Counters {
            stacks: [
                Netstat::of_guest(self.guest)?,
                Netstat::of_network(self.network)?,
            ],
            tap_dropped: self.network.read_file(&dropped)?.trim().parse()?,
            locality: Locality::bytes(&self.backend.metrics()?, "net", NET)?,
        })
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
