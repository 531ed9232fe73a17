//! Loop devices of this machine are the paths, and lose their blocks: what is under way fails, and
//! what comes fails.

use anyhow::{Result, ensure};
use farlane_kit::loop_device::LoopDevice;
use farlane_kit::numa::Numa;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::Scratch;

use super::Random;
use crate::conditions::{no_complaint, wait_until};
use crate::disks::{Disk, DiskBackend, node, path_name, socket};
use crate::numa::backend_words;
use crate::run::Run;
use crate::scenarios::blk_crash::no_disk_error;
use crate::seed::seed;
use crate::work::Work;

const DISK: &str = "octo";
const DISK_BYTES: u64 = 48 << 20;

/// Writes at random with buffers on both nodes, and checks each block soon after and all in the
/// end.
const JOB: &str = "--rw=randwrite --bsrange=4k-256k --iodepth=16 --size=32m --verify=crc32c \
                   --verify_fatal=1 \
    --verify_backlog=64 --fsync=64 --numa_mem_policy=interleave:0-1";

/// Most requests that are done before the next path is pulled, or comes back.
const MOST_REQUESTS: u64 = 40;

/// How often each path must have failed and come back, both have been away with requests that
/// waited, and how many requests have been done again because they were under way.
const LEAST: u64 = 3;
const BOTH: u64 = 2;
const REDONE: u64 = 4;

/// Many times what is needed.
const MOST_PULLS: u64 = 100;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let folder = Scratch::new()?;
    let file = folder.sparse("blocks", DISK_BYTES)?;
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
    let mut work = Work::new(&guest, &node(&guest, DISK)?, JOB);
    let mut random = Random::new(seed()?);
    let mut both = 0;
    let mut seen = Seen::new(&backend)?;
    for pulls in 0.. {
        let least = seen.failures.into_iter().chain(seen.returns).min();
        if least >= Some(LEAST) && both >= BOTH && seen.redone >= REDONE {
            break;
        }
        ensure!(
            pulls < MOST_PULLS,
            "{pulls} pulls, {both} of both: {seen:?}"
        );
        // The one that has failed less often, so that both have soon.
        let path = usize::from(seen.failures[0] > seen.failures[1]);
        // At any moment, of the request too that is under way.
        works(&mut work, &backend, random.below(MOST_REQUESTS))?;
        loops[path].set_failing(true)?;
        fails(&mut work, &backend, u32::try_from(path)?)?;
        if both < BOTH || random.below(4) == 0 {
            // Requests wait until one of the two is back.
            let waited = backend.metrics()?.sum("waited")?;
            loops[1 - path].set_failing(true)?;
            wait_until("requests wait for a path", || {
                work.go_on()?;
                Ok(backend.metrics()?.sum("waited")? > waited)
            })?;
            loops[1 - path].set_failing(false)?;
            both += 1;
        }
        works(&mut work, &backend, random.below(MOST_REQUESTS))?;
        loops[path].set_failing(false)?;
        // Sometimes the next is pulled before this one is seen to be back.
        if random.below(2) == 0 {
            wait_until("both paths are back", || all_up(&backend))?;
        }
        seen = Seen::new(&backend)?;
    }
    work.end()?;
    wait_until("both paths are back", || all_up(&backend))?;
    no_disk_error(&guest)?;
    no_complaint(&guest)?;
    let figure = format!(
        "failed {:?} times, both at once {both} times: {} writes, all found again; {} requests \
         done again",
        seen.failures,
        work.writes(),
        seen.redone
    );
    report.tell("farlane-blk", "loop devices as paths", figure);
    drop(work);
    drop(guest);
    backend.stop()
}

/// What the backend has counted of its paths.
#[derive(Debug)]
struct Seen {
    failures: [u64; 2],
    returns: [u64; 2],
    redone: u64,
}

impl Seen {
    fn new(backend: &DiskBackend) -> Result<Self> {
        let metrics = backend.metrics()?;
        let of = |counter: &str, node: u32| {
            let (name, node) = (path_name(node), node.to_string());
            let labels = [("disk", DISK), ("path", &*name), ("node", &*node)];
            metrics.of(counter, &labels)
        };
        Ok(Self {
            failures: [of("path_failures", 0)?, of("path_failures", 1)?],
            returns: [of("path_returns", 0)?, of("path_returns", 1)?],
            redone: metrics.sum("redone")?,
        })
    }
}

/// Waits until the disk has done so many further requests, over whatever path.
fn works(work: &mut Work<'_>, backend: &DiskBackend, requests: u64) -> Result<()> {
    let done = || {
        let metrics = backend.metrics()?;
        anyhow::Ok(metrics.sum("reads")? + metrics.sum("writes")?)
    };
    let begin = done()?;
    wait_until("the disk works", || {
        work.go_on()?;
        Ok(done()? >= begin + requests)
    })
}

/// Waits until the backend has noticed that a path was pulled.
fn fails(work: &mut Work<'_>, backend: &DiskBackend, path: u32) -> Result<()> {
    let name = path_name(path);
    wait_until("the backend notices that a path has failed", || {
        work.go_on()?;
        let paths = backend.metrics()?.labelled("path_up");
        let mut this = paths.iter().filter(|(of, _)| of.get("path") == Some(&name));
        Ok(this.any(|(_, up)| *up == 0))
    })
}

fn all_up(backend: &DiskBackend) -> Result<bool> {
    let paths = backend.metrics()?.labelled("path_up");
    ensure!(paths.len() == 2, "There are {} paths", paths.len());
    Ok(paths.iter().all(|(_, up)| *up == 1))
}
