//! Sleeping without missing work: the protocol of the backend state word and of the caller-waiting
//! word (`farlane_abi::arena`).
//!
//! Both are the same two-party protocol. The *sleeper* says that it will sleep, looks once more,
//! and sleeps. The *poster* publishes, and wakes the sleeper if it says that it sleeps. Each puts a
//! full fence between its store and its load, so at least one of them sees the other's store
//! (Dekker's argument).

use farlane_abi::arena::{BACKEND_AWAKE, BACKEND_SLEEPING};

#[cfg(loom)]
use loom::sync::atomic::fence;
use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(not(loom))]
use std::sync::atomic::fence;

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

#[cfg(test)]
#[cfg(loom)]
mod tests {
    use super::*;
    use loom::sync::atomic::AtomicU32;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    impl Word for AtomicU32 {
        fn put(&self, value: u32) {
            self.store(value, Ordering::Relaxed);
        }
        fn get(&self) -> u32 {
            self.load(Ordering::Relaxed)
        }
    }

    /// An eventfd: counts wakes, and a wait for one of them blocks.
    struct Event(Mutex<u32>, Condvar);

    impl Event {
        fn raise(&self) {
            *self.0.lock().unwrap() += 1;
            self.1.notify_one();
        }
        fn wait(&self) {
            let mut count = self.0.lock().unwrap();
            while *count == 0 {
                count = self.1.wait(count).unwrap();
            }
            *count = 0;
        }
    }

    struct Shared {
        produced: AtomicU32,
        state: AtomicU32,
        event: Event,
    }

    fn run(posts: u32, post: impl Fn(&Shared) -> bool + Send + Sync + Copy + 'static) {
        loom::model(move || {
            let shared = Arc::new(Shared {
                produced: AtomicU32::new(0),
                state: AtomicU32::new(BACKEND_AWAKE),
                event: Event(Mutex::new(0), Condvar::new()),
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
            wake_a: Event,
            wake_b: Event,
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
        let event = || Event(Mutex::new(0), Condvar::new());
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let shared = Arc::new(Workers {
                posted: AtomicU32::new(0),
                state_of_b: AtomicU32::new(BACKEND_AWAKE),
                awaited: AtomicU32::new(0),
                wake_a: event(),
                wake_b: event(),
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
