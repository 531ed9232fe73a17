//! The command line.

use crate::memory::Kind;
use clap::{Parser, Subcommand};
use std::path::PathBuf;

/// File I/O with device memory.
#[derive(Parser)]
#[command(name = "farlane-io", version)]
pub struct Options {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Subcommand)]
pub enum Command {
    /// Measures transfer times of a device over sizes, fits the cost model and stores it.
    Calibrate {
        /// A block device or a file, which are only read, or a folder, in which a file is made.
        #[arg(value_name = "DEVICE|FILE|DIR")]
        target: PathBuf,
        /// The device memory: `soft` (memory of this process), `p2pmem=BDF` (of a PCI device that
        /// offers it for peer-to-peer).
        #[arg(long, value_name = "MEMORY", default_value = "soft")]
        memory: Kind,
        /// Measures and fits, but stores nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Draws a trace that a program wrote with `FARLANE_IO_TRACE=FILE`, and prints a summary.
    Report {
        /// Trace file to summarise.
        file: PathBuf,
        /// Where the drawing goes.
        #[arg(long, value_name = "DIR", default_value = ".")]
        out: PathBuf,
    },
}
