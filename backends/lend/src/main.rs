//! `farlane-lend`: lends PCIe devices of this host to virtual machines of others.

use farlane_daemon::config;
use farlane_daemon::run::{exit_code, run_with};
use farlane_lend::ask;
use farlane_lend::options::Options;
use farlane_lend::setup::LendDaemon;
use std::process::ExitCode;

fn main() -> ExitCode {
    let options = config::parse_common::<Options>();
    match &options.command {
        Some(command) => exit_code::<Options>(ask::run(command)),
        None => run_with::<LendDaemon>(&options),
    }
}
