//! The programs of `rdma_pingpong` and `rdma_perftest` between two processes of this machine, over
//! the daemon's host socket: RDMA for containers. And what is copied where they share memory.

use std::path::Path;

use anyhow::{Result, ensure};
use farlane_kit::packages;
use farlane_kit::report::Report;

use super::rdma_perftest::{self, OURS, perftests, with_one_size};
use super::rdma_pingpong::{self, device_info, ping_pongs};
use super::rdma_verbs::PACKAGES;
use crate::farlane::Farlane;
use crate::metrics::Metrics;
use crate::place::Host;
use crate::run::Run;
use crate::tools::Ends;

/// What runs through all sizes here; other programs do so between guests, through the same queue
/// pairs.
const OF_ALL_SIZES: &[&str] = &["ib_write_bw", "ib_read_bw"];

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let lines = rdma_perftest::LINES.iter();
    let lines: Vec<String> = lines
        .map(
            |line| match OF_ALL_SIZES.iter().any(|of| line.starts_with(of)) {
                true => (*line).to_owned(),
                false => with_one_size(line),
            },
        )
        .collect();
    on_host(run, rdma_pingpong::LINES, &lines, report)
}

/// Runs programs between two processes of this machine, on a daemon that serves no guest.
pub fn on_host(
    run: &Run<'_>,
    ping_pong: &[&str],
    perftest: &[impl AsRef<str>],
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
    perftests(run, OURS, ends, perftest, report)?;
    sharing(run, farlane, &socket, report)?;
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
        perftests(run, OURS, ends, ["ib_write_bw -s 1048576 -n 500"], report)?;
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
