//! How much is measured: everything, or one tiny round of everything to see that it works.

use farlane_kit::compare::Plan;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Set once, before anything is measured.
static IS_SMOKE: AtomicBool = AtomicBool::new(false);

/// With `--smoke`: one tiny round of every measurement, no bar enforced.
pub fn set_smoke(smoke: bool) {
    IS_SMOKE.store(smoke, Ordering::Relaxed);
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
