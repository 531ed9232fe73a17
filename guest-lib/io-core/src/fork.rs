//! Children, and threads that are interrupted.

use std::cell::Cell;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// It forks, and has all locks.
    static FORKING: Cell<bool> = const { Cell::new(false) };
}

/// Says that this thread is in the library. A signal handler of the thread that does I/O meanwhile gets the plain call: what the
/// thread was interrupted in may hold a lock.
#[derive(Debug)]
pub(crate) struct Inside(());

impl Inside {
    /// None when the thread is inside already.
    pub(crate) fn enter() -> Option<Self> {
        // Made only where it is true: dropping one ends it.
        (!INSIDE.replace(true)).then(|| Self(()))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

/// The process that the tables belong to.
static PROCESS: AtomicI32 = AtomicI32::new(0);
static WATCH: Once = Once::new();

/// Sees to forks from now on.
pub(crate) fn watch() {
    WATCH.call_once(|| {
        PROCESS.store(process(), Ordering::Relaxed);
        // SAFETY: the handlers are made for it. It fails for want of memory only.
        unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    });
}

fn process() -> i32 {
    rustix::process::getpid().as_raw_pid()
}

/// Whether this process owns the tables: a child of `vfork` shares its parent's memory, but not its descriptors.
pub(crate) fn is_owner() -> bool {
    PROCESS.load(Ordering::Relaxed) == process()
}

/// Whether the tables belong to another process: to that of which this is a child of `vfork`.
pub(crate) fn is_foreign() -> bool {
    PROCESS.load(Ordering::Relaxed) != 0 && !is_owner()
}

unsafe extern "C" fn prepare() {
    // A handler that forks while its thread is inside cannot wait for what the thread holds. Until the fork is over this one is inside:
    // handlers of the program, of forks and of signals, that close or lock a file meanwhile do not wait for it.
    if !INSIDE.replace(true) {
        FORKING.set(true);
        crate::registry::hold();
        crate::tunnel::hold();
        crate::files::hold();
        crate::readahead::hold();
        crate::log::hold();
    }
}

unsafe extern "C" fn parent() {
    if FORKING.replace(false) {
        // SAFETY: `prepare` has taken them in this thread.
        unsafe {
            crate::log::release();
            crate::readahead::release();
            crate::files::release();
            crate::tunnel::release();
            crate::registry::release();
        }
        INSIDE.set(false);
    }
}

unsafe extern "C" fn child() {
    PROCESS.store(process(), Ordering::Relaxed);
    crate::locks::forget();
    if FORKING.replace(false) {
        // SAFETY: `prepare` has taken them in the thread that this one continues.
        unsafe {
            crate::log::release();
            crate::readahead::forget();
            crate::readahead::release();
            crate::files::forget();
            crate::files::release();
            crate::tunnel::forget();
            crate::tunnel::release();
            crate::registry::forget();
            crate::registry::release();
        }
        INSIDE.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_inside_once_and_until_the_first_one_goes() {
        let first = Inside::enter();
        assert!(first.is_some() && Inside::enter().is_none() && Inside::enter().is_none());
        drop(first);
        assert!(Inside::enter().is_some());
    }
}
