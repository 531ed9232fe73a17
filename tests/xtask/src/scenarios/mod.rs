//! The scenarios: one file per user story, registered in one list (`list.rs`).

mod blk;
mod blk_crash;
mod blk_vs_qsd;
mod book;
mod cloud_hypervisor;
mod doctor;
mod driver_builds;
mod driver_device;
mod driver_kernels;
mod gpu_coherence;
mod gpu_hostile;
mod gpu_p2pmem;
mod gpu_raid;
mod gpu_read;
pub mod gpu_scan;
mod gpu_soft;
mod gpu_stacks;
mod gpu_unmodified;
mod gpu_write;
mod kills;
mod lend_crash;
mod lend_hostile;
mod lend_partition;
mod lend_reassign;
pub mod lend_soft;
mod lend_vfio;
mod lend_vs_local;
mod libvirt;
mod list;
mod metrics;
mod metrics_page;
pub mod net_vs_tap;
pub mod octo_net;
mod octo_net_flood;
mod octo_net_peers;
mod octo_restart;
pub mod octo_ssd;
mod octo_ssd_failover;
mod p2p_lent;
mod package;
mod rdma_apps;
mod rdma_buffers;
mod rdma_cm;
mod rdma_crash;
pub mod rdma_host;
mod rdma_isolation;
pub mod rdma_perftest;
pub mod rdma_pingpong;
mod rdma_pyverbs;
pub mod rdma_stock;
mod rdma_tenants;
mod rdma_ulps;
mod rdma_users;
mod rdma_verbs;
mod rdma_vs_rxe;
mod rdma_workers;
mod services;
mod start;
mod topology;
mod tracing;
mod vmkit;

use std::env;
use std::error::Error;
use std::fmt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result};
use farlane_kit::progress;
use farlane_kit::report::Report;
use farlane_kit::workspace::Workspace;

use crate::jobs::RECORD_VARIABLE;
use crate::run::{Context, Run};
use crate::test_run;

pub use list::ALL;

/// One user story.
pub struct Scenario {
    /// What it is called on the command line.
    pub name: &'static str,
    /// What it shows, in a line.
    pub about: &'static str,
    /// Whether `cargo xtask test` runs it.
    pub is_test: bool,
    run: fn(&Run<'_>, &mut Report) -> Result<()>,
}

/// Why a scenario cannot be run on this machine. As the error of one it says that it has neither
/// passed nor failed.
#[derive(Debug)]
pub struct NotRun(pub String);

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not run: {}", self.0)
    }
}

impl Error for NotRun {}

/// How a scenario has ended that has not failed.
#[derive(Debug, PartialEq, Eq)]
pub enum Ending {
    Passed,
    /// It cannot be run on this machine, for this reason.
    NotRun(String),
}

/// The exit status of `cargo xtask scenario` when nothing has failed and something could not be
/// run, as automake's tests have it.
const NOT_RUN_STATUS: u8 = 77;

/// Those that measure: nothing else runs beside them.
pub const MEASURING: &[&str] = &["blk-vs-qsd", "lend-vs-local", "net-vs-tap", "rdma-vs-rxe"];

/// Those that look at an order, a share or a lease of a second, for which they need the processors:
/// beside each runs no more than one job a processor.
pub const NEEDING_TWO: &[&str] = &[
    "lend-partition",
    "octo-net",
    "octo-net-flood",
    "octo-net-peers",
    "rdma-tenants",
    "rdma-tenants-workers",
];

impl Scenario {
    /// Does what the scenario is, in a run that the caller has made.
    pub fn perform(&self, run: &Run<'_>, report: &mut Report) -> Result<()> {
        (self.run)(run, report)?;
        run.ensure_blocks_were_run(self.name)
    }

    /// Runs the scenario. Its logs stay when it fails.
    pub fn run(&self, context: &Context, report: &mut Report) -> Result<Ending> {
        let run = Run::new(context, self.name)?;
        let start = Instant::now();
        progress::note(&format!("scenario {}", self.name));
        let error = match self.perform(&run, report) {
            Ok(()) => {
                progress::note(&format!(
                    "scenario {}: passed in {:.1} s",
                    self.name,
                    start.elapsed().as_secs_f64()
                ));
                run.forget_logs()?;
                return Ok(Ending::Passed);
            }
            Err(error) => error,
        };
        if let Some(NotRun(reason)) = error.downcast_ref() {
            progress::note(&format!("scenario {}: NOT RUN: {reason}", self.name));
            run.forget_logs()?;
            return Ok(Ending::NotRun(reason.clone()));
        }
        Err(error.context(format!(
            "Scenario {} failed; its logs are in {}",
            self.name,
            run.logs().display()
        )))
    }
}

/// The scenario of a name.
pub fn find(name: &str) -> Result<&'static Scenario> {
    let found = ALL.iter().find(|scenario| scenario.name == name);
    found.with_context(|| format!("There is no scenario {name}: see `cargo xtask scenario --list`"))
}

/// Prints the names of all scenarios.
pub fn list() {
    for scenario in ALL {
        println!("{:18} {}", scenario.name, scenario.about);
    }
}

/// Runs scenarios by name, then prints their figures.
pub fn run_named(workspace: &Workspace, names: &[String]) -> Result<ExitCode> {
    let chosen: Vec<&Scenario> = names.iter().map(|name| find(name)).collect::<Result<_>>()?;
    let context = Context::new(workspace);
    let mut report = Report::new();
    let mut not_run = Vec::new();
    let mut failed = false;
    for scenario in chosen {
        match scenario.run(&context, &mut report) {
            Ok(Ending::Passed) => {}
            Ok(Ending::NotRun(reason)) => {
                not_run.push(reason);
            }
            Err(error) => {
                eprintln!("Error: {error:#}");
                failed = true;
            }
        }
    }
    if let Some(to) = env::var_os(RECORD_VARIABLE) {
        test_run::record(&report, &not_run, Path::new(&to))?;
    }
    print!("{report}");
    Ok(match (failed, not_run.is_empty()) {
        (true, _) => ExitCode::FAILURE,
        (false, false) => ExitCode::from(NOT_RUN_STATUS),
        (false, true) => ExitCode::SUCCESS,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_by_itself_is_a_scenario_of_a_test_run() {
        for name in MEASURING.iter().chain(NEEDING_TWO) {
            let found = find(name).unwrap();
            assert!(found.is_test, "{name}");
        }
    }
}
