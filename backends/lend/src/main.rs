//! `farlane-lend`: lends PCIe devices of this host to virtual machines of others.

use farlane_daemon::config;
use farlane_daemon::run::run_with;
use farlane_daemon::terminal::exit_code;
use farlane_lend::ask;
use farlane_lend::options::Options;
use farlane_lend::setup::LendDaemon;
use std::process::ExitCode;

fn main() -> ExitCode {
    let options = config::parse_common::<Options>();
    match &options.command {
        Some(command) => exit_code(
            "farlane-lend",
            ask::run(command).map(|()| ExitCode::SUCCESS),
        ),
        None => run_with::<LendDaemon>(&options),
    }
}
