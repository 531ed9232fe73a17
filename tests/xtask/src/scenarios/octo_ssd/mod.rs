//! A disk with a worker and a path on each of two nodes: whatever thread asks, each byte is moved
//! by the worker of the node on which it lies, where the kernel's own multipath goes by the thread.

mod described;
mod real;
mod show;
mod stock;

use anyhow::{Context as _, Result};
use farlane_kit::report::Report;

use crate::numa::{Memory, Placed};
use crate::run::Run;

pub use show::show;

const DISK_BYTES: u64 = 64 << 20;
/// Memory of each node of a guest.
const NODE_MIB: u32 = 512;

/// How much each job writes and reads back.
const VERIFIED_MIB: u32 = 24;

/// On the right node, on the wrong one, and on both.
const JOBS: [Placed; 6] = [
    Placed::new(0, Memory::On(0)),
    Placed::new(1, Memory::On(1)),
    Placed::new(0, Memory::On(1)),
    Placed::new(1, Memory::On(0)),
    Placed::new(0, Memory::Interleaved),
    Placed::new(1, Memory::Striped),
];

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    described::run(run, report).context("On a described machine")?;
    stock::run(run, report).context("The kernel's multipath")?;
    real::run(run, report).context("On a kernel with two nodes")
}
