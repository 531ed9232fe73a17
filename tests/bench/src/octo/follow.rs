//! A flow whose process goes from node to node: where its frames are received, over time
//! (ioctopus-asplos20, figure 14).

use crate::Options;
use crate::machine::Machine;
use crate::net::{boot, guest, host, serve};
use crate::plot::{Axis, Figure, Line};
use crate::report::Report;
use crate::rig::Generator;
use crate::scale;
use anyhow::{Result, ensure};
use farlane_vm_front_end::net::Header;
use farlane_vm_front_end::net::frame::udp;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the process stays on a node, and how long all takes.
const STAY: Duration = Duration::from_millis(500);
const ALL: Duration = Duration::from_secs(4);
/// A point of the drawing.
const STEP: Duration = Duration::from_millis(50);
/// Frames between two answers.
const ANSWER: u64 = 8;
/// Frames that come at once, and how often.
const BURST: usize = 16;
const PAUSE: Duration = Duration::from_millis(1);
const PAYLOAD: usize = 1400;
/// Bytes before the payload.
const HEADERS: usize = 42;
/// Part of the bytes that a worker of another node moves, at most.
const LOCAL: f64 = 0.99;

/// What was received.
#[derive(Default)]
struct Seen {
    /// Bytes by queue, of each step.
    steps: Vec<[u64; 2]>,
    frames: u64,
    /// Frames that came after a later one.
    disordered: u64,
    next: u64,
}

/// Measures it, draws it.
pub fn run(options: &Options, machine: &Machine, folder: &Path, report: &mut Report) -> Result<()> {
    let served = serve(options, folder, machine, 2)?;
    let mac = served.set_up()?;
    let mut nic = boot(&served, machine, 2)?;
    let over = AtomicBool::new(false);
    let generator = Generator::new()?;
    let mut seen = Seen::default();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| -> Result<u64> {
            let mut frame = udp(&host(mac, 7), &guest(7), &[0; PAYLOAD]);
            let mut number = 0_u64;
            while !over.load(Ordering::Relaxed) {
                for _ in 0..BURST {
                    // The driver looks at no checksum.
                    frame[HEADERS..HEADERS + 8].copy_from_slice(&number.to_le_bytes());
                    number += u64::try_from(generator.send(&Header::default(), &frame, 1)?)?;
                }
                std::thread::sleep(PAUSE);
            }
            Ok(number)
        });
        let result = receive(&mut nic, mac, &mut seen);
        over.store(true, Ordering::Relaxed);
        let sent = sender.join().map_err(|e| anyhow::anyhow!("{e:?}"))??;
        result?;
        ensure!(seen.frames > 0, "Nothing came");
        println!(
            "follow: {sent} frames sent, {} received, {} late",
            seen.frames, seen.disordered
        );
        Ok(())
    })?;
    report.keep("follow, bytes by queue of 50 ms", &seen.steps)?;
    let late = f64::from(u32::try_from(seen.disordered)?);
    report.at_most("follow, frames out of order", late, "", 0.0, "none");
    let share = local_share(&served.metrics)?;
    report.keep("follow, bytes by local workers", share)?;
    report.at_least("follow, bytes by local workers", share, "", LOCAL, "all");
    draw(options, &seen)
}

fn receive(nic: &mut farlane_vm_front_end::net::Nic, mac: [u8; 6], seen: &mut Seen) -> Result<()> {
    let answer = udp(&guest(7), &host(mac, 7), &[0; 10]);
    let begin = Instant::now();
    while begin.elapsed() < scale::time(ALL).max(STAY) {
        let now = begin.elapsed();
        let node = usize::from((now.as_millis() / STAY.as_millis()) % 2 == 1);
        let step = usize::try_from(now.as_millis() / STEP.as_millis())?;
        seen.steps.resize(step + 1, [0; 2]);
        let Some((queue, frame)) = nic.receive(STEP)? else {
            continue;
        };
        let Some(number) = frame.bytes.get(HEADERS..HEADERS + 8) else {
            continue;
        };
        if frame.bytes.len() != HEADERS + PAYLOAD {
            continue;
        }
        let number = u64::from_le_bytes(number.try_into()?);
        seen.frames += 1;
        seen.disordered += u64::from(number < seen.next);
        seen.next = seen.next.max(number + 1);
        if let Some(bytes) = seen.steps.last_mut().and_then(|step| step.get_mut(queue)) {
            *bytes += u64::try_from(frame.bytes.len())?;
        }
        if seen.frames.is_multiple_of(ANSWER) {
            nic.send(node, &answer)?;
        }
    }
    Ok(())
}

/// The part of the bytes whose data is on the node of the worker that moved them.
fn local_share(metrics: &Path) -> Result<f64> {
    let text = farlane_daemon::metrics::ask(metrics, Duration::from_secs(10))?;
    let (mut local, mut all) = (0.0, 0.0);
    for line in text
        .lines()
        .filter(|l| l.starts_with("farlane_net_locality_bytes_total{"))
    {
        let label = |name: &str| {
            let rest = line.split(&format!("{name}=\"")).nth(1)?;
            rest.split('"').next().map(str::to_owned)
        };
        let value = line.rsplit(' ').next().unwrap_or_default();
        let bytes: f64 = value.parse()?;
        all += bytes;
        local += if label("data") == label("worker") {
            bytes
        } else {
            0.0
        };
    }
    ensure!(all > 0.0, "farlane-net counts no bytes by node");
    Ok(local / all)
}

fn draw(options: &Options, seen: &Seen) -> Result<()> {
    let line = |queue: usize| -> Result<Line> {
        let point = |(at, step): (usize, &[u64; 2])| -> Result<(f64, f64)> {
            let x = f64::from(u32::try_from(at)?) * STEP.as_secs_f64();
            let bytes = f64::from(u32::try_from(step[queue])?);
            Ok((x, bytes * 8e-6 / STEP.as_secs_f64()))
        };
        Ok(Line {
            label: format!("received by the worker of node {queue}"),
            points: seen
                .steps
                .iter()
                .enumerate()
                .map(point)
                .collect::<Result<_>>()?,
        })
    };
    Figure {
        title: "A flow whose process changes its node every 500 ms (paper fig. 14)".into(),
        x: Axis::Time,
        y: "Mbit/s",
        log_y: false,
        lines: vec![line(0)?, line(1)?],
    }
    .write(&options.output.folder().join("octo-fig14-migration.svg"))
}
