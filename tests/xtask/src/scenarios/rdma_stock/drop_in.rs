//! The same programs over our librdmacm, on this machine, which connect to those over the
//! connection manager of a guest's kernel, and the other way round.

use anyhow::{Context as _, Result};
use farlane_kit::guest::Guest;
use farlane_kit::report::Report;

use super::connections::{FEW, OURS_TOO, PAIRS, Pair};
use crate::conditions::wait_until;
use crate::metrics::Metrics;
use crate::place::{Host, Over, Place};
use crate::run::Run;
use crate::tools::TOOL_TIMEOUT;

/// Debian's packages of the programs.
pub const PACKAGES: &[&str] = &["rdmacm-utils"];

/// The address of processes of this machine, in the network of the guests' interfaces.
pub const HOST: &str = "10.77.0.254";

/// No interface answers for it: the guest is told one that nothing is sent to.
const MAC: &str = "52:54:00:77:00:fe";

/// Runs each with either end in the guest.
pub fn run(run: &Run<'_>, host: &Host, guest: &Guest, report: &mut Report) -> Result<()> {
    guest.run(&format!("arp -i eth0 -s {HOST} {MAC}"))?;
    let pairs = &PAIRS[..if run.is_brief() { FEW } else { OURS_TOO }];
    for pair in pairs {
        in_guest(pair, host, guest)?;
        report.tell("host to kernel", pair.ask, "done".to_owned());
        on_host(run, pair, host, guest)?;
        report.tell("kernel to host", pair.ask, "done".to_owned());
    }
    Ok(())
}

/// The server is in the guest.
fn in_guest(pair: &Pair, host: &Host, guest: &Guest) -> Result<()> {
    let serving = pair.serve(guest)?;
    let line = Over::Farlane.command(&pair.line(pair.ask, guest.address()?));
    let asked = host.spawn(&line)?.wait(TOOL_TIMEOUT);
    let asked = asked.with_context(|| format!("`{}`: {}", pair.serve, serving.so_far()))?;
    pair.check(&asked, &serving.so_far())?;
    let served = serving.wait(TOOL_TIMEOUT)?;
    served.check(format_args!("`{}`", pair.serve))
}

/// The server is on this machine.
fn on_host(run: &Run<'_>, pair: &Pair, host: &Host, guest: &Guest) -> Result<()> {
    let serving = host.spawn(&Over::Farlane.command(&pair.line(pair.serve, HOST)))?;
    wait_until("a program of this machine listens", || {
        Ok(Metrics::read(&run.metrics(), "farlane_rdma_")?.sum("vm_listeners")? > 0)
    })
    .with_context(|| serving.so_far())?;
    let asked = guest.spawn(&pair.line(pair.ask, HOST))?.wait(TOOL_TIMEOUT);
    let asked = asked.with_context(|| format!("`{}`: {}", pair.serve, serving.so_far()))?;
    pair.check(&asked, &serving.so_far())?;
    let served = serving.wait(TOOL_TIMEOUT)?;
    served.check(format_args!("`{}`", pair.serve))
}
