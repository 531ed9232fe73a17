//! `cargo xtask miri`: unit tests in Miri, of modules that it can run: they map no files and open
//! no sockets.

use std::process::{Command, ExitCode};

use anyhow::{Result, bail};
use farlane_kit::workspace::Workspace;

use crate::checked::{Tests, cargo, chosen, in_sysroot, run_tests};

/// A crate, and the modules of it whose tests Miri can run; without modules, all of them.
struct Covered {
    package: &'static str,
    modules: &'static [&'static str],
}

const fn covered(package: &'static str, modules: &'static [&'static str]) -> Covered {
    Covered { package, modules }
}

/// Those with unsafe code first.
const COVERED: &[Covered] = &[
    covered(
        "farlane-rdma-client",
        &["work::", "spin::", "call::", "queue_tests::"],
    ),
    covered(
        "farlane-verbs",
        &[
            "object::",
            "post::",
            "attributes::",
            "completion::",
            "strings::",
        ],
    ),
    covered("farlane-verbs-sys", &["qp_attr::"]),
    covered(
        "farlane-io-core",
        &[
            "region::",
            "automatic::",
            "ranges::",
            "lock::",
            "decide::",
            "plan::model::",
            "plan::greedy::",
            "readahead::",
            "stream::",
        ],
    ),
    covered("farlane-block", &["engine::clear::", "engine::slots::"]),
    covered("farlane-gpu-driver", &["allocator::"]),
    covered("farlane-abi", &[]),
    covered("farlane-vhost-user", &["segment::"]),
    covered(
        "farlane-rdma-remoting",
        &["request::", "attributes::", "table::"],
    ),
    covered("farlane-zero-copy", &["atomic::", "envelope::", "gate::"]),
];

/// Cases of a property test: Miri is some thousand times slower than the processor.
const CASES: &str = "8";

/// What Miri makes its standard library of.
const STANDARD_LIBRARY: &str = "lib/rustlib/src/rust/library/Cargo.lock";

/// Runs the tests of those packages whose names contain the filter.
pub fn run(workspace: &Workspace, filter: Option<&str>) -> Result<ExitCode> {
    let packages = chosen(COVERED.iter().map(|covered| covered.package), filter)?;
    require_miri()?;
    let mut all = Tests {
        ended_well: true,
        ..Tests::default()
    };
    for covered in COVERED
        .iter()
        .filter(|covered| packages.contains(&covered.package))
    {
        let mut command = cargo(workspace, "miri");
        command.args(["+nightly", "miri", "test", "--no-fail-fast", "--lib"]);
        command.args(["--package", covered.package, "--"]);
        command.args(covered.modules);
        command
            // Time, and what property tests read of the environment.
            .env("MIRIFLAGS", "-Zmiri-disable-isolation")
            .env("PROPTEST_CASES", CASES)
            .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true")
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO")
            .env_remove("RUSTUP_TOOLCHAIN");
        let tests = run_tests(&format!("{} in Miri", covered.package), command)?;
        // A module that was renamed must not go unnoticed.
        all.ended_well &= tests.ended_well && tests.passed + tests.failed > 0;
        all.passed += tests.passed;
        all.failed += tests.failed;
    }
    Ok(all.conclude("Miri"))
}

/// Miri is a component of nightly toolchains, and makes its standard library of another.
fn require_miri() -> Result<()> {
    let nightly = |program: &str| {
        let mut command = Command::new(program);
        command.arg("+nightly").env_remove("RUSTUP_TOOLCHAIN");
        command
    };
    let has_miri = nightly("cargo").args(["miri", "--version"]).output();
    if !has_miri.is_ok_and(|output| output.status.success()) {
        bail!(
            "There is no Miri: `rustup toolchain install nightly --component miri,rust-src` \
             installs it"
        );
    }
    if !in_sysroot(nightly("rustc"), STANDARD_LIBRARY)? {
        bail!(
            "Miri has no source of the standard library: `rustup +nightly component add rust-src` \
             installs it"
        );
    }
    Ok(())
}
