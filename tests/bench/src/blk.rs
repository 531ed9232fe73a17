//! `cargo xtask bench blk`: farlane-blk and qemu-storage-daemon over the same file, driven by the same driver (the
//! `virtio-driver` crate) over vhost-user, without a VM, in turns in one run on one machine.

#[path = "blk/backend.rs"]
mod backend;
#[path = "blk/drive.rs"]
mod drive;
// Other benches use the rest.
#[allow(dead_code)]
mod report;
#[allow(dead_code)]
mod stats;

use anyhow::{Context as _, Result};
use backend::{Backend, Kind};
use clap::Parser;
use drive::{Direction, Drive};
use report::Report;
use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of the file.
const FILE: u64 = 256 << 20;
/// How long each rate is measured, and how often; the median counts.
const STRETCH: Duration = Duration::from_millis(700);
const ROUNDS: usize = 5;
/// Outstanding requests.
const DEPTHS: [usize; 2] = [1, 32];
/// How much faster than qemu-storage-daemon at least, where a file in memory does not keep both waiting. A disk does: what is
/// measured there is the disk, and it is told beside.
const BAR: f64 = 1.3;
const TMPFS: &str = "tmpfs";

/// Measures disks over vhost-user without a VM.
#[derive(Parser)]
struct Options {
    /// The backend to measure.
    #[arg(long, value_name = "PATH")]
    backend: PathBuf,
    /// Where the results go.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// qemu-storage-daemon: the words that start it.
    #[arg(last = true, required = true)]
    reference: Vec<OsString>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    std::fs::create_dir_all(&options.out)?;
    let mut report = Report::default();
    for (place, parent) in [
        (TMPFS, Path::new("/dev/shm")),
        ("disk", &std::env::temp_dir()),
    ] {
        let folder = tempfile::tempdir_in(parent)
            .with_context(|| format!("Cannot use {}", parent.display()))?;
        measure(&options, place, folder.path(), &mut report)?;
    }
    report.write(&options.out.join("blk.json"))?;
    report.print();
    Ok(())
}

fn measure(options: &Options, place: &str, folder: &Path, report: &mut Report) -> Result<()> {
    let file = folder.join("disk");
    let mut written = std::fs::File::create(&file)?;
    let part = vec![0xa5; 1 << 20];
    for _ in 0..FILE >> 20 {
        written.write_all(&part)?;
    }
    written.sync_all()?;
    for direction in [Direction::Read, Direction::Write] {
        for depth in DEPTHS {
            // The reference has two ways to do asynchronous I/O: it is taken at its best.
            let kinds = [Kind::Farlane, Kind::Qemu("io_uring"), Kind::Qemu("native")];
            let mut rates = kinds.map(|_| Vec::new());
            for _ in 0..ROUNDS {
                for (kind, rates) in kinds.iter().zip(&mut rates) {
                    let backend = Backend::start(*kind, options, folder, &file)?;
                    let mut drive = Drive::connect(backend.socket(), FILE)?;
                    drive.run(direction, depth, STRETCH / 5)?;
                    rates.push(drive.run(direction, depth, STRETCH)?);
                }
            }
            let [ours, uring, native] = rates.map(median);
            let theirs = uring.max(native);
            let name = format!("{place}, {direction} 4 KiB, depth {depth}");
            println!(
                "{name:<36} farlane-blk {ours:>8.0} IOPS   qemu-storage-daemon io_uring {uring:>8.0}, \
                 native {native:>8.0}   {:.2}x",
                ours / theirs
            );
            report.keep(&name, [ours, uring, native])?;
            if place == TMPFS {
                let reference = format!("qemu-storage-daemon {theirs:.0} IOPS, here {ours:.0}");
                report.at_least(&name, ours / theirs, "x", BAR, &reference);
            }
        }
    }
    Ok(())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(f64::NAN)
}
