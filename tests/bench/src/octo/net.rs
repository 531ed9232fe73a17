//! farlane-net without a VM, beside a plain loop of system calls on a tap (ioctopus-asplos20,
//! figures 6 to 9 and 14 in shape).

use crate::Options;
use crate::follow;
use crate::machine::Machine;
use crate::plot::{Axis, Figure, Line};
use crate::report::Report;
use crate::rig::{self, Generator};
use crate::scale;
use crate::stats::Times;
use crate::ways::{BUFFER, Ours, Plain, Put, Rate, Way};
use anyhow::{Context as _, Result};
use farlane_kit::backend::Backend;
use farlane_kit::compare::interval::median;
use farlane_kit::compare::{Bar, Comparison, Conditions, Plan, Watch};
use farlane_vm_front_end::net::frame::{End, Tcp, echo_request, tcp_large, udp};
use farlane_vm_front_end::net::{Header, Nic, Options as Vm, feature};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Bytes of frames; those above the MTU are cut by whoever receives them.
const SIZES: [usize; 7] = [64, 256, 1024, 1514, 4096, 16_384, 65_000];
/// Bytes of the frames of round trips.
const TRIPS: [usize; 3] = [64, 512, 1514];
/// Bytes of the headers of a TCP frame, and of a UDP frame.
const TCP_HEADERS: usize = 54;
const UDP_HEADERS: usize = 42;
const MSS: u16 = 1448;
const STRETCH: Duration = Duration::from_millis(60);
const TRIPS_A_ROUND: usize = 300;
/// Most bytes that wait in a tap.
const BACKLOG_BYTES: usize = 64 << 20;
const MEMORY: u64 = 128 << 20;
/// farlane-net is better than what it stands beside: at most as much CPU time for a frame.
const BAR: f64 = 1.0;
/// Judges all together, as each round starts what is measured and measures everything.
const PLAN: Plan = Plan {
    least: 6,
    step: 6,
    most: 6,
    ..Plan::LONG
};

/// The guest.
pub fn guest(port: u16) -> End {
    End {
        mac: [2, 0, 0, 0, 0, 2],
        ip: Ipv4Addr::new(10, 79, 0, 2),
        port,
    }
}

/// This end of the tap.
pub fn host(mac: [u8; 6], port: u16) -> End {
    End {
        mac,
        ip: Ipv4Addr::new(10, 79, 0, 1),
        port,
    }
}

impl Served {
    /// Gives its tap the addresses.
    pub fn set_up(&self) -> Result<[u8; 6]> {
        set_up().with_context(|| format!("farlane-net said:\n{}", self.backend.log()))
    }
}

/// Gives the tap that is there its addresses.
fn set_up() -> Result<[u8; 6]> {
    let guest = guest(0);
    rig::set_up(host([0; 6], 0).ip, (guest.ip, guest.mac))
}

/// A frame of so many bytes that its receiver has nothing to do with.
fn frame(bytes: usize, from: &End, to: &End) -> (Header, Vec<u8>) {
    if bytes <= 1514 {
        let payload = vec![0x5a; bytes - UDP_HEADERS];
        return (Header::default(), udp(from, to, &payload));
    }
    let payload = vec![0x5a; bytes - TCP_HEADERS];
    tcp_large(from, to, Tcp::default(), &payload, MSS)
}

/// farlane-net, which runs.
pub struct Served {
    /// Where it serves.
    pub socket: PathBuf,
    /// Where it tells its counters.
    pub metrics: PathBuf,
    backend: Backend,
}

/// Starts farlane-net with the tap.
pub fn serve(options: &Options, folder: &Path, machine: &Machine, queues: u16) -> Result<Served> {
    let (socket, metrics) = (folder.join("net.sock"), folder.join("net.metrics"));
    let mut command = Command::new(&options.net);
    command
        .arg("--socket-path")
        .arg(&socket)
        .args(["--tap", rig::TAP]);
    command.args(["--queues", &queues.to_string()]);
    command.arg("--metrics").arg(&metrics);
    command.args(machine.words(&Nic::ranges_of(MEMORY)?));
    let log = scale::log(options.output.folder(), "farlane-net");
    let sockets = [socket.as_path(), metrics.as_path()];
    let backend = Backend::start("farlane-net", command, &sockets, &log)?;
    Ok(Served {
        backend,
        socket,
        metrics,
    })
}

/// Boots the VM whose interface farlane-net serves.
pub fn boot(served: &Served, machine: &Machine, pairs: u16) -> Result<Nic> {
    let vm = Vm {
        memory_bytes: MEMORY,
        nodes: machine.binding(),
        pairs,
        features: feature::LINUX & !feature::CTRL_VQ,
        receive_buffer_bytes: Some(u32::try_from(BUFFER)?),
        ..Vm::default()
    };
    Ok(Nic::connect(&served.socket, &vm)?)
}

/// What a way was measured to give.
#[derive(Default)]
struct Figures {
    /// Of each size.
    transmit: Vec<Vec<Rate>>,
    receive: Vec<Vec<Rate>>,
    /// Of each size of round trips: all, and the median of each round.
    trips: Vec<Vec<Duration>>,
    trip_medians: Vec<Vec<f64>>,
    /// Two wake-ups, of each round.
    wake_ups: Vec<f64>,
}

impl Figures {
    fn new() -> Self {
        Self {
            transmit: vec![Vec::new(); SIZES.len()],
            receive: vec![Vec::new(); SIZES.len()],
            trips: vec![Vec::new(); TRIPS.len()],
            trip_medians: vec![Vec::new(); TRIPS.len()],
            wake_ups: Vec::new(),
        }
    }

    /// Measures a way once more.
    fn take(&mut self, way: &mut dyn Way, mac: [u8; 6]) -> Result<()> {
        let generator = Generator::new()?;
        // The kernel throws away what is for another host.
        let mut nobody = host(mac, 9);
        nobody.mac = [2, 0, 0, 0, 0, 0x99];
        for (at, bytes) in SIZES.iter().enumerate() {
            let (header, out) = frame(*bytes, &guest(9), &nobody);
            self.transmit[at].push(way.transmit(&header, &out, scale::time(STRETCH))?);
            let (header, frame) = frame(*bytes, &host(mac, 9), &guest(9));
            let put = Put {
                generator: &generator,
                header: &header,
                frame: &frame,
            };
            let count = scale::count((BACKLOG_BYTES / bytes).min(8_192)).max(16);
            self.receive[at].push(way.receive(&put, count)?);
        }
        for (at, bytes) in TRIPS.iter().enumerate() {
            let request = echo_request(&guest(0), &host(mac, 0), &vec![0; bytes - UDP_HEADERS]);
            let trips = (0..scale::count(TRIPS_A_ROUND)).map(|_| way.round_trip(&request));
            let trips: Vec<Duration> = trips.collect::<Result<_>>()?;
            self.trip_medians[at].push(Times::of(trips.clone()).p50_us);
            self.trips[at].extend(trips);
        }
        self.wake_ups.push(farlane_kit::compare::wake_up(32)?);
        Ok(())
    }
}

/// What the figures stand beside.
const NOTE: &str = "QEMU's own tap backend cannot be driven without a VM: it is the reference in \
                    one. Here that is a plain loop of \
                    readv and writev on the tap, the least that any backend does.";

/// Measures everything, in a network of its own.
pub fn run(options: &Options, machine: &Machine, report: &mut Report) -> Result<()> {
    println!("\n{NOTE}");
    report.keep("net, reference", NOTE)?;
    let folder = tempfile::tempdir()?;
    let mut figures = [Figures::new(), Figures::new()];
    let rounds = PLAN.most.min(scale::plan().most);
    let mut watch = Watch::new();
    for round in 0..rounds {
        watch.look()?;
        // Whoever comes first in one round comes second in the next.
        for turn in [round % 2, 1 - round % 2] {
            if turn == 0 {
                let served = serve(options, folder.path(), machine, 1)?;
                let mac = served.set_up()?;
                let mut ours = Ours {
                    nic: boot(&served, machine, 1)?,
                    process: served.backend.pid(),
                };
                figures[0].take(&mut ours, mac)?;
            } else {
                let mut plain = Plain::open()?;
                let mac = set_up()?;
                figures[1].take(&mut plain, mac)?;
            }
        }
    }
    tell(options, figures, watch.conditions(), report)?;
    follow::run(options, machine, folder.path(), report)
}

fn tell(
    options: &Options,
    figures: [Figures; 2],
    conditions: Conditions,
    report: &mut Report,
) -> Result<()> {
    trips(options, &figures, conditions, report)?;
    let [ours, plain] = figures;
    let mut medians = Vec::new();
    for (name, figure, ours, plain) in [
        ("transmit", "fig7-transmit", ours.transmit, plain.transmit),
        ("receive", "fig6-receive", ours.receive, plain.receive),
    ] {
        let mut lines = [Vec::new(), Vec::new()];
        for ((bytes, ours), plain) in SIZES.iter().zip(ours).zip(plain) {
            let of = |rates: &[Rate], pick: fn(&Rate) -> f64| -> Vec<f64> {
                rates.iter().map(pick).collect()
            };
            let cost = Comparison::of_rounds(
                of(&ours, |rate| rate.cpu_ns),
                Some(of(&plain, |rate| rate.cpu_ns)),
                (Bar::AtMost(BAR), &PLAN),
                conditions,
            );
            let [ours, plain] = [&ours, &plain].map(|all| median(&of(all, |rate| rate.frames)));
            let ratio = ours / plain;
            let costs = [cost.ours, cost.theirs.unwrap_or(f64::NAN)];
            let gigabits =
                |rate: f64| -> Result<f64> { Ok(rate * f64::from(u32::try_from(*bytes)?) * 8e-9) };
            let what = format!("{name} {bytes} B, frames/s");
            println!(
                "{what:<32} farlane-net {ours:>9.0} ({:>6.2} Gbit/s, {:>5.0} ns CPU)   \
                 readv/writev {plain:>9.0} ({:>6.2}, {:>5.0})   {ratio:.2}x",
                gigabits(ours)?,
                costs[0],
                gigabits(plain)?,
                costs[1],
            );
            report.keep(&format!("net, {what}"), [ours, plain])?;
            let what = format!("net, {name} {bytes} B, CPU time of a frame");
            report.keep(&what, costs)?;
            report.compared(&what, "ns", "a plain loop on the tap", &cost);
            let x = f64::from(u32::try_from(*bytes)?);
            lines[0].push((x, gigabits(ours)?));
            lines[1].push((x, gigabits(plain)?));
            medians.push((name, *bytes, ours, plain));
        }
        draw(options, name, figure, lines)?;
    }
    packets(options, &medians)
}

fn both(points: [Vec<(f64, f64)>; 2]) -> Vec<Line> {
    let labels = ["farlane-net and a driver", "readv and writev on the tap"];
    let lines = labels.into_iter().zip(points);
    lines
        .map(|(label, points)| Line {
            label: label.into(),
            points,
        })
        .collect()
}

fn draw(options: &Options, name: &str, figure: &str, points: [Vec<(f64, f64)>; 2]) -> Result<()> {
    Figure {
        title: format!(
            "Frames that a driver {name}s, one queue (paper {})",
            &figure[..4]
        ),
        x: Axis::Size,
        y: "Gbit/s",
        log_y: true,
        lines: both(points),
    }
    .write(&options.output.folder().join(format!("octo-{figure}.svg")))
}

/// Frames a second of small frames (fig. 8).
fn packets(options: &Options, medians: &[(&str, usize, f64, f64)]) -> Result<()> {
    let mut lines = Vec::new();
    for name in ["transmit", "receive"] {
        for (way, pick) in [("farlane-net", 0), ("readv/writev", 1)] {
            let own = medians.iter().filter(|m| m.0 == name && m.1 <= 1514);
            let point = |m: &(&str, usize, f64, f64)| -> Result<(f64, f64)> {
                let rate = if pick == 0 { m.2 } else { m.3 };
                Ok((f64::from(u32::try_from(m.1)?), rate / 1e6))
            };
            lines.push(Line {
                label: format!("{name}, {way}"),
                points: own.map(point).collect::<Result<_>>()?,
            });
        }
    }
    Figure {
        title: "Frames a second, one queue (paper fig. 8)".into(),
        x: Axis::Size,
        y: "10^6 frames/s",
        log_y: false,
        lines,
    }
    .write(&options.output.folder().join("octo-fig8-frames.svg"))
}

/// Times of round trips (fig. 9): the plain loop's and two wake-ups, as many as a backend needs
/// that sleeps, measured in the same rounds.
fn trips(
    options: &Options,
    [ours, plain]: &[Figures; 2],
    conditions: Conditions,
    report: &mut Report,
) -> Result<()> {
    let mut lines = [Vec::new(), Vec::new()];
    for (at, bytes) in TRIPS.iter().enumerate() {
        let times = [ours, plain].map(|all| Times::of(all.trips[at].clone()));
        report.times(
            &format!("net, round trip {bytes} B, farlane-net"),
            &times[0],
        )?;
        report.times(&format!("net, round trip {bytes} B, plain loop"), &times[1])?;
        let wake_ups = ours.wake_ups.iter().zip(&plain.wake_ups);
        let allowed = plain.trip_medians[at].iter().zip(wake_ups);
        let allowed = allowed.map(|(plain, (a, b))| plain + f64::midpoint(*a, *b));
        let found = Comparison::of_rounds(
            ours.trip_medians[at].clone(),
            Some(allowed.collect()),
            (Bar::AtMost(1.0), &PLAN),
            conditions,
        );
        let what = format!("net, round trip {bytes} B, p50");
        report.compared(&what, "us", "plain loop and two wake-ups", &found);
        let x = f64::from(u32::try_from(*bytes)?);
        lines[0].push((x, times[0].p50_us));
        lines[1].push((x, times[1].p50_us));
    }
    Figure {
        title: "Round trip to the host's kernel, p50 (paper fig. 9)".into(),
        x: Axis::Size,
        y: "us",
        log_y: false,
        lines: both(lines),
    }
    .write(&options.output.folder().join("octo-fig9-latency.svg"))
    .context("fig. 9")
}
