//! kill -9 of the backends of devices with limbs on two nodes, under load: the next ones go on
//! where they were.

mod blk;
mod net;

use anyhow::{Context as _, Result};
use farlane_kit::report::Report;

use super::Scenario;
use crate::run::Run;

pub const SCENARIO: Scenario = Scenario {
    name: "octo-restart",
    about: "kill -9 of backends with limbs on two nodes under load: nothing lost, nothing done twice",
    is_test: true,
    run,
};

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    blk::run(run, report).context("farlane-blk")?;
    net::run(run, report).context("farlane-net")
}
