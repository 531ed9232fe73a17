//! `farlane-lend`: lends PCIe devices of this host to virtual machines of others.

use clap::Parser as _;
use farlane_daemon::run::{exit_code, run_with};
use farlane_lend::ask;
use farlane_lend::options::Options;
use farlane_lend::setup::LendDaemon;
use std::process::ExitCode;

fn main() -> ExitCode {
    let options = Options::parse();
    match &options.command {
        Some(command) => exit_code::<Options>(ask::run(command)),
        None => run_with::<LendDaemon>(&options),
    }
}
