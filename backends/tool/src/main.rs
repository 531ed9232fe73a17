//! `farlane`: one program for whoever runs backends.

use clap::Parser as _;
use farlane_daemon::terminal::exit_code;
use farlane_tool::options::{Command, Options};
use farlane_tool::{doctor, status, top};
use std::process::ExitCode;

fn main() -> ExitCode {
    let done = match Options::parse().command {
        Command::Status(options) => status::run(&options),
        Command::Top(options) => top::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Doctor(options) => doctor::run(&options),
        Command::Topology(options) => {
            farlane_topology::run::run(&options).map(|()| ExitCode::SUCCESS)
        }
        Command::Lend { command } => farlane_lend::ask::run(&command).map(|()| ExitCode::SUCCESS),
    };
    exit_code("farlane", done)
}
