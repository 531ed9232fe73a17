//! What goes on while backends are killed.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::network::{Network, PEER};
use farlane_kit::report::Report;

use super::backend::Backend;
use super::domain::Domain;
use crate::conditions::wait_until;
use crate::fio::{FIO_TIMEOUT, Fio, figures};
use crate::place::Place as _;
use crate::run::Run;
use crate::scenarios::blk_crash::{ERRORS, JOB};

/// How often each backend is killed.
const KILLS: usize = 2;

/// Requests in the guest's queues at a kill.
const QUEUED: u64 = 16;

/// What is transferred, in bytes, and how fast: it takes some seconds.
const TRANSFER: u64 = 32 << 20;
const RATE: &str = "8M";

const TRANSFER_TIMEOUT: Duration = Duration::from_secs(120);

/// fio writes at random, reads back and checks, while the backend of the disk is killed.
pub fn disk(
    domain: &Domain<'_>,
    backend: &mut Backend<'_>,
    report: &mut Report,
    suite: &str,
) -> Result<()> {
    let fio = Fio::new("/dev/vda", JOB);
    let job = domain.begin(fio.line())?;
    for _ in 0..KILLS {
        let before = done(domain)?;
        wait_until("fio is at work", || Ok(done(domain)? > before))?;
        backend.freeze()?;
        wait_until("the guest has requests under way", || {
            Ok(in_flight(domain)? >= QUEUED)
        })?;
        backend.kill_and_start()?;
    }
    let output = domain.end(job, fio.line(), FIO_TIMEOUT)?;
    let figures = figures(fio.line(), &output)?;
    ensure!(
        figures.write.requests > 0 && figures.read.requests > 0,
        "fio has checked nothing: {figures:?}"
    );
    let log = domain.run("dmesg")?;
    let is_error = |line: &str| ERRORS.iter().any(|error| line.contains(error));
    ensure!(!log.lines().any(is_error), "The guest has noticed:\n{log}");
    report.add(
        "fio --verify",
        format!("{suite}, through {KILLS} kills of farlane-blk"),
        format!("{} writes, all found again", figures.write.requests),
    );
    Ok(())
}

/// How many requests of the disk have ended.
fn done(domain: &Domain<'_>) -> Result<u64> {
    let fields = numbers(&domain.read_file("/sys/block/vda/stat")?)?;
    Ok(fields[0] + fields[4])
}

fn in_flight(domain: &Domain<'_>) -> Result<u64> {
    Ok(numbers(&domain.read_file("/sys/block/vda/inflight")?)?
        .iter()
        .sum())
}

fn numbers(text: &str) -> Result<Vec<u64>> {
    let numbers = text.split_whitespace().map(str::parse);
    numbers
        .collect::<Result<_, _>>()
        .context("Not all are numbers")
}

/// A file goes to the guest over TCP while the backend of the interface is killed.
pub fn net(
    run: &Run<'_>,
    domain: &Domain<'_>,
    network: &Network,
    backend: &mut Backend<'_>,
    report: &mut Report,
    suite: &str,
) -> Result<()> {
    domain.run(&format!("/usr/bin/ping -c 1 -W 10 {PEER}"))?;
    let folder = run.path(&format!("{suite}-http"));
    std::fs::create_dir(&folder).context("Cannot make a folder")?;
    let mut data = Vec::new();
    File::open("/dev/urandom")?
        .take(TRANSFER)
        .read_to_end(&mut data)?;
    File::create(folder.join("file"))?.write_all(&data)?;
    let sum = network.run(&format!("sha256sum <{}/file", folder.display()))?;
    let _server = network.spawn(&format!(
        "busybox httpd -f -p {PEER}:80 -h {}",
        folder.display()
    ))?;
    wait_until("the server listens", || network.is_listening(80))?;
    let line = format!("curl -sS --limit-rate {RATE} -o /tmp/file http://{PEER}/file");
    let first = received(domain)?;
    let job = domain.begin(&line)?;
    let here = || Ok::<_, anyhow::Error>(received(domain)? - first);
    for _ in 0..KILLS {
        let before = here()?;
        wait_until("the transfer goes on", || Ok(here()? > before + (1 << 20)))?;
        backend.freeze()?;
        ensure!(
            here()? < TRANSFER,
            "The transfer has ended before the backend"
        );
        backend.kill_and_start()?;
    }
    let output = domain.end(job, &line, TRANSFER_TIMEOUT)?;
    output.check(&line)?;
    let found = domain.run("sha256sum </tmp/file")?;
    ensure!(found == sum, "{found} came of {sum}");
    report.add(
        "curl",
        format!("{suite}, through {KILLS} kills of farlane-net"),
        "the same sha256",
    );
    Ok(())
}

/// How many bytes the guest's interface has received.
fn received(domain: &Domain<'_>) -> Result<u64> {
    let count = domain.read_file("/sys/class/net/eth0/statistics/rx_bytes")?;
    count.trim().parse().context("A count is no number")
}

/// The guest's kernel has found nothing wrong with itself.
pub fn no_complaint(domain: &Domain<'_>) -> Result<()> {
    let log = domain.run("dmesg")?;
    let bad = crate::conditions::complaint(&log);
    ensure!(bad.is_none(), "The guest's kernel complains:\n{log}");
    Ok(())
}
