//! The guest driver builds without a warning for the kernels of three Debian releases.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::debian::TreeSpec;
use farlane_kit::driver::{self, Driver, KERNELS};
use farlane_kit::report::Report;
use farlane_kit::tree::Tree;
use farlane_kit::workspace::Workspace;

use crate::run::Run;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let mut failures = Vec::new();
    for (release, spec) in KERNELS {
        match build(run.context.workspace(), release, spec) {
            Ok((kernel, kib)) => report.add(
                "guest driver",
                format!("Linux {kernel}"),
                format!("{kib} KiB"),
            ),
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

/// Builds for one kernel; returns its release and the size of the modules.
fn build(workspace: &Workspace, release: &str, spec: &TreeSpec) -> Result<(String, usize)> {
    let tree = Tree::ensure(workspace, spec)?;
    let Driver {
        path,
        rdma,
        kernel,
        messages,
    } = driver::build_anew(workspace, &tree)?;
    ensure!(
        kernel.starts_with(release),
        "{} has headers of Linux {kernel}",
        spec.name
    );
    ensure!(
        !messages.contains("warning:"),
        "Warnings for Linux {kernel}:\n{messages}"
    );
    let rdma = rdma.with_context(|| format!("No RDMA device for Linux {kernel}"))?;
    let kib = check(&path, &kernel)? + check(&rdma, &kernel)?;
    Ok((kernel, kib))
}

/// Looks at whether a module is for a kernel; returns its length in KiB.
fn check(path: &Path, kernel: &str) -> Result<usize> {
    let module = fs::read(path).with_context(|| format!("Cannot read {}", path.display()))?;
    let magic = format!("vermagic={kernel} ");
    let found = module
        .windows(magic.len())
        .any(|window| window == magic.as_bytes());
    ensure!(found, "{} is not for Linux {kernel}", path.display());
    Ok(module.len() / 1024)
}
