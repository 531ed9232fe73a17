//! `farlane`, the program, beside the daemons of this scenario: what it shows of them, of one that
//! was killed, and in a terminal.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::backend::Backend;
use farlane_kit::process::{Process, check_output, output};
use farlane_kit::report::Report;
use serde::Deserialize;

use super::tmux::Tmux;
use crate::conditions::wait_until;
use crate::metrics::Metrics;
use crate::run::Run;

const TIMEOUT: Duration = Duration::from_secs(60);
/// How often `farlane top` looks, in milliseconds.
const INTERVAL: &str = "200";
/// Below the folder of sockets, as the packages' units have them.
const SOCKETS: [&str; 5] = [
    "blk/vm0.metrics",
    "net/vm0.metrics",
    "rdma/vms.metrics",
    "lend.metrics",
    "borrow/vm0.metrics",
];

/// What `farlane status --json` prints, as far as it is looked at.
#[derive(Debug, Deserialize)]
struct Status {
    format: u32,
    backends: Vec<BackendStatus>,
    silent: Vec<Silent>,
}

#[derive(Debug, Deserialize)]
struct BackendStatus {
    address: PathBuf,
    backend: String,
    name: String,
    version: String,
    started_seconds: u64,
    connected: Option<u64>,
    bytes: Option<u64>,
    requests: Option<u64>,
    devices: Vec<Device>,
}

#[derive(Debug, Deserialize)]
struct Device {
    kind: String,
    name: String,
}

#[derive(Debug, Deserialize)]
struct Silent {
    address: PathBuf,
    error: String,
}

/// The program, and where it looks.
pub struct Tool<'a> {
    run: &'a Run<'a>,
    program: PathBuf,
    driver: PathBuf,
    folder: PathBuf,
}

impl<'a> Tool<'a> {
    /// Makes the folder in which daemons tell their metrics.
    pub fn new(run: &'a Run<'a>) -> Result<Self> {
        let workspace = run.context.workspace();
        let folder = run.path("farlane");
        for below in ["blk", "net", "rdma", "borrow"] {
            fs::create_dir_all(folder.join(below))?;
        }
        Ok(Self {
            run,
            program: workspace.built("farlane")?,
            driver: workspace.built("farlane-blk-driver")?,
            folder,
        })
    }

    /// Where the daemons tell their metrics, in their order.
    pub fn sockets(&self) -> [PathBuf; 5] {
        SOCKETS.map(|socket| self.folder.join(socket))
    }

    /// All of it. The first daemon, that of the disk, is killed at the end.
    pub fn check(&self, disks: &mut Backend, lender: &str, report: &mut Report) -> Result<()> {
        let status = self.status()?;
        let found: Vec<_> = status.backends.iter().map(|b| &*b.backend).collect();
        ensure!(
            found == ["blk", "borrow", "lend", "net", "rdma"] && status.silent.is_empty(),
            "farlane finds {status:?}"
        );
        report.add("farlane status", "daemons found", found.len().to_string());
        self.tells_of_each(&status)?;
        self.asks_lenders(lender)?;
        self.counts(&self.drive(&["--requests", "2000"])?.end()?)?;
        self.follows(report)?;
        disks.kill()?;
        self.names_who_was_killed(report)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(words).arg("--folder").arg(&self.folder);
        command
    }

    fn output(&self, words: &[&str]) -> Result<Output> {
        let name = format!("farlane {}", words.join(" "));
        output(&name, self.command(words), TIMEOUT)
    }

    fn status(&self) -> Result<Status> {
        let output = self.output(&["status", "--json"])?;
        let status: Status = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        ensure!(status.format == 1, "Another format: {status:?}");
        // It fails where one does not answer, and only there.
        ensure!(
            output.status.success() == status.silent.is_empty(),
            "{}: {status:?}",
            output.status
        );
        Ok(status)
    }

    /// Name, version, time, devices and connections of each.
    fn tells_of_each(&self, status: &Status) -> Result<()> {
        let devices: BTreeMap<_, BTreeSet<_>> = status
            .backends
            .iter()
            .map(|backend| {
                let devices = backend.devices.iter();
                let devices = devices.map(|device| (&*device.kind, &*device.name));
                (&*backend.backend, devices.collect())
            })
            .collect();
        for (backend, device) in [
            ("borrow", ("device", "nvme0")),
            ("lend", ("device", "nvme0")),
            ("net", ("net", super::TAP)),
            ("rdma", ("vm", "host")),
        ] {
            let found = devices.get(backend);
            ensure!(
                found == Some(&BTreeSet::from([device])),
                "{backend} has {found:?}"
            );
        }
        let disks = devices.get("blk").map_or(0, BTreeSet::len);
        ensure!(disks == 1, "blk has {disks} disks");
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed()?.as_secs();
        for backend in &status.backends {
            let stem = backend.address.file_stem().unwrap_or_default();
            ensure!(
                backend.name == stem.to_string_lossy()
                    && backend.version == env!("CARGO_PKG_VERSION")
                    && backend.started_seconds <= now
                    && now - backend.started_seconds < 3600
                    && backend.connected == Some(0),
                "{backend:?} at {now}"
            );
        }
        Ok(())
    }

    /// `farlane lend` and `farlane topology` are those of the programs of these names.
    fn asks_lenders(&self, lender: &str) -> Result<()> {
        let listed = |program: &Path, words: &[&str]| {
            let mut command = Command::new(program);
            command.args(words).args(["list", "--lender", lender]);
            check_output("a list of devices", command, TIMEOUT)
        };
        let other = self.run.context.workspace().built("farlane-lend")?;
        let (ours, theirs) = (listed(&self.program, &["lend"])?, listed(&other, &[])?);
        ensure!(ours == theirs && ours.contains("nvme0"), "{ours}\n{theirs}");
        let mut command = Command::new(&self.program);
        command.arg("topology");
        let shown = check_output("farlane topology", command, TIMEOUT)?;
        ensure!(shown.starts_with("node "), "{shown}");
        Ok(())
    }

    /// Plays a VM that works with the disk.
    fn drive(&self, words: &[&str]) -> Result<Driver> {
        let mut command = Command::new(&self.driver);
        command
            .arg("--socket")
            .arg(self.run.path("blk"))
            .args(["--bytes", "1048576", "--job", "cpu=0,memory=0"])
            .args(words);
        let log = self.run.path("driver.log");
        fs::write(&log, "")?;
        let process = Process::spawn_logged("farlane-blk-driver", command, &log)?;
        Ok(Driver { process, log })
    }

    /// What was driven is what is told.
    fn counts(&self, driven: &str) -> Result<()> {
        let number = |line: &str, word| line.split_whitespace().nth(word)?.parse::<u64>().ok();
        let bytes = driven.lines().find(|line| line.starts_with("memory "));
        let bytes = bytes.and_then(|line| number(line, 2));
        let disks = self.disks()?;
        ensure!(
            disks.bytes == bytes && bytes > Some(0),
            "The driver said {driven:?}, farlane {disks:?}"
        );
        let metrics = Metrics::read(&disks.address, "farlane_blk_")?;
        let counted = ["reads", "writes", "flushes", "discards", "write_zeroes"];
        let counted = counted.into_iter().map(|name| metrics.sum(name));
        let counted: u64 = counted.sum::<Result<u64>>()?;
        ensure!(
            disks.requests == Some(counted) && disks.connected == Some(0),
            "{counted} requests, and farlane has {disks:?}"
        );
        Ok(())
    }

    fn disks(&self) -> Result<BackendStatus> {
        let mut backends = self.status()?.backends.into_iter();
        let disks = backends.find(|backend| backend.backend == "blk");
        disks.context("farlane does not find the disk")
    }

    /// A terminal shows what is moved while it is, and is left as it was.
    fn follows(&self, report: &mut Report) -> Result<()> {
        let refused = self.output(&["top"])?;
        let error = String::from_utf8_lossy(&refused.stderr);
        ensure!(
            !refused.status.success() && error.contains("Standard output is no terminal"),
            "farlane top without a terminal: {error}"
        );
        let tmux = Tmux::start(self.run)?;
        let end = self.run.path("driven");
        let end_word = end.display().to_string();
        let mut driver = self.drive(&["--until", &end_word])?;
        wait_until("a VM to be connected", || {
            ensure!(driver.process.is_running()?, "{}", driver.said()?);
            Ok(self.disks()?.connected == Some(1))
        })?;
        let before = self.terminal(&tmux)?;
        let line = format!(
            "'{}' top --folder '{}' --interval-ms {INTERVAL}; echo ended $?",
            self.program.display(),
            self.folder.display()
        );
        for is_signalled in [false, true] {
            tmux.enter(&line)?;
            let mut rate = String::new();
            wait_until("a rate above zero in a terminal", || {
                let screen = tmux.screen()?;
                rate = rate_of_disk(&screen).unwrap_or_default();
                let is_working = rate.starts_with(|c| ('1'..='9').contains(&c));
                let has_times = screen.contains(" P99 ");
                Ok(tmux.has_other_screen()? && is_working && has_times)
            })?;
            if is_signalled {
                let mut kill = Command::new("kill");
                kill.arg(tmux.child()?.to_string());
                check_output("kill", kill, TIMEOUT)?;
            } else {
                report.add("farlane top", "of a disk that works", rate);
                tmux.press("q")?;
            }
            wait_until("the terminal to be the shell's again", || {
                let is_ended = tmux.screen()?.lines().any(|line| line == "ended 0");
                Ok(is_ended && !tmux.has_other_screen()?)
            })?;
            let after = self.terminal(&tmux)?;
            ensure!(after == before, "Before:\n{before}\nAfter:\n{after}");
        }
        fs::write(&end, "")?;
        driver.end()?;
        let once = self.output(&["top", "--once", "--interval-ms", INTERVAL])?;
        let once = String::from_utf8_lossy(&once.stdout).into_owned();
        ensure!(
            rate_of_disk(&once).as_deref() == Some("0 B/s"),
            "Nothing is moved any more, and farlane says:\n{once}"
        );
        Ok(())
    }

    /// How the terminal is set up, as its shell sees it.
    fn terminal(&self, tmux: &Tmux) -> Result<String> {
        let file = self.run.path("stty");
        let _ = fs::remove_file(&file);
        let shown = file.display();
        tmux.enter(&format!(
            "clear; stty -a >{shown}.new && mv {shown}.new {shown}"
        ))?;
        let mut said = String::new();
        wait_until("the shell to say how its terminal is set up", || {
            said = fs::read_to_string(&file).unwrap_or_default();
            Ok(!said.is_empty())
        })?;
        Ok(said)
    }

    /// Its socket is there, and nobody behind it.
    fn names_who_was_killed(&self, report: &mut Report) -> Result<()> {
        let status = self.status()?;
        let [socket, ..] = self.sockets();
        let [silent] = &status.silent[..] else {
            anyhow::bail!("One was killed, and farlane says {status:?}");
        };
        ensure!(
            status.backends.len() == SOCKETS.len() - 1
                && silent.address == socket
                && silent.error.contains("refused"),
            "farlane says {status:?}"
        );
        let said = self.output(&["status"])?;
        let text = String::from_utf8_lossy(&said.stdout);
        let line = format!("{} does not answer: ", socket.display());
        ensure!(
            !said.status.success() && text.lines().any(|found| found.starts_with(&line)),
            "farlane says:\n{text}"
        );
        report.add("farlane status", "of one that was killed", &silent.error);
        Ok(())
    }
}

/// A VM that works with the disk.
struct Driver {
    process: Process,
    log: PathBuf,
}

impl Driver {
    fn said(&self) -> Result<String> {
        Ok(fs::read_to_string(&self.log)?)
    }

    /// What it has said when it has ended well.
    fn end(mut self) -> Result<String> {
        let status = self.process.wait(TIMEOUT)?;
        let said = self.said()?;
        ensure!(
            status.is_some_and(|status| status.success()),
            "The driver of the disk has ended with {status:?}:\n{said}"
        );
        Ok(said)
    }
}

/// What stands in the row of the disk as its bytes a second, in a table of `farlane top`.
fn rate_of_disk(text: &str) -> Option<String> {
    let row = text.lines().find(|line| line.starts_with("blk "))?;
    let mut words = row.split_whitespace();
    // Backend, name, label and name of the device.
    words.nth(3)?;
    let (number, unit) = (words.next()?, words.next()?);
    Some(format!("{number} {unit}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_a_disk_is_found() {
        let text = "BACKEND  NAME  DEVICE      BYTES/S\n\
                    blk      vm0   disk a-d0  1.2 GB/s       7\n";
        assert_eq!(rate_of_disk(text).as_deref(), Some("1.2 GB/s"));
        assert_eq!(rate_of_disk("BACKEND\n"), None);
    }
}
