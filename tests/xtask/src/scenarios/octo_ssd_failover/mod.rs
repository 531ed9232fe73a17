//! Paths to a disk are pulled and returned at random while everything written is read back and
//! checked: the VM sees one healthy disk. Once they are loop devices of this machine, and once NVMe
//! controllers of a kernel with two nodes, hot-unplugged.

mod loops;
mod nvme;

use anyhow::{Context as _, Result};
use farlane_kit::report::Report;

use crate::run::Run;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    loops::run(run, report).context("Loop devices")?;
    nvme::run(run, report).context("NVMe controllers")
}

/// Random numbers of a seed.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        // All but zero go round.
        Self(seed | 1)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}
