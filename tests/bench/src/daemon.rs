//! A backend of this run's own.

use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running `farlane-rdma`, ended on drop.
pub struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
}

impl Daemon {
    /// Starts `program` with two VM sockets and a host socket.
    pub fn start(program: &Path) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let vm = |n: u32| {
            format!(
                "socket={},gid=10.9.0.{n}",
                dir.path().join(format!("vm{n}")).display()
            )
        };
        let mut command = Command::new(program);
        command
            .args(["--vm", &vm(1), "--vm", &vm(2), "--host-socket"])
            .arg(dir.path().join("host"))
            .stdin(Stdio::null());
        let child = command
            .spawn()
            .with_context(|| format!("Cannot start {}", program.display()))?;
        let mut daemon = Self { child, dir };
        let began = Instant::now();
        while ![daemon.vm(1), daemon.vm(2), daemon.host()]
            .iter()
            .all(|p| p.exists())
        {
            if let Some(status) = daemon.child.try_wait()? {
                bail!("{} ended: {status}", program.display());
            }
            if began.elapsed() > Duration::from_secs(10) {
                bail!("{} makes no sockets", program.display());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(daemon)
    }

    /// Socket of a VM, 1 or 2.
    pub fn vm(&self, n: u32) -> PathBuf {
        self.dir.path().join(format!("vm{n}"))
    }

    /// Socket for host processes.
    pub fn host(&self) -> PathBuf {
        self.dir.path().join("host")
    }

    /// Resident memory in KiB.
    pub fn resident_kib(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
        let number = line.and_then(|l| l.split_whitespace().next());
        Ok(number.context("no RssAnon")?.parse()?)
    }

    /// CPU time used so far.
    pub fn cpu_time(&self) -> Result<Duration> {
        farlane_kit::compare::cpu::of_process(self.child.id())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let ended = self.child.kill().and_then(|()| self.child.wait());
        if let Err(e) = ended {
            eprintln!("Cannot end the backend: {e}");
        }
    }
}
