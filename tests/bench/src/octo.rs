//! `cargo xtask bench octo`: what locality costs and gives, at native speed: steering decisions,
//! network frames, disk requests (ioctopus-asplos20, sections 5.1 to 5.4).

#[path = "octo/blk.rs"]
mod blk;
#[allow(dead_code)] // Each bench uses a part.
#[path = "blk/drive.rs"]
mod drive;
#[path = "octo/follow.rs"]
mod follow;
#[path = "octo/guest.rs"]
mod guest;
#[path = "octo/machine.rs"]
mod machine;
#[path = "octo/net.rs"]
mod net;
mod plot;
#[allow(dead_code)] // Each bench uses a part.
mod reference;
#[allow(dead_code)] // Each bench uses a part.
mod report;
#[path = "octo/rig.rs"]
mod rig;
#[allow(dead_code)] // Each bench uses a part.
mod scale;
#[allow(dead_code)] // Each bench uses a part.
mod stats;
#[path = "octo/steering.rs"]
mod steering;
#[path = "octo/ways.rs"]
mod ways;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use machine::Machine;
use report::Report;
use std::path::PathBuf;

/// Measures locality without a VM.
#[derive(Clone, Parser)]
struct Options {
    /// The network backend to measure.
    #[arg(long, value_name = "PATH")]
    net: PathBuf,
    /// The disks' backend to measure.
    #[arg(long, value_name = "PATH")]
    blk: PathBuf,
    /// What was measured in a VM.
    #[arg(long, value_name = "FILE")]
    guest: Option<PathBuf>,
    #[command(flatten)]
    output: scale::Output,
    /// Measures some parts only.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
}

/// Parts of the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Decisions alone.
    Steering,
    /// Network frames.
    Net,
    /// Requests for a disk.
    Blk,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let out = options.output.begin()?;
    let described = tempfile::tempdir()?;
    let machine = Machine::find(described.path())?;
    let wanted = |part: Part| options.only.is_empty() || options.only.contains(&part);
    if wanted(Part::Net) {
        rig::enter()?;
    }
    let mut report = Report::default();
    println!("{}\n", machine.note());
    report.keep("machine", machine.note())?;
    report.keep("command", "cargo xtask bench octo")?;
    if let Some(file) = &options.guest {
        guest::add(file, &mut report)?;
    }
    if wanted(Part::Steering) {
        steering::run(&mut report)?;
    }
    if wanted(Part::Blk) {
        blk::run(&options, &machine, &mut report)?;
    }
    if wanted(Part::Net) {
        net::run(&options, &machine, &mut report)?;
    }
    report.finish(&out.join("octo.json"))
}
