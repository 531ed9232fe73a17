//! The device's clock, by which completions say when they came.

use std::time::Instant;

/// Nanoseconds since the device was made: the same moment for all of its contexts, and nothing of
/// when the host was booted. 2^64 of them are 584 years.
#[derive(Clone, Copy, Debug)]
pub struct DeviceClock(Instant);

impl Default for DeviceClock {
    /// One that begins now.
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl DeviceClock {
    /// Ticks in a millisecond: its frequency in kHz.
    pub const KILOHERTZ: u64 = 1_000_000;

    /// What it says now.
    #[must_use]
    pub fn now(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}
