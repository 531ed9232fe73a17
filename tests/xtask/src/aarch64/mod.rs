//! `cargo xtask aarch64`: everything is built for 64-bit Arm; unit tests run under QEMU's user
//! emulation, as far as that carries out the system calls they make; the others, and those of the
//! daemons, run in a machine that QEMU emulates, whose kernel is a real one.

mod machine;

use std::env;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result};
use farlane_kit::packages;
use farlane_kit::process::check_output;
use farlane_kit::workspace::Workspace;

use self::machine::{FILTERED, Job};
use crate::checked::{Tests, cargo, chosen, in_sysroot, run_tests};

/// The target's name in Rust.
const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Linker, C library and emulator.
const PACKAGES: &[&str] = &[
    "gcc-aarch64-linux-gnu",
    "libc6-dev-arm64-cross",
    "qemu-user-static",
];

/// How a program of the target is started, with the C library of the packages above.
const RUNNER: &str = "qemu-aarch64-static -L /usr/aarch64-linux-gnu";

/// Tests of the daemons that cannot run in the machine: which program, and which test.
const NOT_IN_THE_MACHINE: &[(&str, &str)] = &[];

/// How long rustup may take to fetch the standard library.
const RUSTUP_TIMEOUT: Duration = Duration::from_secs(600);

/// A package, and those of its tests that the emulator cannot run.
struct Covered {
    package: &'static str,
    without: &'static [&'static str],
}

const fn covered(package: &'static str, without: &'static [&'static str]) -> Covered {
    Covered { package, without }
}

/// Packages whose unit tests run.
const COVERED: &[Covered] = &[
    covered("farlane", &[]),
    covered("farlane-abi", &[]),
    covered("farlane-blk", &[]),
    covered("farlane-block", &[]),
    covered("farlane-borrow", &[]),
    covered(
        "farlane-daemon",
        &[
            // Start their own program again, which is not one of this machine.
            "control::tests::a_hang_up_ends_nobody_and_a_request_to_end_does",
            "logging::tests::the_journal_has_priorities_and_is_known_by_its_number",
            "per_node::tests::a_thread_that_cannot_be_pinned_says_so_a_few_times_only",
            FILTERED,
        ],
    ),
    covered("farlane-gpu", &[]),
    covered("farlane-gpu-driver", &[]),
    covered("farlane-guest-device", &[]),
    covered(
        "farlane-io-core",
        &[
            // An ioctl of XFS, and looks into the page cache, which the emulator does not know.
            "files::tests::files_of_a_realtime_device_are_elsewhere",
            "residency::tests::runs_are_found_as_they_are_and_looking_changes_nothing",
            "tunnel::tests::envelopes_that_got_onto_a_disk_are_written_over_at_once",
            // It looks at a buffer before it looks at the descriptor.
            "sys::tests::an_error_is_returned_and_errno_stays",
            // Forks in a handler of signals, of which it holds some back.
            "fork::tests::a_signal_handler_forks_while_its_thread_does",
            // Read in /proc by number which call a thread sleeps in: the number is x86-64's there.
            "locks::tests::who_locks_waits_for_those_who_use_a_descriptor_and_a_handler_does_not",
            "tunnel::tests::a_buffer_that_comes_back_wakes_somebody_who_waits_for_one_of_its_size",
        ],
    ),
    covered("farlane-io-tool", &[]),
    covered("farlane-lend", &[]),
    // The emulator has no bpf() and no AF_XDP.
    covered(
        "farlane-net",
        &["ebpf::steering::tests", "port::xdp::tests"],
    ),
    // Nor preadv2(), by which eventfds that may block are read.
    covered(
        "farlane-ntb",
        &[
            "event::tests::an_eventfd_that_blocks_is_drained_without_waiting",
            "shm::tests::both_ends_have_scratchpads_and_doorbells",
        ],
    ),
    // Nor io_uring.
    covered("farlane-nvme", &["controller::sync::tests"]),
    covered("farlane-pages", &[]),
    covered("farlane-pci", &[]),
    // No preadv2().
    covered(
        "farlane-rdma",
        &["host::events::tests::an_event_waits_for_its_eventfd"],
    ),
    covered("farlane-rdma-client", &[]),
    covered("farlane-rdma-cm", &[]),
    covered("farlane-rdma-remoting", &[]),
    covered("farlane-rdmacm", &[]),
    covered("farlane-run", &[]),
    covered("farlane-support", &[]),
    // No preadv2(), and no filters of system calls.
    covered(
        "farlane-sys",
        &[
            "eventfd::tests::an_adopted_eventfd_never_blocks",
            "eventfd::tests::a_full_eventfd_does_not_block_who_signals_it",
            "memory::tests::a_refusal_is_an_error",
            "memory::tests::memory_is_had_",
        ],
    ),
    // Waits for so long for a shell, which takes longer there.
    covered(
        "farlane-tool",
        &["doctor::program::tests::a_program_is_asked_for_so_long_and_so_much"],
    ),
    covered("farlane-topology", &[]),
    // No ptrace(), by which threads are stopped while memory is moved; those of `guard` do not end
    // there, as they do on a kernel of that architecture.
    covered(
        "farlane-transport",
        &[
            "guard::tests",
            "moved_memory::tests",
            "owner::tests",
            "stop::tests",
        ],
    ),
    // No MADV_POPULATE_WRITE, and no huge pages.
    covered(
        "farlane-verbs",
        &[
            "advise::tests::pages_are_there_after_an_advice",
            "dmabuf::tests::huge_pages_are_mapped_and_unmapped_whole",
        ],
    ),
    covered("farlane-verbs-sys", &[]),
    // No eventfds that the kernel signals for a device.
    covered("farlane-vfio", &["source::tests::events"]),
    covered("farlane-vfio-remote", &[]),
    covered("farlane-vfio-user", &[]),
    // No preadv2().
    covered(
        "farlane-vhost-user",
        &["call::tests::an_eventfd_that_has_come_to_block_blocks_nobody"],
    ),
    covered("farlane-vm-front-end", &[]),
    covered("farlane-worker", &[]),
    covered(
        "farlane-zero-copy",
        &[
            // Files in /proc are others there.
            "memory_file::tests::what_is_not_memory_is_refused",
            // Memory and groups of another process.
            "process::tests::a_successor_with_the_same_number_is_not_touched",
            "process::tests::memory_is_reached_for_as_long_as_its_program_is_there",
            "process::tests::more_groups_than_are_usual_are_all_said",
            // Faults of pages that are not there.
            "region::tests::no_memory_reads_as_zeroes_and_takes_what_is_written",
        ],
    ),
];

/// Daemons, whose tests start them, confined as they are by default.
const DAEMONS: &[&str] = &[
    "farlane-blk",
    "farlane-borrow",
    "farlane-lend",
    "farlane-net",
    "farlane-rdma",
];

/// Builds the workspace, and runs the tests of those packages whose names contain the filter: where
/// they can be run; or only those in the emulated machine.
pub fn run(workspace: &Workspace, filter: Option<&str>, only_vm: bool) -> Result<ExitCode> {
    let covered = COVERED.iter().map(|covered| covered.package);
    let chosen = chosen(covered, filter)?;
    packages::ensure(PACKAGES)?;
    ensure_target()?;
    let mut all = Tests {
        ended_well: true,
        ..Tests::default()
    };
    if !only_vm {
        if filter.is_none() {
            let mut command = cargo_for(workspace);
            command.args(["build", "--workspace", "--all-targets", "--target", TARGET]);
            all.ended_well &= run_tests("Building for aarch64", command)?.ended_well;
        }
        for covered in covered_of(&chosen) {
            all.add_all(user_emulation(workspace, covered)?);
        }
    }
    let daemons = daemons(workspace, &chosen)?;
    let others = left_out(workspace, &chosen)?;
    if !daemons.is_empty() || !others.is_empty() {
        all.add_all(machine::run(workspace, &daemons, &others)?);
    }
    Ok(all.conclude("aarch64"))
}

fn covered_of<'a>(chosen: &'a [&str]) -> impl Iterator<Item = &'static Covered> + 'a {
    let is_chosen = |covered: &&Covered| chosen.contains(&covered.package);
    COVERED.iter().filter(is_chosen)
}

/// Runs the unit tests of a package, as far as the emulator can.
fn user_emulation(workspace: &Workspace, covered: &Covered) -> Result<Tests> {
    let mut command = cargo_for(workspace);
    command.args(["test", "--no-fail-fast", "--lib", "--target", TARGET]);
    command.args(["--package", covered.package, "--"]);
    for test in covered.without {
        command.args(["--skip", test]);
    }
    let mut tests = run_tests(&format!("{} on aarch64", covered.package), command)?;
    // A package that has lost its tests must not go unnoticed.
    tests.ended_well &= tests.passed + tests.failed > 0;
    Ok(tests)
}

/// All tests in the daemons' `tests` folders.
fn daemons(workspace: &Workspace, chosen: &[&str]) -> Result<Vec<Job>> {
    let daemons = DAEMONS.iter().filter(|daemon| chosen.contains(daemon));
    let mut command = cargo_for(workspace);
    command.args(["test", "--no-run", "--test", "*", "--target", TARGET]);
    let mut any = false;
    for daemon in daemons {
        command.args(["--package", daemon]);
        any = true;
    }
    if !any {
        return Ok(Vec::new());
    }
    let programs = workspace.test_programs(command)?;
    let jobs = programs.into_iter().map(|test| {
        let left = NOT_IN_THE_MACHINE.iter();
        let left = left.filter(|(program, _)| *program == test.name);
        let words = left.flat_map(|(_, test)| ["--skip".to_owned(), (*test).to_owned()]);
        Job {
            words: words.collect(),
            folder: test.folder,
            program: test.program,
        }
    });
    Ok(jobs.collect())
}

/// The unit tests that user emulation cannot run.
fn left_out(workspace: &Workspace, chosen: &[&str]) -> Result<Vec<Job>> {
    let mut jobs = Vec::new();
    for covered in covered_of(chosen).filter(|covered| !covered.without.is_empty()) {
        let mut command = cargo_for(workspace);
        command.args(["test", "--no-run", "--lib", "--target", TARGET]);
        command.args(["--package", covered.package]);
        for test in workspace.test_programs(command)? {
            jobs.push(Job {
                words: covered.without.iter().map(|&test| test.into()).collect(),
                folder: test.folder,
                program: test.program,
            });
        }
    }
    Ok(jobs)
}

fn cargo_for(workspace: &Workspace) -> Command {
    let mut command = cargo(workspace, "aarch64");
    command
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
            "aarch64-linux-gnu-gcc",
        )
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", RUNNER);
    // The processor is emulated, and what is compiled is run once.
    for (name, value) in [
        ("CARGO_PROFILE_DEV_OPT_LEVEL", "1"),
        ("CARGO_PROFILE_DEV_CODEGEN_UNITS", "16"),
    ] {
        if env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    command
}

/// Has rustup fetch the target's standard library where the toolchain lacks it.
fn ensure_target() -> Result<()> {
    if in_sysroot(Command::new("rustc"), &format!("lib/rustlib/{TARGET}/lib"))? {
        return Ok(());
    }
    let mut command = Command::new("rustup");
    command.args(["target", "add", TARGET]);
    check_output("rustup target add", command, RUSTUP_TIMEOUT)
        .with_context(|| format!("There is no standard library for {TARGET}"))?;
    Ok(())
}

#[test]
fn every_package_of_the_product_that_has_tests_is_covered() {
    let workspace = Workspace::find().unwrap();
    let packages = crate::unit::Package::all(&workspace).unwrap();
    let left = packages.iter().filter_map(|package| {
        let (name, folder, has_tests) = package.tested();
        let is_covered = COVERED.iter().any(|covered| covered.package == name);
        (has_tests && !folder.starts_with("tests/") && !is_covered).then_some(name)
    });
    // Its tests are programs in `tests`.
    assert_eq!(left.collect::<Vec<_>>(), ["farlane-io"]);
}
