//! `farlane-borrow`: makes PCIe devices of other hosts devices of this host's virtual machines.

use std::process::ExitCode;

fn main() -> ExitCode {
    farlane_daemon::reload::run::<farlane_borrow::daemon::BorrowDaemon>()
}
