//! `cargo xtask asan`: the tests of the crates with unsafe code, and the corpus of the fuzz
//! targets, under AddressSanitizer.

use std::process::ExitCode;

use anyhow::Result;
use farlane_kit::workspace::Workspace;

use crate::checked::{cargo, chosen, run_tests};

/// The crates whose modules map memory, walk rings, or talk to C; and the replay of the corpus,
/// which drives all backends.
const PACKAGES: &[&str] = &[
    "farlane-zero-copy",
    "farlane-block",
    "farlane-rdma-remoting",
    "farlane-ntb",
    "farlane-vfio-user",
    "farlane-vfio",
    "farlane-nvme",
    "farlane-gpu",
    "farlane-vhost-user",
    "farlane-transport",
    "farlane-rdma-client",
    "farlane-io-core",
    "farlane-fuzz-targets",
];

/// With a target, the flags reach neither build scripts nor procedural macros.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Runs the tests of those packages whose names contain the filter.
pub fn run(workspace: &Workspace, filter: Option<&str>) -> Result<ExitCode> {
    let packages = chosen(PACKAGES.iter().copied(), filter)?;
    let mut command = cargo(workspace, "asan");
    // Not the examples in documentation, which are linked by other flags.
    command.args(["test", "--no-fail-fast", "--target", TARGET]);
    command.args(["--lib", "--bins", "--tests"]);
    for package in packages {
        command.args(["--package", package]);
    }
    command
        // The flag is not stable, but the stable toolchain has the runtime.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", "-Zsanitizer=address")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        // A SIGBUS that is not handled ends the process, as tests expect; without this, the runtime
        // ends it with a status of its own.
        .env("ASAN_OPTIONS", "handle_sigbus=0")
        // Checks take long to optimise.
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1");
    let tests = run_tests("Tests under AddressSanitizer", command)?;
    Ok(tests.conclude("AddressSanitizer"))
}
