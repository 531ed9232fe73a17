//! `cargo xtask bench rdma`: every figure of the RDMA part at native speed, each beside its
//! reference, measured in one run on one machine.

mod bars;
#[allow(dead_code)] // Each bench uses a part.
mod daemon;
mod direct;
mod figures;
mod idle;
mod messages;
mod plot;
mod reference;
#[allow(dead_code)] // Each bench uses a part.
mod report;
#[allow(dead_code)] // Each bench uses a part.
mod rig;
#[allow(dead_code)] // Each bench uses a part.
mod scale;
mod stats;

use anyhow::Result;
use clap::Parser;
use std::path::PathBuf;

/// Measures Farlane at native speed, each figure beside its reference.
#[derive(Parser)]
struct Options {
    /// The backend to measure.
    #[arg(long, value_name = "PATH")]
    backend: PathBuf,
    #[command(flatten)]
    output: scale::Output,
}

fn main() -> Result<()> {
    if std::env::var_os(figures::TARGET_VARIABLE).is_some() {
        return figures::be_target();
    }
    if let Some(socket) = std::env::var_os(idle::SOCKET_VARIABLE) {
        return idle::be_idle(socket.into());
    }
    let options = Options::parse();
    let out = options.output.begin()?;
    let report = figures::run(&options.backend, out)?;
    report.finish(&out.join("rdma.json"))
}
