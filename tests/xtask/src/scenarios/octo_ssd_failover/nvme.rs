//! The controllers of a dual-ported NVMe disk are the paths, of a kernel with two nodes; they are
//! unplugged, and plugged in again under other names.

use std::time::Duration;

use anyhow::{Result, ensure};
use farlane_kit::report::Report;

use super::Random;
use crate::conditions::{no_complaint, wait_until};
use crate::run::Run;
use crate::seed::seed;
use crate::two_nodes::{DISK, Host, SOCKET, driven};

/// How often each path is pulled, at least, and how many requests must have been done again.
const PULLS: u32 = 2;
const REDONE: u64 = 1;

/// The VM stops working with the disk, and checks all of it, when there is this file.
const ENOUGH: &str = "/tmp/enough";
/// How long the last check may take.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Most requests that are done before the next pull.
const MOST_REQUESTS: u64 = 400;

/// Two threads whose buffers lie on both nodes.
const JOBS: &str = "--job cpu=0,memory=striped --job cpu=1,memory=striped";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let host = Host::boot(run)?;
    let daemon = host.daemon(&format!(
        "--disk socket={SOCKET},path=/dev/{},paths=auto,serial={DISK}",
        host.devices[0]
    ))?;
    let job = host.drive(&format!("{JOBS} --until {ENOUGH}"))?;
    let mut random = Random::new(seed()?);
    let mut pulls = [0_u32; 2];
    let mut redone = 0;
    while pulls.iter().any(|&count| count < PULLS) || redone < REDONE {
        // Each in turn, so that both are pulled in any case.
        let at = if pulls[0] > pulls[1] { 1 } else { 0 };
        works(&host, random.below(MOST_REQUESTS))?;
        host.guest.unplug(&host.subsystem.controller_id(at))?;
        pulls[at] += 1;
        wait_until("the path is seen to have gone", || Ok(!up(&host)?[at]))?;
        works(&host, random.below(MOST_REQUESTS))?;
        host.guest.plug_controller(&host.subsystem, at)?;
        wait_until("the path is back", || {
            let all = up(&host)?.iter().all(|up| *up);
            Ok(all && host.present()?.iter().all(|device| !device.is_empty()))
        })?;
        redone = host.metrics()?.sum("redone")?;
        ensure!(
            pulls[0] < 4 * PULLS,
            "The controllers were pulled {pulls:?} times, and never with a request under way"
        );
    }
    ensure!(!job.has_ended(), "The VM has ended:\n{}", job.so_far());
    host.guest.run(&format!("touch {ENOUGH}"))?;
    let driven = driven(job, TIMEOUT)?;
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
    report.tell(
        "farlane-blk on two nodes",
        "NVMe controllers as paths",
        figure,
    );
    Ok(())
}

/// Waits until the disk has done so many further requests, over whatever path.
fn works(host: &Host, requests: u64) -> Result<()> {
    let done = || {
        let metrics = host.metrics()?;
        anyhow::Ok(metrics.sum("reads")? + metrics.sum("writes")?)
    };
    let begin = done()?;
    wait_until("the disk works", || Ok(done()? >= begin + requests))
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
