//! Whether this process is a child of the one that opened a transport, and what a child has of its
//! own.

use std::fmt;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Forks between the process that loaded this library and the present one.
static FORKS: AtomicU32 = AtomicU32::new(0);
static WATCH: Once = Once::new();

/// The process in which something was made. What lies in memory that children do not inherit
/// asks [`Origin::is_here`] before it touches it: a load, where asking the kernel for the process
/// id would be a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(u32);

impl Origin {
    /// The process that calls this.
    #[must_use]
    pub fn here() -> Self {
        WATCH.call_once(|| {
            // SAFETY: the handler only counts. It fails for want of memory, and then a child is
            // not told from its parent.
            unsafe { libc::pthread_atfork(None, None, Some(count)) };
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is still that process and no child of it.
    #[inline]
    #[must_use]
    pub fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

/// Runs in each child.
unsafe extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A value of which each process has its own, as it is by default. When a child was made, another
/// thread of its parent may have had a lock in the parent's: in the child nobody would unlock it.
/// The parent's is never freed there.
pub struct PerProcess<T>(AtomicPtr<Held<T>>);

struct Held<T> {
    origin: Origin,
    value: T,
}

impl<T: Default + Sync> PerProcess<T> {
    /// A value that is made when it is asked for.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "it is what statics are")]
    pub const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// That of this process.
    #[must_use]
    pub fn get(&'static self) -> &'static T {
        loop {
            let known = self.0.load(Ordering::Acquire);
            // SAFETY: null, or a box that is never freed.
            if let Some(held) = unsafe { known.as_ref() }
                && held.origin.is_here()
            {
                return &held.value;
            }
            let made = Box::into_raw(Box::new(Held {
                origin: Origin::here(),
                value: T::default(),
            }));
            let (ours, theirs) = (Ordering::AcqRel, Ordering::Acquire);
            if self.0.compare_exchange(known, made, ours, theirs).is_err() {
                // SAFETY: made above; nobody else has seen it.
                drop(unsafe { Box::from_raw(made) });
            }
        }
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerProcess").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::thread;

    #[test]
    fn a_child_has_a_value_of_its_own_that_nobody_has_locked() {
        static VALUE: PerProcess<Mutex<u32>> = PerProcess::new();
        let mut ours = VALUE.get().lock().unwrap();
        *ours = 7;
        // SAFETY: the child tries a lock and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_new = VALUE.get().try_lock().is_ok_and(|value| *value == 0);
            let is_same = std::ptr::eq(VALUE.get(), VALUE.get());
            // SAFETY: ends the child without running anything of the test harness.
            unsafe { libc::_exit(i32::from(!is_new || !is_same)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child just made.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        drop(ours);
        assert_eq!(*VALUE.get().lock().unwrap(), 7);
    }

    #[test]
    fn threads_that_ask_at_once_have_one_value() {
        static VALUE: PerProcess<Mutex<u32>> = PerProcess::new();
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| *VALUE.get().lock().unwrap() += 1);
            }
        });
        assert_eq!(*VALUE.get().lock().unwrap(), 8);
    }

    #[test]
    fn a_child_is_not_where_its_parent_made_something() {
        let origin = Origin::here();
        assert!(origin.is_here());
        // SAFETY: the child only loads a word and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child without running anything of the test harness.
            unsafe { libc::_exit(i32::from(origin.is_here())) };
        }
        let mut status = -1;
        // SAFETY: waits for the child just made.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        assert!(origin.is_here());
    }
}
