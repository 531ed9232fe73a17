//! What the kernel's own multipath does over two controllers of one NVMe namespace, each on a node
//! of its own: its `numa` policy takes the path of the node on which the submitting thread runs,
//! wherever the buffers lie.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::numa::Numa;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::sparse_file;

use super::{DISK_BYTES, JOBS, NODE_MIB, VERIFIED_MIB};
use crate::conditions::{no_complaint, wait_until};
use crate::numa::{Memory, NODES, per_cent};
use crate::run::Run;
use crate::two_nodes::sector_bytes;

const SUBSYSTEM: &str = "dual";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let file = run.path("dual");
    sparse_file(&file, DISK_BYTES)?;
    let config = VmConfig::new("stock")
        .storage()
        .numa(Numa::pair(NODE_MIB))
        .nvme_subsystem(SUBSYSTEM, file, &NODES)
        .kernel_arguments(["nvme_core.multipath=Y", "nvme_core.iopolicy=numa"]);
    let [guest] = run.boot([config])?;
    guest.run("modprobe nvme")?;
    let (disk, paths) = disk(&guest)?;
    for job in JOBS {
        let before = moved(&guest, &paths)?;
        job.verify(&guest, &disk, VERIFIED_MIB)
            .with_context(|| format!("Multipath, {}", job.name()))?;
        let after = moved(&guest, &paths)?;
        let by_path = [0, 1].map(|path| after[path] - before[path]);
        let total: u64 = by_path.iter().sum();
        let by_cpu = by_path[usize::try_from(job.cpu)?];
        ensure!(
            total > 0 && by_cpu == total,
            "{}: by the paths of nodes 0 and 1 went {by_path:?} bytes",
            job.name()
        );
        let figure = match job.memory {
            Memory::On(node) => {
                let local = by_path[usize::try_from(node)?];
                format!("{} % local", per_cent(local, total)?)
            }
            Memory::Interleaved | Memory::Striped => {
                format!("all by node {}, half of it remote", job.cpu)
            }
        };
        report.tell("kernel's numa multipath", job.name(), figure);
    }
    no_complaint(&guest)
}

/// The disk that the kernel makes of both paths, and the block device of each node's path.
fn disk(guest: &Guest) -> Result<(String, [String; 2])> {
    let line = "for p in /sys/class/block/nvme*c*n1; do [ -e $p ] && \
        echo $(cat $p/device/numa_node) ${p##*/}; done; true";
    let mut found = Vec::new();
    wait_until("both paths are there", || {
        let lines = guest.run(line)?;
        found = lines.lines().map(str::to_owned).collect();
        found.sort();
        Ok(found.len() == NODES.len())
    })?;
    // Its number is that of the controller that was first.
    let mut disk = None;
    wait_until("the disk is there", || {
        let nodes = guest.run("ls /dev/nvme[0-9]n1 2>/dev/null; true")?;
        disk = nodes.lines().next().map(str::to_owned);
        Ok(disk.is_some())
    })?;
    let disk = disk.context("A disk was found and is not there")?;
    let policy = guest.run("cat /sys/class/nvme-subsystem/*/iopolicy")?;
    ensure!(policy.trim() == "numa", "The policy is {policy}");
    let path = |node: u32| {
        let line = found
            .iter()
            .find_map(|line| line.strip_prefix(&format!("{node} ")));
        line.map(str::to_owned)
            .with_context(|| format!("No path on node {node} among {found:?}"))
    };
    Ok((disk, [path(NODES[0])?, path(NODES[1])?]))
}

/// Bytes read and written over each path.
fn moved(guest: &Guest, paths: &[String; 2]) -> Result<[u64; 2]> {
    let of = |path: &String| {
        let stat = guest.read_file(&format!("/sys/class/block/{path}/stat"))?;
        sector_bytes(&stat).with_context(|| format!("{path} counts {stat}"))
    };
    Ok([of(&paths[0])?, of(&paths[1])?])
}
