//! Totals by way.

use crate::plan::trace::Way;
use std::sync::atomic::{AtomicU64, Ordering};

static CACHE: AtomicU64 = AtomicU64::new(0);
static READ_AHEAD: AtomicU64 = AtomicU64::new(0);
static P2P: AtomicU64 = AtomicU64::new(0);
static REQUESTS: AtomicU64 = AtomicU64::new(0);

/// What has been moved between files and device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes through the page cache.
    pub cache: u64,
    /// Bytes through pages that read-ahead brought.
    pub read_ahead: u64,
    /// Bytes by P2P.
    pub p2p: u64,
    /// Number of calls.
    pub requests: u64,
}

/// Totals since the program began.
#[must_use]
pub fn totals() -> Totals {
    Totals {
        cache: CACHE.load(Ordering::Relaxed),
        read_ahead: READ_AHEAD.load(Ordering::Relaxed),
        p2p: P2P.load(Ordering::Relaxed),
        requests: REQUESTS.load(Ordering::Relaxed),
    }
}

impl Totals {
    /// As a line of JSON, without its end.
    #[must_use]
    pub fn line(&self) -> String {
        format!(
            "{{\"cache\":{},\"read_ahead\":{},\"p2p\":{},\"requests\":{}}}",
            self.cache, self.read_ahead, self.p2p, self.requests
        )
    }
}

/// Counts bytes that have moved one way.
pub(crate) fn add(way: Way, bytes: u64) {
    let total = match way {
        Way::Cache => &CACHE,
        Way::ReadAhead => &READ_AHEAD,
        Way::P2p => &P2P,
    };
    total.fetch_add(bytes, Ordering::Relaxed);
}

/// Counts a call on device memory.
pub(crate) fn request() {
    REQUESTS.fetch_add(1, Ordering::Relaxed);
}
