//! A host of one release: its QEMU as it comes, and our programs where packages put them.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use farlane_kit::network::Network;
use farlane_kit::process::{Process, check_output, tail};
use farlane_kit::tree::Tree;

use super::disk::{BootSector, has_copied};
use crate::conditions::{PATIENCE, wait_until};
use crate::room::Room;
use crate::run::Run;

/// What is built, and the programs of it that the host has.
pub const PACKAGES: &[&str] = &[
    "farlane-blk",
    "farlane-net",
    "farlane-rdma",
    "farlane-lend",
    "farlane-borrow",
    "farlane-tool",
];
const PROGRAMS: &[&str] = &[
    "farlane-blk",
    "farlane-net",
    "farlane-rdma",
    "farlane-lend",
    "farlane-borrow",
    "farlane",
];

/// Files of the checkout that lines name.
const FILES: &[&str] = &["farlane-blk.cfg", "farlane-net.cfg", "farlane-rdma.cfg"];

/// What a backend says whose socket is another one's.
const IN_USE: &str = "is in use by another process";

/// What every backend says when it serves.
const READY: &str = "Ready";

/// Length of the disks that are prepared; the lines may lengthen them.
const DISK_BYTES: u64 = 64 << 20;

/// The host. What runs there ends with what has started it.
pub struct Site<'a> {
    room: Room,
    /// The host's `/srv`, where lines are run.
    srv: PathBuf,
    logs: PathBuf,
    sector: &'a BootSector,
    started: Cell<u32>,
}

impl<'a> Site<'a> {
    pub fn new(
        run: &Run<'_>,
        name: &str,
        tree: &Tree,
        network: &Network,
        sector: &'a BootSector,
    ) -> Result<Self> {
        let workspace = run.context.workspace();
        let (over, srv) = (run.path(name), run.path(&format!("{name}-srv")));
        let logs = run.logs().join(name);
        for folder in [&over, &srv, &logs] {
            fs::create_dir(folder).with_context(|| format!("Cannot make {}", folder.display()))?;
        }
        for file in FILES {
            fs::copy(
                workspace.root().join("qemu-configs").join(file),
                srv.join(file),
            )
            .with_context(|| format!("Cannot copy {file}"))?;
        }
        let programs: Vec<_> = PROGRAMS
            .iter()
            .map(|name| Ok((workspace.built(name)?, format!("/usr/bin/{name}"))))
            .collect::<Result<_>>()?;
        let mut with: Vec<(&Path, &str)> = vec![(&srv, "/srv")];
        with.extend(programs.iter().map(|(from, to)| (from.as_path(), &**to)));
        let room = Room::new(tree, &over, &with, Some(network))?;
        // A line uses a socket that another has left.
        room.run("mkdir -p /run/farlane")?;
        Ok(Self {
            room,
            srv,
            logs,
            sector,
            started: Cell::new(0),
        })
    }

    /// "QEMU 10.0.2".
    pub fn qemu_version(&self) -> Result<String> {
        let said = self.room.run("qemu-system-x86_64 --version")?;
        let mut words = said.split_whitespace().skip(3);
        let version = words.next().context("QEMU says no version")?;
        Ok(format!("QEMU {version}"))
    }

    /// Whether QEMU knows the option of its sockets, which came with 9.2.
    pub fn has_reconnect_ms(&self) -> Result<bool> {
        let version = self.qemu_version()?;
        let mut numbers = version.trim_start_matches("QEMU ").split('.');
        let mut number = || numbers.next().and_then(|number| number.parse::<u32>().ok());
        let version = number().zip(number());
        Ok(version.context("QEMU's version is no number")? >= (9, 2))
    }

    /// Puts a disk in place of what there is, whose format is that of its name.
    pub fn disk(&self, name: &str) -> Result<()> {
        let path = self.srv.join(name);
        let raw = self.srv.join("raw");
        fs::write(&raw, self.sector.disk(&text(name)))?;
        fs::File::options()
            .write(true)
            .open(&raw)?
            .set_len(DISK_BYTES)?;
        if name.ends_with(".qcow2") {
            self.room
                .run(&format!("qemu-img convert -O qcow2 /srv/raw /srv/{name}"))?;
        } else {
            fs::rename(&raw, &path).with_context(|| format!("No {}", path.display()))?;
        }
        ensure!(!has_copied(&path, &text(name))?, "{name} was used before");
        Ok(())
    }

    fn spawn(&self, what: &str, lines: &str) -> Result<(Process, PathBuf)> {
        let number = self.started.replace(self.started.get() + 1);
        let log = self.logs.join(format!("{number}.log"));
        fs::write(&log, "")?;
        let line = format!("set -e\ncd /srv\n{lines}");
        let process = Process::spawn_logged(what, self.room.shell(&line), &log)?;
        Ok((process, log))
    }

    /// Runs lines of which the last one stays, and waits until it serves.
    pub fn start(&self, lines: &str) -> Result<Process> {
        let (mut process, mut log) = self.spawn("a backend", lines)?;
        wait_until("a backend to serve", || {
            let said = fs::read_to_string(&log)?;
            // The one before it was killed, and may not have ended.
            if !process.is_running()? && said.contains(IN_USE) {
                (process, log) = self.spawn("a backend", lines)?;
                return Ok(false);
            }
            ensure!(process.is_running()?, "It has ended: {said}\n{lines}");
            Ok(said.contains(READY))
        })?;
        Ok(process)
    }

    /// Runs lines of QEMU, and waits until the VM has done something.
    pub fn boot_until(
        &self,
        lines: &str,
        what: &str,
        is_done: impl Fn() -> Result<bool>,
    ) -> Result<Process> {
        let (mut process, log) = self.spawn("QEMU", lines)?;
        wait_until(&format!("the VM to start, and {what}"), || {
            let said = || fs::read_to_string(&log).unwrap_or_default();
            ensure!(
                process.is_running()?,
                "QEMU has ended: {}\n{lines}",
                tail(&said(), 20)
            );
            is_done()
        })?;
        Ok(process)
    }

    /// The same with disks, all of which the VM has written to.
    pub fn boot(&self, lines: &str, disks: &[&str]) -> Result<Process> {
        let what = format!("to write to {}", disks.join(" and "));
        self.boot_until(lines, &what, || {
            for disk in disks {
                if !has_copied(&self.srv.join(disk), &text(disk))? {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    /// The same, after which the VM ends.
    pub fn boots(&self, lines: &str, disks: &[&str]) -> Result<()> {
        self.boot(lines, disks).map(drop)
    }

    /// Runs lines that end; returns what they print.
    pub fn run(&self, lines: &str) -> Result<String> {
        check_output(
            lines,
            self.room.shell(&format!("set -e\n{lines}")),
            PATIENCE,
        )
    }
}

/// What stands in the second sector of a disk.
fn text(name: &str) -> String {
    format!("The disk {name} of the scenario")
}
