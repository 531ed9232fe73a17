//! Sleeping without missing what others post: announce, look again, sleep.
//!
//! The *sleeper* says that it will sleep, looks once more, and sleeps. A *poster* publishes, and
//! wakes the sleeper if it says that it sleeps. Each puts a full fence between its store and its
//! load, so at least one of them sees the other's store (Dekker's argument). Checked with loom in
//! `tests/loom`, also that it fails without the fence.
//!
//! The word is either in memory that both map (the backend state and the caller-waiting word of
//! `farlane_abi::arena`, `QUEUE_ASLEEP` of `farlane_abi::gpu`), or a [`Sleep`] of one process.

use farlane_abi::arena::{BACKEND_AWAKE, BACKEND_SLEEPING};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// A word that one side stores and the other loads. The fences give the order.
pub trait Word {
    /// A relaxed store.
    fn put(&self, value: u32);
    /// A relaxed load.
    fn get(&self) -> u32;
}

impl Word for AtomicU32 {
    fn put(&self, value: u32) {
        self.store(value, Ordering::Relaxed);
    }

    fn get(&self) -> u32 {
        self.load(Ordering::Relaxed)
    }
}

/// The sleeper's side: announces sleep on every word of `words`. After this the caller must look
/// at every ring once more before it sleeps.
pub fn announce<'a, W: Word + 'a>(words: impl Iterator<Item = &'a W>) {
    for word in words {
        word.put(BACKEND_SLEEPING);
    }
    fence(Ordering::SeqCst);
}

/// The sleeper's side: it is awake again.
pub fn awake<'a, W: Word + 'a>(words: impl Iterator<Item = &'a W>) {
    for word in words {
        word.put(BACKEND_AWAKE);
    }
}

/// The poster's side, after it has published: whether the other side must be woken.
#[must_use]
pub fn must_wake<W: Word>(word: &W) -> bool {
    fence(Ordering::SeqCst);
    word.get() != BACKEND_AWAKE
}

/// The third party's side: says that its thread cannot go on before something is posted to a
/// context that another thread serves. After this it looks once more, and sleeps. A poster wakes
/// that other thread only, and only if that sleeps: it has to pass the wake-up on, see
/// [`must_pass_on`].
pub fn wait_for_other<W: Word>(word: &W) {
    word.put(AWAITED);
    fence(Ordering::SeqCst);
}

/// The other thread's side, when it finds what was posted, in a turn or after it has announced
/// sleep: whether somebody waits for that, who is to be woken now. The word says so once.
#[must_use]
pub fn must_pass_on<W: Word>(word: &W) -> bool {
    let awaited = word.get() == AWAITED;
    if awaited {
        word.put(NOT_AWAITED);
    }
    awaited
}

/// Whether somebody waits: what [`must_pass_on`] would say.
#[must_use]
pub fn is_awaited<W: Word>(word: &W) -> bool {
    word.get() == AWAITED
}

const NOT_AWAITED: u32 = 0;
const AWAITED: u32 = 1;

/// Wakes a sleeper.
pub trait Event {
    /// Raises the event that the sleeper waits for.
    fn raise(&self);
}

/// Whether a thread of this process sleeps, and what wakes it. In a cache line of its own: posters
/// only read it while the thread is awake.
#[derive(Debug)]
#[repr(align(128))]
pub struct Sleep<E> {
    state: AtomicU32,
    /// What wakes it.
    pub event: E,
}

impl<E: Event> Sleep<E> {
    /// Of a thread that is awake.
    pub fn new(event: E) -> Self {
        Self {
            state: AtomicU32::new(BACKEND_AWAKE),
            event,
        }
    }

    /// The sleeper's side: it will sleep, if it finds nothing when it looks once more.
    pub fn announce(&self) {
        announce(std::iter::once(&self.state));
    }

    /// The sleeper's side: it does not sleep any more. Whether it had said so and nobody has woken
    /// it: else an event is raised already, or is about to be.
    pub fn awake(&self) -> bool {
        self.state.swap(BACKEND_AWAKE, Ordering::Relaxed) != BACKEND_AWAKE
    }

    /// A poster's side, after it has published. Of several posters one wakes.
    pub fn wake(&self) {
        if must_wake(&self.state)
            && self.state.swap(BACKEND_AWAKE, Ordering::Relaxed) != BACKEND_AWAKE
        {
            self.event.raise();
        }
    }
}

#[cfg(test)]
#[cfg(loom)]
mod tests {
    use super::*;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

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
}
