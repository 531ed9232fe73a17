//! Whether this machine can run the scenario: a Cloud Hypervisor, and a KVM that runs the guest.

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use farlane_kit::process::check_output;
use farlane_kit::progress;

use super::vmm::Vmm;
use crate::pvh;
use crate::run::Run;
use crate::scenarios::NotRun;

/// Names the binary, where that is not the `cloud-hypervisor` on `PATH`.
const VARIABLE: &str = "FARLANE_CLOUD_HYPERVISOR";
const PROGRAM: &str = "cloud-hypervisor";

/// How long the binary may take to say what it is.
const VERSION_TIMEOUT: Duration = Duration::from_secs(30);

/// What the guest is made of.
const FILES: &[&str] = &[
    "main.c",
    "virtio.c",
    "blk.c",
    "net.c",
    "farlane.c",
    "nvme.c",
];

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
            guest: pvh::build(run, FILES)?,
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
