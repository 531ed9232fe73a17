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
    let micros = end.duration_since(begin).as_micros().max(1);
    u64::try_from(u128::from(last.wrapping_sub(first)) * 1000 / micros).unwrap_or(u64::MAX)
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
    fn it_is_measured_the_same_twice() {
        let measured = [measure(), measure()];
        assert!(measured[0].abs_diff(measured[1]) < measured[0] / 100);
    }
}
