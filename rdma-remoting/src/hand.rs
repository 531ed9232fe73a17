//! What a worker has in hand, and how others have it let go: between two contexts it looks whether
//! its list has changed, so that whoever takes a context from it waits for that context's turn, and
//! for nobody else's.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Shared by a worker and those who change its list.
///
/// Who takes something from the list counts the change, then looks whether it is in hand; the
/// worker says what it has in hand, then looks whether the list has changed. All of these are
/// sequentially consistent, so that one of them sees the other (Dekker's argument).
#[derive(Debug, Default)]
pub(crate) struct Hand {
    /// Address of what is in hand; zero for nothing.
    held: AtomicUsize,
    /// How often the list has changed.
    generation: AtomicU64,
}

impl Hand {
    /// How often the list has changed.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// The worker takes something of its list into its hand, as it was at `generation`: or not,
    /// since that has changed.
    pub fn take<T>(&self, one: *const T, generation: u64) -> bool {
        self.held.swap(one.addr(), Ordering::SeqCst);
        if self.generation() == generation {
            return true;
        }
        self.put_down();
        false
    }

    /// The worker has nothing in hand.
    pub fn put_down(&self) {
        self.held.store(0, Ordering::Release);
    }

    /// The list has changed. Returns its generation.
    pub fn change(&self) -> u64 {
        self.generation.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Whether one of those is in hand that a change has taken from the list: until the worker sees
    /// that change. What is not will not be.
    pub fn holds(&self, is_one: impl Fn(usize) -> bool) -> bool {
        is_one(self.held.load(Ordering::SeqCst))
    }
}
