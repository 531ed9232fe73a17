//! A million flows that each last for two frames, beside one that was there before and stays.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_vmkit::guest_program::GuestProgram;
use farlane_vmkit::interfaces::Server;
use farlane_vmkit::network::{BRIDGE, PEER};
use farlane_vmkit::numa::Numa;
use farlane_vmkit::report::Report;

use super::Scenario;
use crate::conditions::{no_complaint, wait_until};
use crate::iperf::{Iperf, figure};
use crate::net::{At, GUEST, GUEST_MAC, NET_TIMEOUT, config, connect, network, socket};
use crate::netstat::Netstat;
use crate::numa::backend_words;
use crate::place::Place;
use crate::run::Run;
use crate::tools::Talk;

pub const SCENARIO: Scenario = Scenario {
    name: "octo-net-flood",
    about: "10^6 distinct TCP flows through farlane-net: bounded memory, an established flow is not reordered",
    is_test: true,
    run,
};

/// Flows before the memory is looked at for the first time: what is allocated once is there then.
const WARM_UP: u32 = 200_000;
const FLOWS: u32 = 1_000_000;

/// So much the backend may grow by the flows after those: 8 bytes for each.
const GROWTH: u64 = 8 << 20;

/// How long a flood may take on a busy machine.
const FLOOD_TIMEOUT: Duration = Duration::from_secs(600);

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let flood = program(run)?;
    let network = network(run)?;
    let numa = Numa::pair(512);
    let words = backend_words(run, &numa)?;
    let backend = run.context.nets()?.serve(run, &network, 2, &words)?;
    let [guest] = run.boot([config("a", Server::VhostUser(socket(run)), 2).numa(numa)])?;
    connect(&guest)?;
    guest.run(&format!("/usr/sbin/ip route add default via {PEER}"))?;
    let at = At::new(&guest);
    let iperf = Iperf::new(GUEST, "-t 60 -b 20M");
    let port = at.free_port()?;
    let server = at.spawn(&iperf.serve(port))?;
    wait_until("iperf3 listens", || at.is_listening(port))?;
    let client = Place::spawn(&network, &iperf.ask(port))?;
    let before = Netstat::of_guest(&guest)?;
    let send = |count: u32| -> Result<(u64, u64)> {
        let line = format!("{} {BRIDGE} {GUEST_MAC} {GUEST} {count}", flood.display());
        let output = Place::spawn(&network, &line)?.wait(FLOOD_TIMEOUT)?;
        ensure!(output.success(), "{}", output.all());
        let number = |name: &str| -> Result<u64> {
            let mut words = output.stdout.split_whitespace();
            words.find(|word| *word == name);
            Ok(words.next().context("Not said")?.parse()?)
        };
        Ok((number("sent")?, number("refused")?))
    };
    send(WARM_UP)?;
    let full = backend.resident_bytes()?;
    let (sent, refused) = send(FLOWS)?;
    let grown = backend.resident_bytes()?.saturating_sub(full);
    let asked = client.wait(NET_TIMEOUT)?;
    let served = server.wait(NET_TIMEOUT)?;
    ensure!(
        asked.success() && served.success(),
        "The stream did not survive:\n{}\n{}",
        asked.all(),
        served.all()
    );
    let figures = iperf.figures(&Talk {
        served: served.stdout,
        asked: asked.stdout,
    })?;
    let disorder = Netstat::of_guest(&guest)?.since(&before, "TcpExt:TCPOFOQueue")?;
    let known = backend.metrics()?.sum("flows")?;
    report.add(
        "octo-net-flood",
        format!("{sent} flows, {refused} of them answered"),
        format!(
            "{} KiB grown to {} KiB more, {known} flows known",
            full / 1024,
            grown / 1024
        ),
    );
    report.add("octo-net-flood", "a stream meanwhile", figure(&figures));
    // Most of them went both ways: those that were lost are frames that the tap had no room for.
    ensure!(
        refused >= sent / 2,
        "Only {refused} of {sent} flows were answered"
    );
    ensure!(grown <= GROWTH, "The backend has grown by {grown} bytes");
    ensure!(known < sent, "{known} flows are remembered");
    ensure!(disorder == 0, "{disorder} segments are out of order");
    no_complaint(&guest)?;
    drop(guest);
    backend.stop()
}

/// The program that begins connections, for this machine.
fn program(run: &Run<'_>) -> Result<PathBuf> {
    let program = run.path("flood");
    let folder = run.context.workspace().root().join("tests/xtask/guest");
    GuestProgram {
        source: &folder.join("flood.c"),
        headers: &folder,
        libraries: &[],
    }
    .build(run.context.kit()?.tree(), &program)?;
    Ok(program)
}
