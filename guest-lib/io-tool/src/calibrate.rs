//! Measures, fits, stores.

use crate::target::Target;
use anyhow::{Context as _, Result};
use farlane_io_core::plan::oracle::Random;
use farlane_io_core::plan::store::{self, Calibration, Store};
use farlane_io_core::plan::{Fit, Sample, fit};
use farlane_io_tool::memory::{Kind, Memory};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// Largest transfer that is measured.
const LARGEST: usize = 16 << 20;
/// Times of each size, if the device is fast enough.
const ROUNDS: u32 = 31;
/// Times of each size on any device.
const FEWEST_ROUNDS: u32 = 5;
/// Sequences of reads that are measured for read-ahead.
const SEQUENCES: usize = 5;
/// Bytes of each of their reads.
const READ: usize = 128 << 10;
/// Bytes of a sequence that stay cached until they are dropped: 512 pages, as in the paper.
const KEPT: u64 = 2 << 20;
/// How long a slow device is measured.
const PATIENCE: Duration = Duration::from_secs(20);

/// Measures `target`, says what was found, and stores it.
pub fn run(path: &Path, kind: &Kind, dry_run: bool) -> Result<()> {
    let target = Target::open(path)?;
    let mut memory = Memory::new(kind, LARGEST)?;
    let (p2p, cache) = measure(&target, &mut memory)?;
    let no_model = || {
        let shown = path.display();
        format!("The times of {shown} make no model, nothing is stored")
    };
    let fit = fit(&p2p, &cache).with_context(no_model)?;
    let fit = match readahead(&target, &mut memory)? {
        Some(bandwidth) => fit.with_readahead(bandwidth).with_context(no_model)?,
        None => fit,
    };
    print(&fit);
    let shown = format!("{}, {} memory", target.device, kind.provider());
    if dry_run {
        println!("Not stored: {shown}");
        return Ok(());
    }
    let file = store::path();
    let mut store = Store::read(&file)?;
    let since = SystemTime::UNIX_EPOCH.elapsed();
    let since = since.context("The clock says a time before 1970")?;
    store.put(Calibration {
        device: target.device,
        provider: kind.provider().into(),
        measured: since.as_secs(),
        r2_p2p: fit.r2_p2p,
        r2_cache: fit.r2_cache,
        model: fit.model,
    });
    store.write(&file)?;
    println!("Stored in {}: {shown}", file.display());
    Ok(())
}

/// Times by P2P and from the page cache, round after round, so that a change of the machine's load
/// falls on all sizes; each round in another order, so that none always follows the same one.
fn measure(target: &Target, memory: &mut Memory) -> Result<(Vec<Sample>, Vec<Sample>)> {
    let mut random = Random::new(2);
    let (mut p2p, mut cache) = (Vec::new(), Vec::new());
    let mut sizes = target.sizes(u64::try_from(LARGEST)?);
    let start = Instant::now();
    for round in 0..=ROUNDS {
        if round > FEWEST_ROUNDS && start.elapsed() > PATIENCE {
            break;
        }
        random.shuffle(&mut sizes);
        for bytes in &sizes {
            let length = usize::try_from(*bytes)?;
            let (file, offset) = target.direct(&mut random, *bytes);
            let direct = memory.read(file, offset, length).context("By direct I/O")?;
            let (file, offset) = target.cached(&mut random, *bytes);
            let copied = memory.read(file, offset, length)?;
            // The first round warms up.
            if round > 0 {
                p2p.push(sample(*bytes, direct));
                cache.push(sample(*bytes, copied));
            }
        }
    }
    Ok((p2p, cache))
}

/// Bytes per second of a sequence of reads of a file that is not cached, of which, as the library
/// does it, no more than a little stays cached: the median of some. None if the file is too short
/// for one.
fn readahead(target: &Target, memory: &mut Memory) -> Result<Option<f64>> {
    let mut rates = Vec::new();
    for round in 0..=SEQUENCES {
        let Some(sequence) = target.sequence()? else {
            return Ok(None);
        };
        let bytes = sequence.end - sequence.start;
        let start = Instant::now();
        for offset in sequence.clone().step_by(READ) {
            memory.read(target.buffered(), offset, READ)?;
            let end = offset + READ as u64;
            if (end - sequence.start).is_multiple_of(KEPT) {
                target.forget(end - KEPT, KEPT)?;
            }
        }
        if round > 0 {
            rates.push(bytes as f64 / start.elapsed().as_secs_f64());
        }
    }
    rates.sort_by(f64::total_cmp);
    Ok(rates.get(rates.len() / 2).copied())
}

fn sample(bytes: u64, took: Duration) -> Sample {
    Sample {
        bytes,
        nanoseconds: took.as_secs_f64() * 1e9,
    }
}

fn print(fit: &Fit) {
    println!(
        "{:>10} {:>14} {:>12} {:>14} {:>12}",
        "bytes", "P2P, us", "model, us", "cache, us", "model, us"
    );
    for ((bytes, p2p), (_, cache)) in fit.p2p.iter().zip(&fit.cache) {
        println!(
            "{bytes:>10} {:>14.1} {:>12.1} {:>14.1} {:>12.1}",
            p2p / 1e3,
            fit.model.p2p_ns(*bytes) / 1e3,
            cache / 1e3,
            fit.model.cache_ns(*bytes) / 1e3
        );
    }
    let found = fit.model.parameters();
    println!(
        "\nS_cutoff        {:>10} bytes\n\
         C_p2p           {:>10.1} us\n\
         P2P bandwidth   {:>10.1} MB/s    R^2 {:.4}\n\
         cache call      {:>10.1} us\n\
         cache bandwidth {:>10.1} MB/s    R^2 {:.4}\n\
         read-ahead      {:>10.1} MB/s",
        found.cutoff_bytes,
        found.p2p_overhead_ns / 1e3,
        found.p2p_bandwidth / 1e6,
        fit.r2_p2p,
        found.cache_overhead_ns / 1e3,
        found.cache_bandwidth / 1e6,
        fit.r2_cache,
        found.readahead_bandwidth.unwrap_or(f64::NAN) / 1e6
    );
    match fit.model.direct_from() {
        Some(u64::MAX) => println!("P2P is never faster than read-ahead"),
        Some(bytes) => println!("P2P is faster than read-ahead from {bytes} bytes on"),
        None => println!("Too short a file to measure read-ahead"),
    }
}
