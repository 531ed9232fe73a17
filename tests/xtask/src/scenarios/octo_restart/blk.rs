//! farlane-blk with a worker and a path on each of two nodes is killed while its workers work for
//! each other.

use anyhow::Result;
use farlane_kit::numa::Numa;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::Scratch;

use crate::conditions::no_complaint;
use crate::disks::{Disk, socket, two_paths};
use crate::numa::backend_words;
use crate::run::Run;
use crate::scenarios::blk_crash::{JOB, no_disk_error, under_fire};

const DISK: &str = "octo";
const DISK_BYTES: u64 = 32 << 20;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let folder = Scratch::new()?;
    let paths = two_paths(&folder, "blocks", DISK_BYTES)?;
    let numa = Numa::pair(512);
    let mut words = backend_words(run, &numa)?;
    // Requests of pages from both nodes are in several hands when they are lost.
    words.extend(["--split".into(), "4K".into()]);
    let disk = Disk::on_nodes(DISK, &[&paths[0], &paths[1]]);
    let disks = run.context.disks()?;
    let mut backend = disks.serve_with(run, "farlane-blk", &[disk], &words, &[])?;
    let config = VmConfig::new("disk")
        .storage()
        .numa(numa)
        .kernel_arguments(["transparent_hugepage=never"])
        .vhost_user_disk(DISK, socket(run, DISK), 2);
    let [guest] = run.boot([config])?;
    let job = format!("{JOB} --numa_mem_policy=interleave:0-1");
    under_fire(&guest, DISK, &job, &mut backend, report)?;
    no_complaint(&guest)?;
    no_disk_error(&guest)?;
    drop(guest);
    backend.stop()
}
