//! The same programs between two processes of this machine, over the daemon's host socket: RDMA for
//! containers.

use anyhow::{Context as _, Result};
use farlane_kit::packages;
use farlane_kit::report::Report;

use super::rdma_perftest::perftests;
use super::rdma_pingpong::{device_info, ping_pongs};
use crate::place::{Host, Over};
use crate::run::Run;
use crate::tools::{Ends, Program};

/// Debian's packages of the programs.
const PACKAGES: &[&str] = &["ibverbs-utils", "perftest", "qperf"];

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

/// The tests of qperf over reliable connections but those of atomic operations, which there are
/// not.
const QPERF: &[&str] = &[
    "rc_bi_bw",
    "rc_bw",
    "rc_lat",
    "rc_rdma_read_bw",
    "rc_rdma_read_lat",
    "rc_rdma_write_bw",
    "rc_rdma_write_lat",
    "rc_rdma_write_poll_lat",
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
    let ends = Ends {
        name: "host",
        server: &host,
        client: &host,
    };
    ping_pongs(ends, ping_pong, report)?;
    perftests(run, ends, perftest, report)?;
    if !perftest.is_empty() {
        qperf(&host, report)?;
    }
    backend.stop()
}

fn qperf(host: &Host, report: &mut Report) -> Result<()> {
    let tests = QPERF.join(" ");
    let program = Program {
        name: "qperf",
        serve: &|port| Over::Farlane.command(&format!("qperf -lp {port}")),
        // The last word ends the server.
        ask: &|address, port| {
            Over::Farlane.command(&format!("qperf -lp {port} -t 1 {address} {tests} quit"))
        },
    };
    let said = program.run(host, host)?.asked;
    let mut figures = said.split("rc_").skip(1).map(|part| {
        let (test, rest) = part.split_once(':').unwrap_or((part, ""));
        (
            format!("rc_{test}"),
            rest.split_whitespace().collect::<Vec<_>>(),
        )
    });
    for test in QPERF {
        let figure = figures
            .next()
            .and_then(|(name, words)| match (name == *test, &words[..]) {
                (true, [what, "=", number, unit, ..]) => Some(format!("{what} {number} {unit}")),
                _ => None,
            });
        let figure = figure.with_context(|| format!("qperf said nothing of {test}:\n{said}"))?;
        report.add("host", format!("qperf {test}"), figure);
    }
    Ok(())
}
