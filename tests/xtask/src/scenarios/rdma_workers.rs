//! The scenarios of virtual RDMA with two worker threads: what one context waits for is posted in
//! another, which another thread serves.

use anyhow::Result;
use farlane_kit::report::Report;

use crate::run::Run;

type Work = fn(&Run<'_>, &mut Report) -> Result<()>;

/// All of a scenario.
pub fn whole(scenario: Work, run: &Run<'_>, report: &mut Report) -> Result<()> {
    run.use_workers(2);
    scenario(run, report)
}

/// Less of it: half as many kills, one size in place of all.
pub fn brief(scenario: Work, run: &Run<'_>, report: &mut Report) -> Result<()> {
    run.be_brief();
    whole(scenario, run, report)
}
