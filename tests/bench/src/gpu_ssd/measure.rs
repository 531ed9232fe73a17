//! The measurements.

use crate::disk::Disk;
use crate::imagery::{self, Layout};
use crate::job::{Job, Mechanism};
use crate::logs;
use crate::plans;
use crate::plot::{Axis, Figure, Line, bytes_label};
use crate::report::Report;
use crate::rounds::{Round, Rounds};
use crate::scale;
use crate::team::{Programs, Team};
use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use farlane_io_core::plan::oracle::Random;
use farlane_io_core::plan::store::Store;
use farlane_io_core::plan::{CostModel, Run, device};
use farlane_kit::compare::{Bar, Plan};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the file.
const FILE: u64 = 1 << 30;
/// Rounds of each measurement; the paper has 10. Most of them are judged earlier.
const ROUNDS: Plan = Plan {
    least: 9,
    step: 1,
    most: 25,
    ..Plan::LONG
};
/// Of the measurements that take longest.
const FEWER_ROUNDS: Plan = Plan { most: 17, ..ROUNDS };
/// Sizes of random reads (fig. 4a).
const RANDOM: [u32; 8] = [
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    4 << 20,
    8 << 20,
];
/// Sizes of sequential reads (figs. 1 and 4b).
const SEQUENTIAL: [u32; 9] = [
    4 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    4 << 20,
    8 << 20,
];
/// Bytes of a sequence.
const SEQUENCE: u64 = 32 << 20;
/// Sizes at different residencies (fig. 5, there 512 bytes).
const MIXED: [u32; 4] = [512, 4 << 10, 64 << 10, 1 << 20];
const RESIDENCIES: [u32; 5] = [0, 25, 50, 75, 100];
/// Bytes that are read at different residencies.
const MIXED_BYTES: u64 = 64 << 20;
/// Mean length of their cached and absent runs, in reads: portions of the file, as in the paper, so
/// that most reads are wholly cached or not at all.
const MIXED_RUN: u64 = 8;
/// The shortest mean, in pages.
const SHORTEST_RUN: u64 = 48;
/// What the router may lose to the best mechanism from 64 KiB on, and at 4 KiB, where nothing or
/// all is cached.
const NEAR: f64 = 0.95;
const NEAR_SMALL: f64 = 0.85;

/// What figures show of each mechanism.
const RELATIVE: &str = "throughput, router = 1";

/// How often calibration is tried.
const ATTEMPTS: u32 = 5;

/// What can be measured by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Fig. 4a.
    Random,
    /// Figs. 1 and 4b.
    Sequential,
    /// Fig. 5.
    Residency,
    /// Fig. 6.
    Imagery,
    /// Table 3.
    Throughput,
    /// Table 4.
    Logs,
    /// Schedules of random requests.
    Schedules,
}

struct Bench {
    report: Report,
    team: Team,
    disk: Disk,
    out: PathBuf,
    random: Random,
}

/// Measures everything.
pub fn run(programs: &Programs, folder: &Path, out: &Path, parts: &[Part]) -> Result<Report> {
    let disk = Disk::new(folder, scale::bytes(FILE), FILE)?;
    let config = disk.folder().join("io.toml");
    let model = calibrate(programs, &disk, &config)?;
    let mut bench = Bench {
        report: Report::default(),
        team: Team::start(programs, &config)?,
        disk,
        out: out.to_owned(),
        random: Random::new(5),
    };
    bench.report.keep("model", model.parameters())?;
    bench.check()?;
    for part in parts {
        match part {
            Part::Random => bench.random_reads()?,
            Part::Sequential => bench.sequential_reads()?,
            Part::Residency => bench.residency()?,
            Part::Imagery => bench.imagery()?,
            Part::Throughput => bench.throughput()?,
            Part::Logs => logs::measure(&mut bench.report, &mut bench.team, bench.disk.folder())?,
            Part::Schedules => plans::measure(&mut bench.report, &model)?,
        }
    }
    Ok(bench.report)
}

/// Has the disk calibrated as a user does it.
fn calibrate(programs: &Programs, disk: &Disk, config: &Path) -> Result<CostModel> {
    let calibrate = || {
        Command::new(&programs.tool)
            .arg("calibrate")
            .arg(disk.path())
            .env("FARLANE_IO_CONFIG", config)
            .status()
            .with_context(|| format!("Cannot start {}", programs.tool.display()))
    };
    let mut attempts = 1;
    // On a busy machine a fit is refused now and then.
    while !calibrate()?.success() {
        ensure!(attempts < ATTEMPTS, "The disk cannot be calibrated");
        attempts += 1;
    }
    let name = device::name(&rustix::fs::fstat(File::open(disk.path())?)?);
    let store = Store::read(config)?;
    let found = store
        .find(&name, "soft")
        .context("No calibration is stored")?;
    Ok(found.model)
}

/// The bar of the router beside the best mechanism where nothing is cached before.
fn bar_of(size: u32) -> Option<Bar> {
    match size {
        _ if size >= 64 << 10 => Some(Bar::AtLeast(NEAR)),
        _ if size == 4 << 10 => Some(Bar::AtLeast(NEAR_SMALL)),
        _ => None,
    }
}

/// A plan, or one round of it.
fn planned(plan: Plan) -> Plan {
    if scale::is_smoke() {
        scale::plan()
    } else {
        plan
    }
}

fn x(size: u32) -> f64 {
    f64::from(size)
}

fn label(size: u32) -> String {
    bytes_label(x(size))
}

fn sequence() -> u64 {
    scale::bytes(SEQUENCE).max(8 << 20)
}

fn mixed_bytes() -> u64 {
    scale::bytes(MIXED_BYTES)
}

/// How many reads of a size make a measurement of some 20 ms.
fn count(size: u32) -> u64 {
    let bytes = scale::bytes(24 << 20);
    (bytes / u64::from(size)).clamp(if scale::is_smoke() { 1 } else { 4 }, 256)
}

impl Bench {
    /// Every mechanism reads what is in the file.
    fn check(&mut self) -> Result<()> {
        let mut reads: Vec<_> = RANDOM
            .iter()
            .map(|size| (u64::from(*size) * 3, *size))
            .collect();
        reads.extend([
            (0, 1),
            (511, 2),
            (12_345, 54_321),
            (scale::bytes(FILE) - 100, 100),
            (4096, 700),
        ]);
        for mechanism in Mechanism::ALL {
            for arrange in [
                &[Run::absent(scale::bytes(FILE))][..],
                &[Run::cached(1 << 20)],
            ] {
                self.disk.arrange(arrange)?;
                self.team.perform(Job {
                    mechanism,
                    file: self.disk.path(),
                    reads: reads.clone(),
                    threads: 1,
                    verify: true,
                })?;
            }
        }
        Ok(())
    }

    /// Random blocks of `size`, each another one, in the first `bytes` of the file. None follows
    /// one of those just before, which would be a sequence, and none is the first, where one
    /// begins.
    fn blocks(&mut self, size: u32, bytes: u64, count: u64) -> Vec<(u64, u32)> {
        const LATELY: usize = 64;
        let mut blocks: Vec<_> = (1..bytes / u64::from(size)).collect();
        self.random.shuffle(&mut blocks);
        let mut chosen: Vec<u64> = Vec::new();
        for block in blocks {
            if u64::try_from(chosen.len()).is_ok_and(|chosen| chosen == count) {
                break;
            }
            let lately = chosen.iter().rev().take(LATELY);
            if !lately.into_iter().any(|before| before + 1 == block) {
                chosen.push(block);
            }
        }
        chosen
            .into_iter()
            .map(|block| (block * u64::from(size), size))
            .collect()
    }

    /// Prints, keeps and draws a set of rounds for each x.
    fn show(&mut self, name: &str, x: f64, rounds: &Rounds, lines: &mut Vec<Line>) -> Result<()> {
        print!("{name:<44}");
        for mechanism in Mechanism::ALL {
            let Some(found) = rounds.of(mechanism) else {
                continue;
            };
            print!(" {} {:>7.1} MB/s", mechanism.name(), found.rate / 1e6);
            self.report
                .keep(&format!("{name}, {}", mechanism.name()), found)?;
            let line = lines.iter_mut().find(|line| line.label == mechanism.name());
            let point = (x, found.relative);
            match line {
                Some(line) => line.points.push(point),
                None => lines.push(Line {
                    label: mechanism.name().into(),
                    points: vec![point],
                }),
            }
        }
        println!();
        Ok(())
    }

    fn draw(
        &self,
        file: &str,
        title: &str,
        x: Axis,
        y: &'static str,
        lines: Vec<Line>,
    ) -> Result<()> {
        Figure {
            title: title.into(),
            x,
            y,
            log_y: false,
            lines,
        }
        .write(&self.out.join(file))
    }

    /// The router beside the best of some mechanisms, as a bar.
    fn near_best(
        &mut self,
        name: &str,
        of: &[Mechanism],
        (bar, plan): (Option<Bar>, &Plan),
        rounds: &Rounds,
    ) -> Result<()> {
        let Some(bar) = bar else { return Ok(()) };
        let (best, found) = rounds
            .beside_best(of, bar, plan)
            .context("Nothing was measured")?;
        let name = format!("{name}, router / best");
        self.report.compared(&name, "MB/s", best.name(), &found);
        Ok(())
    }

    /// Rounds of all mechanisms in which nothing is cached before. `all` has the reads of each
    /// round of the plan, and of the one before that does not count.
    fn uncached(
        &mut self,
        mut all: Vec<Vec<(u64, u32)>>,
        bar: Option<Bar>,
        plan: &Plan,
    ) -> Result<Rounds> {
        let disk = &self.disk;
        Rounds::take(
            &mut self.team,
            disk,
            &Mechanism::ALL,
            plan,
            bar,
            |round| Round {
                reads: std::mem::take(&mut all[round]),
                threads: 1,
            },
            |_| disk.evict(),
        )
    }

    /// Fig. 4a: nothing is cached.
    fn random_reads(&mut self) -> Result<()> {
        let mut lines = Vec::new();
        let mut changed = 0.0_f64;
        let plan = planned(ROUNDS);
        for size in RANDOM {
            let all = (0..=plan.most)
                .map(|_| self.blocks(size, scale::bytes(FILE), count(size)))
                .collect();
            let rounds = self.uncached(all, bar_of(size), &plan)?;
            let name = format!("random reads of {}", label(size));
            self.show(&name, x(size), &rounds, &mut lines)?;
            self.near_best(&name, &Mechanism::ALL, (bar_of(size), &plan), &rounds)?;
            changed = changed.max(rounds.changed());
        }
        self.unchanged("random reads of what is not cached", changed);
        self.draw(
            "fig4a-random.svg",
            "Random reads (paper fig. 4a)",
            Axis::Size,
            RELATIVE,
            lines,
        )
    }

    fn unchanged(&mut self, name: &str, changed: f64) {
        self.report.at_most(
            &format!("{name}: pages cached or dropped"),
            changed,
            "",
            0.0,
            "by the router's reads",
        );
    }

    /// Figs. 1 and 4b: nothing is cached before.
    fn sequential_reads(&mut self) -> Result<()> {
        let mut lines = Vec::new();
        let mut speedup = Vec::new();
        let plan = planned(FEWER_ROUNDS);
        for size in SEQUENTIAL {
            let step = usize::try_from(size)?;
            let places = scale::bytes(FILE) / sequence();
            let all = (0..places)
                .cycle()
                .take(plan.most + 1)
                .map(|place| {
                    let start = place * sequence();
                    let offsets = (start..start + sequence()).step_by(step);
                    offsets.map(|offset| (offset, size)).collect()
                })
                .collect();
            let rounds = self.uncached(all, bar_of(size), &plan)?;
            let name = format!("sequential reads of {}", label(size));
            self.show(&name, x(size), &rounds, &mut lines)?;
            self.near_best(&name, &Mechanism::ALL, (bar_of(size), &plan), &rounds)?;
            let of = |mechanism| {
                rounds
                    .of(mechanism)
                    .map_or(f64::NAN, |found| found.relative)
            };
            speedup.push((x(size), of(Mechanism::CiWrite) / of(Mechanism::P2p)));
        }
        self.report
            .keep("sequential reads, CIWrite / P2P", &speedup)?;
        let line = Line {
            label: "CIWrite / P2P".into(),
            points: speedup,
        };
        self.draw(
            "fig1-sequential-speedup.svg",
            "CPU-mediated I/O over P2P, sequential reads (paper fig. 1)",
            Axis::Size,
            "speed-up",
            vec![line],
        )?;
        self.draw(
            "fig4b-sequential.svg",
            "Sequential reads (paper fig. 4b)",
            Axis::Size,
            RELATIVE,
            lines,
        )
    }

    /// A file of which `percent` are cached, in runs of random lengths; the share is exact.
    fn runs(&mut self, percent: u32, size: u32) -> Vec<Run> {
        const PAGE: u64 = 4096;
        let mean = (MIXED_RUN * u64::from(size) / PAGE).max(SHORTEST_RUN);
        let pages = mixed_bytes() / PAGE;
        let wanted = pages * u64::from(percent) / 100;
        let mut left = [pages - wanted, wanted];
        let mut runs = Vec::new();
        let mut cached = self.random.below(2) == 1;
        while left != [0, 0] {
            let of_kind = &mut left[usize::from(cached)];
            let share = if cached { percent } else { 100 - percent };
            let longest = (4 * mean * u64::from(share) / 100).max(1);
            let taken = (1 + self.random.below(longest)).min(*of_kind);
            *of_kind -= taken;
            if taken > 0 {
                runs.push(Run {
                    bytes: taken * PAGE,
                    cached,
                });
            }
            cached = !cached;
        }
        runs
    }

    /// Fig. 5.
    fn residency(&mut self) -> Result<()> {
        const PURE: [Mechanism; 3] = [Mechanism::P2p, Mechanism::PreadGpu, Mechanism::Router];
        let mut changed = 0.0_f64;
        let plan = planned(FEWER_ROUNDS);
        for size in MIXED {
            let mut lines = Vec::new();
            let mut mechanisms = PURE.to_vec();
            mechanisms.push(Mechanism::CiWrite);
            for percent in RESIDENCIES {
                let runs: Vec<_> = (0..=plan.most).map(|_| self.runs(percent, size)).collect();
                // Faster than either pure way where a part is cached.
                let bar = (1..100).contains(&percent).then_some(Bar::AtLeast(1.0));
                let reads = 512.min(count(size) * 2);
                let mut all: Vec<_> = (0..=plan.most)
                    .map(|_| self.blocks(size, mixed_bytes(), reads))
                    .collect();
                let disk = &self.disk;
                let rounds = Rounds::take(
                    &mut self.team,
                    disk,
                    &mechanisms,
                    &plan,
                    bar,
                    |round| Round {
                        reads: std::mem::take(&mut all[round]),
                        threads: 1,
                    },
                    |round| disk.arrange(&runs[round]),
                )?;
                let name = format!("random reads of {}, {percent} % cached", label(size));
                self.show(&name, f64::from(percent), &rounds, &mut lines)?;
                // What is shorter than a page goes through the page cache, as misaligned ends do.
                if size >= 4 << 10 {
                    changed = changed.max(rounds.changed());
                }
                self.near_best(&name, &PURE, (bar, &plan), &rounds)?;
            }
            let bytes = label(size);
            self.draw(
                &format!("fig5-residency-{}.svg", bytes.replace(' ', "")),
                &format!("Random reads of {bytes} (paper fig. 5)"),
                Axis::Residency,
                RELATIVE,
                lines,
            )?;
        }
        self.unchanged("random reads of what is partly cached", changed);
        Ok(())
    }

    /// Fig. 6.
    fn imagery(&mut self) -> Result<()> {
        ensure!(
            imagery::bytes() <= FILE,
            "The raster does not fit in the file"
        );
        let raster = [683, 1024].map(|tile| Layout::Raster { tile });
        let tiles = [64, 128, 256].map(|tile| Layout::Tiles { tile });
        let sets: [(&str, &str, Vec<Layout>); 2] = [
            ("raster-contiguous", "fig6-raster.svg", raster.to_vec()),
            ("tile-contiguous", "fig6-tiles.svg", tiles.to_vec()),
        ];
        for (layout_name, file, layouts) in sets {
            let mut lines = Vec::new();
            let plan = planned(ROUNDS);
            for layout in layouts {
                let (regions, bytes) = match layout {
                    Layout::Raster { tile } => (1, tile * 3),
                    Layout::Tiles { tile } => (6, tile * tile * 3),
                };
                let all = (0..=plan.most)
                    .map(|_| imagery::reads(&mut self.random, layout, regions))
                    .collect::<Result<_>>()?;
                let rounds = self.uncached(all, None, &plan)?;
                let size = u32::try_from(bytes)?;
                let name = format!("imagery, {layout_name}, {bytes} bytes");
                self.show(&name, x(size), &rounds, &mut lines)?;
            }
            self.draw(
                file,
                &format!("Aerial imagery, {layout_name} (paper fig. 6)"),
                Axis::Size,
                RELATIVE,
                lines,
            )?;
        }
        Ok(())
    }

    /// Table 3: all is cached; 8 MB reads from as many threads as there are processors, up to 4.
    fn throughput(&mut self) -> Result<()> {
        const READ: u32 = 8 << 20;
        let throughput_bytes = scale::bytes(256 << 20);
        let plan = planned(ROUNDS);
        let threads = std::thread::available_parallelism()?.get().min(4);
        let threads = u32::try_from(threads)?;
        self.disk.evict()?;
        self.disk.warm(0, throughput_bytes)?;
        let disk = &self.disk;
        let rounds = Rounds::take(
            &mut self.team,
            disk,
            &Mechanism::ALL,
            &plan,
            None,
            |_| Round {
                reads: (0..throughput_bytes)
                    .step_by(8 << 20)
                    .map(|offset| (offset, READ))
                    .collect(),
                threads,
            },
            |_| Ok(()),
        )?;
        let name = format!("cached file, reads of 8 MiB, {threads} threads");
        self.show(&name, x(READ), &rounds, &mut Vec::new())
    }
}
