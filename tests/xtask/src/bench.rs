//! `cargo xtask bench NAME`: measurements at native speed, each figure beside its reference.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use farlane_kit::backend::last_words;
use farlane_kit::debian::GUEST_TREE;
use farlane_kit::process::{Process, describe};
use farlane_kit::progress;
use farlane_kit::scratch::Scratch;
use farlane_kit::tree::Tree;
use farlane_kit::workspace::Workspace;

use crate::run::{Context, Run};
use crate::scenarios::net_vs_tap;
use crate::versus::Form;

/// Longer than any bench takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(900);

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Bench {
    /// Virtual RDMA: calls, registration, transfers, events (writes target/bench/rdma.json and
    /// plots)
    Rdma,
    /// Virtual RDMA: a VM beside processes that attack it, and limits of an operator (writes
    /// target/bench/rdma-tenants.json; needs root)
    RdmaTenants,
    /// A lent NVMe: rates, latency, bandwidth (writes target/bench/lend.json and plots)
    Lend,
    /// farlane-blk beside qemu-storage-daemon, without a VM (writes target/bench/blk.json)
    Blk,
    /// Reads into device memory by every mechanism (writes target/bench/gpu-ssd.json and plots)
    GpuSsd,
    /// Files and memory of a CUDA device, beside what programs do by hand (writes
    /// target/bench/cuda.json; needs a CUDA device)
    Cuda,
    /// Locality: steering, network interfaces and disks on two nodes (writes target/bench/octo.json
    /// and plots; needs root)
    Octo,
}

/// Those that need no hardware that few machines have.
const ALL: [Bench; 6] = [
    Bench::Rdma,
    Bench::RdmaTenants,
    Bench::Lend,
    Bench::Blk,
    Bench::GpuSsd,
    Bench::Octo,
];

/// Measures, and says where the results are. Fails where a bar is not met.
pub fn run(workspace: &Workspace, bench: Bench) -> Result<ExitCode> {
    let out = workspace.target().join("bench");
    if bench == Bench::Octo {
        fs::create_dir_all(&out)?;
        let guest = out.join("octo-guest.json");
        in_guest(workspace, &guest)?;
        let mut command = command(workspace, bench, &out)?;
        command.arg("--guest").arg(guest);
        return measure(bench, command, &out);
    }
    measure(bench, command(workspace, bench, &out)?, &out)
}

/// Makes one tiny round of every measurement of every bench, without a VM: shows that they work,
/// and judges nothing.
pub fn smoke(workspace: &Workspace) -> Result<ExitCode> {
    let out = Scratch::new()?;
    for bench in ALL {
        let mut command = command(workspace, bench, out.path())?;
        // The words of the reference come last.
        if bench == Bench::Blk {
            command = with_first(command, "--smoke");
        } else {
            command.arg("--smoke");
        }
        measure(bench, command, out.path())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The same command with a further first word.
fn with_first(command: Command, word: &str) -> Command {
    let mut with = Command::new(command.get_program());
    with.arg(word).args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            with.env(name, value);
        }
    }
    with
}

impl Bench {
    /// The program that measures, and what is measured: packages, and the options that name what
    /// they were built into.
    fn parts(
        self,
    ) -> (
        &'static str,
        &'static [&'static str],
        &'static [[&'static str; 2]],
    ) {
        match self {
            Self::Rdma => (
                "farlane-bench",
                &["farlane-rdma"],
                &[["--backend", "farlane-rdma"]],
            ),
            Self::RdmaTenants => (
                "farlane-bench-tenants",
                &["farlane-rdma"],
                &[
                    ["--backend", "farlane-rdma"],
                    ["--tenant", "farlane-tenant"],
                ],
            ),
            Self::Lend => (
                "farlane-bench-lend",
                &["farlane-lend", "farlane-borrow"],
                &[
                    ["--lender", "farlane-lend"],
                    ["--borrower", "farlane-borrow"],
                ],
            ),
            Self::Blk => (
                "farlane-bench-blk",
                &["farlane-blk"],
                &[["--backend", "farlane-blk"]],
            ),
            Self::GpuSsd => (
                "farlane-bench-gpu-ssd",
                &["farlane-io", "farlane-io-tool"],
                &[["--library", "libfarlane_io.so"], ["--tool", "farlane-io"]],
            ),
            Self::Cuda => (
                "farlane-bench-cuda",
                &["farlane-io"],
                &[["--library", "libfarlane_io.so"]],
            ),
            Self::Octo => (
                "farlane-bench-octo",
                &["farlane-net", "farlane-blk"],
                &[["--net", "farlane-net"], ["--blk", "farlane-blk"]],
            ),
        }
    }
}

/// Builds what a bench needs; its command, with results to `out`.
fn command(workspace: &Workspace, bench: Bench, out: &Path) -> Result<Command> {
    let (program, packages, options) = bench.parts();
    let mut all = packages.to_vec();
    all.push("farlane-bench");
    progress::step(&format!("Building {}", all.join(", ")), || {
        workspace.build(&all)
    })?;
    let mut command = Command::new(workspace.built(program)?);
    for [option, built] in options {
        command.arg(option).arg(workspace.built(built)?);
    }
    command.arg("--out").arg(out).env("RUST_LOG", "warn");
    // An error is what a bench says last, not where in it the error was made.
    command.env("RUST_LIB_BACKTRACE", "0");
    if bench == Bench::Blk {
        let tree = Tree::ensure(workspace, &GUEST_TREE)?;
        let reference = tree.program("usr/bin/qemu-storage-daemon");
        let words = reference.get_args();
        command.arg("--").arg(reference.get_program()).args(words);
    }
    Ok(command)
}

/// What is measured in a VM: a network interface beside QEMU's own.
fn in_guest(workspace: &Workspace, to: &Path) -> Result<()> {
    let context = Context::new(workspace);
    let run = Run::new(&context, "bench-octo")?;
    let all = net_vs_tap::compare(&run, Form::Long)
        .with_context(|| format!("The VM's logs are in {}", run.logs().display()))?;
    fs::write(to, serde_json::to_string_pretty(&all)?)?;
    run.forget_logs()
}

/// Runs a bench with results to `out`. It fails where a bar is not met.
fn measure(bench: Bench, command: Command, out: &Path) -> Result<ExitCode> {
    let logs = out.join("logs");
    // What daemons of earlier runs have said explains nothing.
    if logs.exists() {
        fs::remove_dir_all(&logs)?;
    }
    let (name, ..) = bench.parts();
    let mut running = Process::spawn(name, command)?;
    let Some(status) = running.wait(TIMEOUT)? else {
        running.kill()?;
        let seconds = TIMEOUT.as_secs();
        bail!("{name} takes longer than {seconds} s{}", quoted(&logs)?);
    };
    ensure!(
        status.success(),
        "{name} {}{}",
        describe(status),
        quoted(&logs)?
    );
    Ok(ExitCode::SUCCESS)
}

/// What the daemons of a bench have said last, each of them.
fn quoted(logs: &Path) -> Result<String> {
    if !logs.exists() {
        return Ok(String::new());
    }
    let logs: io::Result<Vec<_>> = fs::read_dir(logs)?.collect();
    let mut logs: Vec<PathBuf> = logs?.iter().map(fs::DirEntry::path).collect();
    logs.sort();
    let quotes = logs.iter().map(|log| format!("\n{}", last_words(log)));
    Ok(quotes.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bench_that_fails_is_told_with_the_last_words_of_its_daemons() {
        let out = Scratch::new().unwrap();
        let bench = |script: &str| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]).current_dir(out.path());
            measure(Bench::Rdma, command, out.path())
        };
        let failed = bench("mkdir logs; echo one path is gone >logs/a.log; exit 1");
        let error = failed.unwrap_err().to_string();
        assert!(
            error.contains("exit status 1\n--- last lines of")
                && error.ends_with("one path is gone"),
            "{error}"
        );
        let failed = bench("exit 1").unwrap_err().to_string();
        assert!(failed.ends_with("exit status 1"), "{failed}");
    }
}
