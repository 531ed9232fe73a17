//! `farlane-io`: measures what transfers between a disk and device memory cost, and shows what
//! libfarlane_io decided.

mod calibrate;
mod figure;
mod report;
mod target;

use clap::Parser as _;
use farlane_io_tool::options::{Command, Options};
use std::process::ExitCode;

fn main() -> ExitCode {
    let done = match Options::parse().command {
        Command::Calibrate {
            target,
            memory,
            dry_run,
        } => calibrate::run(&target, &memory, dry_run),
        Command::Report { file, out } => report::run(&file, &out),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("farlane-io: {error:#}");
            ExitCode::FAILURE
        }
    }
}
