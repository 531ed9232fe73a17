//! `cargo xtask bench gpu-ssd`: reads from files into device memory by every mechanism, in one run
//! on one machine (spin-atc17, section 6).

#[path = "gpu_ssd/disk.rs"]
mod disk;
#[path = "gpu_ssd/imagery.rs"]
mod imagery;
#[path = "gpu_ssd/job.rs"]
mod job;
#[path = "gpu_ssd/logs.rs"]
mod logs;
#[path = "gpu_ssd/measure.rs"]
mod measure;
#[path = "gpu_ssd/plans.rs"]
mod plans;
mod plot;
#[allow(dead_code)] // Each bench uses a part.
mod report;
#[path = "gpu_ssd/rounds.rs"]
mod rounds;
#[allow(dead_code)] // Each bench uses a part.
mod scale;
#[path = "gpu_ssd/scan.rs"]
mod scan;
#[allow(dead_code)] // Each bench uses a part.
mod stats;
#[path = "gpu_ssd/team.rs"]
mod team;
#[path = "gpu_ssd/worker.rs"]
mod worker;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum as _};
use std::path::PathBuf;

/// Measures the ways between files and device memory.
#[derive(Parser)]
struct Options {
    /// The library that chooses the way: libfarlane_io.so.
    #[arg(long, value_name = "PATH", required_unless_present = "worker")]
    library: Option<PathBuf>,
    /// The program that calibrates: farlane-io.
    #[arg(long, value_name = "PATH", required_unless_present = "worker")]
    tool: Option<PathBuf>,
    /// Where the results go.
    #[arg(long, value_name = "DIR", required_unless_present = "worker")]
    out: Option<PathBuf>,
    /// A folder on the disk that is measured, where direct I/O works; without it, that of the
    /// results.
    #[arg(long, value_name = "DIR")]
    disk: Option<PathBuf>,
    /// Measures some parts only.
    #[arg(long, value_delimiter = ',')]
    only: Vec<measure::Part>,
    /// Makes one tiny round of every measurement, and judges nothing.
    #[arg(long)]
    smoke: bool,
    /// Does jobs from standard input, as a child of this program.
    #[arg(long, hide = true)]
    worker: bool,
}

fn main() -> Result<()> {
    let options = Options::parse();
    if options.worker {
        return worker::run();
    }
    let out = options.out.context("--out is missing")?;
    scale::set_smoke(options.smoke);
    std::fs::create_dir_all(&out)?;
    let programs = team::Programs {
        library: options.library.context("--library is missing")?,
        tool: options.tool.context("--tool is missing")?,
    };
    let disk = options.disk.as_deref().unwrap_or(&out);
    let parts = match options.only.as_slice() {
        [] => measure::Part::value_variants(),
        some => some,
    };
    let report = measure::run(&programs, disk, &out, parts)?;
    report.finish(&out.join("gpu-ssd.json"))
}
