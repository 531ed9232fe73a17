//! Flows whose endpoints in the guest migrate between its nodes: each is received by the worker of
//! the node that its process is on, nothing is lost, and hardly anything comes out of order on the
//! way there.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::interfaces::Server;
use farlane_kit::network::Network;
use farlane_kit::numa::Numa;
use farlane_kit::process::Process;
use farlane_kit::report::Report;

use crate::capture::Captures;
use crate::conditions::{no_complaint, wait_until};
use crate::drops::Counters;
use crate::iperf::Iperf;
use crate::net::{At, GUEST, NET, NET_TIMEOUT, NetBackend, config, connect, network, socket};
use crate::numa::{Locality, backend_words, per_cent};
use crate::place::{Place, Running};
use crate::run::Run;

/// How often a stream's program moves once the stream has followed.
const FOLLOWED_MOVES: u32 = 40;

/// Frames within which a stream follows.
const MOST_FRAMES: u32 = 2000;

/// Of each hundred frames that come to a stream that has followed, so many at least come to its
/// program's node.
const STAYS: u64 = 95;

/// A flow that moves is to keep its order, and does not quite: a frame of the new queue has been
/// seen before the last one of the old, once in about a thousand moves, as a queue counts as
/// drained when the driver has taken its frames and not when the guest's stack has seen them. More
/// than one late frame in so many moves is something else.
const MOVES_A_LATE_FRAME: u64 = 100;

/// Of each hundred frames so many at most are handed from one thread to another, on the way of a
/// move: later the tap itself gives them to the right one.
const MOST_HANDED_OVER: u64 = 10;

/// How often each program migrates, and how long it stays, where its flows cannot follow each time.
const MOVES: u32 = 1000;
const STAY: Duration = Duration::from_millis(15);

/// The flows meanwhile.
const FLOWS: [&str; 4] = ["-b 400M", "-b 200M -R", "-u -b 10M", "-u -b 10M -R"];

/// Of each hundred bytes that come to the guest, so many at least are moved by the worker of the
/// node where they lie: that a pair's worker is that of its buffers. Of those that it sends, fewer:
/// a frame may lie where its program was before.
const RECEIVED_LOCALLY: u64 = 99;
const SENT_LOCALLY: u64 = 75;

/// Seconds that nothing here takes: flows are ended when what they are for has been seen.
const FOR_EVER: u32 = 3600;

/// The program in the guest that moves others.
const MIGRATE: &str = "/usr/bin/migrate";

/// What came through which worker while processes migrated.
#[derive(Debug, Clone, Copy)]
pub struct Moved {
    /// Bytes that came through the queue of the processor that the processes were on.
    pub here: u64,
    /// Those that came through others.
    pub elsewhere: u64,
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let network = network(run)?;
    let (backend, guest) = two_nodes(run, &network)?;
    let ends = Ends {
        run,
        network: &network,
        guest: &guest,
        backend: &backend,
    };
    ends.follows(report)?;
    ends.keeps_order(report)?;
    no_complaint(&guest)?;
    drop(guest);
    backend.stop()
}

/// A stream whose receiver migrates every 100 ms, and what each worker moves meanwhile, as it
/// happens.
pub fn show(run: &Run<'_>, report: &mut Report) -> Result<()> {
    const MIGRATIONS: u32 = 80;
    const PAUSE: Duration = Duration::from_millis(100);
    let workspace = run.context.workspace();
    workspace.build(&["farlane-topology"])?;
    let network = network(run)?;
    let (backend, guest) = two_nodes(run, &network)?;
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
            "{} % moved by the worker of their node, {} % received on the program's node",
            per_cent(locality.local(), locality.total())?,
            per_cent(moved.here, moved.here + moved.elsewhere)?
        ),
    );
    drop(guest);
    backend.stop()
}

/// A guest on two nodes with an interface of two queue pairs, and what serves that.
pub fn two_nodes<'a>(run: &Run<'_>, network: &'a Network) -> Result<(NetBackend<'a>, Guest)> {
    let numa = Numa::pair(512);
    let words = backend_words(run, &numa)?;
    let backend = run.context.nets()?.serve(run, network, 2, &words)?;
    let [guest] = run.boot([config("a", Server::VhostUser(socket(run)), 2)
        .numa(numa)
        .files([migrator(run)?])])?;
    connect(&guest)?;
    Ok((backend, guest))
}

/// The program that migrates others.
fn migrator(run: &Run<'_>) -> Result<GuestFile> {
    Ok(GuestFile::new(run.guest_program("migrate")?, MIGRATE))
}

/// A server of iperf3 in the guest and its client, which go on until they are ended.
pub struct Flow<'a> {
    port: u16,
    words: &'static str,
    server: Box<dyn Running + 'a>,
    client: Box<dyn Running + 'a>,
}

impl<'a> Flow<'a> {
    /// Has a server listen, and its client call it.
    pub fn begin(network: &'a Network, at: &'a At<'a>, words: &'static str) -> Result<Self> {
        let iperf = Iperf::new(GUEST, &format!("-t {FOR_EVER} {words}"));
        let port = at.free_port()?;
        let server = at.spawn(&iperf.serve(port))?;
        wait_until("iperf3 listens", || at.is_listening(port))?;
        let client = Place::spawn(network, &iperf.ask(port))?;
        Ok(Self {
            port,
            words,
            server,
            client,
        })
    }

    /// The server's port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What its client has said so far.
    pub fn so_far(&self) -> String {
        self.client.so_far()
    }

    /// Ends it: the client first, then the server by itself.
    pub fn end(mut self) -> Result<()> {
        let words = self.words;
        ensure!(
            !self.client.wait_briefly()? && !self.server.wait_briefly()?,
            "iperf3 {words} has ended: {}\n{}",
            self.client.so_far(),
            self.server.so_far()
        );
        self.client.kill()?;
        self.server.wait(NET_TIMEOUT)?;
        Ok(())
    }
}

/// The two ends of the flows.
struct Ends<'a> {
    run: &'a Run<'a>,
    network: &'a Network,
    guest: &'a Guest,
    backend: &'a NetBackend<'a>,
}

impl Ends<'_> {
    /// Has one stream's program move as soon as the stream has followed it, again and again.
    fn follows(&self, report: &mut Report) -> Result<()> {
        let at = At::new(self.guest);
        let flow = Flow::begin(self.network, &at, "-b 400M")?;
        let before = self.backend.metrics()?;
        let followed = follow(self.guest, "iperf3", FOLLOWED_MOVES, MOST_FRAMES)?;
        let after = self.backend.metrics()?;
        flow.end()?;
        let since = |name: &str| -> Result<u64> { Ok(after.sum(name)? - before.sum(name)?) };
        let (moves, handed, frames) = (
            since("flow_moves")?,
            since("handed_over")?,
            since("rx_frames")?,
        );
        let figure = format!(
            "{} of {FOLLOWED_MOVES} moves followed, each within {} frames; {} of {} frames \
             afterwards on the program's node; \
             {moves} moves of flows, {handed} of {frames} frames handed from thread to thread",
            followed.moves,
            followed.slowest,
            followed.here,
            followed.here + followed.elsewhere
        );
        report.tell("octo-net", "a stream follows its program", figure);
        ensure!(
            followed.moves == u64::from(FOLLOWED_MOVES),
            "The stream has followed its program {} of {FOLLOWED_MOVES} times within \
             {MOST_FRAMES} frames",
            followed.moves
        );
        // A few frames come between two steps of a move: those of the window that showed it are not
        // among these.
        ensure!(
            per_cent(followed.here, followed.here + followed.elsewhere)? >= STAYS,
            "The stream did not stay with its program: {followed:?}"
        );
        // Without rules for the tap every frame is handed over half of the time.
        ensure!(
            per_cent(handed, frames)? <= MOST_HANDED_OVER,
            "{handed} of {frames} frames were handed over: the tap does not follow"
        );
        Ok(())
    }

    /// Has flows of all kinds side by side whose servers, in the guest, migrate together, faster
    /// than flows can follow.
    fn keeps_order(&self, report: &mut Report) -> Result<()> {
        let at = At::new(self.guest);
        let captures = Captures::begin(self.run, self.network, self.guest, "tcp or udp")?;
        let before = Counters::read(self.network, self.guest, self.backend)?;
        let locality = || -> Result<[Locality; 2]> {
            let metrics = self.backend.metrics()?;
            let of = |direction| {
                Locality::bytes_where(&metrics, &[("net", NET), ("direction", direction)])
            };
            Ok([of("rx")?, of("tx")?])
        };
        let first = locality()?;
        let mut flows = Vec::new();
        for words in FLOWS {
            flows.push(Flow::begin(self.network, &at, words)?);
        }
        let moved = migrate(self.guest, "iperf3", MOVES, STAY)?;
        let ports: Vec<(u16, &str)> = flows.iter().map(|flow| (flow.port, flow.words)).collect();
        for flow in flows {
            flow.end()?;
        }
        let captured = captures.end()?;
        let after = Counters::read(self.network, self.guest, self.backend)?;
        let last = locality()?;
        let drops = after.since(&before)?;
        let local = |way: usize| {
            let since = last[way].since(&first[way]);
            per_cent(since.local(), since.total())
        };
        let (received, sent) = (local(0)?, local(1)?);
        let (mut lost, mut late) = (0, 0);
        for (port, words) in ports {
            let (there, back) = (captured.received(port)?, captured.sent(port)?);
            let figure = format!("to the guest {there}; from it {back}");
            report.tell("octo-net", format!("{MOVES} moves, iperf3 {words}"), figure);
            for order in [there, back] {
                ensure!(
                    order.sent > 0 && order.repeated == 0 && order.unknown == 0,
                    "iperf3 {words}: {order}"
                );
                lost += order.lost;
            }
            // What the guest sends is in the order of each of its transmit queues, and the guest
            // chooses the queue of each frame: an acknowledgement by the program and one by the
            // interrupt of the queue on which a segment came may overtake each other, as on any
            // interface with several queues.
            late += there.late;
        }
        let tcp = format!(
            "TCP: {} out of order, {} sent again",
            after.both_since(&before, "TcpExt:TCPOFOQueue")?,
            after.both_since(&before, "Tcp:RetransSegs")?
        );
        let figure = format!(
            "{received} % of received bytes and {sent} % of sent ones moved by the worker of their \
             node, {} % received on the \
             program's node; {lost} frames lost ({drops}); {tcp}",
            per_cent(moved.here, moved.here + moved.elsewhere)?,
        );
        report.tell("octo-net", format!("{MOVES} moves, all flows"), figure);
        ensure!(
            late * MOVES_A_LATE_FRAME <= u64::from(MOVES),
            "{late} frames with data to the guest are out of order; its own counters say {tcp}"
        );
        ensure!(
            lost <= drops.frames(),
            "{lost} frames are lost, and only {} were dropped by anybody who counts: {drops}",
            drops.frames()
        );
        ensure!(
            received >= RECEIVED_LOCALLY && sent >= SENT_LOCALLY,
            "Only {received} % of received and {sent} % of sent bytes are local"
        );
        Ok(())
    }
}

/// How a stream has followed its program.
#[derive(Debug, Clone, Copy)]
struct Followed {
    /// Moves after which it did.
    moves: u64,
    /// The most frames that it took.
    slowest: u64,
    /// Frames that came to the program's node afterwards.
    here: u64,
    /// Those that came to another.
    elsewhere: u64,
}

/// Moves all processes of a name between the guest's two processors, each time when what they
/// receive has followed, or has not within so many frames.
fn follow(guest: &Guest, name: &str, moves: u32, most: u32) -> Result<Followed> {
    let said = ask(guest, &format!("--follow {}", words(name, moves, most)))?;
    Ok(Followed {
        moves: said.number("followed")?,
        slowest: said.number("slowest")?,
        here: said.number("here")?,
        elsewhere: said.number("elsewhere")?,
    })
}

/// Moves all processes of a name to a processor of the guest, and returns when the stream that one
/// of them receives has followed.
pub fn settle_on(guest: &Guest, name: &str, cpu: u32) -> Result<()> {
    let moves = cpu + 1;
    let followed = follow(guest, name, moves, MOST_FRAMES)?;
    ensure!(
        followed.moves == u64::from(moves),
        "The stream does not follow its program: {followed:?}"
    );
    Ok(())
}

/// Moves all processes of a name between the guest's two processors.
pub fn migrate(guest: &Guest, name: &str, moves: u32, stay: Duration) -> Result<Moved> {
    let said = ask(guest, &words(name, moves, stay.as_millis()))?;
    Ok(Moved {
        here: said.number("here")?,
        elsewhere: said.number("elsewhere")?,
    })
}

fn words(name: &str, moves: u32, number: impl std::fmt::Display) -> String {
    format!("$(pidof {name} | tr ' ' ,) eth0 {moves} {number} 0 1")
}

/// What the program that moves others has printed: names, each before its number.
struct Said(String);

impl Said {
    fn number(&self, name: &str) -> Result<u64> {
        let mut words = self.0.split_whitespace();
        words.find(|word| *word == name);
        let value = words.next().with_context(|| format!("No {name}"))?;
        Ok(value.parse()?)
    }
}

fn ask(guest: &Guest, words: &str) -> Result<Said> {
    let line = format!("{MIGRATE} {words}");
    let output = guest.spawn(&line)?.wait(NET_TIMEOUT)?;
    output.check(format_args!("`{line}`"))?;
    Ok(Said(output.stdout))
}
