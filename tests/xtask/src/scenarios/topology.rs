//! A kernel with two NUMA nodes: what farlane-topology shows of it, and whether memory is found
//! where it lies and followed when it moves.

use anyhow::{Result, ensure};
use farlane_kit::guest_root::GuestFile;
use farlane_kit::numa::Numa;
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::sparse_file;

use crate::conditions::no_complaint;
use crate::numa::NODES;
use crate::run::Run;

const NODE_MIB: u32 = 512;
const BLOCKS: u64 = 16 << 20;
const CHECK: &str = "usr/bin/two_nodes";
const SHOW: &str = "usr/bin/farlane-topology";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let workspace = run.context.workspace();
    let check = progress::step("Building farlane-topology", || {
        workspace.build(&["farlane-topology"])?;
        workspace.build_example("farlane-zero-copy", "two_nodes")
    })?;
    let file = run.path("blocks");
    sparse_file(&file, BLOCKS)?;
    let config = VmConfig::new("host")
        .numa(Numa::pair(NODE_MIB))
        .nvme_subsystem("dual", file, &NODES)
        .files([
            GuestFile::new(check, CHECK),
            GuestFile::new(workspace.built("farlane-topology")?, SHOW),
        ]);
    let [guest] = run.boot([config])?;

    let shown = guest.run(&format!("/{SHOW} --svg /tmp/machine.svg"))?;
    for node in NODES {
        let mut lines = shown.lines();
        let title = format!("node {node}: processor {node}, ");
        ensure!(lines.any(|line| line.starts_with(&title)), "{shown}");
        // The controller of the node stands below it, before anything else's.
        let next = lines.next().unwrap_or_default();
        ensure!(next.trim_start().starts_with("NVMe "), "{shown}");
    }
    let drawing = guest.read_file("/tmp/machine.svg")?;
    ensure!(drawing.contains("distance 21"), "{drawing}");
    report.add("farlane-topology", "two nodes, a controller each", "shown");

    let said = guest.run(&format!("/{CHECK}"))?;
    for line in said.lines() {
        progress::note(line);
        report.add("placement", line, "yes");
    }
    no_complaint(&guest)
}
