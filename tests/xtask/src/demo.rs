//! `cargo xtask demo`: what a stranger watches first.

use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result};
use farlane_kit::kit;
use farlane_kit::progress;
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;
use farlane_kit::workspace::Workspace;

use crate::run::{Context, Run};
use crate::scenarios::gpu_scan;
use crate::scenarios::lend_soft;
use crate::scenarios::octo_net;
use crate::scenarios::octo_ssd;
use crate::scenarios::rdma_host::on_host;
use crate::scenarios::rdma_perftest::{OURS, perftests};
use crate::scenarios::rdma_pingpong::{device_info, ping_pongs};

const PING_PONGS: &[&str] = &[
    "ibv_rc_pingpong",
    "ibv_rc_pingpong -e",
    "ibv_rc_pingpong -g 0 -c -s 65536",
];

const PERFTESTS: &[&str] = &[
    "ib_send_bw -s 4096 -n 1000",
    "ib_send_bw -s 65536 -n 1000",
    "ib_send_bw -s 1048576 -n 500",
    "ib_write_bw -s 4096 -n 1000",
    "ib_write_bw -s 65536 -n 1000",
    "ib_write_bw -s 1048576 -n 500",
    "ib_read_bw -s 4096 -n 1000",
    "ib_read_bw -s 65536 -n 1000",
    "ib_read_bw -s 1048576 -n 500",
    "ib_write_lat -s 8 -n 1000",
    "ib_write_lat -s 4096 -n 1000",
    "ib_write_lat -s 65536 -n 500",
];

/// All that runs, built at once.
const PACKAGES: &[&str] = &[
    "farlane",
    "farlane-blk",
    "farlane-borrow",
    "farlane-gpu-driver",
    "farlane-io",
    "farlane-kit",
    "farlane-lend",
    "farlane-net",
    "farlane-rdma",
    "farlane-rdmacm",
    "farlane-run",
    "farlane-topology",
    "farlane-verbs",
];
const EXAMPLES: &[&str] = &["gpu_coherence", "gpu_io", "log_scan"];

/// Runs unmodified programs between two guests, then between two processes of this machine, then on
/// a lent disk, then with a lent GPU that a disk reaches, then with a disk that has a worker on
/// each of two nodes, and prints their figures.
pub fn run(workspace: &Workspace) -> Result<ExitCode> {
    let start = Instant::now();
    make(workspace)?;
    let context = Context::new(workspace);
    let run = Run::new(&context, "demo")?;
    let mut report = Report::new();
    between_guests(&run, &mut report)
        .with_context(|| format!("The logs are in {}", run.logs().display()))?;
    progress::note("The same between two processes of this machine");
    on_host(&run, PING_PONGS, PERFTESTS, &mut report)
        .with_context(|| format!("The logs are in {}", run.logs().display()))?;
    progress::note(
        "A disk of another process becomes a disk of one virtual machine, then of another",
    );
    let lending = Run::new(&context, "demo-lending")?;
    lend_soft::show(&lending, &mut report)
        .with_context(|| format!("The logs are in {}", lending.logs().display()))?;
    lending.forget_logs()?;
    progress::note(
        "A log is searched on a GPU; its bytes go from the disk straight to the GPU's memory",
    );
    let scanning = Run::new(&context, "demo-scanning")?;
    gpu_scan::show(&scanning, &mut report)
        .with_context(|| format!("The logs are in {}", scanning.logs().display()))?;
    scanning.forget_logs()?;
    progress::note(
        "A virtual machine with two NUMA nodes: what moves its disk's bytes is on the node where \
         they lie",
    );
    let nodes = Run::new(&context, "demo-nodes")?;
    octo_ssd::show(&nodes, &mut report)
        .with_context(|| format!("The logs are in {}", nodes.logs().display()))?;
    nodes.forget_logs()?;
    progress::note(
        "Its network interface: a stream whose receiver goes to the other node and back, every \
         100 ms",
    );
    let nets = Run::new(&context, "demo-net")?;
    octo_net::show(&nets, &mut report)
        .with_context(|| format!("The logs are in {}", nets.logs().display()))?;
    nets.forget_logs()?;
    println!(
        "\nWhat ran, all of it without an error, in {:.0} s:\n\n{report}",
        start.elapsed().as_secs_f64()
    );
    run.forget_logs()?;
    Ok(ExitCode::SUCCESS)
}

/// Builds what runs, and meanwhile makes what guests are booted from.
fn make(workspace: &Workspace) -> Result<()> {
    thread::scope(|scope| {
        let root = scope.spawn(|| kit::prepare_root(workspace));
        progress::step("Building what is shown", || {
            workspace.build_once(PACKAGES, EXAMPLES)
        })?;
        root.join()
            .ok()
            .context("The making of the guests' root has panicked")?
    })
}

fn between_guests(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let farlane = run.context.farlane()?;
    progress::note("Two virtual machines boot; neither has RDMA hardware or an RDMA kernel stack");
    let wire = Wire::new()?;
    let pair = farlane.boot_pair(run, &wire)?;
    println!("{}", device_info(&pair.a)?);
    progress::note("Debian's own RDMA programs talk from one to the other");
    ping_pongs(pair.ends(), PING_PONGS, report)?;
    perftests(run, OURS, pair.ends(), PERFTESTS, report)?;
    pair.backend.stop()
}
