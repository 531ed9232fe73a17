//! Children, and threads that are interrupted.

use farlane_transport::with_signals_blocked;
use std::cell::Cell;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

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
            crate::registry::hold();
            crate::tunnel::hold();
            crate::files::hold();
            crate::readahead::hold();
            crate::log::hold();
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
        crate::locks::forget();
        if FORKS.get() > 0 {
            // SAFETY: `prepare` has taken the locks in the thread that this one continues.
            unsafe {
                crate::readahead::forget();
                crate::files::forget();
                crate::tunnel::forget();
                crate::registry::forget();
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
            // SAFETY: `prepare` has taken them.
            unsafe {
                crate::log::release();
                crate::readahead::release();
                crate::files::release();
                crate::tunnel::release();
                crate::registry::release();
            }
            FORKS.set(0);
            INSIDE.set(false);
        }
        forks => FORKS.set(forks - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::thread::JoinHandleExt as _;
    use std::thread::JoinHandle;

    #[test]
    fn a_thread_is_inside_once_and_until_the_first_one_goes() {
        let first = Inside::enter();
        assert!(first.is_some() && Inside::enter().is_none() && Inside::enter().is_none());
        drop(first);
        assert!(Inside::enter().is_some());
    }

    /// Whether a thread of this process waits for a lock: with nothing else it sleeps on a futex.
    fn waits(thread: &AtomicI32) -> bool {
        let thread = thread.load(Ordering::Relaxed);
        let call = std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall"));
        call.is_ok_and(|call| call.starts_with(&format!("{} ", libc::SYS_futex)))
    }

    /// Whether a signal is kept from a thread until it does not block it any more.
    fn is_kept_from(thread: &AtomicI32, signal: i32) -> bool {
        let thread = thread.load(Ordering::Relaxed);
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status"));
        let status = status.unwrap_or_default();
        let mut sets = status
            .lines()
            .filter_map(|line| line.strip_prefix("SigPnd:"));
        let set = sets
            .next()
            .and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
        set.is_some_and(|set| set >> (signal - 1) & 1 == 1)
    }

    /// The child that the handler has made; zero in that child.
    static NESTED: AtomicI32 = AtomicI32::new(-1);

    /// Who hangs, here or in the child, is ended by a signal.
    extern "C" fn fork_once_more(_: i32) {
        // SAFETY: the child goes on as its parent does, and ends.
        let child = unsafe {
            let child = libc::fork();
            libc::alarm(60);
            child
        };
        NESTED.store(child, Ordering::Relaxed);
    }

    fn fork_as_the_c_library_does() {
        // SAFETY: these are its calls.
        unsafe {
            prepare();
            parent();
        }
    }

    /// A thread that forks, as far as the library is concerned, and its number when it has one.
    fn forker(number: &'static AtomicI32) -> JoinHandle<()> {
        std::thread::spawn(|| {
            number.store(rustix::thread::gettid().as_raw_pid(), Ordering::Relaxed);
            fork_as_the_c_library_does();
            if NESTED.load(Ordering::Relaxed) == 0 {
                // All locks are free here, too.
                fork_as_the_c_library_does();
                // SAFETY: ends the handler's child.
                unsafe { libc::_exit(0) };
            }
        })
    }

    /// In a process of its own. A signal comes while a thread waits for the third lock. Afterwards
    /// all of them are free.
    fn interrupted() -> bool {
        static FIRST: AtomicI32 = AtomicI32::new(0);
        static SECOND: AtomicI32 = AtomicI32::new(0);
        let signal = libc::SIGUSR1;
        // SAFETY: the handler makes calls that handlers may make.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = fork_once_more as *const () as usize;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
        crate::files::hold();
        let first = forker(&FIRST);
        while !waits(&FIRST) {
            std::thread::yield_now();
        }
        // SAFETY: the thread has not been waited for.
        unsafe { libc::pthread_kill(first.as_pthread_t(), signal) };
        while NESTED.load(Ordering::Relaxed) < 0 && !is_kept_from(&FIRST, signal) {
            std::thread::yield_now();
        }
        // SAFETY: this thread has taken it.
        unsafe { crate::files::release() };
        let ended = first.join().is_ok();
        // Who waits now waits for ever: nobody else is here.
        let second = forker(&SECOND);
        while !second.is_finished() && !waits(&SECOND) {
            std::thread::yield_now();
        }
        let mut status = -1;
        // SAFETY: waits for the child of the handler.
        unsafe { libc::waitpid(NESTED.load(Ordering::Relaxed), &raw mut status, 0) };
        ended && second.is_finished() && status == 0
    }

    #[test]
    fn a_signal_handler_forks_while_its_thread_does() {
        // The child's locks are free, whatever other tests are at.
        watch();
        // SAFETY: the child runs threads of its own and ends; one that hangs is ended by a signal.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                libc::alarm(60);
                libc::_exit(i32::from(!interrupted()))
            };
        }
        let mut status = -1;
        // SAFETY: waits for the child just made.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    }
}
