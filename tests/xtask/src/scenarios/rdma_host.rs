//! The same programs between two processes of this machine, over the daemon's host socket: RDMA for containers.

use anyhow::Result;
use farlane_vmkit::packages;
use farlane_vmkit::report::Report;

use super::Scenario;
use super::rdma_perftest::counted_perftests;
use super::rdma_pingpong::{device_info, ping_pongs};
use crate::place::Host;
use crate::run::Run;

pub const SCENARIO: Scenario = Scenario {
    name: "rdma-host",
    about: "the same programs between two processes of this machine over the daemon's host socket",
    is_test: true,
    run,
};

/// Debian's packages of the programs.
const PACKAGES: &[&str] = &["ibverbs-utils", "perftest"];

const PING_PONGS: &[&str] = &[
    "ibv_rc_pingpong",
    "ibv_rc_pingpong -e",
    "ibv_rc_pingpong -g 0 -c -s 65536",
    "ibv_rc_pingpong -g 0 -c -e",
];

const PERFTESTS: &[&str] = &[
    "ib_send_bw -a -n 100",
    "ib_write_bw -a -n 100",
    "ib_read_bw -a -n 100",
    "ib_write_bw -s 65536 -n 1000 -q 4",
    "ib_send_bw -s 65536 -n 1000 -b",
    "ib_write_lat -a -n 50",
    "ib_send_lat -s 8 -n 2000",
    "ib_send_lat -s 8 -n 2000 -e",
    "ib_read_lat -s 8 -n 2000",
];

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    on_host(run, PING_PONGS, PERFTESTS, report)
}

/// Runs programs between two processes of this machine, on a daemon that serves no guest.
pub fn on_host(
    run: &Run<'_>,
    ping_pong: &[&str],
    perftest: &[&str],
    report: &mut Report,
) -> Result<()> {
    packages::ensure(PACKAGES)?;
    let farlane = run.context.farlane()?;
    let socket = run.path("host");
    let backend = farlane.daemon(run, &[], Some(&socket))?;
    let host = Host::new(farlane.programs(), &socket, run.logs());
    device_info(&host)?;
    ping_pongs("host", ping_pong, &host, &host, report)?;
    counted_perftests(run, "host", perftest, &host, &host, report)?;
    backend.stop()
}
