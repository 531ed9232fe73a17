//! Whether this process is a child of the one that opened a transport.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

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

#[cfg(test)]
mod tests {
    use super::*;

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
