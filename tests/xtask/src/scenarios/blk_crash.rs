//! kill -9 of a disk's backend, again and again, while fio writes to the disk and checks what it
//! has written: the backend that comes next completes what was under way, and the guest notices
//! nothing but a pause.
//!
//! Each kill happens while the backend has requests that it has taken and not completed: its
//! workers are stopped where they are about to move the data of one (`farlane_kit::held`).

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::held::Held;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::Scratch;

use crate::conditions::{no_complaint, wait_until};
use crate::disks::{Disk, DiskBackend, node, socket};
use crate::run::Run;
use crate::under_way;
use crate::work::{Work, in_flight};

const DISK: &str = "disk";
const MEMORY: &str = "memory";

/// How often the backend is killed while a disk is in use.
const KILLS: usize = 5;

/// Writes at random, many at a time, and checks each block soon after and all in the end. A request
/// that is lost never ends, and neither does fio.
pub const JOB: &str = "--rw=randwrite --bsrange=16k-256k --iodepth=32 --size=24m --loops=2 \
                       --verify=crc32c \
    --verify_fatal=1 --verify_backlog=64";

/// How long the backend's workers are watched before it is looked whether fio has ended.
const WATCH: Duration = Duration::from_secs(1);

/// How often in a row the guest says that its queues have not grown before it is taken at its word:
/// a guest that is kept from running says nothing.
const LOOKS: u32 = 100;

/// The guest has so many requests in its queues before the workers go on: they take several at
/// once.
const QUEUED: u64 = 16;

/// What the guest's driver and block layer say of requests that fail or end twice.
pub const ERRORS: &[&str] = &["I/O error", "is not a head", "bad response"];

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let folders = [(DISK, Scratch::new()?), (MEMORY, Scratch::in_memory()?)];
    let mut disks = Vec::new();
    for (name, folder) in &folders {
        let path = folder.sparse("blocks", 32 << 20)?;
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

/// All requests of a disk have ended, each once. A completion too many would have stood for another
/// request's, whose own then found none that was waiting: that is what the driver complains of, at
/// the last one if not before.
fn settled(guest: &Guest, node: &str) -> Result<()> {
    let left = in_flight(guest, node)?;
    ensure!(
        left == 0,
        "{node} has {left} requests that nobody waits for"
    );
    no_disk_error(guest)
}

/// Waits until the disk, whose backend stands still, has many requests queued. False where its
/// queues do not grow any more: fio is at the end of its job.
fn queues_up(guest: &Guest, node: &str) -> Result<bool> {
    let (mut most, mut grown, mut looks) = (0, Instant::now(), 0);
    loop {
        let queued = in_flight(guest, node)?;
        if queued >= QUEUED {
            return Ok(true);
        }
        if queued > most {
            (most, grown, looks) = (queued, Instant::now(), 0);
        }
        looks += 1;
        if looks >= LOOKS && grown.elapsed() >= WATCH {
            return Ok(false);
        }
    }
}

/// Waits until the backend has requests under way, and a worker is about to move the data of one
/// for the `turn`th time. Returns how many they are, and the workers, which stand still.
fn caught(backend: &DiskBackend, work: &mut Work<'_>, turn: usize) -> Result<(usize, Held)> {
    let is_worker = |name: &str| name.starts_with("queue") || name.starts_with("worker");
    let mut found = None;
    wait_until("the backend has requests under way", || {
        work.go_on()?;
        // The guest's driver finds its queue served once the VMM has connected.
        let Ok(mut held) = Held::stop(backend.pid(), is_worker) else {
            return Ok(false);
        };
        if !queues_up(work.guest(), work.node())? {
            return Ok(false);
        }
        for _ in 0..turn {
            let moves = |call: libc::c_long| {
                [
                    libc::SYS_io_uring_enter,
                    libc::SYS_preadv,
                    libc::SYS_pwritev,
                ]
                .contains(&call)
            };
            let in_hands = || under_way::count(backend.pid()).is_ok_and(|count| count > 0);
            let call = held.advance(WATCH, |_, call| moves(call.number) && in_hands())?;
            if call.is_none() {
                return Ok(false);
            }
        }
        found = Some((under_way::count(backend.pid())?, held));
        Ok(true)
    })
    .with_context(|| {
        format!(
            "The guest has {:?} requests in flight, the backend {:?} under way; kernel of the \
             guest:\n{}",
            in_flight(work.guest(), work.node()),
            under_way::count(backend.pid()),
            work.guest()
                .run(
                    "for q in /sys/block/vd*/mq/*; do echo $q; done; cat /proc/interrupts | grep \
                      virtio; cat /sys/block/vd*/stat; ps | grep fio"
                )
                .unwrap_or_default()
        )
    })?;
    found.context("Requests were found and are not there")
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
    let mut work = Work::new(guest, &node, words);
    let mut taken_over = Vec::new();
    for turn in 1..=KILLS {
        // Of what is under way, more and more has been moved already.
        let (caught, held) = caught(backend, &mut work, turn)?;
        held.kill()?;
        backend.kill()?;
        backend.start_again()?;
        let mut resubmitted = 0;
        wait_until("what was under way is taken over", || {
            resubmitted = backend.metrics()?.sum("resubmitted")?;
            Ok(resubmitted > 0)
        })
        .with_context(|| format!("{disk}: {caught} requests were under way"))?;
        // One that the driver has just been shown is not done again.
        ensure!(
            resubmitted <= u64::try_from(caught)?,
            "{disk}: {caught} requests were under way, {resubmitted} are done again"
        );
        taken_over.push(resubmitted);
    }
    work.end()?;
    settled(guest, &node)?;
    let figure = format!(
        "{} writes, all found again; requests taken over: {taken_over:?}",
        work.writes()
    );
    report.tell(
        "farlane-blk",
        format!("{disk}: killed {KILLS} times"),
        figure,
    );
    Ok(())
}
