//! The guest driver in kernels of earlier Debian releases: it loads, does what its own scenario
//! asks of it, and carries RDMA.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::debian::{HEADERS_6_1, HEADERS_6_12, TreeSpec};
use farlane_kit::report::Report;
use farlane_kit::tree::Tree;

use super::{Scenario, driver_device, rdma_pingpong};
use crate::run::{Context, Run};

pub const LINUX_6_1: Scenario = Scenario {
    name: "driver-6.1",
    about: "driver-device and rdma-pingpong in guests with Linux 6.1",
    is_test: true,
    run: |run, report| in_kernel(run, report, &HEADERS_6_1, "6.1."),
};

pub const LINUX_6_12: Scenario = Scenario {
    name: "driver-6.12",
    about: "driver-device and rdma-pingpong in guests with Linux 6.12",
    is_test: true,
    run: |run, report| in_kernel(run, report, &HEADERS_6_12, "6.12."),
};

fn in_kernel(run: &Run<'_>, report: &mut Report, spec: &TreeSpec, release: &str) -> Result<()> {
    let tree = Tree::ensure(run.context.workspace(), spec)?;
    let kit = run.context.kit()?.with_kernel_of(&tree)?;
    let kernel = kit.kernel().release.clone();
    ensure!(
        kernel.starts_with(release),
        "{} has Linux {kernel}, not {release}x",
        spec.name
    );
    // The driver is built for this kernel: another one would refuse to load it.
    let context = Context::with_kit(kit);
    let mut inner = |name: &str, scenario: fn(&Run<'_>, &mut Report) -> Result<()>| {
        let run = Run::new(&context, name)?;
        scenario(&run, report).with_context(|| format!("In Linux {kernel}"))?;
        run.forget_logs()
    };
    inner("driver-device", driver_device::run)?;
    inner("rdma-pingpong", rdma_pingpong::run)?;
    report.add("guest driver", format!("in Linux {kernel}"), "works");
    Ok(())
}
