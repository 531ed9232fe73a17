//! The time of day at which something happened by the device's clock.

use crate::{Context, Error};
use farlane_sys::sync::lock;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

/// For so long the clocks of the device and of this process are taken to run alike. What adjusts
/// the time of day makes it run faster or slower by 500 millionths at most (adjtimex(2)): they are
/// apart by 50 us then.
const GOOD_FOR: Duration = Duration::from_millis(100);
/// How often both are read for it, of which the quickest counts.
const READINGS: u32 = 3;

/// How far the time of day of this process is from the device's clock.
#[derive(Debug)]
pub struct WallClock(Mutex<Offset>);

#[derive(Clone, Copy, Debug)]
struct Offset {
    /// The time of day less the device's time, modulo 2^64.
    nanoseconds: u64,
    read_at: Instant,
}

/// Nanoseconds since 1970 of this process.
fn time_of_day() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    })
}

impl Offset {
    /// Reads both clocks: the device's lies in the middle of the call, as far as anybody knows.
    fn read(device: impl Fn() -> Result<u64, Error>) -> Result<Self, Error> {
        let mut best: Option<(Duration, u64)> = None;
        for _ in 0..READINGS {
            let (day, began) = (time_of_day(), Instant::now());
            let device = device()?;
            let took = began.elapsed();
            let half = u64::try_from(took.as_nanos() / 2).unwrap_or(u64::MAX);
            let offset = day.wrapping_add(half).wrapping_sub(device);
            if best.is_none_or(|(least, _)| took < least) {
                best = Some((took, offset));
            }
        }
        Ok(Self {
            nanoseconds: best.map_or(0, |(_, offset)| offset),
            read_at: Instant::now(),
        })
    }
}

impl WallClock {
    /// Reads both clocks of a context.
    ///
    /// # Errors
    /// Those of [`Context::clock`].
    pub fn of(context: &Context) -> Result<Self, Error> {
        let offset = Offset::read(|| context.clock())?;
        Ok(Self(Mutex::new(offset)))
    }

    /// The time of day of a time of the device, in nanoseconds since 1970: as exact as half a call
    /// takes. Reads both clocks again now and then; where the device is gone what was read last
    /// counts.
    #[must_use]
    pub fn at(&self, context: &Context, device_time: u64) -> u64 {
        let mut offset = lock(&self.0);
        if offset.read_at.elapsed() > GOOD_FOR
            && let Ok(read) = Offset::read(|| context.clock())
        {
            *offset = read;
        }
        device_time.wrapping_add(offset.nanoseconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_abi::Errno;
    use std::cell::Cell;

    #[test]
    fn a_time_of_the_device_is_one_of_the_day() {
        let began = Instant::now();
        // The device was made a second before.
        let device = || Ok(u64::try_from(began.elapsed().as_nanos()).unwrap() + 1_000_000_000);
        let before = time_of_day();
        let (first, offset) = (device().unwrap(), Offset::read(device).unwrap());
        let last = device().unwrap();
        let after = time_of_day();
        let at = |time: u64| time.wrapping_add(offset.nanoseconds);
        // However long this thread did not run: the quickest reading is no longer than all of it.
        let most = after - before;
        assert!(at(first).abs_diff(before) <= most && at(last).abs_diff(after) <= most);
        assert_eq!(at(last) - at(first), last - first);
    }

    #[test]
    fn a_device_that_is_gone_has_no_time() {
        let calls = Cell::new(0_u32);
        let device = || {
            calls.set(calls.get() + 1);
            // Nonsense is no reason to fail.
            Ok(if calls.get().is_multiple_of(2) {
                u64::MAX
            } else {
                0
            })
        };
        assert!(Offset::read(device).is_ok());
        assert_eq!(calls.get(), READINGS);
        let gone = Offset::read(|| Err(Errno::ENODEV.into()));
        assert_eq!(gone.unwrap_err().errno(), Errno::ENODEV);
    }
}
