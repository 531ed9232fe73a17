//! The same programs between two processes of this machine, over the daemon's host socket: RDMA for
//! containers.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::packages;
use farlane_kit::report::Report;
use std::path::Path;

use super::rdma_perftest::perftests;
use super::rdma_pingpong::{device_info, ping_pongs};
use crate::farlane::Farlane;
use crate::metrics::Metrics;
use crate::place::{Host, Over};
use crate::run::Run;
use crate::tools::{Ends, Program, between};

/// Debian's packages of the programs.
const PACKAGES: &[&str] = &["ibverbs-utils", "perftest", "qperf"];

const PING_PONGS: &[&str] = &[
    "ibv_rc_pingpong",
    "ibv_rc_pingpong -e",
    "ibv_rc_pingpong -g 0 -c -s 65536",
    "ibv_rc_pingpong -g 0 -c -e",
    "ibv_uc_pingpong",
    "ibv_uc_pingpong -g 0 -c -e",
    "ibv_uc_pingpong -g 0 -c -s 65536",
    "ibv_ud_pingpong",
    "ibv_ud_pingpong -g 0 -c -e",
    "ibv_srq_pingpong",
    "ibv_srq_pingpong -g 0 -e",
    "ibv_srq_pingpong -g 0 -q 16",
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
    "ib_write_bw -c UC -a -n 100",
    "ib_write_lat -c UC -s 8 -n 2000",
    "ib_send_lat -c UC -s 8 -n 2000",
    "ib_send_bw -c UD -s 4096 -n 400",
    "ib_send_lat -c UD -s 8 -n 2000",
    "ib_send_lat -c UD -s 8 -n 2000 -e",
    "ib_send_bw -c UD -s 64 -n 400 -g -M 0:0:0:0:0:0:0:0:0:0:255:255:239:1:1:1",
    "ib_send_bw --use-srq -q 4 -s 65536 -n 1000",
    "ib_send_lat --use-srq -c UC -s 8 -n 2000",
    "ib_send_lat --use-srq -s 8 -n 2000",
    "ib_send_bw -c XRC -s 65536 -n 1000",
    "ib_send_lat -c XRC -s 8 -n 2000",
    "ib_write_bw -c XRC -s 65536 -n 1000",
    "ib_atomic_bw -A CMP_AND_SWAP -n 1000",
    "ib_atomic_bw -A FETCH_AND_ADD -n 1000 -q 4",
    "ib_atomic_bw -A FETCH_AND_ADD -n 1000 -e",
    "ib_atomic_lat -A CMP_AND_SWAP -n 1000 -e",
    "ib_atomic_lat -A FETCH_AND_ADD -n 1000",
];

/// The tests of qperf over connections.
const QPERF: &[&str] = &[
    "rc_bi_bw",
    "rc_bw",
    "rc_compare_swap_mr",
    "rc_fetch_add_mr",
    "rc_lat",
    "rc_rdma_read_bw",
    "rc_rdma_read_lat",
    "rc_rdma_write_bw",
    "rc_rdma_write_lat",
    "rc_rdma_write_poll_lat",
    "uc_bi_bw",
    "uc_bw",
    "uc_lat",
    "uc_rdma_write_bw",
    "uc_rdma_write_lat",
    "uc_rdma_write_poll_lat",
    "ud_bi_bw",
    "ud_bw",
    "ud_lat",
    "ver_rc_compare_swap",
    "ver_rc_fetch_add",
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
        extended(ends, report)?;
        qperf(&host, report)?;
        sharing(run, farlane, &socket, report)?;
    }
    backend.stop()
}

/// Transfers between processes that share what they register: the daemon copies all of it between
/// mapped memory. Beside each, how often the bytes of one that does not share are copied.
fn sharing(run: &Run<'_>, farlane: &Farlane, socket: &Path, report: &mut Report) -> Result<()> {
    let host = || Host::new(farlane.programs(), socket, run.logs());
    let (private, sharing) = (host(), host().sharing_memory());
    for (name, server, client, counts) in [
        ("private to private", &private, &private, [false, true]),
        ("private to shared", &sharing, &private, [true, false]),
        ("shared to shared", &sharing, &sharing, [false, false]),
    ] {
        let ends = Ends {
            name,
            server,
            client,
        };
        let copied = || {
            let metrics = Metrics::read(&run.metrics(), "farlane_rdma_")?;
            let of = |name| metrics.sum(name);
            anyhow::Ok([of("bytes_by_system_call")?, of("bytes_copied_twice")?])
        };
        let before = copied()?;
        perftests(run, ends, &["ib_write_bw -s 1048576 -n 500"], report)?;
        let grown: Vec<_> = std::iter::zip(copied()?, before)
            .map(|(after, before)| after > before)
            .collect();
        ensure!(
            grown == counts,
            "{name}: bytes copied by system calls, and twice: {grown:?}, expected {counts:?}"
        );
    }
    Ok(())
}

/// Messages to shared receive queues of another process, by extended reliable connections.
fn extended(ends: Ends<'_>, report: &mut Report) -> Result<()> {
    let line = "ibv_xsrq_pingpong -g 0";
    let said = between(Over::Farlane, line, ends.server, ends.client)?;
    ensure!(
        said.contains("success"),
        "`{line}` says nothing of success:\n{said}"
    );
    report.add(ends.name, line, "all messages have arrived");
    Ok(())
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
    for test in QPERF {
        let figure = figure(&said, test);
        let figure = figure.with_context(|| format!("qperf said nothing of {test}:\n{said}"))?;
        report.add("host", format!("qperf {test}"), figure);
    }
    Ok(())
}

/// What qperf said of a test: of what was sent and what was received the latter. A rate of zero is
/// nothing.
fn figure(said: &str, test: &str) -> Option<String> {
    let (_, rest) = said.split_once(&format!("{test}:"))?;
    let words: Vec<_> = rest.split_whitespace().collect();
    let figures = words.chunks(4).map_while(|words| match words {
        [what, "=", number, unit] if *number != "0" => Some(format!("{what} {number} {unit}")),
        _ => None,
    });
    figures.last()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_qperf_says_of_a_test_is_what_has_arrived() {
        let said = "rc_lat:\n    latency  =  54 us\nuc_bw:\n    send_bw  =  1.58 GB/sec\n    \
                    recv_bw  =  1.52 GB/sec\nuc_lat:\n    latency  =  0 us\n";
        assert_eq!(figure(said, "rc_lat").as_deref(), Some("latency 54 us"));
        assert_eq!(
            figure(said, "uc_bw").as_deref(),
            Some("recv_bw 1.52 GB/sec")
        );
        assert_eq!(figure(said, "uc_lat"), None);
        assert_eq!(figure(said, "uc_bi_bw"), None);
    }
}
