//! A backend of this run's own.

use anyhow::{Context as _, Result};
use farlane_kit::backend::Backend;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A running `farlane-rdma`, ended on drop.
pub struct Daemon {
    backend: Backend,
    dir: tempfile::TempDir,
}

impl Daemon {
    /// Starts `program` with two VM sockets and a host socket. What it says goes to `log`.
    pub fn start(program: &Path, log: &Path) -> Result<Self> {
        Self::with_workers(program, log, 1)
    }

    /// The same with so many workers.
    pub fn with_workers(program: &Path, log: &Path, workers: usize) -> Result<Self> {
        Self::with_limits(program, log, workers, ["rate=max", "ops=max"])
    }

    /// The same with an option of each VM.
    pub fn with_limits(
        program: &Path,
        log: &Path,
        workers: usize,
        limits: [&str; 2],
    ) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let vm = |n: usize| {
            format!(
                "socket={},gid=10.9.0.{n},{}",
                dir.path().join(format!("vm{n}")).display(),
                limits[n - 1]
            )
        };
        let mut command = Command::new(program);
        command
            .args(["--vm", &vm(1), "--vm", &vm(2), "--host-socket"])
            .arg(dir.path().join("host"))
            .args(["--workers", &workers.to_string()]);
        let sockets = ["vm1", "vm2", "host"].map(|name| dir.path().join(name));
        let sockets: Vec<&Path> = sockets.iter().map(PathBuf::as_path).collect();
        let backend = Backend::start("farlane-rdma", command, &sockets, log)?;
        Ok(Self { backend, dir })
    }

    /// Socket of a VM, 1 or 2.
    pub fn vm(&self, n: u32) -> PathBuf {
        self.dir.path().join(format!("vm{n}"))
    }

    /// Socket for host processes.
    pub fn host(&self) -> PathBuf {
        self.dir.path().join("host")
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.backend.pid()
    }

    /// Resident memory in KiB.
    pub fn resident_kib(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.backend.pid()))?;
        let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
        let number = line.and_then(|l| l.split_whitespace().next());
        Ok(number.context("no RssAnon")?.parse()?)
    }

    /// CPU time used so far.
    pub fn cpu_time(&self) -> Result<Duration> {
        farlane_kit::compare::cpu::of_process(self.backend.pid())
    }
}
