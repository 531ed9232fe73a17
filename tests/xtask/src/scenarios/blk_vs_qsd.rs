//! fio in one guest, in turns, on disks of farlane-blk and of qemu-storage-daemon over files that are alike.

use std::ffi::OsString;
use std::process::Command;

use anyhow::{Result, bail};
use farlane_vmkit::backend::Backend;
use farlane_vmkit::guest::Guest;
use farlane_vmkit::progress;
use farlane_vmkit::qemu::VmConfig;
use farlane_vmkit::report::Report;

use super::Scenario;
use crate::disks::{Disk, node, socket};
use crate::fio::{Figures, Fio};
use crate::lending::Blocks;
use crate::run::Run;
use crate::tools::median;

pub const SCENARIO: Scenario = Scenario {
    name: "blk-vs-qsd",
    about: "fio on a disk of farlane-blk and on one of qemu-storage-daemon, in one VM, in turns",
    is_test: false,
    run,
};

/// How often fio runs on each; the median counts.
const ROUNDS: usize = 7;

/// How long one run of fio takes.
const SECONDS: u32 = 2;

const SIZE_MIB: u32 = 256;

/// How much of what the other gives farlane-blk gives at least: the emulated guest is what is slow.
const BAR: f64 = 0.97;

/// The serial numbers of the disks. qemu-storage-daemon's is fixed.
const OURS: &str = "farlane";
const THEIRS: &str = "vhost_user_blk";

struct Measure {
    name: &'static str,
    words: &'static str,
    unit: &'static str,
    figure: fn(&Figures) -> f64,
}

const MEASURES: &[Measure] = &[
    Measure {
        name: "4 KiB random reads, depth 1",
        words: "--rw=randread --norandommap --bs=4k --iodepth=1",
        unit: "IOPS",
        figure: |figures| figures.read.iops,
    },
    Measure {
        name: "4 KiB random reads, depth 32",
        words: "--rw=randread --norandommap --bs=4k --iodepth=32",
        unit: "IOPS",
        figure: |figures| figures.read.iops,
    },
    Measure {
        name: "4 KiB random writes, depth 1",
        words: "--rw=randwrite --norandommap --bs=4k --iodepth=1",
        unit: "IOPS",
        figure: |figures| figures.write.iops,
    },
    Measure {
        name: "4 KiB random writes, depth 32",
        words: "--rw=randwrite --norandommap --bs=4k --iodepth=32",
        unit: "IOPS",
        figure: |figures| figures.write.iops,
    },
    Measure {
        name: "1 MiB sequential reads, depth 4",
        words: "--rw=read --bs=1m --iodepth=4",
        unit: "MiB/s",
        figure: |figures| figures.read.bytes_per_second / 1_048_576.0,
    },
    Measure {
        name: "1 MiB sequential writes, depth 4",
        words: "--rw=write --bs=1m --iodepth=4",
        unit: "MiB/s",
        figure: |figures| figures.write.bytes_per_second / 1_048_576.0,
    },
];

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let (ours, theirs) = (Blocks::random(SIZE_MIB)?, Blocks::random(SIZE_MIB)?);
    let disks = [Disk::new(OURS, ours.path())];
    let backend = run.context.disks()?.serve(run, "farlane-blk", &disks)?;
    let reference = reference(run, &theirs)?;
    let mut config = VmConfig::new("a").storage();
    // One to compute, one to be interrupted.
    config.cpus = 2;
    let [guest] = run.boot([config
        .vhost_user_disk("ours", socket(run, OURS), 1)
        .vhost_user_disk("theirs", run.path(THEIRS), 1)])?;
    let nodes = [node(&guest, OURS)?, node(&guest, THEIRS)?];
    compare(&guest, &nodes, report)?;
    drop(guest);
    drop(reference);
    backend.stop()
}

/// qemu-storage-daemon with the file of a disk.
fn reference(run: &Run<'_>, blocks: &Blocks) -> Result<Backend> {
    let tree = run.context.kit()?.tree();
    let mut command: Command = tree.program("usr/bin/qemu-storage-daemon");
    let socket = run.path(THEIRS);
    let option = |text: String| OsString::from(text);
    command.args(["--object", "iothread,id=thread", "--blockdev"]);
    command.arg(option(format!(
        "driver=file,node-name=disk,filename={},cache.direct=on,aio=io_uring",
        blocks.path().display()
    )));
    command.arg("--export").arg(option(format!(
        "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},writable=on,iothread=thread",
        socket.display()
    )));
    let log = run.logs().join("qemu-storage-daemon.log");
    Backend::start("qemu-storage-daemon", command, &[&socket], &log)
}

fn compare(guest: &Guest, nodes: &[String; 2], report: &mut Report) -> Result<()> {
    let mut missed = Vec::new();
    for measure in MEASURES {
        let mut figures = [Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            // Whoever comes first in one round comes second in the next.
            for turn in [round % 2, 1 - round % 2] {
                figures[turn].push(measure.run(guest, &nodes[turn])?);
            }
        }
        let [ours, theirs] = figures;
        let (ours, theirs) = (median(ours)?, median(theirs)?);
        let Measure { name, unit, .. } = measure;
        let ratio = ours / theirs;
        let figure = format!(
            "farlane-blk {ours:.0} {unit}, qemu-storage-daemon {theirs:.0}: {ratio:.2}x (at least {BAR:.2}x)"
        );
        progress::note(&format!("{name}: {figure}"));
        report.add("one VM", *name, &figure);
        if ratio < BAR {
            missed.push(format!("{name}: {figure}"));
        }
    }
    if !missed.is_empty() {
        bail!("farlane-blk is not fast enough:\n{}", missed.join("\n"));
    }
    Ok(())
}

impl Measure {
    fn run(&self, guest: &Guest, node: &str) -> Result<f64> {
        let words = format!("{} --time_based --runtime={SECONDS}", self.words);
        let figures = Fio::new(node, &words).run(guest)?;
        Ok((self.figure)(&figures))
    }
}
