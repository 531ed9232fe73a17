//! How much is measured: everything, or one tiny round of everything to see that it works.

use anyhow::{Context as _, Result};
use farlane_kit::compare::Plan;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The folder, beside the results, of what daemons log. `cargo xtask bench` quotes it.
const LOGS: &str = "logs";

/// Set once, before anything is measured.
static IS_SMOKE: AtomicBool = AtomicBool::new(false);

/// With `--smoke`: one tiny round of every measurement, no bar enforced.
pub fn set_smoke(smoke: bool) {
    IS_SMOKE.store(smoke, Ordering::Relaxed);
}

/// Options of every bench.
#[derive(Clone, clap::Args)]
pub struct Output {
    /// Where the results go.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Makes one tiny round of every measurement, and judges nothing.
    #[arg(long)]
    smoke: bool,
}

impl Output {
    /// Goes by them; returns where the results go.
    pub fn begin(&self) -> Result<&Path> {
        set_smoke(self.smoke);
        let logs = self.out.join(LOGS);
        std::fs::create_dir_all(&logs)
            .with_context(|| format!("Cannot make {}", logs.display()))?;
        Ok(&self.out)
    }

    /// Where the results go.
    pub fn folder(&self) -> &Path {
        &self.out
    }
}

/// The log of a daemon of a bench whose results go to `out`.
pub fn log(out: &Path, daemon: &str) -> PathBuf {
    out.join(LOGS).join(daemon).with_extension("log")
}

/// Whether only that all measurements work is to be shown.
pub fn is_smoke() -> bool {
    IS_SMOKE.load(Ordering::Relaxed)
}

/// The rounds of comparisons.
pub fn plan() -> Plan {
    if is_smoke() { Plan::SMOKE } else { Plan::LONG }
}

/// How long something is measured.
pub fn time(full: Duration) -> Duration {
    if is_smoke() {
        (full / 50).max(Duration::from_millis(10))
    } else {
        full
    }
}

/// How often something is done.
pub fn count(full: usize) -> usize {
    if is_smoke() {
        (full / 100).clamp(1, 50)
    } else {
        full
    }
}

/// Bytes of a file.
pub fn bytes(full: u64) -> u64 {
    if is_smoke() { full / 8 } else { full }
}
