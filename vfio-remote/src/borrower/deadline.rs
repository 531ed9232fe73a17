//! The time that a virtual machine monitor leaves us.

use crate::lender::unmapping;
use std::time::{Duration, Instant};

/// How long one request of a monitor, which waits five seconds for us, waits for lenders and other devices: for all that it asks
/// of them.
const PATIENCE: Duration = Duration::from_millis(4500);
/// So much of it is left when a device that goes on with what it has begun is waited for no more: so that its last word comes in
/// time.
const LAST_WORD: Duration = Duration::from_millis(500);

/// When all is over that one request waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    /// That of a request that begins now.
    pub fn begin() -> Self {
        Self(Instant::now() + PATIENCE)
    }

    /// When the last answer has to be there.
    pub fn answered_by(self) -> Instant {
        self.0
    }

    /// So much earlier: something else is still to be done.
    pub fn earlier(self, by: Duration) -> Self {
        Self(self.0.checked_sub(by).unwrap_or(self.0))
    }

    /// Whether a lender can still take memory away, or say that its device is at it, as late as so much from now.
    pub fn has_time(self, after: Duration) -> bool {
        Instant::now() + after + unmapping::PATIENCE + LAST_WORD <= self.0
    }
}
