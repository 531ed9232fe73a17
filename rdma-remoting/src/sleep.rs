//! Sleeping without missing work: the protocol of the backend state word and of the caller-waiting
//! word (`farlane_abi::arena`).
//!
//! Both are the same two-party protocol. The *sleeper* says that it will sleep, looks once more,
//! and sleeps. The *poster* publishes, and wakes the sleeper if it says that it sleeps. Each puts a
//! full fence between its store and its load, so at least one of them sees the other's store
//! (Dekker's argument).

use farlane_abi::arena::{BACKEND_AWAKE, BACKEND_SLEEPING};

#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};

/// The sleeper's side: announces sleep on every word of `words`. After this the caller must look
/// at every ring once more before it sleeps.
pub fn announce<'a>(words: impl Iterator<Item = &'a AtomicU32>) {
    for word in words {
        word.store(BACKEND_SLEEPING, Ordering::Relaxed);
    }
    fence(Ordering::SeqCst);
}

/// The sleeper's side: it is awake again.
pub fn awake<'a>(words: impl Iterator<Item = &'a AtomicU32>) {
    for word in words {
        word.store(BACKEND_AWAKE, Ordering::Relaxed);
    }
}

/// The poster's side, after it has published: whether the other side must be woken.
#[must_use]
pub fn must_wake(word: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    word.load(Ordering::Relaxed) != BACKEND_AWAKE
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

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
