//! iperf3 and a ping-pong in one guest, in turns, on an interface of farlane-net and on one of
//! QEMU's own over a tap that is alike; the peer is the same.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use farlane_kit::compare::{Bar, Bars, Comparison, Side, alternating};
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::interfaces::{Interface, Server};
use farlane_kit::network::{BRIDGE, Network};
use farlane_kit::progress;
use farlane_kit::report::Report;
use serde::Serialize;

use crate::iperf::Iperf;
use crate::net::{At, GUEST, TAP, config, connect, socket};
use crate::run::Run;
use crate::tools::Program;
use crate::versus::{Form, tell};

/// farlane-net is no worse than the other: at least so much of its rate, at most so much of its
/// time.
const BAR: f64 = 1.0;

/// The small form's: usual is 0.9 to 1.2, and 0.5 where the time of a frame has doubled.
const SMALL_BAR: f64 = 0.65;

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
    Iperf {
        words: &'static str,
        small: &'static str,
        payload: Option<f64>,
    },
    /// By the ping-pong: microseconds.
    PingPong,
}

const MEASURES: &[(&str, &str, Measure)] = &[
    (
        "TCP to the guest",
        "Mbit/s",
        Measure::Iperf {
            words: "-t 1",
            small: "-n 32M",
            payload: None,
        },
    ),
    (
        "TCP from the guest",
        "Mbit/s",
        Measure::Iperf {
            words: "-t 1 -R",
            small: "-n 32M -R",
            payload: None,
        },
    ),
    (
        "UDP to the guest, frames of 64 B",
        "frames/s",
        Measure::Iperf {
            words: "-u -b 0 -l 22 -t 1",
            small: "",
            payload: Some(SMALL),
        },
    ),
    (
        "UDP from the guest, frames of 64 B",
        "frames/s",
        Measure::Iperf {
            words: "-u -b 0 -l 22 -t 1 -R",
            small: "",
            payload: Some(SMALL),
        },
    ),
    ("TCP request and response", "us", Measure::PingPong),
];

/// A figure of both.
#[derive(Debug, Serialize)]
pub struct Compared {
    /// What was measured.
    pub name: &'static str,
    unit: &'static str,
    comparison: Comparison,
}

pub fn versus(run: &Run<'_>, form: Form, report: &mut Report) -> Result<()> {
    let mut bars = Bars::default();
    for compared in compare(run, form)? {
        let what = ("one VM", compared.name);
        let other = (compared.unit, "QEMU's tap backend");
        tell(&mut bars, report, what, other, &compared.comparison);
    }
    form.enforce(&bars)
}

/// Measures all.
pub fn compare(run: &Run<'_>, form: Form) -> Result<Vec<Compared>> {
    let pingpong = run.guest_program("pingpong")?;
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
            "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore && echo 2 > \
             /proc/sys/net/ipv4/conf/all/arp_announce && \
             ip link set eth1 up && /usr/sbin/ip address add {THEIR_GUEST}/24 dev eth1"
        ))
        .context("The guest has no second interface")?;
    let rig = Rig {
        form,
        network: &network,
        guest: &guest,
        pingpong,
    };
    let all = MEASURES
        .iter()
        .filter_map(|measure| rig.compare(measure).transpose());
    let all: Vec<Compared> = all.collect::<Result<_>>()?;
    drop(guest);
    backend.stop()?;
    Ok(all)
}

struct Rig<'a> {
    form: Form,
    network: &'a Network,
    guest: &'a Guest,
    pingpong: PathBuf,
}

impl Rig<'_> {
    /// The comparison of a measure, where this form has it.
    fn compare(
        &self,
        (name, unit, measure): &(&'static str, &'static str, Measure),
    ) -> Result<Option<Compared>> {
        if self.form == Form::Small && matches!(measure, Measure::Iperf { small: "", .. }) {
            return Ok(None);
        }
        let bar = match self.form {
            Form::Small => SMALL_BAR,
            Form::Long => BAR,
        };
        let bar = match measure {
            Measure::Iperf { .. } => Bar::AtLeast(bar),
            Measure::PingPong => Bar::AtMost(1.0 / bar),
        };
        let one = |side| {
            let address = match side {
                Side::Ours => GUEST,
                Side::Theirs(_) => THEIR_GUEST,
            };
            let figure = self.measure(measure, address);
            figure.with_context(|| format!("{name}, {address}"))
        };
        let found = farlane_kit::compare::compare(&self.form.plan(), &[bar], alternating(1, one))?;
        let comparison = found.into_iter().next().context("No comparison")?;
        progress::note(&format!("{name}: {comparison}"));
        Ok(Some(Compared {
            name,
            unit,
            comparison,
        }))
    }

    fn measure(&self, measure: &Measure, address: &'static str) -> Result<f64> {
        let guest = At::with(self.guest, address);
        match measure {
            Measure::Iperf {
                words,
                small,
                payload,
            } => {
                let words = if self.form == Form::Small {
                    small
                } else {
                    words
                };
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
