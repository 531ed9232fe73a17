//! The measurements.

use crate::daemon::Daemon;
use crate::direct::Direct;
use crate::idle;
use crate::messages;
use crate::plot::{Axis, Figure, Line};
use crate::reference;
use crate::report::Report;
use crate::rig::{ACCESS, BUFFER, End, connect};
use crate::scale;
use crate::stats::{Times, gib_per_s};
use anyhow::Result;
use farlane_rdma_client::{Buffer, Mr};
use std::path::Path;
use std::time::{Duration, Instant};

/// Sizes of the paper's figures 6 to 8.
const LARGE: [usize; 5] = [512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20];
/// Sizes of figure 10.
const LATENCY: [usize; 7] = [4, 16, 64, 256, 1024, 4096, 16384];
/// Sizes of figure 11.
const THROUGHPUT: [usize; 9] = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536];

/// A run of this bench.
pub struct Run<'a> {
    /// What was measured.
    pub report: Report,
    /// The backend.
    pub daemon: Daemon,
    out: &'a Path,
    /// Two VMs that a harness plays.
    pub vms: [End; 2],
    /// Two ends in this process.
    pub hosts: [End; 2],
}

#[allow(clippy::cast_precision_loss)] // Sizes far below 2^53.
fn x(bytes: usize) -> f64 {
    bytes as f64
}

/// Measures everything.
pub fn run(backend: &Path, out: &Path) -> Result<Report> {
    let mut report = Report::default();
    let cache_line = reference::cache_line()?;
    report.times("cache-line round trip, two cores", &cache_line)?;
    let eventfd = reference::eventfd(false)?;
    report.times("eventfd round trip, two cores", &eventfd)?;
    let rested = reference::eventfd(true)?;
    report.times("eventfd round trip, two cores at rest", &rested)?;

    for (how, times) in reference::signals()? {
        report.times(&format!("signalling an eventfd, {how}"), &times)?;
    }

    let daemon = Daemon::start(backend, &scale::log(out, "farlane-rdma"))?;
    let vms = [End::in_vm(&daemon.vm(1))?, End::in_vm(&daemon.vm(2))?];
    connect(&vms[0], &vms[1])?;
    let hosts = [End::on_host(&daemon.host())?, End::on_host(&daemon.host())?];
    connect(&hosts[0], &hosts[1])?;
    let mut run = Run {
        report,
        daemon,
        out,
        vms,
        hosts,
    };
    run.calls(&cache_line, &eventfd)?;
    run.registration()?;
    run.bandwidth()?;
    run.overhead()?;
    run.events()?;
    run.bars(&cache_line)?;
    run.endurance()?;
    messages::measure(&mut run.report, backend, out)?;
    // Last, so that so many processes disturb no other figure.
    idle::measure(&mut run.report, &run.hosts, backend, out)?;
    Ok(run.report)
}

impl Run<'_> {
    /// Call round trip awake and asleep; spin against notify (fig. 9).
    fn calls(&mut self, cache_line: &Times, eventfd: &Times) -> Result<()> {
        // The host socket: in the VM that the harness plays, one more thread of its own would have
        // to wake up for an event.
        let context = &self.hosts[0].context;
        let call = || context.verbs().nop(&()).map_err(anyhow::Error::from);
        let awake = Times::take(20_000, call)?;
        let asleep = Times::timed(500, || {
            reference::let_sleep();
            let start = Instant::now();
            call()?;
            Ok(start.elapsed())
        })?;
        self.report.times("call, backend awake (spin)", &awake)?;
        self.report
            .times("call, backend asleep (notify)", &asleep)?;
        Figure {
            title: "Synchronisation: spin against notify (paper fig. 9)".into(),
            x: Axis::Percentile,
            y: "round trip, us",
            log_y: true,
            lines: [
                ("call, spin", &awake),
                ("call, notify", &asleep),
                ("cache line", cache_line),
                ("eventfd", eventfd),
            ]
            .into_iter()
            .map(|(label, t)| Line {
                label: label.into(),
                points: vec![(50.0, t.p50_us), (90.0, t.p90_us), (99.0, t.p99_us)],
            })
            .collect(),
        }
        .write(&self.out.join("fig9-synchronisation.svg"))
    }

    /// Allocation and registration (fig. 6).
    fn registration(&mut self) -> Result<()> {
        let mut lines = Vec::new();
        let mut eight = f64::NAN;
        let ends = [("VM", &self.vms[0]), ("host process", &self.hosts[0])];
        for (who, end) in ends {
            let memory = end.memory.allocate(BUFFER)?;
            let (mut register, mut allocate) = (Vec::new(), Vec::new());
            for bytes in LARGE {
                let times = Times::take(200, || {
                    // SAFETY: the memory is never freed.
                    let mr = unsafe {
                        Mr::register(&end.pd, memory as usize, bytes, memory as u64, ACCESS)
                    }?;
                    mr.destroy()?;
                    Ok(())
                })?;
                self.report.times(
                    &format!("register + deregister {} KiB, {who}", bytes >> 10),
                    &times,
                )?;
                register.push((x(bytes), times.p50_us / 1e3));
                let times = Times::take(50, || {
                    let buffer = Buffer::allocate(&end.context, bytes)?;
                    // SAFETY: the buffer outlives the registration.
                    let mr = unsafe {
                        Mr::register(
                            &end.pd,
                            buffer.address(),
                            bytes,
                            buffer.address() as u64,
                            ACCESS,
                        )
                    }?;
                    mr.destroy()?;
                    Ok(())
                })?;
                self.report.times(
                    &format!("allocate + register {} KiB, {who}", bytes >> 10),
                    &times,
                )?;
                allocate.push((x(bytes), times.p50_us / 1e3));
                if bytes == 8 << 20 {
                    eight = eight.max(register[register.len() - 1].1);
                }
            }
            lines.push(Line {
                label: format!("registration, {who}"),
                points: register,
            });
            lines.push(Line {
                label: format!("allocation in host memory, {who}"),
                points: allocate,
            });
        }
        self.report.at_most(
            "registering 8 MiB, p50",
            eight,
            "ms",
            1.0,
            "paper: tens of ms",
        );
        Figure {
            title: "Allocation and registration (paper fig. 6)".into(),
            x: Axis::Size,
            y: "ms",
            log_y: true,
            lines,
        }
        .write(&self.out.join("fig6-registration.svg"))
    }

    /// Single transfers and bursts (figs. 7, 8).
    fn bandwidth(&mut self) -> Result<()> {
        let [a, b] = &self.vms;
        let (mut single, mut burst, mut memcpy) = (Vec::new(), Vec::new(), Vec::new());
        let (mut host, mut host_pair, mut vm_writev) = (Vec::new(), Vec::new(), Vec::new());
        let [ha, hb] = &self.hosts;
        // A host process that writes into a VM, where the backend copies once.
        let mixed = [End::on_host(&self.daemon.host())?, End::beside(b)?];
        connect(&mixed[0], &mixed[1])?;
        let child = Echo::start()?;
        for bytes in LARGE {
            let n = reference::rounds(bytes);
            let rate = |t: &Times| gib_per_s(bytes, t.p50_us);
            // Alternate, so that what else the machine does hits all of them.
            let reference = reference::memcpy(b.buffer, a.buffer, bytes)?;
            let one = Times::take(n, || a.write(b, bytes))?;
            let writev = child.write(ha.buffer, bytes)?;
            let from_host = Times::take(n, || mixed[0].write(&mixed[1], bytes))?;
            let between = Times::take(n, || ha.write(hb, bytes))?;
            let count = scale::count((1usize << 30) / bytes);
            let many = Times::take(3, || a.burst(b, bytes, count, 8))?;
            memcpy.push((x(bytes), rate(&reference)));
            single.push((x(bytes), rate(&one)));
            vm_writev.push((x(bytes), rate(&writev)));
            host.push((x(bytes), rate(&from_host)));
            host_pair.push((x(bytes), rate(&between)));
            burst.push((x(bytes), gib_per_s(count * bytes, many.p50_us)));
            println!(
                "{:>5} KiB: memcpy {:.1}, VM to VM {:.1}, burst {:.1}; process_vm_writev {:.1}, \
                 host to VM {:.1}, host to host {:.1} GiB/s",
                bytes >> 10,
                rate(&reference),
                rate(&one),
                gib_per_s(count * bytes, many.p50_us),
                rate(&writev),
                rate(&from_host),
                rate(&between)
            );
        }
        let line = |label: &str, points: &Vec<(f64, f64)>| Line {
            label: label.into(),
            points: points.clone(),
        };
        for (name, value) in [
            ("memcpy, GiB/s", &memcpy),
            ("single transfer VM to VM, GiB/s", &single),
            ("burst VM to VM, GiB/s", &burst),
            ("process_vm_writev, GiB/s", &vm_writev),
            ("single transfer host to VM, GiB/s", &host),
            ("single transfer host to host, GiB/s", &host_pair),
        ] {
            self.report.keep(name, value)?;
        }
        Figure {
            title: "Single transfer (paper fig. 7)".into(),
            x: Axis::Size,
            y: "GiB/s",
            log_y: false,
            lines: vec![
                line("memcpy", &memcpy),
                line("VM to VM", &single),
                line("process_vm_writev", &vm_writev),
                line("host process to VM", &host),
                line("host process to host process", &host_pair),
            ],
        }
        .write(&self.out.join("fig7-single-transfer.svg"))?;
        Figure {
            title: "1 GiB in bursts (paper fig. 8)".into(),
            x: Axis::Size,
            y: "GiB/s",
            log_y: false,
            lines: vec![
                line("memcpy", &memcpy),
                line("VM to VM, 8 outstanding", &burst),
            ],
        }
        .write(&self.out.join("fig8-burst.svg"))
    }

    /// Latency and throughput over the engine called directly (figs. 10, 11).
    fn overhead(&mut self) -> Result<()> {
        let direct = Direct::new()?;
        let [a, b] = &self.vms;
        let (mut native, mut remoted) = (Vec::new(), Vec::new());
        for bytes in LATENCY {
            let d = Times::take(20_000, || direct.write(bytes))?;
            let r = Times::take(20_000, || a.write(b, bytes))?;
            native.push((x(bytes), d.p50_us));
            remoted.push((x(bytes), r.p50_us));
            self.report
                .times(&format!("write {bytes} B, engine directly"), &d)?;
            self.report
                .times(&format!("write {bytes} B, remoted"), &r)?;
        }
        let d = Times::take(20_000, || direct.write(8))?;
        let r = Times::take(20_000, || a.write(b, 8))?;
        self.report.times("write 8 B, engine directly", &d)?;
        self.report.times("write 8 B, remoted", &r)?;
        let pair = |one: Vec<(f64, f64)>, two: Vec<(f64, f64)>| {
            vec![
                Line {
                    label: "engine directly".into(),
                    points: one,
                },
                Line {
                    label: "remoted".into(),
                    points: two,
                },
            ]
        };
        Figure {
            title: "Write latency (paper fig. 10)".into(),
            x: Axis::Size,
            y: "us",
            log_y: true,
            lines: pair(native, remoted),
        }
        .write(&self.out.join("fig10-latency.svg"))?;
        let (mut native, mut remoted) = (Vec::new(), Vec::new());
        for bytes in THROUGHPUT {
            let operations = scale::count(10_000);
            let rate = |t: &Times| gib_per_s(bytes * operations, t.p50_us) * 1024.0;
            let d = Times::take(10, || direct.burst(bytes, operations, 32))?;
            let r = Times::take(10, || a.burst(b, bytes, operations, 32))?;
            native.push((x(bytes), rate(&d)));
            remoted.push((x(bytes), rate(&r)));
            println!(
                "throughput {bytes} B: directly {:.1}, remoted {:.1} MiB/s",
                rate(&d),
                rate(&r)
            );
        }
        self.report
            .keep("throughput, engine directly, MiB/s", &native)?;
        self.report.keep("throughput, remoted, MiB/s", &remoted)?;
        Figure {
            title: "Write throughput, 32 outstanding (paper fig. 11)".into(),
            x: Axis::Size,
            y: "MiB/s",
            log_y: true,
            lines: pair(native, remoted),
        }
        .write(&self.out.join("fig11-throughput.svg"))
    }

    /// From posting a write to its completion event, in a program that sleeps.
    fn events(&mut self) -> Result<()> {
        let [a, b] = &self.hosts;
        let round = || a.write_and_sleep(b);
        let awake = Times::timed(2000, round)?;
        let asleep = Times::timed(500, || {
            reference::let_sleep();
            round()
        })?;
        self.report
            .times("completion event, backend awake", &awake)?;
        self.report
            .times("completion event, backend asleep", &asleep)?;
        Ok(())
    }

    /// A million operations, and none.
    fn endurance(&mut self) -> Result<()> {
        let [a, b] = &self.vms;
        a.burst(b, 8, scale::count(1_000_000).min(100_000), 32)?;
        let before = self.daemon.resident_kib()?;
        a.burst(b, 8, scale::count(1_000_000), 32)?;
        let after = self.daemon.resident_kib()?;
        self.report
            .keep("resident KiB before and after 10^6 writes", [before, after])?;
        #[allow(clippy::cast_precision_loss)]
        let grown = after.saturating_sub(before) as f64;
        self.report.at_most(
            "growth over 10^6 writes",
            grown,
            "KiB",
            64.0,
            &format!("{before} KiB before"),
        );
        reference::let_sleep();
        let used = self.daemon.cpu_time()?;
        let rest = scale::time(Duration::from_secs(3));
        std::thread::sleep(rest);
        let idle = (self.daemon.cpu_time()? - used).as_secs_f64() / rest.as_secs_f64() * 100.0;
        self.report.at_most(
            "CPU of an idle backend, 4 contexts open",
            idle,
            "%",
            0.1,
            "3 s",
        );
        Ok(())
    }
}

/// Has this program be the target of `process_vm_writev` rather than measure.
pub const TARGET_VARIABLE: &str = "FARLANE_BENCH_TARGET";

/// Another process, into which `process_vm_writev` writes.
pub struct Echo {
    child: std::process::Child,
    address: usize,
}

impl Echo {
    /// A copy of this process that waits in `read`, with a buffer at the same address.
    pub fn start() -> Result<Self> {
        use std::io::BufRead as _;
        let mut child = std::process::Command::new(std::env::current_exe()?)
            .env(TARGET_VARIABLE, "1")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        if let Some(out) = child.stdout.take() {
            std::io::BufReader::new(out).read_line(&mut line)?;
        }
        Ok(Self {
            address: line.trim().parse()?,
            child,
        })
    }

    /// Writes `bytes` into it, again and again.
    pub fn write(&self, from: *mut u8, bytes: usize) -> Result<Times> {
        let pid = i32::try_from(self.child.id())?;
        reference::process_vm(pid, self.address, from, bytes)
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        let ended = self.child.kill().and_then(|()| self.child.wait());
        if let Err(e) = ended {
            eprintln!("Cannot end the target process: {e}");
        }
    }
}

/// What the other process does.
pub fn be_target() -> Result<()> {
    let base = crate::rig::Memory::Process.allocate(BUFFER)?;
    println!("{}", base as usize);
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}
