//! Locks without poison: a panic of another holder ends the process, or has left nothing half done.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError, RwLock};
use std::sync::{RwLockReadGuard, RwLockWriteGuard};

/// Locks a mutex.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    held(mutex.lock())
}

/// Locks for reading, beside other readers.
pub fn read<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    held(lock.read())
}

/// Locks for writing.
pub fn write<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    held(lock.write())
}

/// The value of a lock, or of a wait on a condition variable, poisoned or not.
pub fn held<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poisoned_lock_gives_its_value() {
        let (mutex, shared) = (Mutex::new(1), RwLock::new(2));
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let _held = (lock(&mutex), write(&shared));
                panic!("on purpose");
            });
            assert!(panics.join().is_err());
        });
        assert!(mutex.is_poisoned() && shared.is_poisoned());
        assert_eq!((*lock(&mutex), *read(&shared)), (1, 2));
        assert_eq!(held(mutex.into_inner()), 1);
    }
}
