//! `cargo xtask bench lend`: a lent NVMe controller at native speed, without a VM, beside the same
//! reads made locally, measured in one run on one machine.

#[path = "lend/drive.rs"]
mod drive;
#[path = "lend/local.rs"]
mod local;
#[path = "lend/measure.rs"]
mod measure;
#[path = "lend/pair.rs"]
mod pair;
mod plot;
#[allow(dead_code)] // Each bench uses a part.
mod report;
#[allow(dead_code)] // Each bench uses a part.
mod scale;
mod stats;

use anyhow::Result;
use clap::Parser;
use std::path::PathBuf;

/// Measures a lent NVMe controller beside local reads.
#[derive(Parser)]
struct Options {
    /// The lender to measure. Without it, only the controller in this process is.
    #[arg(long, value_name = "PATH", requires = "borrower")]
    lender: Option<PathBuf>,
    /// The borrower to measure.
    #[arg(long, value_name = "PATH", requires = "lender")]
    borrower: Option<PathBuf>,
    #[command(flatten)]
    output: scale::Output,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let out = options.output.begin()?;
    let programs = options.lender.as_deref().zip(options.borrower.as_deref());
    let report = measure::run(programs, out)?;
    report.finish(&out.join("lend.json"))
}
