//! `cargo xtask bench NAME`: measurements at native speed, each figure beside its reference.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use farlane_vmkit::debian::GUEST_TREE;
use farlane_vmkit::process::{Process, describe};
use farlane_vmkit::progress;
use farlane_vmkit::tree::Tree;
use farlane_vmkit::workspace::Workspace;

use crate::run::{Context, Run};
use crate::scenarios::net_vs_tap;
use crate::versus::Form;

/// Longer than any bench takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(900);

/// What can be measured.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Bench {
    /// Virtual RDMA: calls, registration, transfers, events (writes target/bench/rdma.json and plots)
    Rdma,
    /// A lent NVMe: rates, latency, bandwidth (writes target/bench/lend.json and plots)
    Lend,
    /// farlane-blk beside qemu-storage-daemon, without a VM (writes target/bench/blk.json)
    Blk,
    /// Reads into device memory by every mechanism (writes target/bench/gpu-ssd.json and plots)
    GpuSsd,
    /// Locality: steering, network interfaces and disks on two nodes (writes target/bench/octo.json and plots; needs root)
    Octo,
}

/// Measures, and says where the results are.
pub fn run(workspace: &Workspace, bench: Bench) -> Result<ExitCode> {
    match bench {
        Bench::Rdma => rdma(workspace),
        Bench::Lend => lend(workspace),
        Bench::Blk => blk(workspace),
        Bench::GpuSsd => gpu_ssd(workspace),
        Bench::Octo => octo(workspace),
    }
}

fn rdma(workspace: &Workspace) -> Result<ExitCode> {
    progress::step("Building the backend and the bench", || {
        workspace.build(&["farlane-rdma", "farlane-bench"])
    })?;
    let mut command = Command::new(workspace.built("farlane-bench")?);
    command
        .arg("--backend")
        .arg(workspace.built("farlane-rdma")?)
        .arg("--out")
        .arg(workspace.target().join("bench"))
        .env("RUST_LOG", "warn");
    measure("farlane-bench", command)
}

fn lend(workspace: &Workspace) -> Result<ExitCode> {
    progress::step("Building lender, borrower and the bench", || {
        workspace.build(&["farlane-lend", "farlane-borrow", "farlane-bench"])
    })?;
    let mut command = Command::new(workspace.built("farlane-bench-lend")?);
    command
        .arg("--lender")
        .arg(workspace.built("farlane-lend")?)
        .arg("--borrower")
        .arg(workspace.built("farlane-borrow")?)
        .arg("--out")
        .arg(workspace.target().join("bench"))
        .env("RUST_LOG", "warn");
    measure("farlane-bench-lend", command)
}

fn gpu_ssd(workspace: &Workspace) -> Result<ExitCode> {
    progress::step("Building libfarlane_io, farlane-io and the bench", || {
        workspace.build(&["farlane-io", "farlane-io-tool", "farlane-bench"])
    })?;
    let mut command = Command::new(workspace.built("farlane-bench-gpu-ssd")?);
    command
        .arg("--library")
        .arg(workspace.built("libfarlane_io.so")?)
        .arg("--tool")
        .arg(workspace.built("farlane-io")?)
        .arg("--out")
        .arg(workspace.target().join("bench"))
        .env("RUST_LOG", "warn");
    measure("farlane-bench-gpu-ssd", command)
}

fn blk(workspace: &Workspace) -> Result<ExitCode> {
    progress::step("Building farlane-blk and the bench", || {
        workspace.build(&["farlane-blk", "farlane-bench"])
    })?;
    let tree = Tree::ensure(workspace, &GUEST_TREE)?;
    let reference = tree.program("usr/bin/qemu-storage-daemon");
    let mut command = Command::new(workspace.built("farlane-bench-blk")?);
    command
        .arg("--backend")
        .arg(workspace.built("farlane-blk")?)
        .arg("--out")
        .arg(workspace.target().join("bench"))
        .arg("--")
        .arg(reference.get_program())
        .args(reference.get_args())
        .env("RUST_LOG", "warn");
    measure("farlane-bench-blk", command)
}

fn octo(workspace: &Workspace) -> Result<ExitCode> {
    let out = workspace.target().join("bench");
    std::fs::create_dir_all(&out)?;
    let guest = out.join("octo-guest.json");
    in_guest(workspace, &guest)?;
    progress::step("Building the backends and the bench", || {
        workspace.build(&["farlane-net", "farlane-blk", "farlane-bench"])
    })?;
    let mut command = Command::new(workspace.built("farlane-bench-octo")?);
    command
        .arg("--net")
        .arg(workspace.built("farlane-net")?)
        .arg("--blk")
        .arg(workspace.built("farlane-blk")?)
        .arg("--guest")
        .arg(guest)
        .arg("--out")
        .arg(out)
        .env("RUST_LOG", "warn");
    measure("farlane-bench-octo", command)
}

/// What is measured in a VM: a network interface beside QEMU's own.
fn in_guest(workspace: &Workspace, to: &Path) -> Result<()> {
    let context = Context::new(workspace);
    let run = Run::new(&context, "bench-octo")?;
    let all = net_vs_tap::compare(&run, Form::Long)
        .with_context(|| format!("The VM's logs are in {}", run.logs().display()))?;
    std::fs::write(to, serde_json::to_string_pretty(&all)?)?;
    run.forget_logs()
}

fn measure(name: &str, command: Command) -> Result<ExitCode> {
    let mut bench = Process::spawn(name, command)?;
    let Some(status) = bench.wait(TIMEOUT)? else {
        bench.kill()?;
        bail!("{name} takes longer than {} s", TIMEOUT.as_secs());
    };
    ensure!(status.success(), "{name} {}", describe(status));
    Ok(ExitCode::SUCCESS)
}
