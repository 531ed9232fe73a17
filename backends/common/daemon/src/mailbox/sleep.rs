//! Sleeping without missing an item of a mailbox.
//!
//! The receiver says that it will sleep, looks once more, and sleeps; a sender sends, and then
//! looks whether it sleeps. Each puts a full fence between its store and its load, so at least one
//! of them sees the other's store (Dekker's argument). Checked with loom in `tests/loom`, also that
//! it fails without the fence.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Wakes a receiver.
pub trait Event {
    /// Raises the event that the receiver waits for.
    fn raise(&self);
}

/// Whether the receiver sleeps, and what wakes it. In a cache line of its own: senders only read it
/// while the receiver is awake.
#[repr(align(128))]
pub struct Sleep<E> {
    sleeps: AtomicBool,
    /// What wakes the receiver.
    pub event: E,
}

impl<E: Event> Sleep<E> {
    /// A receiver that is awake.
    pub fn new(event: E) -> Self {
        Self {
            sleeps: AtomicBool::new(false),
            event,
        }
    }

    /// The receiver's side: it will sleep, if it finds nothing when it looks once more.
    pub fn announce(&self) {
        self.sleeps.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The receiver's side: it does not sleep any more. Whether it had said so and nobody has woken
    /// it.
    pub fn awake(&self) -> bool {
        self.sleeps.swap(false, Ordering::Relaxed)
    }

    /// A sender's side, after it has sent. Of several senders one wakes.
    pub fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleeps.load(Ordering::Relaxed) && self.sleeps.swap(false, Ordering::Relaxed) {
            self.event.raise();
        }
    }
}

#[cfg(test)]
#[cfg(loom)]
mod tests {
    use super::*;
    use loom::sync::atomic::AtomicU32;
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
        fn wait(&self) {
            let mut count = self.0.lock().unwrap();
            while *count == 0 {
                count = self.1.wait(count).unwrap();
            }
        }

        fn drain(&self) {
            *self.0.lock().unwrap() = 0;
        }
    }

    /// `senders` send one item each; the receiver takes all. loom reports a deadlock if it misses
    /// one.
    fn run(senders: u32, wake: impl Fn(&Sleep<Counter>) + Send + Sync + Copy + 'static) {
        let mut model = loom::model::Builder::new();
        // All that can happen with up to three changes of thread at any place: more takes hours.
        model.preemption_bound = Some(3);
        model.check(move || {
            let sent = Arc::new(AtomicU32::new(0));
            let sleep = Arc::new(Sleep::new(Counter(Mutex::new(0), Condvar::new())));
            let threads: Vec<_> = (0..senders)
                .map(|_| {
                    let (sent, sleep) = (Arc::clone(&sent), Arc::clone(&sleep));
                    thread::spawn(move || {
                        sent.fetch_add(1, Ordering::Release);
                        wake(&sleep);
                    })
                })
                .collect();
            while sent.load(Ordering::Acquire) != senders {
                sleep.announce();
                if sent.load(Ordering::Acquire) != senders {
                    sleep.event.wait();
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
        run(1, Sleep::wake);
        run(2, Sleep::wake);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn loom_without_the_fence_an_item_is_missed() {
        run(1, |sleep| {
            if sleep.sleeps.load(Ordering::Relaxed) {
                sleep.event.raise();
            }
        });
    }
}
