//! `farlane-topology`: shows what is on which NUMA node, and what backends move where.

use clap::Parser as _;
use farlane_daemon::terminal::exit_code;
use farlane_topology::options::Options;
use farlane_topology::run::run;
use std::process::ExitCode;

fn main() -> ExitCode {
    let done = run(&Options::parse());
    exit_code("farlane-topology", done.map(|()| ExitCode::SUCCESS))
}
