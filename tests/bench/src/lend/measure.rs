//! The measurements.

use crate::drive::{Done, Drive, LARGEST, PAGE};
use crate::local::Local;
use crate::pair::Pair;
use crate::plot::{Axis, Figure, Line};
use crate::report::Report;
use crate::scale;
use crate::stats::{Times, gib_per_s};
use anyhow::{Context as _, Result};
use farlane_kit::compare::cpu::of_own_threads;
use farlane_kit::compare::{Bar, observe};
use farlane_nvme::{Backing, Doorbells, NvmeConfig, NvmeSource};
use farlane_vm_front_end::nvme::{Driver, InProcess, Memory, Register, Socket, Transport};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of the file.
const FILE: u64 = 256 << 20;
/// Bytes of the namespace that stores nothing.
const NULL: u64 = 64 << 30;
/// Memory of the driver: a buffer and a list for each read, and queues.
const MEMORY: u64 = 320 << 20;
const BASE: u64 = 0x1_0000_0000;
/// How long each rate is measured.
const STRETCH: Duration = Duration::from_millis(1500);
/// Shortest stretch whose CPU time of the lender is a figure: the kernel brings that of a thread
/// that runs on another CPU up to date with its ticks, every 1 to 10 ms.
const SHORTEST: Duration = Duration::from_millis(50);
/// Reads whose latency is measured.
const SAMPLES: usize = 50_000;
/// Outstanding reads of the issue.
const DEPTHS: [u32; 3] = [1, 32, 256];
/// Sizes of the paper's figure 18.
const SIZES: [u64; 9] = [4, 8, 16, 32, 64, 128, 256, 512, 1024];
/// Outstanding sequential reads.
const SEQUENTIAL_DEPTH: u32 = 8;

/// A stretch, with what it cost the lender.
#[derive(serde::Serialize)]
struct Rate {
    iops: f64,
    iops_per_core: Option<f64>,
    trapped_per_io: f64,
}

struct Run<'a> {
    report: Report,
    out: &'a Path,
    file: PathBuf,
    local: Local,
}

/// Measures everything; without a lender and a borrower, what can be measured in this process.
pub fn run(programs: Option<(&Path, &Path)>, out: &Path) -> Result<Report> {
    // Of tmpfs, as the issue says.
    let folder = tempfile::tempdir_in("/dev/shm").context("Cannot use /dev/shm")?;
    let file = folder.path().join("disk");
    let mut written = std::fs::File::create(&file)?;
    let pages = vec![0xa5; usize::try_from(LARGEST)?];
    for _ in 0..scale::bytes(FILE) / LARGEST {
        written.write_all(&pages)?;
    }
    drop(written);
    let mut run = Run {
        report: Report::default(),
        out,
        local: Local::open(&file, DEPTHS[2])?,
        file,
    };
    let reference = run.local_rates()?;
    run.in_process()?;
    if let Some((lender, borrower)) = programs {
        run.lent(lender, borrower, &reference)?;
        run.shadow_doorbells(lender, borrower)?;
    }
    Ok(run.report)
}

fn rate(done: Done, cpu: Option<Duration>) -> Rate {
    let reads = f64::from(u32::try_from(done.reads).unwrap_or(u32::MAX));
    let trapped = f64::from(u32::try_from(done.trapped).unwrap_or(u32::MAX));
    Rate {
        iops: done.per_second(),
        iops_per_core: cpu.map(|cpu| reads / cpu.as_secs_f64()),
        trapped_per_io: trapped / reads,
    }
}

fn stretch() -> Duration {
    scale::time(STRETCH)
}

fn memory() -> Result<Memory> {
    Ok(Memory::new(BASE, MEMORY)?)
}

impl Run<'_> {
    fn say(&mut self, name: &str, rate: &Rate) -> Result<()> {
        let core = rate
            .iops_per_core
            .map_or(String::new(), |i| format!("{:>9.0} a core   ", i));
        println!(
            "{name:<44} {:>9.0} IOPS   {core}{:.4} trapped an I/O",
            rate.iops, rate.trapped_per_io
        );
        self.report.keep(name, rate)
    }

    /// What this process reaches by itself.
    fn local_rates(&mut self) -> Result<Vec<f64>> {
        let mut reference = Vec::new();
        for depth in DEPTHS {
            let done = if depth == 1 {
                self.local.pread_for(stretch(), PAGE, true)?
            } else {
                self.local.ring_for(stretch(), depth, PAGE, true)?
            };
            let how = if depth == 1 { "pread" } else { "io_uring" };
            let rate = rate(done, None);
            self.say(&format!("local {how}, depth {depth}"), &rate)?;
            reference.push(rate.iops);
        }
        Ok(reference)
    }

    /// The controller in this process: what is without link and borrower.
    fn in_process(&mut self) -> Result<()> {
        let mut config = NvmeConfig::new("bench", "BENCH");
        config.doorbells = Doorbells::Shared;
        let file = Backing::File {
            path: self.file.clone(),
            read_only: true,
        };
        config.namespaces = vec![file.into(), Backing::Null { bytes: NULL }.into()];
        let source = NvmeSource::open(config)?;
        let driver = Driver::start(InProcess::new(&source)?, memory()?)?;
        let mut drive = Drive::new(driver, 1)?;
        for (nsid, name) in [(1, "tmpfs file"), (2, "null namespace")] {
            drive.use_namespace(nsid)?;
            for depth in DEPTHS {
                let before = of_own_threads("nvme")?;
                let done = drive.read_for(stretch(), depth, PAGE, true)?;
                let cpu = of_own_threads("nvme")? - before;
                let name = format!("{name} in this process, depth {depth}");
                self.say(&name, &rate(done, Some(cpu)))?;
            }
        }
        Ok(())
    }

    fn rates<T: Transport>(
        &mut self,
        pair: &Pair,
        drive: &mut Drive<T>,
        name: &str,
    ) -> Result<Vec<Rate>> {
        let mut rates = Vec::new();
        for depth in DEPTHS {
            drive.read_for(stretch() / 10, depth, PAGE, true)?;
            let before = pair.cpu_time()?;
            let done = drive.read_for(stretch(), depth, PAGE, true)?;
            let rate = rate(done, Some(pair.cpu_time()? - before));
            self.say(&format!("{name}, depth {depth}"), &rate)?;
            rates.push(rate);
        }
        Ok(rates)
    }

    /// With the doorbell page mapped: no message for an I/O.
    fn lent(&mut self, lender: &Path, borrower: &Path, local: &[f64]) -> Result<()> {
        let source = format!(
            "nvme,file={},null={NULL},serial=BENCH,doorbells=shared",
            self.file.display()
        );
        let pair = Pair::start(lender, borrower, &source, self.out)?;
        let driver = Driver::start(Socket::connect(&pair.socket())?, memory()?)?;
        let mut drive = Drive::new(driver, 1)?;
        let rates = self.rates(&pair, &mut drive, "lent tmpfs file")?;
        self.a_core(&pair, &mut drive, "tmpfs file", 300_000.0, local[1])?;
        self.latency(&mut drive)?;
        self.bandwidth(&mut drive)?;
        drive.use_namespace(2)?;
        let null = self.rates(&pair, &mut drive, "lent null namespace")?;
        self.a_core(&pair, &mut drive, "null namespace", 1_000_000.0, f64::NAN)?;
        let trapped = rates.iter().chain(&null).map(|r| r.trapped_per_io);
        self.report.at_most(
            "trapped accesses an I/O, doorbells shared",
            trapped.fold(0.0, f64::max),
            "",
            0.05,
            "fewer than 1 in 20",
        );
        Ok(())
    }

    /// Reads at depth 32 for each second of the lender's CPU time.
    fn a_core<T: Transport>(
        &mut self,
        pair: &Pair,
        drive: &mut Drive<T>,
        name: &str,
        bar: f64,
        local: f64,
    ) -> Result<()> {
        let mut rates = Vec::new();
        let found = observe(&scale::plan(), Bar::AtLeast(bar), |_| {
            let before = pair.cpu_time()?;
            let stretch = (stretch() / 10).max(SHORTEST);
            let done = drive.read_for(stretch, DEPTHS[1], PAGE, true)?;
            let rate = rate(done, Some(pair.cpu_time()? - before));
            rates.push(rate.iops);
            rate.iops_per_core.context("No CPU time")
        })?;
        let mut reference = format!("{:.0} IOPS", farlane_kit::compare::interval::median(&rates));
        if local.is_finite() {
            reference += &format!("; local io_uring {local:.0}");
        }
        let what = format!("{name}, depth 32, IOPS per core of the lender");
        self.report.compared(&what, "IOPS", &reference, &found);
        Ok(())
    }

    /// With trapped doorbells and shadow doorbells, as Linux uses them.
    fn shadow_doorbells(&mut self, lender: &Path, borrower: &Path) -> Result<()> {
        let source = format!("nvme,file={},serial=BENCH", self.file.display());
        let pair = Pair::start(lender, borrower, &source, self.out)?;
        let mut driver = Driver::start(Socket::connect(&pair.socket())?, memory()?)?;
        driver.use_shadow_doorbells()?;
        let mut drive = Drive::new(driver, 1)?;
        let times = Times::timed(SAMPLES, || drive.read_one())?;
        self.report
            .times("latency of 4 KiB, lent, shadow doorbells", &times)?;
        let message = Times::take(SAMPLES / 10, || {
            drive.driver().get(Register::Csts)?;
            Ok(())
        })?;
        self.report.times("a register read, trapped", &message)?;
        let rates = self.rates(&pair, &mut drive, "lent tmpfs file, shadow doorbells")?;
        let trapped = rates.iter().map(|r| r.trapped_per_io);
        self.report.at_most(
            "trapped accesses an I/O, shadow doorbells",
            trapped.fold(0.0, f64::max),
            "",
            0.05,
            "fewer than 1 in 20",
        );
        Ok(())
    }

    /// Latency of random reads of a page, eight blocks, one at a time (fig. 19).
    fn latency<T: Transport>(&mut self, drive: &mut Drive<T>) -> Result<()> {
        let lent = sample(|| drive.read_one())?;
        let local = sample(|| self.local.read_one())?;
        let mut lines = Vec::new();
        for (name, samples) in [("local pread", local), ("lent", lent)] {
            let points = percentiles(&samples);
            self.report
                .keep(&format!("latency percentiles, {name}"), &points)?;
            self.report
                .times(&format!("latency of 4 KiB, {name}"), &Times::of(samples))?;
            lines.push(Line {
                label: name.into(),
                points,
            });
        }
        Figure {
            title: "Random reads of 4 KiB, one at a time (paper fig. 19)".into(),
            x: Axis::Percentile,
            y: "latency, us",
            log_y: true,
            lines,
        }
        .write(&self.out.join("fig19-latency.svg"))
    }

    /// Sequential reads of all sizes (fig. 18).
    fn bandwidth<T: Transport>(&mut self, drive: &mut Drive<T>) -> Result<()> {
        let (mut lent, mut ring, mut pread) = (Vec::new(), Vec::new(), Vec::new());
        let stretch = stretch() / 4;
        for kib in SIZES {
            let bytes = kib << 10;
            let x = f64::from(u32::try_from(bytes)?);
            let speed = |done: Done| -> Result<f64> {
                let us = 1e6 / done.per_second();
                Ok(gib_per_s(usize::try_from(bytes)?, us))
            };
            lent.push((
                x,
                speed(drive.read_for(stretch, SEQUENTIAL_DEPTH, bytes, false)?)?,
            ));
            let local = &mut self.local;
            ring.push((
                x,
                speed(local.ring_for(stretch, SEQUENTIAL_DEPTH, bytes, false)?)?,
            ));
            pread.push((x, speed(local.pread_for(stretch, bytes, false)?)?));
            let at = |points: &[(f64, f64)]| points.last().map_or(f64::NAN, |p| p.1);
            println!(
                "sequential reads of {kib:>4} KiB: lent {:>6.2} GiB/s   io_uring {:>6.2}   pread \
                 {:>6.2}",
                at(&lent),
                at(&ring),
                at(&pread)
            );
        }
        let lines: Vec<_> = [
            ("lent, 8 at a time", lent),
            ("local io_uring, 8 at a time", ring),
            ("local pread", pread),
        ]
        .into_iter()
        .map(|(label, points)| Line {
            label: label.into(),
            points,
        })
        .collect();
        for line in &lines {
            self.report.keep(
                &format!("sequential reads, GiB/s, {}", line.label),
                &line.points,
            )?;
        }
        Figure {
            title: "Sequential reads (paper fig. 18)".into(),
            x: Axis::Size,
            y: "GiB/s",
            log_y: false,
            lines,
        }
        .write(&self.out.join("fig18-bandwidth.svg"))
    }
}

fn sample(mut read: impl FnMut() -> Result<Duration>) -> Result<Vec<Duration>> {
    let samples = scale::count(SAMPLES).max(50);
    for _ in 0..samples / 10 {
        read()?;
    }
    (0..samples).map(|_| read()).collect()
}

/// (percentile, us), from 1 to 99.
fn percentiles(samples: &[Duration]) -> Vec<(f64, f64)> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    (1..100_u32)
        .filter_map(|p| {
            let index = sorted.len() * usize::try_from(p).ok()? / 100;
            Some((f64::from(p), sorted.get(index)?.as_secs_f64() * 1e6))
        })
        .collect()
}
