//! `farlane-rdma`: serves RDMA devices to VMs and to processes of this host.

use std::process::ExitCode;

fn main() -> ExitCode {
    farlane_daemon::reload::run::<farlane_rdma::daemon::RdmaDaemon>()
}
