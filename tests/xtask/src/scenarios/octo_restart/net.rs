//! The interface: streams and pings go on.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_vmkit::interfaces::Server;
use farlane_vmkit::numa::Numa;
use farlane_vmkit::report::Report;

use crate::conditions::{no_complaint, wait_until};
use crate::iperf::Iperf;
use crate::net::{At, GUEST, NET, NET_TIMEOUT, NetBackend, config, connect, network, socket};
use crate::numa::{Locality, backend_words};
use crate::place::{Place, Running};
use crate::run::Run;
use crate::tools::Talk;

/// How often the backend is killed.
const KILLS: u32 = 4;

/// So many bytes show that a stream flows.
const FLOWING: u64 = 8 << 20;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let network = network(run)?;
    let numa = Numa::pair(512);
    let words = backend_words(run, &numa)?;
    let mut backend = run.context.nets()?.serve(run, &network, 2, &words)?;
    let [guest] = run.boot([config("net", Server::VhostUser(socket(run)), 2).numa(numa)])?;
    connect(&guest)?;
    let at = At::new(&guest);
    // TCP both ways in one connection each, and a ping that is awaited however long it takes.
    let iperf = Iperf::new(GUEST, "-t 20 -b 300M --bidir");
    let port = at.free_port()?;
    let server = at.spawn(&iperf.serve(port))?;
    wait_until("iperf3 listens", || at.is_listening(port))?;
    let client = Place::spawn(&network, &iperf.ask(port))?;
    let mut kills = 0;
    while kills < KILLS {
        flows(&backend, client.as_ref())?;
        backend.kill()?;
        backend.start_again()?;
        kills += 1;
    }
    flows(&backend, client.as_ref())?;
    network
        .run(&format!("ping -c 3 -W 10 {GUEST}"))
        .context("After the last restart")?;
    let asked = client.wait(NET_TIMEOUT)?;
    let served = server.wait(NET_TIMEOUT)?;
    ensure!(
        asked.success() && served.success(),
        "The connections did not survive:\n{}\n{}",
        asked.all(),
        served.all()
    );
    let talk = Talk {
        served: served.stdout,
        asked: asked.stdout,
    };
    let figures = iperf.figures(&talk)?;
    report.add(
        "farlane-net",
        format!("killed {kills} times under TCP both ways"),
        format!(
            "the same connections; {} MB received",
            figures.received_bytes / 1_000_000
        ),
    );
    no_complaint(&guest)?;
    drop(guest);
    backend.stop()
}

/// Waits until the backend that runs now has moved bytes of the streams, whose client must run for that.
fn flows(backend: &NetBackend<'_>, client: &dyn Running) -> Result<()> {
    let moved = || -> Result<u64> { Ok(Locality::bytes(&backend.metrics()?, "net", NET)?.total()) };
    let begin = moved()?;
    wait_until("the streams flow", || {
        std::thread::sleep(Duration::from_millis(10));
        Ok(moved()? >= begin + FLOWING)
    })
    .with_context(|| format!("iperf3 said:\n{}", client.so_far()))
}
