//! Guests of the kernels of earlier Debian releases: the guest driver loads, does what its own
//! scenario asks of it, and carries RDMA, with our library and with the distribution's; and the
//! kernel's own driver drives a lent disk.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::debian::TreeSpec;
use farlane_kit::report::Report;
use farlane_kit::tree::Tree;

use super::{driver_device, lend_soft, rdma_pingpong, rdma_stock};
use crate::run::{Context, Run};

pub fn in_kernel(run: &Run<'_>, report: &mut Report, spec: &TreeSpec, release: &str) -> Result<()> {
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
        run.be_brief();
        scenario(&run, report).with_context(|| format!("In Linux {kernel}"))?;
        run.forget_logs()
    };
    inner("driver-device", driver_device::run)?;
    inner("rdma-pingpong", rdma_pingpong::run)?;
    inner("rdma-stock", rdma_stock::run)?;
    inner("lend-soft", lend_soft::show)?;
    report.add("guest driver", format!("in Linux {kernel}"), "works");
    Ok(())
}
