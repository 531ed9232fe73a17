//! A lender and a borrower of this run's own.

use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A program that is ended on drop.
struct Program {
    name: String,
    child: Child,
}

impl Program {
    fn start(program: &Path, arguments: &[String]) -> Result<Self> {
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("Cannot start {}", program.display()))?;
        Ok(Self {
            name: program.display().to_string(),
            child,
        })
    }

    fn wait_for(&mut self, path: &Path) -> Result<()> {
        let began = Instant::now();
        while !path.exists() {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended: {status}", self.name);
            }
            if began.elapsed() > Duration::from_secs(10) {
                bail!("{} makes no socket", self.name);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let ended = self.child.kill().and_then(|()| self.child.wait());
        if let Err(e) = ended {
            eprintln!("Cannot end {}: {e}", self.name);
        }
    }
}

/// A lender with one device, and a borrower of it.
pub struct Pair {
    /// Dropped before the lender.
    _borrower: Program,
    lender: Program,
    folder: tempfile::TempDir,
}

impl Pair {
    /// Starts both. `source` is what follows `NAME=` in the lender's `--device`.
    pub fn start(lender: &Path, borrower: &Path, source: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let link = folder.path().join("lender");
        let socket = folder.path().join("nvme");
        let mut lender = Program::start(
            lender,
            &[
                "--listen".into(),
                format!("unix:{}", link.display()),
                "--device".into(),
                format!("nvme={source}"),
            ],
        )?;
        lender.wait_for(&link)?;
        let mut borrower = Program::start(
            borrower,
            &[
                "--socket-path".into(),
                socket.display().to_string(),
                "--lender".into(),
                format!("unix:{}", link.display()),
                "--device".into(),
                "nvme".into(),
            ],
        )?;
        borrower.wait_for(&socket)?;
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
        farlane_kit::compare::cpu::of_process(self.lender.child.id())
    }
}
