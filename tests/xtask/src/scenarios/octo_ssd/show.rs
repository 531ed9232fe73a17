//! What the demo shows: bytes per worker over time, while fio goes from one node to the other.

use std::process::Command;

use anyhow::{Result, ensure};
use farlane_kit::numa::Numa;
use farlane_kit::process::Process;
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::Scratch;

use super::{DISK_BYTES, NODE_MIB};
use crate::conditions::PATIENCE;
use crate::disks::{Disk, node, socket, two_paths};
use crate::fio::Fio;
use crate::numa::{Locality, Memory, Placed, backend_words, per_cent};
use crate::run::Run;

const DISK: &str = "octo";

/// What fio does on each node, and for how long.
const WORDS: &str =
    "--rw=randrw --bs=64k --iodepth=8 --size=48m --norandommap --time_based --runtime=3";

/// Where fio's thread and its buffers are, one after the other.
const JOBS: [Placed; 3] = [
    Placed::new(0, Memory::On(0)),
    Placed::new(1, Memory::On(1)),
    Placed::new(0, Memory::On(1)),
];

/// How often the bytes are drawn.
const TICK_MS: &str = "500";

pub fn show(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let workspace = run.context.workspace();
    workspace.build(&["farlane-topology"])?;
    let folder = Scratch::new()?;
    let paths = two_paths(&folder, "blocks", DISK_BYTES)?;
    let numa = Numa::pair(NODE_MIB);
    let words = backend_words(run, &numa)?;
    let disk = Disk::on_nodes(DISK, &[&paths[0], &paths[1]]);
    let disks = run.context.disks()?;
    let backend = disks.serve_with(run, "farlane-blk", &[disk], &words, &[])?;
    let config =
        VmConfig::new("nodes")
            .storage()
            .numa(numa)
            .vhost_user_disk(DISK, socket(run, DISK), 2);
    let [guest] = run.boot([config])?;
    let device = node(&guest, DISK)?;
    let before = Locality::bytes(&backend.metrics()?, "disk", DISK)?;

    let mut watch = Command::new(workspace.built("farlane-topology")?);
    watch.args(["watch", "--interval-ms", TICK_MS]);
    watch.arg(backend.metrics_socket());
    let mut watch = Process::spawn("farlane-topology", watch)?;
    for job in JOBS {
        progress::note(&format!("fio: {}", job.name()));
        let line = format!("{WORDS} {}", job.words(&guest, 0, 0)?);
        Fio::new(&device, &line).run(&guest)?;
    }
    let status = watch.terminate(PATIENCE)?;
    ensure!(status.success(), "farlane-topology ended with {status}");

    let moved = Locality::bytes(&backend.metrics()?, "disk", DISK)?.since(&before);
    ensure!(
        moved.total() > 0 && moved.local() == moved.total(),
        "{moved:?}"
    );
    report.add(
        "farlane-blk",
        "fio on one node, the other, the wrong one",
        format!(
            "{} % of {} MiB by the worker of their node",
            per_cent(moved.local(), moved.total())?,
            moved.total() >> 20
        ),
    );
    drop(guest);
    backend.stop()
}
