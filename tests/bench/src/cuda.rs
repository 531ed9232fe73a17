//! `cargo xtask bench cuda`: files and memory of a CUDA device by plain calls with the library
//! preloaded, beside what programs do by hand. It checks every way first. It needs a CUDA device.

#[path = "cuda/by_hand.rs"]
mod by_hand;
#[path = "cuda/check.rs"]
mod check;
#[path = "cuda/cufile.rs"]
mod cufile;
#[path = "cuda/device.rs"]
mod device;
#[allow(dead_code)] // Each bench uses a part.
mod report;
#[allow(dead_code)] // Each bench uses a part.
mod scale;
#[allow(dead_code)] // Each bench uses a part.
mod stats;

use anyhow::{Context as _, Result, bail};
use by_hand::{Way, Ways};
use clap::Parser;
use cufile::CuFile;
use device::Device;
use farlane_kit::compare::{Bar, Side, alternating, compare};
use report::Report;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes of the file, which is in the page cache.
const FILE: u64 = 512 << 20;
/// How long a rate is measured in a round.
const STRETCH: Duration = Duration::from_millis(120);
/// Bytes of a request, and the least ratio to each way that a program does by hand: a short one
/// costs what the library asks the kernel and the driver.
const SIZES: [(usize, f64); 5] = [
    (4 << 10, 0.9),
    (64 << 10, 0.9),
    (1 << 20, 1.0),
    (16 << 20, 1.0),
    (64 << 20, 1.0),
];

/// Measures files and memory of a CUDA device.
#[derive(Parser)]
struct Options {
    /// The library that serves plain calls with device memory: libfarlane_io.so.
    #[arg(long, value_name = "PATH")]
    library: PathBuf,
    /// A folder for the file that is read and written; without it, one in memory.
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    folder: PathBuf,
    #[command(flatten)]
    output: scale::Output,
}

/// Says that this process has the library preloaded.
const PRELOADED: &str = "FARLANE_BENCH_PRELOADED";

fn main() -> Result<()> {
    let options = Options::parse();
    if std::env::var_os(PRELOADED).is_none() {
        let mut again = Command::new(std::env::current_exe()?);
        again.args(std::env::args_os().skip(1)).env(PRELOADED, "1");
        again.env("LD_PRELOAD", &options.library);
        bail!("Cannot start anew: {}", again.exec());
    }
    let out = options.output.begin()?;
    let device = Device::open()?;
    println!("{}, driver {}\n", device.name(), device.version());
    let mut report = Report::default();
    report.keep("device", device.name())?;
    report.keep("driver", device.version())?;
    let folder = tempfile::tempdir_in(&options.folder)
        .with_context(|| format!("Cannot use {}", options.folder.display()))?;
    let checked = check::all(&device, folder.path())?;
    println!("{checked} requests moved what they had to, and nothing else\n");
    report.keep("requests checked", checked)?;
    measure(&device, folder.path(), &mut report)?;
    report.finish(&out.join("cuda.json"))
}

fn measure(device: &Device, folder: &Path, report: &mut Report) -> Result<()> {
    let path = folder.join("measured");
    let bytes = scale::bytes(FILE);
    let mut file = std::fs::File::create_new(&path)?;
    let part: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
    for _ in 0..bytes >> 20 {
        file.write_all(&part)?;
    }
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)?;
    let cufile = CuFile::new(&file);
    if let Err(why) = &cufile {
        println!("cuFile is not compared: {why:#}\n");
    }
    let cufile = cufile.as_ref().ok();
    let mut references = vec![
        (Way::Pageable, "pageable memory and cuMemcpy"),
        (Way::Pinned, "pinned memory and cuMemcpy"),
    ];
    references.extend(cufile.map(|_| (Way::CuFile, "cuFile")));
    for direction in ["read", "write"] {
        for (size, least) in SIZES {
            let mut ways = Ways::new(device, &file, cufile, size)?;
            let stretch = scale::time(STRETCH);
            let mut at = 0;
            let rounds = alternating(references.len(), |side| {
                let way = match side {
                    Side::Ours => Way::Plain,
                    Side::Theirs(which) => references[which].0,
                };
                let (begin, mut moved) = (Instant::now(), 0);
                while moved == 0 || begin.elapsed() < stretch {
                    if at + size as u64 > bytes {
                        at = 0;
                    }
                    match direction {
                        "read" => ways.read(way, at)?,
                        _ => ways.write(way, at)?,
                    }
                    moved += size;
                    at += size as u64;
                }
                Ok(moved as f64 / 1e9 / begin.elapsed().as_secs_f64())
            });
            let found = compare(
                &scale::plan(),
                &vec![Bar::AtLeast(least); references.len()],
                rounds,
            )?;
            let name = format!("{direction} {} KiB", size >> 10);
            for ((_, words), found) in references.iter().zip(&found) {
                report.compared(&format!("{name}, beside {words}"), "GB/s", words, found);
            }
            report.keep(&name, found)?;
        }
    }
    Ok(())
}
