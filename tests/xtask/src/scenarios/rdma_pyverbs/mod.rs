//! rdma-core's own tests of verbs and of connections, with our libibverbs and librdmacm over the
//! daemon's host socket.

mod example;
mod huge_pages;
mod results;
mod skips;
mod stock;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use farlane_kit::guest_root::GuestFile;
use farlane_kit::packages;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::tree::RDMA_CORE;

use self::huge_pages::HugePages;
use self::results::{Ending, Test};
use self::skips::{Sorted, Where};
pub use self::stock::run as stock;
use super::NotRun;
use crate::conditions::no_complaint;
use crate::farlane::wait_device;
use crate::place::{Host, Place};
use crate::run::Run;
use crate::tools::TOOL_TIMEOUT;

/// Debian's packages that the tests need on this machine. The bindings of vendors' libraries are
/// loaded with the tests.
const PACKAGES: &[&str] = &["ibverbs-providers", "python3"];

/// The tests themselves and what they load, which are not installed: with them would come services
/// and rules for devices.
const UNPACKED: &[&str] = &["python3-pyverbs", "librdmacm1"];

/// The release of rdma-core that the list of skipped tests is of: Debian 12's.
const RELEASE: &str = "44.";

/// How many tests pass at least, also without [`HugePages`].
const PASSES: usize = 143;

/// What is run.
const PROGRAM: &str = "rdma-core's tests";

/// What runs them, and tells them the address of the device, which has no network interface: of the
/// checkout, and where guests have it.
const RUNNER: &str = "tests/xtask/guest/pyverbs_tests.py";
const RUNNER_IN_GUEST: &str = "usr/lib/farlane/pyverbs_tests.py";

/// Where guests have the example.
const EXAMPLE_IN_GUEST: &str = "usr/lib/farlane/verbs.py";

/// The usual address of the host's device.
const HOST: &str = "127.0.0.1";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    match packages::offered(UNPACKED[0])? {
        Some(version) if version.starts_with(RELEASE) => {}
        other => {
            let other = other.as_deref().unwrap_or("no such package");
            let reason = format!(
                "the list of skipped tests is of {} {RELEASE}0; this machine's sources have \
                 {other}",
                UNPACKED[0]
            );
            return Err(NotRun(reason).into());
        }
    }
    packages::ensure(PACKAGES)?;
    let workspace = run.context.workspace();
    let folder = packages::unpacked(workspace, &format!("pyverbs-{RELEASE}0"), UNPACKED)?;
    let farlane = run.context.on_host()?;
    let socket = run.path("host");
    let backend = farlane.daemon(run, &[], Some(&socket))?;
    let host = Host::new(farlane.programs(), &socket, run.logs());
    let huge_pages = HugePages::of_machine();
    let python = python(&folder);
    let text = example::path(run).display().to_string();
    example::run(
        &host,
        &format!("export {python}; exec farlane-run /usr/bin/python3 '{text}'"),
    )?;
    let tests = tests(&host, &folder, &python, &runner(run))?;
    drop(huge_pages);
    backend.stop()?;

    judge(Where::Host, &tests, &[], PASSES, report)
}

/// How many tests of the guests' release of rdma-core pass at least.
const PASSES_IN_GUEST: usize = 138;

/// The address of the guest's device.
const GUEST: &str = "10.0.0.1";

/// How long they may take there, where a processor is emulated.
const LIMIT_IN_GUEST: Duration = Duration::from_secs(900);

/// The test that ends with an error in a guest: it reads the kernel's list of keys, of which there
/// is none without a device of the kernel's RDMA.
const FAILS_IN_GUEST: &[&str] = &["test_device.DeviceTest.test_get_pkey_index"];

/// The tests of the release that guests have, in one of them.
pub fn in_guest(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let farlane = run.context.farlane()?;
    let socket = run.path("a");
    let backend = farlane.daemon(run, &[(&socket, GUEST)], None)?;
    let files = [
        GuestFile::new(runner(run), RUNNER_IN_GUEST),
        GuestFile::new(example::path(run), EXAMPLE_IN_GUEST),
    ];
    let files = farlane.guest_files().chain(files);
    let config = VmConfig::new("a").farlane(&socket).files(files);
    let [guest] = run.boot([config.python()])?;
    wait_device(&guest)?;
    example::run(
        &guest,
        &format!("exec farlane-run python3 /{EXAMPLE_IN_GUEST}"),
    )?;
    let line = format!(
        "mount -t tmpfs none /mnt && cp -r /{RDMA_CORE}/tests /mnt && cd /mnt && \
         {{ gunzip -f tests/*.gz 2>/dev/null; export PYTHONPATH=/mnt:/mnt/tests; \
         exec farlane-run python3 /{RUNNER_IN_GUEST} {GUEST} -v; }}"
    );
    let tests = results(&guest, &line, LIMIT_IN_GUEST)?;
    no_complaint(&guest)?;
    judge(Where::Vm, &tests, FAILS_IN_GUEST, PASSES_IN_GUEST, report)?;
    backend.stop()
}

/// Tells how the tests have ended, of which those are to fail and so many are to pass.
fn judge(
    place: Where,
    tests: &[Test],
    fail: &[&str],
    least: usize,
    report: &mut Report,
) -> Result<()> {
    let failed = tests.iter().filter_map(|test| match &test.ending {
        Ending::Failed(how) => Some((test.name.as_str(), how)),
        _ => None,
    });
    let (known, others): (Vec<_>, Vec<_>) = failed.partition(|(name, _)| fail.contains(name));
    ensure!(others.is_empty(), "Failed: {others:?}");
    ensure!(
        known.len() == fail.len(),
        "Of {fail:?}, which are to fail, only these have: {known:?}"
    );
    let skipped = Sorted::new(tests, place);
    let surplus = skipped.surplus();
    ensure!(
        surplus.is_empty(),
        "Skipped, which is not listed:\n{}",
        surplus.join("\n")
    );
    let passed = tests
        .iter()
        .filter(|test| test.ending == Ending::Passed)
        .count();
    ensure!(
        passed >= least,
        "{passed} tests pass, which is less than {least}"
    );
    let own = tests.len() - skipped.vendors;
    let place = place.name();
    report.add(place, PROGRAM, format!("{passed} of {own} pass"));
    for (cause, count) in skipped.causes() {
        report.add(place, format!("skipped: {cause}"), count.to_string());
    }
    Ok(())
}

fn runner(run: &Run<'_>) -> PathBuf {
    run.context.workspace().root().join(RUNNER)
}

/// What Python finds the bindings of an unpacked package by: variables of the shell.
fn python(folder: &Path) -> String {
    let shell = |path: &str| format!("'{}'", folder.join(path).display());
    let documents = shell("usr/share/doc/rdma-core");
    let libraries = shell("usr/lib/x86_64-linux-gnu");
    let modules = [
        shell("usr/lib/python3/dist-packages"),
        documents,
        shell("usr/share/doc/rdma-core/tests"),
    ]
    .join(":");
    format!("LD_LIBRARY_PATH={libraries} PYTHONPATH={modules} PYTHONDONTWRITEBYTECODE=1")
}

/// Runs the tests, which lie in the folder of an unpacked package.
fn tests(host: &Host, folder: &Path, python: &str, runner: &Path) -> Result<Vec<Test>> {
    let documents = folder.join("usr/share/doc/rdma-core");
    let documents = documents.display();
    // Debian's own interpreter, which the bindings are built for. Their files may be compressed, as
    // documentation is.
    let line = format!(
        "cd '{documents}' && {{ gunzip --force tests/*.gz 2>/dev/null; export {python}; \
         exec farlane-run /usr/bin/python3 '{}' {HOST} -v; }}",
        runner.display()
    );
    results(host, &line, TOOL_TIMEOUT)
}

/// Runs the tests by a command line, and reads how they have ended.
fn results(place: &dyn Place, line: &str, limit: Duration) -> Result<Vec<Test>> {
    let output = place.spawn(line)?.wait(limit)?;
    let said = output.all();
    let tests = results::parse(&said);
    match tests {
        // A failure of a test is told by its name.
        Ok(tests) if output.success() || tests.iter().any(has_failed) => Ok(tests),
        Ok(_) => bail!("{PROGRAM} ended with {}:\n{said}", output.how()),
        Err(error) => Err(error.context(format!("{PROGRAM}: {}:\n{said}", output.how()))),
    }
}

fn has_failed(test: &Test) -> bool {
    matches!(test.ending, Ending::Failed(_))
}
