//! The controllers of a dual-ported NVMe disk are the paths, of a kernel with two nodes; they are unplugged, and plugged in again
//! under other names.

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use farlane_vmkit::progress;
use farlane_vmkit::report::Report;

use super::Random;
use crate::conditions::{no_complaint, wait_until};
use crate::run::Run;
use crate::two_nodes::{DISK, Host, SOCKET, driven};

/// How long a VM works with the disk.
const SECONDS: u64 = 40;
/// How long that may take with the last check.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Two threads whose buffers lie on both nodes.
const JOBS: &str = "--job cpu=0,memory=striped --job cpu=1,memory=striped";

/// How long a path is left as it is, at most.
const MOST_MS: u64 = 1000;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let host = Host::boot(run)?;
    let daemon = host.daemon(&format!(
        "--disk socket={SOCKET},path=/dev/{},paths=auto,serial={DISK}",
        host.devices[0]
    ))?;
    let job = host.drive(&format!("{JOBS} --seconds {SECONDS}"))?;
    let mut random = Random::new();
    let mut pulls = [0_u32; 2];
    while !job.has_ended() {
        // Each in turn, so that both are pulled in any case.
        let at = if pulls[0] > pulls[1] { 1 } else { 0 };
        thread::sleep(Duration::from_millis(random.below(MOST_MS)));
        host.guest.unplug(&host.subsystem.controller_id(at))?;
        pulls[at] += 1;
        wait_until("the path is seen to have gone", || {
            Ok(job.has_ended() || !up(&host)?[at])
        })?;
        thread::sleep(Duration::from_millis(random.below(MOST_MS)));
        host.guest.plug_controller(&host.subsystem, at)?;
        wait_until("the path is back", || {
            let all = up(&host)?.iter().all(|up| *up);
            Ok(all && host.present()?.iter().all(|device| !device.is_empty()))
        })?;
    }
    let driven = driven(job, TIMEOUT)?;
    ensure!(
        pulls.iter().all(|count| *count > 0),
        "The controllers were pulled {pulls:?} times"
    );
    let metrics = host.metrics()?;
    let redone = metrics.sum("redone")?;
    let log = host.stop(daemon)?;
    ensure!(
        log.contains("is back"),
        "farlane-blk has not noticed that a path came back:\n{log}"
    );
    no_complaint(&host.guest)?;
    let figure = format!(
        "unplugged {} and {} times: {}; {redone} done again",
        pulls[0], pulls[1], driven.summary
    );
    progress::note(&format!("NVMe controllers as paths, {SECONDS} s: {figure}"));
    report.add(
        "farlane-blk on two nodes",
        format!("NVMe controllers as paths, {SECONDS} s"),
        figure,
    );
    Ok(())
}

/// Whether the path on each node can be used, as farlane-blk believes.
fn up(host: &Host) -> Result<[bool; 2]> {
    let metrics = host.metrics()?;
    let paths = metrics.labelled("path_up");
    let of = |node: &str| {
        paths
            .iter()
            .any(|(labels, up)| labels.get("node").is_some_and(|n| n == node) && *up == 1)
    };
    ensure!(paths.len() == 2, "There are {} paths", paths.len());
    Ok([of("0"), of("1")])
}
