use super::*;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// Numbers that a thread counts as fast as it can.
static COUNTS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

fn counts() -> [u64; 3] {
    COUNTS.each_ref().map(|count| count.load(Ordering::SeqCst))
}

#[test]
fn nothing_runs_meanwhile_and_everything_afterwards() {
    let end = AtomicBool::new(false);
    let (has, changed) = (Mutex::new(false), Condvar::new());
    thread::scope(|scope| {
        for count in &COUNTS {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    count.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        // One that blocks all signals, too.
        let waits = with_signals_blocked(|| {
            scope.spawn(|| {
                let mut told = has.lock().unwrap();
                while !*told {
                    told = changed.wait(told).unwrap();
                }
            })
        });
        let stops = (0..20).map(|_| {
            while counts().contains(&0) {
                thread::yield_now();
            }
            with_threads_stopped(&|| {
                let before = counts();
                let pause = Instant::now() + Duration::from_millis(2);
                while Instant::now() < pause {}
                let moved = before != counts();
                COUNTS
                    .iter()
                    .for_each(|count| count.store(0, Ordering::SeqCst));
                if moved { Err(Errno::AGAIN) } else { Ok(()) }
            })
        });
        let stops: Vec<_> = stops.collect();
        *has.lock().unwrap() = true;
        changed.notify_all();
        waits.join().unwrap();
        end.store(true, Ordering::Relaxed);
        assert_eq!(stops, [Ok(()); 20]);
    });
}

#[test]
fn an_error_is_told_and_the_process_that_traces_has_gone() {
    assert_eq!(
        with_threads_stopped(&|| Err(Errno::NOSPC)),
        Err(Errno::NOSPC)
    );
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let tracer = status.lines().find(|line| line.starts_with("TracerPid:"));
    assert_eq!(tracer.unwrap().split_whitespace().last(), Some("0"));
}

#[test]
fn threads_that_come_and_go_do_not_matter() {
    let end = Arc::new(AtomicBool::new(false));
    let makes = {
        let end = Arc::clone(&end);
        thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                let few: Vec<_> = (0..4).map(|_| thread::spawn(|| ())).collect();
                few.into_iter().for_each(|thread| thread.join().unwrap());
            }
        })
    };
    for _ in 0..100 {
        assert_eq!(with_threads_stopped(&|| Ok(())), Ok(()));
    }
    end.store(true, Ordering::Relaxed);
    makes.join().unwrap();
}

/// A signal that was on its way arrives, once.
#[test]
fn signals_are_not_lost() {
    static SEEN: AtomicU64 = AtomicU64::new(0);
    extern "C" fn count(_: c_int) {
        SEEN.fetch_add(1, Ordering::SeqCst);
    }
    // SAFETY: the handler counts, and no other test uses this signal.
    unsafe { libc::signal(libc::SIGUSR2, count as extern "C" fn(c_int) as usize) };
    let sent = AtomicU64::new(0);
    thread::scope(|scope| {
        let sends = scope.spawn(|| {
            for number in 1..=2000 {
                // SAFETY: a signal for this thread itself.
                unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2) };
                sent.store(number, Ordering::SeqCst);
            }
        });
        while !sends.is_finished() {
            assert_eq!(with_threads_stopped(&|| Ok(())), Ok(()));
        }
    });
    assert_eq!(SEEN.load(Ordering::SeqCst), sent.load(Ordering::SeqCst));
}
