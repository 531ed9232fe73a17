//! What the software GPU and files do to each other, checked from the other side.
//!
//! * `self-test`: video memory through the BAR, copies, search, checksum, gather.
//! * `is-zero`, `fill`: what is in video memory.
//! * `search`: searches until it is stopped.
//! * `make`, `make-pieces`, `read`, `write`, `rewrite`, `rewrite-pieces`, `keep-on`, `read-matrix`,
//!   `write-matrix`: files and video memory, by plain calls of the C library, which another library
//!   may have replaced.
//!
//! Prints a line of JSON; fails with a message at the first byte that is not what it should be.

mod contents;
mod files;
mod matrix;
mod pieces;
mod self_test;
mod transfer;

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand};
use farlane_gpu_driver::Gpu;
use serde::Serialize;
use std::path::PathBuf;

/// Software GPU and files
#[derive(Debug, Parser)]
struct Options {
    /// PCI address of the device, such as 0000:01:00.0; the first that is free where it is not
    /// given
    #[arg(long, global = true, value_name = "ADDRESS")]
    device: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Tries everything that the device does
    SelfTest {
        /// Also copies from and to system memory, in huge pages, of which it reserves some
        #[arg(long)]
        dma: bool,
    },
    /// Whether all of video memory is zeroes, but for the queue
    IsZero,
    /// Fills all of video memory, but for the queue
    Fill,
    /// Searches all of video memory again and again, until the device is gone
    Search,
    /// Makes a file of known contents
    Make {
        file: PathBuf,
        #[arg(long)]
        seed: u64,
        #[arg(long)]
        bytes: u64,
    },
    /// Makes a file of known contents with holes, and with pieces that are only allocated
    MakePieces {
        file: PathBuf,
        #[arg(long)]
        seed: u64,
        #[arg(long)]
        bytes: usize,
    },
    /// Compares a file with known contents
    Check {
        file: PathBuf,
        #[arg(long)]
        seed: u64,
    },
    /// Reads a range of a file of known contents into video memory
    Read(transfer::Transfer),
    /// Writes known contents from video memory to a range of a file
    Write(transfer::Transfer),
    /// Reads a range of a file of known contents into video memory, then writes other ones from
    /// there to the same range
    Rewrite {
        #[command(flatten)]
        transfer: transfer::Transfer,
        /// What the contents that are written are made of
        #[arg(long)]
        to: u64,
    },
    /// The same of a whole file that was made with `make-pieces`
    RewritePieces {
        #[command(flatten)]
        transfer: transfer::Transfer,
        /// What the contents that are written are made of
        #[arg(long)]
        to: u64,
    },
    /// Rewrites a range to and fro; prints how often
    KeepOn {
        #[command(flatten)]
        transfer: transfer::Transfer,
        /// What the contents that are written are made of
        #[arg(long)]
        to: u64,
        /// Ends when there is this file; the contents are then what they were
        #[arg(long)]
        end: PathBuf,
    },
    /// Reads with all sizes, alignments and calls, by several threads
    ReadMatrix(matrix::Matrix),
    /// Writes with all sizes, alignments and calls, by several threads; the file has the contents
    /// of its seed before, and again after
    WriteMatrix(matrix::Matrix),
}

/// What was done.
#[derive(Debug, Default, Serialize)]
struct Report {
    /// Which command.
    what: &'static str,
    /// Things tried.
    checks: u64,
    /// Bytes that were compared.
    bytes: u64,
}

fn main() -> Result<()> {
    env_logger::init();
    let options = Options::parse();
    let gpu = || Gpu::open(options.device.as_deref()).context("Cannot open the GPU");
    let report = match &options.command {
        Command::SelfTest { dma } => self_test::run(&gpu()?, *dma, options.device.as_deref())?,
        Command::IsZero => is_zero(&gpu()?)?,
        Command::Fill => fill(&gpu()?)?,
        Command::Search => return search(&gpu()?),
        Command::Make { file, seed, bytes } => files::make(file, *seed, *bytes)?,
        Command::MakePieces { file, seed, bytes } => pieces::make(file, *seed, *bytes)?,
        Command::Check { file, seed } => files::check(file, *seed)?,
        Command::Read(transfer) => transfer.read(&gpu()?)?,
        Command::Write(transfer) => transfer.write(&gpu()?)?,
        Command::Rewrite { transfer, to } => transfer.rewrite(&gpu()?, *to)?,
        Command::RewritePieces { transfer, to } => pieces::rewrite(transfer, &gpu()?, *to)?,
        Command::KeepOn { transfer, to, end } => transfer.keep_on(&gpu()?, *to, end)?,
        Command::ReadMatrix(matrix) => matrix.read(&gpu()?)?,
        Command::WriteMatrix(matrix) => matrix.write(&gpu()?)?,
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// The largest buffer there can be, in halves where the rest of the memory is not in one piece.
fn all_memory(gpu: &Gpu) -> Result<farlane_gpu_driver::Buffer> {
    let bytes = usize::try_from(gpu.free_bytes())?;
    Ok(gpu.allocate(bytes)?)
}

fn is_zero(gpu: &Gpu) -> Result<Report> {
    let all = all_memory(gpu)?;
    let other = all.as_slice().iter().position(|&byte| byte != 0);
    if let Some(at) = other {
        anyhow::bail!("Byte {at:#x} of video memory is {:#x}", all.as_slice()[at]);
    }
    Ok(Report {
        what: "is-zero",
        checks: 1,
        bytes: u64::try_from(all.len())?,
    })
}

fn fill(gpu: &Gpu) -> Result<Report> {
    let mut all = all_memory(gpu)?;
    contents::fill(7, 0, all.as_mut_slice());
    let sum = crc32c::crc32c(all.as_slice());
    ensure!(
        all.checksum(0..all.len())? == sum,
        "The device sees other bytes"
    );
    Ok(Report {
        what: "fill",
        checks: 1,
        bytes: u64::try_from(all.len())?,
    })
}

fn search(gpu: &Gpu) -> Result<()> {
    let mut search = gpu.prepare(&[[0_u8; 4]], 16)?;
    let all = all_memory(gpu)?;
    println!("searching");
    loop {
        search.run(&all, 0..all.len())?;
    }
}
