//! A guest that is a host with two NUMA nodes and a dual-ported NVMe disk, a controller on each
//! node: farlane-blk runs in it over the kernel's real nodes, and a program that plays a VM drives
//! the disk.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::{Guest, Job};
use farlane_kit::guest_root::GuestFile;
use farlane_kit::numa::{Numa, NvmeSubsystem};
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::scratch::sparse_file;

use crate::conditions::{PATIENCE, wait_until};
use crate::metrics::Metrics;
use crate::numa::NODES;
use crate::run::Run;

/// What the disk is called: the NVMe subsystem in QEMU, and what farlane-blk serves.
pub const DISK: &str = "dual";
const DISK_BYTES: u64 = 64 << 20;
const NODE_MIB: u32 = 512;

/// Where farlane-blk serves it.
pub const SOCKET: &str = "/run/disk";
const METRICS: &str = "/run/metrics";
const DAEMON: &str = "/usr/bin/farlane-blk";
const DRIVER: &str = "/usr/bin/farlane-blk-driver";

/// What the driver has said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driven {
    /// Bytes of buffers on each node.
    pub on: [u64; 2],
    /// Its last line.
    pub summary: String,
}

/// The guest.
pub struct Host {
    /// Itself.
    pub guest: Guest,
    /// Its disk.
    pub subsystem: NvmeSubsystem,
    /// The block device of the controller on each node.
    pub devices: [String; 2],
}

impl Host {
    /// Boots it, and finds its disk.
    pub fn boot(run: &Run<'_>) -> Result<Self> {
        let workspace = run.context.workspace();
        progress::step("Building farlane-blk and its driver", || {
            workspace.build(&["farlane-blk", "farlane-vm-front-end"])
        })?;
        let file = run.path("blocks");
        sparse_file(&file, DISK_BYTES)?;
        let config = VmConfig::new("host")
            .numa(Numa::pair(NODE_MIB))
            .nvme_subsystem(DISK, file, &NODES)
            // Each controller is a disk of its own.
            .kernel_arguments(["nvme_core.multipath=N"])
            .files([
                GuestFile::new(workspace.built("farlane-blk")?, &DAEMON[1..]),
                GuestFile::new(workspace.built("farlane-blk-driver")?, &DRIVER[1..]),
            ]);
        let subsystem = config
            .nvme_subsystems
            .first()
            .cloned()
            .context("No subsystem")?;
        let [guest] = run.boot([config])?;
        guest.run("modprobe nvme")?;
        let mut devices = [String::new(), String::new()];
        wait_until("both controllers have their disk", || {
            devices = present(&guest)?;
            Ok(devices.iter().all(|device| !device.is_empty()))
        })?;
        Ok(Self {
            guest,
            subsystem,
            devices,
        })
    }

    /// Starts farlane-blk with a disk at [`SOCKET`], which `words` name.
    pub fn daemon(&self, words: &str) -> Result<Job<'_>> {
        let line = format!(
            "rm -f {SOCKET} {METRICS}; RUST_LOG=info exec {DAEMON} --metrics {METRICS} {words}"
        );
        let daemon = self.guest.spawn(&line)?;
        wait_until("farlane-blk serves", || {
            if daemon.has_ended() {
                anyhow::bail!("farlane-blk has ended: {}", daemon.so_far());
            }
            let ready = self
                .guest
                .exec(&format!("test -S {METRICS} && test -S {SOCKET}"))?;
            Ok(ready.success())
        })?;
        Ok(daemon)
    }

    /// Ends it as its administrator does; returns what it said.
    pub fn stop(&self, daemon: Job<'_>) -> Result<String> {
        daemon.signal(15)?;
        let output = daemon.wait(PATIENCE)?;
        output.check("farlane-blk")?;
        Ok(output.all())
    }

    /// What it counts.
    pub fn metrics(&self) -> Result<Metrics> {
        let text = self.guest.run(&format!("{DRIVER} --counters {METRICS}"))?;
        Ok(Metrics::parse(&text, "farlane_blk_"))
    }

    /// Has a program that plays a VM work with the disk.
    pub fn drive(&self, words: &str) -> Result<Job<'_>> {
        self.guest.spawn(&format!(
            "{DRIVER} --socket {SOCKET} --bytes {DISK_BYTES} {words}"
        ))
    }

    /// Bytes that each device has read and written.
    pub fn device_bytes(&self) -> Result<[u64; 2]> {
        let of = |device: &String| {
            let stat = self
                .guest
                .read_file(&format!("/sys/class/block/{device}/stat"))?;
            sector_bytes(&stat).with_context(|| format!("{device} counts {stat}"))
        };
        Ok([of(&self.devices[0])?, of(&self.devices[1])?])
    }

    /// The block device of each node, as it is now; empty where there is none.
    pub fn present(&self) -> Result<[String; 2]> {
        present(&self.guest)
    }
}

fn present(guest: &Guest) -> Result<[String; 2]> {
    let list = guest.run(
        "for d in /sys/class/block/nvme*n1; do [ -e $d ] && [ -b /dev/${d##*/} ] && \
         echo $(cat $d/device/numa_node) ${d##*/}; done; true",
    )?;
    Ok(NODES.map(|node| {
        let found = list
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{node} ")));
        found.unwrap_or_default().to_owned()
    }))
}

/// Bytes read and written, of what a block device counts.
pub fn sector_bytes(stat: &str) -> Option<u64> {
    let fields: Vec<u64> = stat.split_whitespace().flat_map(str::parse).collect();
    Some((fields.get(2)? + fields.get(6)?) * 512)
}

/// What the driver said, which must have ended well.
pub fn driven(job: Job<'_>, timeout: Duration) -> Result<Driven> {
    let output = job.wait(timeout)?;
    output.check("The driver")?;
    parse(&output.stdout).with_context(|| format!("The driver said:\n{}", output.stdout))
}

fn parse(text: &str) -> Result<Driven> {
    let on = |node: u32| {
        let prefix = format!("memory {node} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&prefix));
        let bytes = line.and_then(|line| line.strip_suffix(" bytes"));
        bytes
            .and_then(|bytes| bytes.parse().ok())
            .with_context(|| format!("Nothing of node {node}"))
    };
    let summary = text.lines().last().unwrap_or_default();
    ensure!(summary.ends_with("all right"), "No last line");
    Ok(Driven {
        on: [on(0)?, on(1)?],
        summary: summary.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_says_is_read() {
        let text = "memory 0 0 bytes\nmemory 1 4096 bytes\n7 requests, all right\n";
        let driven = parse(text).unwrap();
        assert_eq!(driven.on, [0, 4096]);
        assert!(parse("memory 0 0 bytes\nmemory 1 1 bytes\n").is_err());
    }

    #[test]
    fn sectors_are_512_bytes() {
        assert_eq!(sector_bytes("1 0 8 0 1 0 2 0 0 0 0"), Some(5120));
        assert_eq!(sector_bytes("1 0"), None);
    }
}
