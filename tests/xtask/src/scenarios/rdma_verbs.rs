//! Debian's own programs of verbs, unmodified, with every transport and every operation: between
//! two guests, and the same between two processes of this machine.
//!
//! Plain reliable connections are in `rdma_pingpong` and `rdma_perftest`, whose lines `rdma_host`
//! runs on this machine; connections by addresses (`-R`) are in `rdma_cm`. Some of the packages'
//! programs cannot work: perftest's `raw_ethernet_*` send and receive frames of a network interface
//! (queue pairs of the type RAW_PACKET), which the device has none of; and qperf's `xrc_*` is
//! missing from Debian's build.

use std::iter::zip;
use std::path::Path;
use std::thread;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::packages;
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use super::rdma_perftest::{OURS, perftests, with_one_size};
use super::rdma_pingpong::ping_pongs;
use crate::conditions::{PATIENCE, no_complaint};
use crate::place::{Host, Over};
use crate::run::Run;
use crate::tools::{Ends, Program};

/// Debian's packages of the programs.
pub const PACKAGES: &[&str] = &["ibverbs-utils", "perftest", "qperf"];

/// What they have received they look at, where they can (`-c`). Few turns: whoever polls has no
/// processor to itself, here and in guests.
const PING_PONGS: &[&str] = &[
    "ibv_rc_pingpong -g 0 -c -N -n 200",
    "ibv_rc_pingpong -g 0 -c -j -n 200",
    "ibv_uc_pingpong -n 200",
    "ibv_uc_pingpong -g 0 -c -e -n 200",
    "ibv_uc_pingpong -g 0 -c -s 65536 -n 100",
    "ibv_ud_pingpong -n 200",
    "ibv_ud_pingpong -g 0 -c -e -n 200",
    "ibv_srq_pingpong -n 50",
    "ibv_srq_pingpong -g 0 -c -e -n 50",
    "ibv_srq_pingpong -g 0 -c -q 4 -s 65536 -n 50",
];

/// Messages to shared receive queues of other processes, by extended reliable connections, and how
/// many clients there are: of two each gets messages through the connection of the other one, whose
/// domain it shares.
const EXTENDED: &[(&str, usize)] = &[
    ("ibv_xsrq_pingpong -g 0", 1),
    ("ibv_xsrq_pingpong -g 0 -e -n 100", 1),
    ("ibv_xsrq_pingpong -g 0 -n 50", 2),
    ("ibv_xsrq_pingpong -g 0 -e -n 50", 2),
];

/// A receiver of datagrams, or of an unreliable connection, has as many receive requests at once as
/// there are messages, and at most 512: it loses none of these, however slow it is.
const PERFTESTS: &[&str] = &[
    "ib_send_bw -c UC -a -n 20",
    "ib_send_bw -c UC -s 4096 -b -l 4 -n 100",
    "ib_send_lat -c UC -s 8 -n 200",
    "ib_send_lat -c UC -s 8 -e -n 200",
    "ib_write_bw -c UC -a -n 20",
    "ib_write_bw -c UC -s 4096 -q 4 -n 200",
    "ib_write_lat -c UC -s 8 -n 200",
    "ib_send_bw -c UD -s 4096 -n 400",
    "ib_send_bw -c UD -x 0 -s 1024 -b -e -n 200",
    "ib_send_lat -c UD -s 8 -I 64 -n 200",
    "ib_send_lat -c UD -x 0 -s 8 -e -n 200",
    "ib_send_bw -c UD -s 64 -n 400 -g -M 0:0:0:0:0:0:0:0:0:0:255:255:239:1:1:1",
    "ib_send_bw --use-srq -q 4 -s 65536 -n 200",
    "ib_send_bw --use-srq -s 64 -e -n 200",
    "ib_send_bw --use-srq -c UD -s 4096 -n 400",
    "ib_send_lat --use-srq -s 8 -n 200",
    "ib_send_lat --use-srq -c UC -s 8 -n 200",
    "ib_send_bw -c XRC -s 65536 -q 4 -b -n 100",
    "ib_send_lat -c XRC -s 8 -n 200",
    "ib_write_bw -c XRC -s 65536 -n 200",
    "ib_write_lat -c XRC -s 8 -n 200",
    "ib_read_bw -c XRC -s 65536 -e -n 200",
    "ib_read_lat -c XRC -s 8 -e -n 200",
    "ib_atomic_bw -A CMP_AND_SWAP -n 200",
    "ib_atomic_bw -A FETCH_AND_ADD -q 4 -e -n 200",
    "ib_atomic_bw -A CMP_AND_SWAP -c XRC -b -n 200",
    "ib_atomic_lat -A CMP_AND_SWAP -e -n 200",
    "ib_atomic_lat -A FETCH_AND_ADD -n 200",
    "ib_atomic_lat -A FETCH_AND_ADD -c XRC -n 200",
];

/// Options that Debian 13's perftest has, which guests have, and Debian 12's has not.
const LATER_PERFTESTS: &[&str] = &[
    "ib_write_bw --write_with_imm -s 4096 -n 200",
    "ib_write_lat --write_with_imm -s 8 -n 200",
];

/// The tests of qperf. Each takes a second, whatever it does: these groups run side by side.
const QPERF: [&[&str]; 3] = [
    &[
        "rc_bi_bw",
        "rc_bw",
        "rc_lat",
        "rc_rdma_read_bw",
        "rc_rdma_read_lat",
        "rc_rdma_write_bw",
        "rc_rdma_write_lat",
    ],
    &[
        "uc_bi_bw",
        "uc_bw",
        "uc_lat",
        "uc_rdma_write_bw",
        "uc_rdma_write_lat",
        "uc_rdma_write_poll_lat",
        "rc_rdma_write_poll_lat",
    ],
    &[
        "ud_bi_bw",
        "ud_bw",
        "ud_lat",
        "rc_compare_swap_mr",
        "rc_fetch_add_mr",
        "ver_rc_compare_swap",
        "ver_rc_fetch_add",
    ],
];

/// How long a test of qperf runs that has done nothing in a second beside others.
const ALONE_SECONDS: u32 = 10;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    packages::ensure(PACKAGES)?;
    let farlane = run.context.farlane()?;
    let wire = Wire::new()?;
    let socket = run.path("host");
    let pair = farlane.boot_pair_with(run, &wire, &[], Some(&socket))?;
    all(run, pair.ends(), PERFTESTS, report)?;
    perftests(run, OURS, pair.ends(), LATER_PERFTESTS, report)?;
    for guest in [&pair.a, &pair.b] {
        no_complaint(guest)?;
    }
    between_processes(run, farlane.programs(), &socket, report)?;
    pair.backend.stop()
}

/// What is between two processes of this machine alone.
pub fn on_host(run: &Run<'_>, report: &mut Report) -> Result<()> {
    packages::ensure(PACKAGES)?;
    let farlane = run.context.on_host()?;
    let socket = run.path("host");
    let backend = farlane.daemon(run, &[], Some(&socket))?;
    between_processes(run, farlane.programs(), &socket, report)?;
    backend.stop()
}

fn between_processes(
    run: &Run<'_>,
    programs: &Path,
    socket: &Path,
    report: &mut Report,
) -> Result<()> {
    let host = Host::new(programs, socket, run.logs());
    let ends = Ends {
        name: "host",
        server: &host,
        client: &host,
    };
    // All sizes are between guests, and here of reliable connections (`rdma_host`).
    let lines: Vec<String> = PERFTESTS.iter().map(|line| with_one_size(line)).collect();
    all(run, ends, &lines, report)
}

/// All the programs at one place.
fn all(
    run: &Run<'_>,
    ends: Ends<'_>,
    lines: &[impl AsRef<str>],
    report: &mut Report,
) -> Result<()> {
    ping_pongs(ends, PING_PONGS, report)?;
    extended(ends, report)?;
    perftests(run, OURS, ends, lines, report)?;
    qperf(ends, report)
}

fn extended(ends: Ends<'_>, report: &mut Report) -> Result<()> {
    for (line, clients) in EXTENDED {
        let program = Program {
            name: line,
            serve: &|port| Over::Farlane.command(&format!("{line} -c {clients} -p {port}")),
            ask: &|address, port| {
                let client = Over::Farlane.command(&format!("{line} -p {port} {address}"));
                match clients {
                    1 => client,
                    _ => format!(
                        "{client} & first=$!; {client}; second=$?; wait $first && exit $second"
                    ),
                }
            },
        };
        let said = program.run(ends.server, ends.client)?.asked;
        let successes = said.matches("success").count();
        ensure!(
            successes == *clients,
            "`{line}` has {successes} successes of {clients}:\n{said}"
        );
        let line = format!("{line} -c {clients}");
        report.tell(ends.name, line, "all messages have arrived");
    }
    Ok(())
}

fn qperf(ends: Ends<'_>, report: &mut Report) -> Result<()> {
    let said = thread::scope(|scope| {
        let groups = QPERF.map(|tests| scope.spawn(move || qperf_tests(ends, tests, 1)));
        groups.map(|group| group.join())
    });
    for (tests, said) in zip(QPERF, said) {
        let said = said.ok().context("A thread has panicked")??;
        for test in tests {
            let figure = match figure(&said, test) {
                Some(figure) => figure,
                // In a second beside others nothing has come to its end, on a busy machine.
                None => {
                    let again = qperf_tests(ends, &[test], ALONE_SECONDS)?;
                    let figure = figure(&again, test);
                    figure.with_context(|| {
                        format!("qperf said nothing of {test}:\n{said}\nnor when alone:\n{again}")
                    })?
                }
            };
            report.tell(ends.name, format!("qperf {test}"), figure);
        }
    }
    Ok(())
}

/// What qperf says of some of its tests, each of which takes so many seconds.
fn qperf_tests(ends: Ends<'_>, tests: &[&str], seconds: u32) -> Result<String> {
    let tests = tests.join(" ");
    // How long one side waits for the other: of its own accord 5 s.
    let patience = PATIENCE.as_secs();
    let program = Program {
        name: "qperf",
        serve: &|port| Over::Farlane.command(&format!("qperf -lp {port}")),
        // The last word ends the server.
        ask: &|address, port| {
            Over::Farlane.command(&format!(
                "qperf -lp {port} -to {patience} -t {seconds} {address} {tests} quit"
            ))
        },
    };
    Ok(program.run(ends.server, ends.client)?.asked)
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
