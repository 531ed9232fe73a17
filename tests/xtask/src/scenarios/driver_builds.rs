//! The guest driver builds without a warning for the kernels of three Debian releases.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use farlane_vmkit::driver::{self, KERNELS};
use farlane_vmkit::report::Report;
use farlane_vmkit::tree::Tree;

use super::Scenario;
use crate::run::Run;

pub const SCENARIO: Scenario = Scenario {
    name: "driver-builds",
    about: "the guest driver builds for Linux 6.1, 6.12 and 7.2 with each one's own compiler",
    is_test: true,
    run,
};

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let workspace = run.context.workspace();
    for (release, spec) in KERNELS {
        let tree = Tree::ensure(workspace, spec)?;
        let driver = driver::build(workspace, &tree)?;
        ensure!(
            driver.kernel.starts_with(release),
            "{} has headers of Linux {}",
            spec.name,
            driver.kernel
        );
        ensure!(
            !driver.messages.contains("warning:"),
            "Warnings for Linux {}:\n{}",
            driver.kernel,
            driver.messages
        );
        let module = fs::read(&driver.path)
            .with_context(|| format!("Cannot read {}", driver.path.display()))?;
        let magic = format!("vermagic={} ", driver.kernel);
        let found = module
            .windows(magic.len())
            .any(|window| window == magic.as_bytes());
        ensure!(
            found,
            "{} is not for Linux {}",
            driver.path.display(),
            driver.kernel
        );
        report.add(
            "guest driver",
            format!("Linux {}", driver.kernel),
            format!("{} KiB", module.len() / 1024),
        );
    }
    Ok(())
}
