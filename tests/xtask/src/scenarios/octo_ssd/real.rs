//! farlane-blk on a kernel that really has two nodes, over a dual-ported NVMe disk that it finds in
//! sysfs: what it believes of memory is what the kernel tells, and what each controller moves is
//! what the kernel counts.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::report::Report;

use crate::conditions::no_complaint;
use crate::metrics::Metrics;
use crate::numa::{Locality, NODES, per_cent};
use crate::run::Run;
use crate::two_nodes::{DISK, Host, SOCKET, driven};

/// How long a run of the driver may take.
const TIMEOUT: Duration = Duration::from_secs(120);

/// What the driver does: threads and buffers on nodes.
const JOBS: [(&str, &str); 4] = [
    ("thread and buffers on node 1", "--job cpu=1,memory=1"),
    (
        "thread on node 0, buffers on node 1",
        "--job cpu=0,memory=1",
    ),
    (
        "thread on node 1, buffers on node 0",
        "--job cpu=1,memory=0",
    ),
    (
        "two threads, buffers on both by 128 KiB",
        "--job cpu=0,memory=striped --job cpu=1,memory=striped",
    ),
];

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let host = Host::boot(run)?;
    // The second controller is found behind the first, and the node of each is the kernel's word.
    let found = format!(
        "--disk socket={SOCKET},path=/dev/{},paths=auto,serial={DISK}",
        host.devices[0]
    );
    let daemon = host.daemon(&found)?;
    for (what, words) in JOBS {
        job(&host, words, report, what).with_context(|| what.to_owned())?;
    }
    host.stop(daemon)?;
    no_complaint(&host.guest)
}

fn job(host: &Host, words: &str, report: &mut Report, what: &str) -> Result<()> {
    let before = host.metrics()?;
    let devices_before = host.device_bytes()?;
    let driven = driven(host.drive(&format!("{words} --requests 300"))?, TIMEOUT)?;
    let devices = host.device_bytes()?;
    let devices = [0, 1].map(|at| devices[at] - devices_before[at]);
    let moved = locality(&host.metrics()?)?.since(&locality(&before)?);
    let say = || format!("{driven:?}: {moved:?}; the devices moved {devices:?}");
    let total: u64 = driven.on.iter().sum();
    ensure!(
        total > 0 && moved.total() == total && moved.local() == total,
        "{}",
        say()
    );
    for (node, (on, by)) in NODES.iter().zip(driven.on.iter().zip(&devices)) {
        ensure!(moved.on(*node) == *on && by == on, "{}", say());
    }
    let figure = format!(
        "{} % local; {} and {} MiB by the controllers",
        per_cent(moved.local(), total)?,
        devices[0] >> 20,
        devices[1] >> 20
    );
    report.tell("farlane-blk on two nodes", what, figure);
    Ok(())
}

fn locality(metrics: &Metrics) -> Result<Locality> {
    Locality::bytes(metrics, "disk", DISK)
}
