//! What the machine can do at best: the references that figures stand beside.

use crate::stats::Times;
use anyhow::Result;
use farlane_sys::eventfd;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Pins the calling thread to one CPU.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)?;
    Ok(())
}

/// Runs `echo` on CPU 1 while `measure` runs on CPU 0.
fn across_cores(
    echo: impl FnOnce() + Send + 'static,
    measure: impl FnOnce() -> Result<Times> + Send + 'static,
) -> Result<Times> {
    let other = thread::spawn(move || {
        pin(1)?;
        echo();
        anyhow::Ok(())
    });
    let own = thread::spawn(move || {
        pin(0)?;
        measure()
    });
    let join = |e| anyhow::anyhow!("a measuring thread failed: {e:?}");
    let times = own.join().map_err(join)??;
    other.join().map_err(join)??;
    Ok(times)
}

/// Round trip of a flag in a cache line between two cores that poll.
pub fn cache_line() -> Result<Times> {
    const ROUNDS: u32 = 200_000;
    const BATCH: u32 = 100;
    let flag = Arc::new(AtomicU32::new(0));
    let echo = {
        let flag = Arc::clone(&flag);
        move || {
            for round in 0..ROUNDS {
                while flag.load(Ordering::Acquire) != 2 * round + 1 {
                    std::hint::spin_loop();
                }
                flag.store(2 * round + 2, Ordering::Release);
            }
        }
    };
    across_cores(echo, move || {
        let mut samples = Vec::new();
        for batch in 0..ROUNDS / BATCH {
            let start = Instant::now();
            for round in batch * BATCH..(batch + 1) * BATCH {
                flag.store(2 * round + 1, Ordering::Release);
                while flag.load(Ordering::Acquire) != 2 * round + 2 {
                    std::hint::spin_loop();
                }
            }
            samples.push(start.elapsed() / BATCH);
        }
        Ok(Times::of(samples))
    })
}

/// Messages per second through a ring of 64-byte entries between two cores: sixteen are written and
/// then published, each is copied out.
pub fn ring(bytes: usize, messages: usize) -> Result<f64> {
    const ENTRIES: usize = 64;
    const BATCH: usize = 16;
    #[repr(align(64))]
    struct Entry([AtomicU64; 8]);
    #[repr(align(64))]
    struct Index(AtomicUsize);
    struct Ring {
        entries: [Entry; ENTRIES],
        produced: Index,
        consumed: Index,
    }
    let ring = Arc::new(Ring {
        entries: [const { Entry([const { AtomicU64::new(0) }; 8]) }; ENTRIES],
        produced: Index(AtomicUsize::new(0)),
        consumed: Index(AtomicUsize::new(0)),
    });
    let words = bytes.div_ceil(8).min(8);
    let messages = messages.next_multiple_of(BATCH);
    let other = Arc::clone(&ring);
    let took = across_cores(
        move || {
            let mut memory = [0; 8];
            for consumed in (0..messages).step_by(BATCH) {
                while other.produced.0.load(Ordering::Acquire) < consumed + BATCH {
                    std::hint::spin_loop();
                }
                for at in consumed..consumed + BATCH {
                    let entry = &other.entries[at % ENTRIES].0[..words];
                    for (word, to) in entry.iter().zip(&mut memory) {
                        *to = word.load(Ordering::Relaxed);
                    }
                    std::hint::black_box(&mut memory);
                }
                other.consumed.0.store(consumed + BATCH, Ordering::Release);
            }
        },
        move || {
            let start = Instant::now();
            for produced in (0..messages).step_by(BATCH) {
                while produced + BATCH - ring.consumed.0.load(Ordering::Acquire) > ENTRIES {
                    std::hint::spin_loop();
                }
                for at in produced..produced + BATCH {
                    for word in &ring.entries[at % ENTRIES].0[..words] {
                        word.store(at as u64, Ordering::Relaxed);
                    }
                }
                ring.produced.0.store(produced + BATCH, Ordering::Release);
            }
            while ring.consumed.0.load(Ordering::Acquire) < messages {
                std::hint::spin_loop();
            }
            Ok(Times::of(vec![start.elapsed()]))
        },
    )?;
    #[allow(clippy::cast_precision_loss)] // A count far below 2^53.
    let messages = messages as f64;
    Ok(messages / took.p50_us * 1e6)
}

/// Round trip of two eventfds between two cores that sleep: one after the other, or, `rested`,
/// each after a pause in which both cores have gone to rest.
pub fn eventfd(rested: bool) -> Result<Times> {
    eventfd_trips(rested, 500)
}

/// The same, so many times.
pub fn eventfd_trips(rested: bool, trips: usize) -> Result<Times> {
    let make = || rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
    let (there, back) = (Arc::new(make()?), Arc::new(make()?));
    let one = 1u64.to_ne_bytes();
    let echo = {
        let (there, back) = (Arc::clone(&there), Arc::clone(&back));
        move || {
            let mut count = [0; 8];
            let trips = crate::scale::count(trips);
            for _ in 0..trips + trips / 10 {
                let passed = rustix::io::read(&there, &mut count)
                    .and_then(|_| rustix::io::write(&back, &one));
                if passed.is_err() {
                    return;
                }
            }
        }
    };
    across_cores(echo, move || {
        Times::timed(trips, || {
            if rested {
                let_sleep();
            }
            let start = Instant::now();
            rustix::io::write(&there, &one)?;
            rustix::io::read(&back, &mut [0; 8])?;
            Ok(start.elapsed())
        })
    })
}

/// A copy of `bytes` between the same two buffers, over and over.
pub fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> Result<Times> {
    Times::take(rounds(bytes), || {
        // SAFETY: the caller's buffers have `bytes` bytes and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        std::hint::black_box(to);
        Ok(())
    })
}

/// The same by `process_vm_writev` into another process.
pub fn process_vm(pid: i32, to: usize, from: *mut u8, bytes: usize) -> Result<Times> {
    Times::take(rounds(bytes), || {
        let local = libc::iovec {
            iov_base: from.cast(),
            iov_len: bytes,
        };
        let remote = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(to),
            iov_len: bytes,
        };
        // SAFETY: `from` has `bytes` bytes; the remote side is the kernel's business.
        let n =
            unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
        anyhow::ensure!(
            usize::try_from(n) == Ok(bytes),
            "process_vm_writev: {}",
            std::io::Error::last_os_error()
        );
        Ok(())
    })
}

/// How often to repeat what moves `bytes`, for a few hundred milliseconds in all.
pub fn rounds(bytes: usize) -> usize {
    ((1usize << 31) / bytes.max(1 << 14)).clamp(50, 2000)
}

/// Waits until the other side has gone to sleep: longer than anybody polls.
pub fn let_sleep() {
    thread::sleep(Duration::from_millis(2));
}

/// What it costs to signal an eventfd by `write`, and so that it never blocks, as the backend does.
pub fn signals() -> Result<[(&'static str, Times); 2]> {
    let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
    let one = 1_u64.to_ne_bytes();
    let by_write = Times::take(100_000, || Ok(rustix::io::write(&fd, &one).map(drop)?))?;
    if !eventfd::install() {
        eprintln!("This kernel has no asynchronous requests: eventfds are looked at first");
    }
    let by_kernel = Times::take(100_000, || {
        eventfd::signal(fd.as_fd());
        Ok(())
    })?;
    Ok([("write", by_write), ("by the kernel", by_kernel)])
}
