//! Children, and threads that are interrupted.

use crate::lock::Lock;
use farlane_transport::with_signals_blocked;
use std::cell::Cell;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Once, OnceLock};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// Forks of this thread that are under way and for which it has all locks: the first one took
    /// them, and the others are made by handlers, of forks and of signals, that run meanwhile.
    static FORKS: Cell<u32> = const { Cell::new(0) };
}

/// Says that this thread is in the library. A signal handler of the thread that does I/O meanwhile
/// gets the plain call: what the thread was interrupted in may hold a lock.
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

/// What a lock guards, in a child: that has none of its parent's descriptors, pins and threads.
pub(crate) trait ParentState {
    /// Forgets what is the parent's, without giving it back.
    fn forget(&mut self);
}

/// A lock that is held over a fork, so that a child finds whole what it guards.
pub(crate) trait ForkLock: Sync {
    /// Takes the lock, before a fork.
    fn hold(&self);

    /// Gives the lock back, after a fork.
    ///
    /// # Safety
    /// This thread has called [`hold`](Self::hold).
    unsafe fn release(&self);

    /// In a child, before [`release`](Self::release).
    ///
    /// # Safety
    /// As [`release`](Self::release).
    unsafe fn forget(&self);
}

impl<T: ParentState + Send> ForkLock for Lock<T> {
    fn hold(&self) {
        self.take();
    }

    unsafe fn release(&self) {
        // SAFETY: as promised by the caller.
        unsafe { self.give() };
    }

    unsafe fn forget(&self) {
        // SAFETY: the lock is held, says the caller.
        unsafe { self.held() }.forget();
    }
}

/// All locks of the library, in the order in which they are taken.
static LOCKS: OnceLock<&'static [&'static dyn ForkLock]> = OnceLock::new();

static IN_CHILD: OnceLock<fn()> = OnceLock::new();

fn locks() -> &'static [&'static dyn ForkLock] {
    LOCKS.get().copied().unwrap_or_default()
}

/// The process that the tables belong to.
static PROCESS: AtomicI32 = AtomicI32::new(0);
static WATCH: Once = Once::new();

/// Sees to forks from now on: holds these locks over each, in their order, and calls `in_child` in
/// each child.
pub(crate) fn watch(all: &'static [&'static dyn ForkLock], in_child: fn()) {
    WATCH.call_once(|| {
        PROCESS.store(process(), Ordering::Relaxed);
        // Before the handlers are there that use them.
        let _ = LOCKS.set(all);
        let _ = IN_CHILD.set(in_child);
        // SAFETY: the handlers are made for it. It fails for want of memory only.
        unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    });
}

/// Whether this thread has all locks because it forks: a handler of the program calls, and must not
/// wait for them.
pub(crate) fn has_locks() -> bool {
    FORKS.get() > 0
}

fn process() -> i32 {
    rustix::process::getpid().as_raw_pid()
}

/// Whether this process owns the tables: a child of `vfork` shares its parent's memory, but not its
/// descriptors.
pub(crate) fn is_owner() -> bool {
    PROCESS.load(Ordering::Relaxed) == process()
}

/// Whether the tables belong to another process: to that of which this is a child of `vfork`.
pub(crate) fn is_foreign() -> bool {
    PROCESS.load(Ordering::Relaxed) != 0 && !is_owner()
}

/// No handler of a signal forks while locks are being taken or given: either all of them are held
/// for [`FORKS`], or none is.
unsafe extern "C" fn prepare() {
    with_signals_blocked(|| {
        let forks = FORKS.get();
        // A handler that forks while its thread is inside cannot wait for what the thread holds.
        // Until the fork is over this one is inside: handlers of the program, of forks and of
        // signals, that close or lock a file meanwhile do not wait for it.
        if forks > 0 {
            FORKS.set(forks + 1);
        } else if !INSIDE.replace(true) {
            FORKS.set(1);
            locks().iter().for_each(|lock| lock.hold());
        }
    });
}

unsafe extern "C" fn parent() {
    // SAFETY: `prepare` has run in this thread.
    with_signals_blocked(|| unsafe { over() });
}

/// A child of a fork inside another one goes on with the other one: it forgets what is its
/// parent's, and keeps the locks until that one is over, too.
unsafe extern "C" fn child() {
    with_signals_blocked(|| {
        PROCESS.store(process(), Ordering::Relaxed);
        if let Some(in_child) = IN_CHILD.get() {
            in_child();
        }
        if FORKS.get() > 0 {
            for lock in locks().iter().rev() {
                // SAFETY: `prepare` has taken the locks in the thread that this one continues.
                unsafe { lock.forget() };
            }
        }
        // SAFETY: as above.
        unsafe { over() };
    });
}

/// A fork is over. With the first one that is under way the locks are given back.
///
/// # Safety
/// This thread, or in a child the one that forked, has run [`prepare`] for it.
unsafe fn over() {
    match FORKS.get() {
        // It has no locks: `prepare` found it inside.
        0 => (),
        1 => {
            for lock in locks().iter().rev() {
                // SAFETY: `prepare` has taken them.
                unsafe { lock.release() };
            }
            FORKS.set(0);
            INSIDE.set(false);
        }
        forks => FORKS.set(forks - 1),
    }
}

#[cfg(test)]
mod tests;
