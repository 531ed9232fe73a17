//! A lock that threads have in turn.

use farlane_sys::sync::lock;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// A lock that whoever gives it back, and asks for it again at once, gets only after one that has
/// been waiting for it: nobody waits for more than what one other thread does with it, once it is
/// the next one.
#[derive(Debug, Default)]
pub(crate) struct FairMutex<T> {
    /// Held while the next one waits. Taken before what it is about, and given back when that is
    /// had.
    next: Mutex<()>,
    what: Mutex<T>,
}

impl<T> FairMutex<T> {
    pub fn new(what: T) -> Self {
        Self {
            next: Mutex::default(),
            what: Mutex::new(what),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        let _next = lock(&self.next);
        lock(&self.what)
    }

    /// None where another thread has it, or comes before.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let _next = match self.next.try_lock() {
            Err(TryLockError::WouldBlock) => return None,
            next => next,
        };
        match self.what.try_lock() {
            Ok(what) => Some(what),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    #[test]
    fn who_waits_comes_before_who_asks_again() {
        for _ in 0..10 {
            let turns = Arc::new(FairMutex::new(0));
            let held = turns.lock();
            let waiting = std::thread::spawn({
                let turns = Arc::clone(&turns);
                move || *turns.lock() += 1
            });
            let end = Instant::now() + Duration::from_secs(60);
            while turns.next.try_lock().is_ok() {
                assert!(Instant::now() < end, "nobody waits");
                std::thread::yield_now();
            }
            assert!(turns.try_lock().is_none());
            drop(held);
            let had = turns.try_lock().is_none_or(|had| *had == 1);
            assert!(had, "who does not wait came first");
            assert_eq!(*turns.lock(), 1);
            waiting.join().unwrap();
        }
    }
}
