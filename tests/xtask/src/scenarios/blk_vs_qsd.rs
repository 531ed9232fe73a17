//! fio in one guest, in turns, on disks of farlane-blk and of qemu-storage-daemon over files that
//! are alike.

use std::ffi::OsString;
use std::process::Command;

use anyhow::Result;
use farlane_kit::backend::Backend;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use crate::disks::{Disk, node, socket};
use crate::lending::Blocks;
use crate::run::Run;
use crate::versus::{Contest, Form, Workload};

/// How much of what the other gives farlane-blk gives at least: the emulated guest is what is slow.
const BAR: f64 = 0.97;

/// The serial numbers of the disks. qemu-storage-daemon's is fixed.
const OURS: &str = "farlane";
const THEIRS: &str = "vhost_user_blk";

struct Measure {
    workload: Workload,
    /// The small form's bar: usual is 1.0 to 1.2, and 0.5 where the time of a request has doubled.
    small: Option<f64>,
}

const MEASURES: &[Measure] = &[
    Measure {
        workload: Workload::RANDOM_READS_1,
        small: None,
    },
    Measure {
        workload: Workload::RANDOM_READS_32,
        small: Some(0.7),
    },
    Measure {
        workload: Workload {
            name: "4 KiB random writes, depth 1",
            words: "--rw=randwrite --norandommap --bs=4k --iodepth=1",
            unit: "IOPS",
            figure: |figures| figures.write.iops,
        },
        small: None,
    },
    Measure {
        workload: Workload {
            name: "4 KiB random writes, depth 32",
            words: "--rw=randwrite --norandommap --bs=4k --iodepth=32",
            unit: "IOPS",
            figure: |figures| figures.write.iops,
        },
        small: Some(0.7),
    },
    Measure {
        workload: Workload {
            name: "1 MiB sequential reads, depth 4",
            words: "--rw=read --bs=1m --iodepth=4",
            unit: "MiB/s",
            figure: |figures| figures.read.bytes_per_second / 1_048_576.0,
        },
        small: Some(0.7),
    },
    Measure {
        workload: Workload {
            name: "1 MiB sequential writes, depth 4",
            words: "--rw=write --bs=1m --iodepth=4",
            unit: "MiB/s",
            figure: |figures| figures.write.bytes_per_second / 1_048_576.0,
        },
        small: None,
    },
];

pub fn versus(run: &Run<'_>, form: Form, report: &mut Report) -> Result<()> {
    let size = form.disk_mib();
    let (ours, theirs) = (Blocks::random(size)?, Blocks::random(size)?);
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
    let mut contest = Contest::new(form, &guest, &nodes, &["qemu-storage-daemon"], report);
    for measure in MEASURES {
        if let Some(bar) = form.choose(measure.small, BAR) {
            contest.compare(&measure.workload, &[bar])?;
        }
    }
    contest.end()?;
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
        "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},\
         writable=on,iothread=thread",
        socket.display()
    )));
    let log = run.logs().join("qemu-storage-daemon.log");
    Backend::start("qemu-storage-daemon", command, &[&socket], &log)
}
