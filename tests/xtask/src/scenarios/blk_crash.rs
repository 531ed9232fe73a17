//! kill -9 of a disk's backend, again and again, while fio writes to the disk and checks what it has written: the backend
//! that comes next completes what was under way, and the guest notices nothing but a pause.

use std::time::Duration;

use anyhow::{Result, ensure};
use farlane_vmkit::guest::{Guest, Job};
use farlane_vmkit::progress;
use farlane_vmkit::qemu::VmConfig;
use farlane_vmkit::report::Report;
use farlane_vmkit::scratch::Scratch;

use super::Scenario;
use crate::conditions::no_complaint;
use crate::disks::{Disk, DiskBackend, node, socket};
use crate::fio::{FIO_TIMEOUT, Fio, figures};
use crate::lending::wait_traffic;
use crate::run::Run;

pub const SCENARIO: Scenario = Scenario {
    name: "blk-crash",
    about: "kill -9 of farlane-blk, several times, under fio --verify on two queues: nothing lost, nothing done twice",
    is_test: true,
    run,
};

const DISK: &str = "disk";
const MEMORY: &str = "memory";

/// How often the backend is killed while a disk is in use.
const KILLS: usize = 4;

/// Writes at random, many at a time, over and over again, and checks each block soon after and all in the end. A request
/// that is lost never ends, and neither does fio; one that is done twice is a completion that the guest's driver complains of.
const JOB: &str = "--rw=randwrite --bsrange=4k-16k --iodepth=32 --size=24m --verify=crc32c --verify_fatal=1 \
    --verify_backlog=256 --time_based --runtime=12";

/// What the guest's driver and block layer say of requests that fail or end twice.
const ERRORS: &[&str] = &["I/O error", "is not a head", "bad response"];

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let folders = [(DISK, Scratch::new()?), (MEMORY, Scratch::in_memory()?)];
    let mut disks = Vec::new();
    for (name, folder) in &folders {
        let path = folder.join("blocks");
        std::fs::File::create(&path)?.set_len(32 << 20)?;
        disks.push(Disk::new(name, &path));
    }
    let mut backend = run.context.disks()?.serve(run, "farlane-blk", &disks)?;
    let mut config = VmConfig::new("a").storage();
    config.cpus = 2;
    for (disk, _) in &folders {
        config = config.vhost_user_disk(*disk, socket(run, disk), 2);
    }
    let [guest] = run.boot([config])?;
    for (disk, _) in &folders {
        under_fire(&guest, disk, &mut backend, report)?;
    }
    no_complaint(&guest)?;
    let log = guest.run("dmesg")?;
    let bad = log
        .lines()
        .find(|line| ERRORS.iter().any(|error| line.contains(error)));
    ensure!(bad.is_none(), "The guest has noticed:\n{log}");
    drop(guest);
    backend.stop()
}

fn under_fire(
    guest: &Guest,
    disk: &str,
    backend: &mut DiskBackend,
    report: &mut Report,
) -> Result<()> {
    let node = node(guest, disk)?;
    let fio = Fio::new(&node, JOB);
    let job: Job<'_> = guest.spawn(fio.line())?;
    let mut resubmitted = 0;
    for _ in 0..KILLS {
        wait_traffic(guest, &node)?;
        ensure!(!job.has_ended(), "fio ended early:\n{}", job.so_far());
        resubmitted += backend.metrics()?.sum("resubmitted")?;
        backend.kill()?;
        backend.start_again()?;
    }
    wait_traffic(guest, &node)?;
    resubmitted += backend.metrics()?.sum("resubmitted")?;
    let figures = figures(
        fio.line(),
        &job.wait(FIO_TIMEOUT + Duration::from_secs(60))?,
    )?;
    ensure!(figures.read.requests > 0, "Nothing was checked");
    ensure!(
        resubmitted > 0,
        "The backend was killed {KILLS} times, and never while a request was under way"
    );
    let figure = format!(
        "{} writes, all found again; {resubmitted} requests taken over",
        figures.write.requests
    );
    progress::note(&format!("{disk}: killed {KILLS} times: {figure}"));
    report.add(
        "farlane-blk",
        format!("{disk}: killed {KILLS} times"),
        figure,
    );
    Ok(())
}
