//! `cargo xtask bench rdma-tenants`: a VM beside processes that attack it, as Husky does (Kong et
//! al., "Understanding RDMA Microarchitecture Resources for Performance Isolation", NSDI 2023), and
//! limits of an operator, at native speed.
//!
//! The VM is played by this process. Its requests are posted, and their completions polled for, by
//! a thread that the kernel runs before all others, so that what the attackers' own threads take of
//! the processors is no part of the figures; between two requests they have it. Where one worker is
//! measured, it has a processor of its own.

#[allow(dead_code)] // Each bench uses a part.
mod daemon;
#[path = "tenants/limits.rs"]
mod limits;
#[path = "tenants/matrix.rs"]
mod matrix;
#[path = "tenants/priority.rs"]
mod priority;
#[allow(dead_code)] // Each bench uses a part.
mod report;
#[allow(dead_code)] // Each bench uses a part.
mod rig;
#[allow(dead_code)] // Each bench uses a part.
mod scale;
#[allow(dead_code)] // Each bench uses a part.
mod stats;

use anyhow::Result;
use clap::Parser;
use report::Report;
use std::path::PathBuf;

/// Measures how tenants of the RDMA backend disturb each other.
#[derive(Parser)]
struct Options {
    /// The backend to measure.
    #[arg(long, value_name = "PATH")]
    backend: PathBuf,
    /// The program that attacks.
    #[arg(long, value_name = "PATH")]
    tenant: PathBuf,
    #[command(flatten)]
    output: scale::Output,
    /// Measures beside these attackers only, and no limits.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Measures limits only.
    #[arg(long)]
    limits: bool,
    /// Measures daemons with so many workers.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    workers: Vec<usize>,
    /// Rounds of which the medians are taken.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let out = options.output.begin()?;
    let mut report = Report::default();
    let programs = matrix::Programs {
        backend: &options.backend,
        tenant: &options.tenant,
        out,
        rounds: options.rounds,
    };
    let workers = options.workers.iter().filter(|_| !options.limits);
    for &workers in workers {
        matrix::measure(&mut report, &programs, workers, &options.only)?;
    }
    if options.only.is_empty() {
        limits::measure(&mut report, &programs)?;
    }
    report.finish(&out.join("rdma-tenants.json"))
}
