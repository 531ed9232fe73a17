//! iperf3 and a ping-pong in one guest, in turns, on an interface of farlane-net and on one of QEMU's own over a tap that is
//! alike; the peer is the same.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use farlane_vmkit::guest::Guest;
use farlane_vmkit::guest_program::GuestProgram;
use farlane_vmkit::guest_root::GuestFile;
use farlane_vmkit::interfaces::{Interface, Server};
use farlane_vmkit::network::{BRIDGE, Network};
use farlane_vmkit::progress;
use farlane_vmkit::report::Report;
use serde_json::{Value, json};

use super::Scenario;
use crate::iperf::Iperf;
use crate::net::{At, GUEST, TAP, config, connect, socket};
use crate::run::Run;
use crate::tools::{Program, median};

pub const SCENARIO: Scenario = Scenario {
    name: "net-vs-tap",
    about: "iperf3 and a ping-pong over farlane-net and over QEMU's own tap backend, in one VM, in turns",
    is_test: false,
    run,
};

/// How often each is measured on each interface; the median of the ratios of a round counts.
const ROUNDS: usize = 7;

/// How much of what the other gives farlane-net gives at least: the emulated guest is what is slow.
const BAR: f64 = 0.97;

/// The other interface: its tap, its address, that of the peer there.
const THEIR_TAP: &str = "tap1";
const THEIR_GUEST: &str = "10.79.0.2";
const THEIR_PEER: &str = "10.79.0.1";
const THEIR_MAC: &str = "52:54:00:79:00:02";

/// Bytes of the payload of a UDP frame of 64 bytes.
const SMALL: f64 = 22.0;

/// Round trips of a ping-pong.
const TRIPS: u32 = 400;

/// The program of the ping-pong in the guest.
const PINGPONG: &str = "/usr/bin/pingpong";

/// How a figure is measured.
enum Measure {
    /// By iperf3 with these words; bits a second, or frames if these have so many bytes of payload.
    Iperf(&'static str, Option<f64>),
    /// By the ping-pong: microseconds.
    PingPong,
}

const MEASURES: &[(&str, &str, Measure)] = &[
    ("TCP to the guest", "Mbit/s", Measure::Iperf("-t 1", None)),
    (
        "TCP from the guest",
        "Mbit/s",
        Measure::Iperf("-t 1 -R", None),
    ),
    (
        "UDP to the guest, frames of 64 B",
        "frames/s",
        Measure::Iperf("-u -b 0 -l 22 -t 1", Some(SMALL)),
    ),
    (
        "UDP from the guest, frames of 64 B",
        "frames/s",
        Measure::Iperf("-u -b 0 -l 22 -t 1 -R", Some(SMALL)),
    ),
    ("TCP request and response", "us", Measure::PingPong),
];

/// A figure of both.
#[derive(Debug)]
pub struct Compared {
    /// What was measured.
    pub name: &'static str,
    unit: &'static str,
    ours: f64,
    theirs: f64,
    /// How much better farlane-net is: above one.
    ratio: f64,
}

impl Compared {
    /// For people.
    pub fn text(&self) -> String {
        let Self {
            unit, ours, theirs, ..
        } = self;
        let ratio = self.ratio;
        format!(
            "farlane-net {ours:.0} {unit}, QEMU's tap backend {theirs:.0}: {ratio:.2}x as good (at least {BAR:.2}x)"
        )
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "name": self.name,
            "unit": self.unit,
            "farlane_net": self.ours,
            "qemu_tap": self.theirs,
            "ratio": self.ratio,
            "bar": BAR,
        })
    }
}

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let all = compare(run)?;
    let mut missed = Vec::new();
    for compared in &all {
        report.add("one VM", compared.name, compared.text());
        if compared.ratio < BAR {
            missed.push(format!("{}: {}", compared.name, compared.text()));
        }
    }
    if !missed.is_empty() {
        bail!("farlane-net is not fast enough:\n{}", missed.join("\n"));
    }
    Ok(())
}

/// Measures all.
pub fn compare(run: &Run<'_>) -> Result<Vec<Compared>> {
    let pingpong = pingpong(run)?;
    let network = Network::new(run.context.kit()?.tree(), run.logs())?;
    for tap in [TAP, THEIR_TAP] {
        network.tap(tap, false)?;
    }
    network.run(&format!("ip address add {THEIR_PEER}/24 dev {BRIDGE}"))?;
    let backend = run.context.nets()?.serve(run, &network, 1, &[])?;
    let mut config = config("a", Server::VhostUser(socket(run)), 1)
        .interface(Interface::new("theirs", Server::Tap(THEIR_TAP.into())).mac(THEIR_MAC))
        .inside(&network)
        .files([GuestFile::new(pingpong.clone(), PINGPONG)]);
    // One to compute, one to be interrupted.
    config.cpus = 2;
    let [guest] = run.boot([config])?;
    connect(&guest)?;
    // Each interface answers for its own address only.
    guest
        .run(&format!(
            "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore && echo 2 > /proc/sys/net/ipv4/conf/all/arp_announce && \
             ip link set eth1 up && /usr/sbin/ip address add {THEIR_GUEST}/24 dev eth1"
        ))
        .context("The guest has no second interface")?;
    let rig = Rig {
        network: &network,
        guest: &guest,
        pingpong,
    };
    let all = MEASURES.iter().map(|measure| rig.compare(measure));
    let all: Vec<Compared> = all.collect::<Result<_>>()?;
    drop(guest);
    backend.stop()?;
    Ok(all)
}

/// Compiles the ping-pong, for the guest and for its peer.
fn pingpong(run: &Run<'_>) -> Result<PathBuf> {
    let program = run.path("pingpong");
    let folder = run.context.workspace().root().join("tests/xtask/guest");
    GuestProgram {
        source: &folder.join("pingpong.c"),
        headers: &folder,
        libraries: &[],
    }
    .build(run.context.kit()?.tree(), &program)?;
    Ok(program)
}

struct Rig<'a> {
    network: &'a Network,
    guest: &'a Guest,
    pingpong: PathBuf,
}

impl Rig<'_> {
    fn compare(
        &self,
        (name, unit, measure): &(&'static str, &'static str, Measure),
    ) -> Result<Compared> {
        let mut figures = [Vec::new(), Vec::new()];
        let mut ratios = Vec::new();
        for round in 0..ROUNDS {
            // Whoever comes first in one round comes second in the next.
            for turn in [round % 2, 1 - round % 2] {
                let address = [GUEST, THEIR_GUEST][turn];
                let figure = self.measure(measure, address);
                figures[turn].push(figure.with_context(|| format!("{name}, {address}"))?);
            }
            let ratio = figures[0][round] / figures[1][round];
            ratios.push(match measure {
                Measure::Iperf(..) => ratio,
                Measure::PingPong => 1.0 / ratio,
            });
        }
        let [ours, theirs] = figures;
        let compared = Compared {
            name,
            unit,
            ours: median(ours)?,
            theirs: median(theirs)?,
            ratio: median(ratios)?,
        };
        progress::note(&format!("{name}: {}", compared.text()));
        Ok(compared)
    }

    fn measure(&self, measure: &Measure, address: &'static str) -> Result<f64> {
        let guest = At::with(self.guest, address);
        match measure {
            Measure::Iperf(words, payload) => {
                let figures = Iperf::new(address, words).run(&guest, self.network)?;
                let bits = figures.received_bits_per_second;
                Ok(payload.map_or(bits / 1e6, |bytes| bits / 8.0 / bytes))
            }
            Measure::PingPong => {
                let own = self.pingpong.display();
                let program = Program {
                    name: "pingpong",
                    serve: &|port| format!("{PINGPONG} serve {port}"),
                    ask: &|address, port| format!("{own} ask {address} {port} {TRIPS}"),
                };
                let asked = program.run(&guest, self.network)?.asked;
                let figure = asked.trim().strip_prefix("median ");
                let figure = figure.with_context(|| format!("pingpong said {asked:?}"))?;
                Ok(figure.parse()?)
            }
        }
    }
}
