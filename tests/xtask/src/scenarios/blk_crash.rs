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
use crate::conditions::{no_complaint, wait_until};
use crate::disks::{Disk, DiskBackend, node, socket};
use crate::fio::{FIO_TIMEOUT, Fio, figures};
use crate::run::Run;

pub const SCENARIO: Scenario = Scenario {
    name: "blk-crash",
    about: "kill -9 of farlane-blk, several times, under fio --verify on two queues: nothing lost, nothing done twice",
    is_test: true,
    run,
};

const DISK: &str = "disk";
const MEMORY: &str = "memory";

/// How often the backend is killed while a disk is in use: at least, and at most until it was while a request was under
/// way, which is not for long.
const KILLS: usize = 4;
const MOST_KILLS: usize = 24;

/// Writes at random, many at a time, over and over again, and checks each block soon after and all in the end. A request
/// that is lost never ends, and neither does fio; one that is done twice is a completion that the guest's driver complains of.
pub const JOB: &str = "--rw=randwrite --bsrange=16k-256k --iodepth=32 --size=24m --verify=crc32c --verify_fatal=1 \
    --verify_backlog=64 --time_based --runtime=30";

/// So many requests are more than those that were under way.
const BUSY_REQUESTS: u64 = 100;

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
        under_fire(&guest, disk, JOB, &mut backend, report)?;
    }
    no_complaint(&guest)?;
    no_disk_error(&guest)?;
    drop(guest);
    backend.stop()
}

/// The guest's driver and block layer have nothing to say.
pub fn no_disk_error(guest: &Guest) -> Result<()> {
    let log = guest.run("dmesg")?;
    let bad = log
        .lines()
        .find(|line| ERRORS.iter().any(|error| line.contains(error)));
    ensure!(bad.is_none(), "The guest has noticed:\n{log}");
    Ok(())
}

/// Waits until some requests have been completed since this was called, or the job has ended. Returns whether it goes on.
fn busy(guest: &Guest, node: &str, job: &Job<'_>) -> Result<bool> {
    let stat = format!("/sys/class/block/{}/stat", node.trim_start_matches("/dev/"));
    let completed = || {
        let stat = guest.read_file(&stat)?;
        let fields: Vec<u64> = stat.split_whitespace().flat_map(str::parse).collect();
        // Reads come first, writes fifth.
        anyhow::Ok(fields.first().unwrap_or(&0) + fields.get(4).unwrap_or(&0))
    };
    let begin = completed()?;
    wait_until(&format!("{node} is in use"), || {
        Ok(job.has_ended() || completed()? >= begin + BUSY_REQUESTS)
    })?;
    Ok(!job.has_ended())
}

/// Kills the backend while fio works with `disk` as `words` say.
pub fn under_fire(
    guest: &Guest,
    disk: &str,
    words: &str,
    backend: &mut DiskBackend,
    report: &mut Report,
) -> Result<()> {
    let node = node(guest, disk)?;
    let fio = Fio::new(&node, words);
    let job: Job<'_> = guest.spawn(fio.line())?;
    let mut resubmitted = 0;
    let mut kills = 0;
    while kills < KILLS || resubmitted == 0 && disk != MEMORY && kills < MOST_KILLS {
        if !busy(guest, &node, &job)? {
            break;
        }
        // At whatever moment, but not one that the guest has just spent on an answer to us.
        let begin = backend.metrics()?.sum("writes")?;
        wait_until("the backend writes", || {
            Ok(job.has_ended() || backend.metrics()?.sum("writes")? > begin)
        })?;
        backend.kill()?;
        backend.start_again()?;
        kills += 1;
        busy(guest, &node, &job)?;
        resubmitted += backend.metrics()?.sum("resubmitted")?;
    }
    ensure!(kills >= KILLS, "fio ended early:\n{}", job.so_far());
    let figures = figures(
        fio.line(),
        &job.wait(FIO_TIMEOUT + Duration::from_secs(60))?,
    )?;
    ensure!(figures.read.requests > 0, "Nothing was checked");
    // What is in memory is there at once: it takes luck to catch one of those.
    ensure!(
        resubmitted > 0 || disk == MEMORY,
        "The backend was killed {kills} times, and never while a request was under way"
    );
    let figure = format!(
        "{} writes, all found again; {resubmitted} requests taken over",
        figures.write.requests
    );
    progress::note(&format!("{disk}: killed {kills} times: {figure}"));
    report.add(
        "farlane-blk",
        format!("{disk}: killed {kills} times"),
        figure,
    );
    Ok(())
}
