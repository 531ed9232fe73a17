//! A lock that a fork can take and give back, which the standard library's cannot.

use rustix::thread::futex;
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;
const HELD: u32 = 1;
const AWAITED: u32 = 2;

/// Mutual exclusion. Held for short work in memory only, never over file I/O.
#[derive(Debug)]
pub struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only by the thread that holds the lock.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// A lock that nobody holds.
    pub const fn new(value: T) -> Self {
        Self {
            word: AtomicU32::new(FREE),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for the lock.
    pub fn lock(&self) -> Guard<'_, T> {
        self.take();
        Guard(self)
    }

    /// The lock, if it is free or may be waited for.
    pub fn lock_if(&self, waits: bool) -> Option<Guard<'_, T>> {
        if waits {
            return Some(self.lock());
        }
        let (order, ignored) = (Ordering::Acquire, Ordering::Relaxed);
        let taken = self.word.compare_exchange(FREE, HELD, order, ignored);
        taken.is_ok().then(|| Guard(self))
    }

    /// Takes the lock without a guard: for what runs before a fork.
    pub fn take(&self) {
        let taken = self
            .word
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_ok() {
            return;
        }
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, AWAITED, None);
        }
    }

    /// Gives back what [`take`](Self::take) took.
    ///
    /// # Safety
    /// This thread, or in a child the one that forked, holds the lock and uses the value no more.
    pub unsafe fn give(&self) {
        if self.word.swap(FREE, Ordering::Release) == AWAITED {
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
        }
    }

    /// The value, for the only thread there is.
    ///
    /// # Safety
    /// The caller holds the lock by [`take`](Self::take), and no other reference is alive.
    #[expect(clippy::mut_from_ref, reason = "that is what holding the lock means")]
    pub unsafe fn held(&self) -> &mut T {
        // SAFETY: as promised by the caller.
        unsafe { &mut *self.value.get() }
    }
}

/// Gives the lock back when dropped.
#[derive(Debug)]
pub struct Guard<'a, T>(&'a Lock<T>);

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is held.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held, by this guard alone.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: this guard held it and is gone.
        unsafe { self.0.give() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_count_under_it_lose_nothing() {
        let count = Lock::new(0_u32);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| *count.lock() += 1));
            }
        });
        assert_eq!(*count.lock(), 40_000);
    }

    #[test]
    fn who_must_not_wait_gets_a_free_lock_and_no_other() {
        let lock = Lock::new(());
        let first = lock.lock_if(false);
        assert!(first.is_some() && lock.lock_if(false).is_none());
        drop(first);
        assert!(lock.lock_if(true).is_some());
    }
}
