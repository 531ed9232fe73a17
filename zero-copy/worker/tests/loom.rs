//! The protocols between threads on which nothing may be lost, checked with
//! [loom](https://docs.rs/loom): every order in which their loads and stores can happen.
//!
//! The source is that of the product; here it is compiled with loom's atomics, so that neither the
//! product nor what it depends on is built a second time.

#![allow(clippy::unwrap_used)]

/// What the library takes from the standard library.
mod sync {
    pub use loom::sync::atomic;
}

#[path = "../src/wake.rs"]
mod wake;

use farlane_abi::arena::BACKEND_AWAKE;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use wake::{Event, Sleep, announce, awake, is_awaited, must_pass_on, must_wake, wait_for_other};

/// An eventfd: counts wakes, and a wait for one of them blocks.
struct Counter(Mutex<u32>, Condvar);

impl Event for Counter {
    fn raise(&self) {
        *self.0.lock().unwrap() += 1;
        self.1.notify_one();
    }
}

impl Counter {
    fn new() -> Self {
        Self(Mutex::new(0), Condvar::new())
    }

    /// Sleeps until it is raised, and leaves it so.
    fn sleep(&self) {
        let mut count = self.0.lock().unwrap();
        while *count == 0 {
            count = self.1.wait(count).unwrap();
        }
    }

    fn drain(&self) {
        *self.0.lock().unwrap() = 0;
    }

    fn wait(&self) {
        self.sleep();
        self.drain();
    }
}

/// `posters` post one item each; the sleeper takes all. loom reports a deadlock if it misses
/// one.
fn run_private(posters: u32, wake: impl Fn(&Sleep<Counter>) + Send + Sync + Copy + 'static) {
    let mut model = loom::model::Builder::new();
    // All that can happen with up to three changes of thread at any place: more takes hours.
    model.preemption_bound = Some(3);
    model.check(move || {
        let posted = Arc::new(AtomicU32::new(0));
        let sleep = Arc::new(Sleep::new(Counter::new()));
        let threads: Vec<_> = (0..posters)
            .map(|_| {
                let (posted, sleep) = (Arc::clone(&posted), Arc::clone(&sleep));
                thread::spawn(move || {
                    posted.fetch_add(1, Ordering::Release);
                    wake(&sleep);
                })
            })
            .collect();
        while posted.load(Ordering::Acquire) != posters {
            sleep.announce();
            if posted.load(Ordering::Acquire) != posters {
                sleep.event.sleep();
            }
            if !sleep.awake() {
                sleep.event.drain();
            }
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn loom_no_item_is_missed() {
    run_private(1, Sleep::wake);
    run_private(2, Sleep::wake);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_without_the_fence_an_item_is_missed() {
    run_private(1, |sleep| {
        if sleep.state.load(Ordering::Relaxed) != BACKEND_AWAKE {
            sleep.event.raise();
        }
    });
}

struct Shared {
    produced: AtomicU32,
    state: AtomicU32,
    event: Counter,
}

fn run(posts: u32, post: impl Fn(&Shared) -> bool + Send + Sync + Copy + 'static) {
    loom::model(move || {
        let shared = Arc::new(Shared {
            produced: AtomicU32::new(0),
            state: AtomicU32::new(BACKEND_AWAKE),
            event: Counter::new(),
        });
        let poster = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                for n in 1..=posts {
                    shared.produced.store(n, Ordering::Release);
                    if post(&shared) {
                        shared.event.raise();
                    }
                }
            })
        };
        // loom reports a deadlock if the sleeper misses the last post.
        while shared.produced.load(Ordering::Acquire) != posts {
            announce(std::iter::once(&shared.state));
            if shared.produced.load(Ordering::Acquire) != posts {
                shared.event.wait();
            }
            awake(std::iter::once(&shared.state));
        }
        poster.join().unwrap();
    });
}

/// A program posts to a context of worker B, which is about to sleep; worker A waits for that.
/// Whether B passes the wake-up on is the parameter.
fn run_two_workers(passes_on: bool) {
    struct Workers {
        posted: AtomicU32,
        state_of_b: AtomicU32,
        awaited: AtomicU32,
        wake_a: Counter,
        wake_b: Counter,
    }
    impl Workers {
        fn is_posted(&self) -> bool {
            self.posted.load(Ordering::Acquire) == 1
        }
        fn turn_of_b(&self, passes_on: bool) {
            if self.is_posted() && passes_on && must_pass_on(&self.awaited) {
                self.wake_a.raise();
            }
        }
    }
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let shared = Arc::new(Workers {
            posted: AtomicU32::new(0),
            state_of_b: AtomicU32::new(BACKEND_AWAKE),
            awaited: AtomicU32::new(0),
            wake_a: Counter::new(),
            wake_b: Counter::new(),
        });
        let program = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.posted.store(1, Ordering::Release);
                if must_wake(&shared.state_of_b) {
                    shared.wake_b.raise();
                }
            })
        };
        let b = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                announce(std::iter::once(&shared.state_of_b));
                if !(shared.is_posted() && is_awaited(&shared.awaited)) {
                    shared.wake_b.wait();
                }
                shared.turn_of_b(passes_on);
            })
        };
        wait_for_other(&shared.awaited);
        if !shared.is_posted() {
            shared.wake_a.wait();
        }
        assert!(shared.is_posted());
        // It has other work, too.
        shared.wake_b.raise();
        program.join().unwrap();
        b.join().unwrap();
    });
}

#[test]
fn loom_a_post_wakes_the_worker_that_waits_for_it_though_another_serves_it() {
    run_two_workers(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_a_post_that_is_not_passed_on_is_missed() {
    run_two_workers(false);
}

#[test]
fn loom_no_post_is_missed() {
    run(2, |shared| must_wake(&shared.state));
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_without_the_fence_a_post_is_missed() {
    run(1, |shared| {
        shared.state.load(Ordering::Relaxed) != BACKEND_AWAKE
    });
}

/// A queue pair of a context, as `farlane_abi::arena` has it.
struct Rung {
    produced: AtomicU32,
    /// Whether the backend looks at the queue pair.
    queue: AtomicU32,
    bits: AtomicU32,
    summary: AtomicU32,
    /// Whether the backend sleeps.
    state: AtomicU32,
    event: Counter,
}

impl Rung {
    /// The process, after it has published.
    fn ring(&self) {
        if must_wake(&self.queue) {
            self.bits.fetch_or(1, Ordering::SeqCst);
            self.summary.fetch_or(1, Ordering::SeqCst);
        }
        if must_wake(&self.state) {
            self.event.raise();
        }
    }

    /// Whether the queue pair was rung.
    fn take(&self) -> bool {
        self.summary.load(Ordering::Relaxed) != 0
            && self.summary.swap(0, Ordering::Acquire) != 0
            && self.bits.swap(0, Ordering::Acquire) != 0
    }
}

fn run_rung(posts: u32, ring: impl Fn(&Rung) + Send + Sync + Copy + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        // loom's own panics when it is dropped after a deadlock.
        let shared = std::sync::Arc::new(Rung {
            produced: AtomicU32::new(0),
            queue: AtomicU32::new(BACKEND_AWAKE),
            bits: AtomicU32::new(0),
            summary: AtomicU32::new(0),
            state: AtomicU32::new(BACKEND_AWAKE),
            event: Counter::new(),
        });
        let process = {
            let shared = std::sync::Arc::clone(&shared);
            thread::spawn(move || {
                for n in 1..=posts {
                    shared.produced.store(n, Ordering::Release);
                    ring(&shared);
                }
            })
        };
        let (mut seen, mut looks) = (0, true);
        let look = |seen: &mut u32| {
            let before = std::mem::replace(seen, shared.produced.load(Ordering::Acquire));
            before != *seen
        };
        let queue = || std::iter::once(&shared.queue);
        let state = || std::iter::once(&shared.state);
        // loom reports a deadlock if the backend misses the last post.
        while seen != posts {
            if shared.take() {
                awake(queue());
                looks = true;
            }
            if looks && look(&mut seen) {
                continue;
            }
            if looks {
                // It has had nothing to do for a while.
                announce(queue());
                looks = look(&mut seen);
                if looks {
                    awake(queue());
                    continue;
                }
            }
            announce(state());
            if shared.summary.load(Ordering::Relaxed) == 0 {
                shared.event.wait();
            }
            awake(state());
        }
        process.join().unwrap();
    });
}

#[test]
fn loom_a_queue_pair_that_is_rung_is_not_missed() {
    run_rung(1, Rung::ring);
    run_rung(2, Rung::ring);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_a_bit_that_is_set_after_the_look_at_the_backend_is_missed() {
    run_rung(1, |shared| {
        if must_wake(&shared.state) {
            shared.event.raise();
        }
        if must_wake(&shared.queue) {
            shared.bits.fetch_or(1, Ordering::SeqCst);
            shared.summary.fetch_or(1, Ordering::SeqCst);
        }
    });
}
