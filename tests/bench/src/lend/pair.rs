//! A lender and a borrower of this run's own.

use crate::scale;
use anyhow::Result;
use farlane_kit::backend::Backend;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A lender with one device, and a borrower of it.
pub struct Pair {
    /// Dropped before the lender.
    _borrower: Backend,
    lender: Backend,
    folder: tempfile::TempDir,
}

impl Pair {
    /// Starts both, in a bench whose results go to `out`. `source` is what follows `NAME=` in the
    /// lender's `--device`.
    pub fn start(lender: &Path, borrower: &Path, source: &str, out: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let link = folder.path().join("lender");
        let socket = folder.path().join("nvme");
        let address = format!("unix:{}", link.display());
        let mut command = Command::new(lender);
        command.args(["--listen", &address]);
        command.args(["--device", &format!("nvme={source}")]);
        let log = scale::log(out, "farlane-lend");
        let lender = Backend::start("farlane-lend", command, &[&link], &log)?;
        let mut command = Command::new(borrower);
        command.arg("--socket-path").arg(&socket);
        command.args(["--lender", &address, "--device", "nvme"]);
        let log = scale::log(out, "farlane-borrow");
        let borrower = Backend::start("farlane-borrow", command, &[&socket], &log)?;
        Ok(Self {
            _borrower: borrower,
            lender,
            folder,
        })
    }

    /// The borrower's vfio-user socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("nvme")
    }

    /// CPU time of the lender so far.
    pub fn cpu_time(&self) -> Result<Duration> {
        farlane_kit::compare::cpu::of_process(self.lender.pid())
    }
}
