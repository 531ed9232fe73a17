//! `farlane-net`: serves network interfaces to a VM.

use std::process::ExitCode;

fn main() -> ExitCode {
    farlane_daemon::reload::run::<farlane_net::daemon::NetDaemon>()
}
