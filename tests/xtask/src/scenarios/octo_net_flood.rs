//! Many flows that each last for two frames, beside one that was there before and stays: they fill
//! the flow table, and go on.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::network::{BRIDGE, Network, PEER};
use farlane_kit::report::Report;

use super::octo_net::{Flow, settle_on, two_nodes};
use crate::capture::Captures;
use crate::conditions::{no_complaint, wait_until};
use crate::drops::Counters;
use crate::iperf::Iperf;
use crate::net::{At, GUEST, GUEST_MAC, NetBackend, network};
use crate::place::Place;
use crate::run::Run;

/// Floods: the first fills the table, and whatever is allocated once; the others find all of that
/// there.
const FLOODS: u32 = 3;

/// Flows that the backend knows at most (docs/net.md).
const CAPACITY: u64 = 65_536;

/// So much of its own memory the backend may grow by a flood that finds the table full. An entry of
/// the table has more than 100 bytes: it would be 10 MB if the flows of the smaller floods were
/// kept.
const GROWTH: u64 = 1 << 20;

/// How long a flood may take on a busy machine.
const FLOOD_TIMEOUT: Duration = Duration::from_secs(600);

/// A queue pair's thread follows a program when eight windows of 5 ms agree: many times that.
const QUIET: Duration = Duration::from_millis(500);
/// The stream that is there before, as iperf3's words.
const STREAM: &str = "-b 20M";

pub fn flood(run: &Run<'_>, flows: u32, report: &mut Report) -> Result<()> {
    let program = run.guest_program("flood")?;
    let network = network(run)?;
    let (backend, guest) = two_nodes(run, &network)?;
    // Each beginning is answered and forgotten (SYN cookies): what is to be filled is the backend's
    // table, not the guest's.
    guest.run(&format!(
        "/usr/sbin/ip route add default via {PEER} && echo 2 > /proc/sys/net/ipv4/tcp_syncookies"
    ))?;
    let at = At::new(&guest);
    let port = at.free_port()?;
    let listener = at.spawn(&Iperf::new(GUEST, "").serve(port))?;
    wait_until("somebody listens", || at.is_listening(port))?;
    let floods = Floods {
        program,
        network: &network,
        port,
        flows,
    };
    let captures = Captures::begin(run, &network, &guest, "tcp and not net 11.0.0.0/8")?;
    let stream = Flow::begin(&network, &at, STREAM)?;
    let before = Counters::read(&network, &guest, &backend)?;
    let mut sizes = Vec::new();
    let mut answered = 0;
    for number in 0..FLOODS {
        // The kernel's choice for a flow that is not steered is one of the queues: the stream is on
        // the other at least once.
        settle_on(&guest, "iperf3", number % 2)?;
        let steady = Steady::reached(&backend)?;
        answered += floods.send(number)?;
        let now = Steady::read(&backend)?;
        ensure!(
            now == steady,
            "Flood {number} has moved the stream: {steady:?}, then {now:?}"
        );
        sizes.push((backend.private_bytes()?, backend.guest_bytes()?));
    }
    let census = backend.metrics()?;
    let port = stream.port();
    stream.end()?;
    drop(listener);
    let captured = captures.end()?;
    let (there, back) = (captured.received(port)?, captured.sent(port)?);
    let after = Counters::read(&network, &guest, &backend)?;
    let drops = after.since(&before)?;
    let (known, forgotten, refused) = (
        census.sum("flows")?,
        census.sum("flows_forgotten")?,
        census.sum("flows_refused")?,
    );
    let sent = u64::from(flows) * u64::from(FLOODS);
    let kib = sizes
        .iter()
        .map(|(own, guest)| format!("{} ({})", own / 1024, guest / 1024));
    let figure = format!(
        "own memory (and the guest's) after each flood: {} KiB; {known} flows known, {forgotten} \
         forgotten, {refused} refused",
        kib.collect::<Vec<_>>().join(", ")
    );
    report.tell(
        "octo-net-flood",
        format!("{sent} flows, {answered} of them answered"),
        figure,
    );
    let figure = format!(
        "to the guest {there}; from it {back}; {drops}; TCP: {} out of order, {} sent again",
        after.both_since(&before, "TcpExt:TCPOFOQueue")?,
        after.both_since(&before, "Tcp:RetransSegs")?
    );
    report.tell("octo-net-flood", "a stream meanwhile", figure);
    // Most of them went both ways: those that were lost are frames that the tap had no room for.
    ensure!(
        answered >= sent / 2 && answered > 2 * CAPACITY,
        "Only {answered} of {sent} flows were answered"
    );
    ensure!(
        known <= CAPACITY && forgotten + refused > 0,
        "{known} flows are known of {CAPACITY} at most, {forgotten} forgotten"
    );
    let grown = sizes[2].0.saturating_sub(sizes[1].0);
    ensure!(
        grown <= GROWTH,
        "The backend has grown by {grown} bytes while its table was full"
    );
    for order in [there, back] {
        ensure!(
            order.late == 0 && order.repeated == 0 && order.unknown == 0,
            "The stream: {order}"
        );
        ensure!(
            order.lost <= drops.frames(),
            "The stream: {order}, and only {drops}"
        );
    }
    no_complaint(&guest)?;
    drop(guest);
    backend.stop()
}

/// What does not change while a flow stays with its thread: moves of flows, and frames that one
/// thread took and another delivered.
#[derive(Debug, PartialEq, Eq)]
struct Steady {
    moves: u64,
    handed_over: u64,
}

impl Steady {
    /// What it is when nothing has moved for [`QUIET`]: the queue pair's thread follows the program
    /// a while after its frames do.
    fn reached(backend: &NetBackend<'_>) -> Result<Self> {
        let mut last = Self::read(backend)?;
        wait_until("the stream stays", || {
            std::thread::sleep(QUIET);
            let now = Self::read(backend)?;
            Ok(std::mem::replace(&mut last, now) == last)
        })?;
        Ok(last)
    }

    fn read(backend: &NetBackend<'_>) -> Result<Self> {
        let metrics = backend.metrics()?;
        Ok(Self {
            moves: metrics.sum("flow_moves")?,
            handed_over: metrics.sum("handed_over")?,
        })
    }
}

/// What sends floods.
struct Floods<'a> {
    program: PathBuf,
    network: &'a Network,
    port: u16,
    flows: u32,
}

impl Floods<'_> {
    /// Sends one, of flows of its own; returns how many of them were answered.
    fn send(&self, number: u32) -> Result<u64> {
        let line = format!(
            "{} {BRIDGE} {GUEST_MAC} {GUEST} {} {} {}",
            self.program.display(),
            self.port,
            number * self.flows,
            self.flows
        );
        let output = Place::spawn(self.network, &line)?.wait(FLOOD_TIMEOUT)?;
        ensure!(output.success(), "{}", output.all());
        let mut words = output.stdout.split_whitespace();
        words.find(|word| *word == "accepted");
        Ok(words.next().context("Not said")?.parse()?)
    }
}
