//! `farlane-blk`: serves disks to a VM.

use std::process::ExitCode;

fn main() -> ExitCode {
    farlane_daemon::reload::run::<farlane_blk::daemon::BlkDaemon>()
}
