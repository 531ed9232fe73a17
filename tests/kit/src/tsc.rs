//! How fast the processor's time stamp counter counts. A guest whose processor is emulated reads
//! this machine's (QEMU, `cpu_get_host_ticks`), and its kernel would find that out by an emulated
//! timer: on a busy machine it is mistaken by several times, and all of its clocks run so wrong.

use std::arch::x86_64::_rdtsc;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// How long it is measured: a look that is 10 us off is an error of 200 in a million.
const INTERVAL: Duration = Duration::from_millis(50);

/// Of so many looks at both clocks the one is taken in which least went by.
const LOOKS: u32 = 8;

/// Its frequency in kHz, which is measured once.
pub fn khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(measure)
}

fn measure() -> u64 {
    let (begin, first) = look();
    thread::sleep(INTERVAL);
    let (end, last) = look();
    frequency(last.wrapping_sub(first), end.duration_since(begin))
}

/// In kHz: it has counted so many in that time.
fn frequency(counted: u64, time: Duration) -> u64 {
    let nanos = time.as_nanos().max(1);
    u64::try_from(u128::from(counted) * 1_000_000 / nanos).unwrap_or(u64::MAX)
}

/// A time, and the counter at that time.
fn look() -> (Instant, u64) {
    let one = || {
        let before = Instant::now();
        // SAFETY: every x86-64 processor has the instruction.
        let counter = unsafe { _rdtsc() };
        (before.elapsed(), before, counter)
    };
    let best = (1..LOOKS).fold(one(), |best, _| std::cmp::min_by_key(best, one(), |l| l.0));
    (best.1, best.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frequency_is_in_kilohertz() {
        for (counted, micros, khz) in [
            (125_000_000, 50_000, 2_500_000),
            (2_500, 1, 2_500_000),
            (1, 1_000, 1),
            (0, 50_000, 0),
            (u64::MAX, 0, u64::MAX),
        ] {
            assert_eq!(frequency(counted, Duration::from_micros(micros)), khz);
        }
    }

    #[test]
    fn the_counter_counts_as_fast_as_was_measured() {
        // SAFETY: as in `look`.
        let counter = || unsafe { _rdtsc() };
        let measured = measure();
        let (outer, begin) = (counter(), Instant::now());
        let inner = counter();
        thread::sleep(INTERVAL * 2);
        let inner = counter().wrapping_sub(inner);
        let time = begin.elapsed();
        let outer = counter().wrapping_sub(outer);
        let expected = u128::from(measured) * time.as_nanos() / 1_000_000;
        // However late this thread runs between two of these, one goes on longer than the time,
        // the other less long.
        let (most, least) = (u128::from(outer), u128::from(inner));
        let tolerance = expected / 100;
        let is_right = least <= expected + tolerance && most + tolerance >= expected;
        assert!(
            is_right,
            "{least} to {most}, and {expected} by what was measured"
        );
    }
}
