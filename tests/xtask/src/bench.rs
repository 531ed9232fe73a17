//! `cargo xtask bench NAME`: measurements at native speed, each figure beside its reference.

use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use farlane_vmkit::process::{Process, describe};
use farlane_vmkit::progress;
use farlane_vmkit::workspace::Workspace;

/// Longer than any bench takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(900);

/// What can be measured.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Bench {
    /// Virtual RDMA: calls, registration, transfers, events (writes target/bench/rdma.json and plots)
    Rdma,
}

/// Measures, and says where the results are.
pub fn run(workspace: &Workspace, bench: Bench) -> Result<ExitCode> {
    match bench {
        Bench::Rdma => rdma(workspace),
    }
}

fn rdma(workspace: &Workspace) -> Result<ExitCode> {
    progress::step("Building the backend and the bench", || {
        workspace.build_release(&["farlane-rdma", "farlane-bench"])
    })?;
    let mut command = Command::new(workspace.built("farlane-bench")?);
    command
        .arg("--backend")
        .arg(workspace.built("farlane-rdma")?)
        .arg("--out")
        .arg(workspace.target().join("bench"))
        .env("RUST_LOG", "warn");
    let mut bench = Process::spawn("farlane-bench", command)?;
    let Some(status) = bench.wait(TIMEOUT)? else {
        bench.kill()?;
        bail!("farlane-bench takes longer than {} s", TIMEOUT.as_secs());
    };
    ensure!(status.success(), "farlane-bench {}", describe(status));
    Ok(ExitCode::SUCCESS)
}
