//! kill -9 of the backends of devices with workers on two nodes, under load: the next ones go on
//! where they were.

mod blk;
mod net;

use anyhow::{Context as _, Result};
use farlane_kit::report::Report;

use crate::run::Run;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    blk::run(run, report).context("farlane-blk")?;
    net::run(run, report).context("farlane-net")
}
