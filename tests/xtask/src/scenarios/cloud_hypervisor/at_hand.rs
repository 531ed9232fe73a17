//! Whether this machine can run the scenario: a Cloud Hypervisor, and a KVM that runs the guest.

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::process::check_output;
use farlane_kit::progress;

use super::vmm::Vmm;
use crate::run::Run;
use crate::scenarios::NotRun;

/// Names the binary, where that is not the `cloud-hypervisor` on `PATH`.
const VARIABLE: &str = "FARLANE_CLOUD_HYPERVISOR";
const PROGRAM: &str = "cloud-hypervisor";

/// How long a build of the guest may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(120);

/// How long the binary may take to say what it is.
const VERSION_TIMEOUT: Duration = Duration::from_secs(30);

/// The guest's sources, below the checkout, and what it is linked by.
const SOURCES: &str = "tests/xtask/guest/pvh";
const FILES: &[&str] = &[
    "start.S",
    "main.c",
    "machine.c",
    "virtio.c",
    "blk.c",
    "net.c",
    "farlane.c",
    "nvme.c",
];
const LINKED_BY: &str = "link.ld";

/// Without a C library, without registers that nobody saves, at the address where it is linked.
const FLAGS: &str = "-std=gnu11 -O2 -Wall -Wextra -Werror -m64 -ffreestanding -fno-pic -fno-pie \
                     -fno-stack-protector \
    -fcf-protection=none -fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns \
    -mgeneral-regs-only \
    -mno-red-zone -nostdlib -static -no-pie -Wl,--build-id=none";

/// What the scenario needs of this machine.
pub struct AtHand {
    /// Cloud Hypervisor.
    pub program: PathBuf,
    /// What it calls itself.
    pub version: String,
    /// The guest.
    pub guest: PathBuf,
}

impl AtHand {
    /// Finds the binary, builds the guest, and boots it without any device of Farlane.
    ///
    /// # Errors
    /// [`NotRun`] where there is no binary, or KVM does not run the guest; any other one is a
    /// failure.
    pub fn find(run: &Run<'_>) -> Result<Self> {
        let program = program()?;
        let mut command = Command::new(&program);
        command.arg("--version");
        let said = check_output(PROGRAM, command, VERSION_TIMEOUT)?;
        // It says more in further lines.
        let version = said.lines().next().unwrap_or_default();
        let at_hand = Self {
            program,
            version: version.trim().to_owned(),
            guest: build(run)?,
        };
        progress::note(&at_hand.version);
        if let Err(error) = std::fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
        {
            bail!(NotRun(format!("/dev/kvm cannot be opened: {error}")));
        }
        match Vmm::boot(run, &at_hand, "probe", &[]) {
            Ok(vmm) => vmm.end()?,
            Err(error) => {
                let error = format!("{error:#}");
                progress::note(&error);
                bail!(NotRun(format!(
                    "KVM does not run the guest under {}: {}",
                    at_hand.program.display(),
                    error.lines().next().unwrap_or_default()
                )))
            }
        }
        Ok(at_hand)
    }
}

/// The binary.
fn program() -> Result<PathBuf> {
    if let Some(named) = env::var_os(VARIABLE) {
        let named = PathBuf::from(named);
        ensure!(
            named.is_file(),
            "{VARIABLE} names {}, which is no file",
            named.display()
        );
        return Ok(named);
    }
    let folders = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&folders)
        .map(|folder| folder.join(PROGRAM))
        .find(|path| path.is_file());
    match found {
        Some(path) => Ok(path),
        None => bail!(NotRun(format!(
            "no {PROGRAM} is on PATH, and {VARIABLE} names none"
        ))),
    }
}

/// Compiles and links the guest.
fn build(run: &Run<'_>) -> Result<PathBuf> {
    let root = run.context.workspace().root();
    let sources = root.join(SOURCES);
    let guest = run.path("guest");
    let mut compiler = Command::new("cc");
    compiler.current_dir(&sources).args(FLAGS.split(' '));
    compiler.arg("-I").arg(root.join("guest-driver"));
    compiler.arg("-Wl,-T").arg(format!("-Wl,{LINKED_BY}"));
    compiler.arg("-o").arg(&guest).args(FILES);
    progress::step("Compiling the guest", || {
        check_output("the C compiler", compiler, BUILD_TIMEOUT)
    })
    .with_context(|| format!("The guest of {} does not build", sources.display()))?;
    Ok(guest)
}
