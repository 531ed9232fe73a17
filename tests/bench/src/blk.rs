//! `cargo xtask bench blk`: farlane-blk and qemu-storage-daemon over the same file, driven by the
//! same driver (the `virtio-driver` crate) over vhost-user, without a VM, in turns in one run on
//! one machine.

#[path = "blk/backend.rs"]
mod backend;
#[path = "blk/drive.rs"]
mod drive;
// Other benches use the rest.
#[allow(dead_code)]
mod report;
#[allow(dead_code)]
mod scale;
#[allow(dead_code)]
mod stats;

use anyhow::{Context as _, Result};
use backend::{Backend, Kind};
use clap::Parser;
use drive::{Direction, Drive};
use farlane_kit::compare::{Bar, Side, alternating, compare};
use report::Report;
use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of the file.
const FILE: u64 = 256 << 20;
/// How long a rate is measured in a round.
const STRETCH: Duration = Duration::from_millis(250);
/// Outstanding requests.
const DEPTHS: [usize; 2] = [1, 32];
/// How much faster than qemu-storage-daemon at least.
const BAR: f64 = 1.3;

/// Measures disks over vhost-user without a VM.
#[derive(Parser)]
struct Options {
    /// The backend to measure.
    #[arg(long, value_name = "PATH")]
    backend: PathBuf,
    #[command(flatten)]
    output: scale::Output,
    /// qemu-storage-daemon: the words that start it.
    #[arg(last = true, required = true)]
    reference: Vec<OsString>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let out = options.output.begin()?;
    let mut report = Report::default();
    for (place, parent) in [
        ("tmpfs", Path::new("/dev/shm")),
        ("disk", &std::env::temp_dir()),
    ] {
        let folder = tempfile::tempdir_in(parent)
            .with_context(|| format!("Cannot use {}", parent.display()))?;
        measure(&options, place, folder.path(), &mut report)?;
    }
    report.finish(&out.join("blk.json"))
}

fn measure(options: &Options, place: &str, folder: &Path, report: &mut Report) -> Result<()> {
    let file = folder.join("disk");
    let bytes = scale::bytes(FILE);
    let mut written = std::fs::File::create(&file)?;
    let part = vec![0xa5; 1 << 20];
    for _ in 0..bytes >> 20 {
        written.write_all(&part)?;
    }
    written.sync_all()?;
    // The reference has two ways to do asynchronous I/O: both are to be beaten. All three run all
    // the time; those whose turn it is not sleep.
    let kinds = [Kind::Farlane, Kind::Qemu("io_uring"), Kind::Qemu("native")];
    let mut backends = Vec::new();
    for kind in kinds {
        let backend = Backend::start(kind, options, folder, &file)?;
        let drive = Drive::connect(backend.socket(), bytes)?;
        backends.push((drive, backend));
    }
    for direction in [Direction::Read, Direction::Write] {
        for depth in DEPTHS {
            let stretch = scale::time(STRETCH);
            let rounds = alternating(kinds.len() - 1, |side| {
                let (drive, _) = match side {
                    Side::Ours => &mut backends[0],
                    Side::Theirs(at) => &mut backends[1 + at],
                };
                drive.run(direction, depth, stretch / 5)?;
                drive.run(direction, depth, stretch)
            });
            let found = compare(&scale::plan(), &[Bar::AtLeast(BAR); 2], rounds)?;
            let name = format!("{place}, {direction} 4 KiB, depth {depth}");
            for (aio, found) in ["io_uring", "native"].into_iter().zip(&found) {
                let what = format!("{name}, beside aio={aio}");
                let reference = format!("qemu-storage-daemon with aio={aio}");
                report.compared(&what, "IOPS", &reference, found);
            }
            report.keep(&name, found)?;
        }
    }
    Ok(())
}
