//! rdma-core's own tests of verbs over the RDMA device of a guest's kernel, with nothing of ours in
//! the guest but kernel modules.

use std::time::Duration;

use anyhow::{Context as _, Result};
use farlane_kit::guest_root::GuestFile;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::tree::RDMA_CORE;
use farlane_kit::wire::{End, Wire};

use super::super::rdma_stock;
use super::skips::Where;
use super::{RUNNER_IN_GUEST, judge, results, runner};
use crate::conditions::no_complaint;
use crate::run::Run;

/// Modules of tests, each for an interpreter of its own. Not those of vendors; nor those of flows
/// and of parent domains, of which the provider has none: the bindings crash at the end of what
/// they skip, over rxe too.
const MODULES: &[&str] = &[
    "addr",
    "atomic",
    "cq",
    "cq_events",
    "cqex",
    "device",
    "fork",
    "mr",
    "odp",
    "pd",
    "qp",
    "qpex",
    "rdmacm",
    "relaxed_ordering",
    "rss_traffic",
    "shared_pd",
    "srq",
    "tag_matching",
];

/// How many tests pass at least: all but those of what the provider of rxe does not have.
const PASSES: usize = 103;

/// How long a module may take, where a processor is emulated.
const LIMIT: Duration = Duration::from_secs(300);

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let farlane = run.context.farlane()?;
    let wire = Wire::new()?;
    let socket = run.path("a");
    let backend = farlane.daemon(run, &[(&socket, &rdma_stock::vm(End::A))], None)?;
    let runner = GuestFile::new(runner(run), RUNNER_IN_GUEST);
    let files = farlane.guest_modules().chain([runner]);
    let config = VmConfig::new("a").farlane(&socket).wire(&wire, End::A);
    let [guest] = run.boot([config.files(files).python()])?;
    rdma_stock::start(&guest)?;
    rdma_stock::start_connections(&guest)?;
    guest.run(&format!(
        "mount -t tmpfs none /mnt && cp -r /{RDMA_CORE}/tests /mnt && gunzip -f /mnt/tests/*.gz"
    ))?;
    let mut tests = Vec::new();
    for module in MODULES {
        let line = format!(
            "cd /mnt && PYTHONPATH=/mnt:/mnt/tests python3 /{RUNNER_IN_GUEST} {} -v \
             --dev {} --gid {} tests.test_{module}",
            End::A.address(),
            rdma_stock::DEVICE,
            rdma_stock::GID
        );
        let of_module = results(&guest, &line, LIMIT).with_context(|| format!("test_{module}"))?;
        tests.extend(of_module);
    }
    no_complaint(&guest)?;
    judge(Where::Kernel, &tests, &[], PASSES, report)?;
    backend.stop()
}
