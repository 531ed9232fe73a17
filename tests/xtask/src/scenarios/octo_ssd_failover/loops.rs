//! Loop devices of this machine are the paths, and lose their blocks: what is under way fails, and what comes fails.

use std::fs::File;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_vmkit::loop_device::LoopDevice;
use farlane_vmkit::numa::Numa;
use farlane_vmkit::progress;
use farlane_vmkit::qemu::VmConfig;
use farlane_vmkit::report::Report;
use farlane_vmkit::scratch::Scratch;

use super::Random;
use crate::conditions::{no_complaint, wait_until};
use crate::disks::{Disk, DiskBackend, node, path_name, socket};
use crate::fio::{FIO_TIMEOUT, Fio, figures};
use crate::numa::backend_words;
use crate::run::Run;
use crate::scenarios::blk_crash::no_disk_error;

const DISK: &str = "octo";
const DISK_BYTES: u64 = 48 << 20;

/// Writes at random for a minute, with buffers on both nodes, and checks each block soon after and all in the end.
const JOB: &str = "--rw=randwrite --bsrange=4k-256k --iodepth=16 --size=32m --verify=crc32c --verify_fatal=1 \
    --verify_backlog=64 --fsync=64 --time_based --runtime=60 --numa_mem_policy=interleave:0-1";

/// How long a path is left as it is, at most, and how long both are away.
const MOST_MS: u64 = 1500;
const BOTH_AWAY: Duration = Duration::from_millis(700);

/// How often each path must have failed and come back for the test to mean something.
const LEAST: u64 = 4;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let folder = Scratch::new()?;
    let file = folder.join("blocks");
    File::create(&file)
        .and_then(|file| file.set_len(DISK_BYTES))
        .with_context(|| format!("Cannot make {}", file.display()))?;
    let loops = [LoopDevice::new(&file)?, LoopDevice::new(&file)?];
    let numa = Numa::pair(512);
    let disk = Disk::on_nodes(DISK, &[loops[0].path(), loops[1].path()]);
    let words = backend_words(run, &numa)?;
    let backend = run
        .context
        .disks()?
        .serve_with(run, "farlane-blk", &[disk], &words, &[])?;
    let config =
        VmConfig::new("octo")
            .storage()
            .numa(numa)
            .vhost_user_disk(DISK, socket(run, DISK), 2);
    let [guest] = run.boot([config])?;
    let fio = Fio::new(&node(&guest, DISK)?, JOB);
    let job = guest.spawn(fio.line())?;

    let mut random = Random::new();
    let (mut pulls, mut both) = (0, 0);
    while !job.has_ended() {
        let path = usize::try_from(random.below(2))?;
        // At any moment, of the request too that is under way.
        thread::sleep(Duration::from_millis(random.below(MOST_MS)));
        loops[path].set_failing(true)?;
        pulls += 1;
        if random.below(4) == 0 {
            // Requests wait until one of the two is back.
            loops[1 - path].set_failing(true)?;
            thread::sleep(BOTH_AWAY);
            loops[1 - path].set_failing(false)?;
            both += 1;
        }
        thread::sleep(Duration::from_millis(random.below(MOST_MS)));
        loops[path].set_failing(false)?;
        // Sometimes the next is pulled before this one is seen to be back.
        if random.below(2) == 0 {
            wait_until("both paths are back", || all_up(&backend))?;
        }
    }
    let figures = figures(fio.line(), &job.wait(FIO_TIMEOUT)?)?;
    ensure!(figures.read.requests > 0, "Nothing was checked");
    wait_until("both paths are back", || all_up(&backend))?;
    let metrics = backend.metrics()?;
    for number in [0, 1] {
        let name = path_name(number);
        let of = |counter: &str| {
            metrics.get(&format!(
                "{counter}{{disk=\"{DISK}\",path=\"{name}\",node=\"{number}\"}}"
            ))
        };
        let (failures, returns) = (of("path_failures")?, of("path_returns")?);
        ensure!(
            failures >= LEAST && returns >= LEAST,
            "{name} has failed {failures} times and come back {returns} times"
        );
    }
    let redone = metrics.get(&format!("redone{{disk=\"{DISK}\"}}"))?;
    ensure!(
        redone > 0,
        "No request was under way when a path was pulled"
    );
    no_disk_error(&guest)?;
    no_complaint(&guest)?;
    let figure = format!(
        "pulled {pulls} times, both at once {both} times: {} writes, all found again; {redone} requests done again",
        figures.write.requests
    );
    progress::note(&format!("Loop devices as paths, fio for 60 s: {figure}"));
    report.add("farlane-blk", "loop devices as paths, fio for 60 s", figure);
    drop(guest);
    backend.stop()
}

fn all_up(backend: &DiskBackend) -> Result<bool> {
    let paths = backend.metrics()?.labelled("path_up");
    ensure!(paths.len() == 2, "There are {} paths", paths.len());
    Ok(paths.iter().all(|(_, up)| *up == 1))
}
