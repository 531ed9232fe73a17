//! `cargo xtask kasan`: the guest driver's scenarios in a kernel with KASAN, lockdep and kmemleak.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::checking_kernel;
use farlane_kit::report::Report;
use farlane_kit::workspace::Workspace;

use crate::run::{Context, Run};
use crate::scenarios;

/// The scenarios in which the driver does most.
const SCENARIOS: &[&str] = &[
    "driver-device",
    "rdma-pingpong",
    "rdma-crash",
    "rdma-isolation",
    "rdma-stock",
    "rdma-stock-crash",
    "rdma-stock-isolation",
];

/// What the kernel's checkers say when they have found something.
const FOUND: &[&str] = &[
    "BUG: ",
    "WARNING: ",
    "possible circular locking",
    "possible recursive locking",
    "inconsistent lock state",
    "suspicious RCU usage",
    "unreferenced object",
];

/// Builds the kernel where it is not there yet, and runs the scenarios in it.
pub fn run(workspace: &Workspace, filter: &str) -> Result<ExitCode> {
    let names: Vec<_> = SCENARIOS
        .iter()
        .filter(|name| name.contains(filter))
        .collect();
    ensure!(
        !names.is_empty(),
        "None of {SCENARIOS:?} contains {filter:?}"
    );
    let tree = checking_kernel::tree(workspace)?;
    let kit = Context::new(workspace)
        .kit()?
        .with_packed_kernel_of(&tree)?;
    let context = Context::with_kit(kit);
    let mut report = Report::new();
    let mut code = ExitCode::SUCCESS;
    for name in names {
        let scenario = scenarios::find(name)?;
        let run = Run::new(&context, name)?;
        let result = scenario
            .perform(&run, &mut report)
            .and_then(|()| nothing_found(run.logs()));
        match result {
            Ok(()) => {
                report.add("kernel with KASAN", *name, "nothing found");
                run.forget_logs()?;
            }
            Err(error) => {
                eprintln!("Error: {name}: {error:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    print!("{report}");
    Ok(code)
}

/// No guest's console has a word of the checkers.
fn nothing_found(logs: &Path) -> Result<()> {
    let entries = fs::read_dir(logs).with_context(|| format!("Cannot read {}", logs.display()))?;
    let mut consoles = 0;
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|kind| kind != "console") {
            continue;
        }
        consoles += 1;
        let text = fs::read(&path).with_context(|| format!("Cannot read {}", path.display()))?;
        let text = String::from_utf8_lossy(&text);
        let said = text
            .lines()
            .find(|line| FOUND.iter().any(|found| line.contains(found)));
        ensure!(
            said.is_none(),
            "{}: {}",
            path.display(),
            said.unwrap_or_default()
        );
    }
    ensure!(consoles > 0, "No guest has written to its console");
    Ok(())
}
