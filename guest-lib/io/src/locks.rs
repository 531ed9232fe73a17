//! Calls that take POSIX locks: before them the library's own descriptors of the file are closed.
//!
//! A thread may be cancelled while it waits for a lock. What is called before and after is `extern
//! "C"`, and nothing here is to be dropped: then there is nothing to be done in these functions
//! when the C library unwinds them.

use crate::next;
use farlane_io_core::descriptors::{lock_begins, lock_ended};
use farlane_io_core::locks::LockCall;
use farlane_io_core::sys::SavedErrno;
use libc::off_t;
use std::ffi::c_int;

#[cold]
extern "C" fn begins(fd: c_int) -> LockCall {
    let _saved = SavedErrno::new();
    lock_begins(fd)
}

#[cold]
extern "C" fn ended(locking: LockCall) {
    let _saved = SavedErrno::new();
    lock_ended(locking);
}

/// `fcntl`. C declares it with any arguments; the kernel knows at most three, and where there are
/// two the third is in no use.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    if !matches!(command, libc::F_SETLK | libc::F_SETLKW) {
        // SAFETY: as promised by the caller.
        return unsafe { next::fcntl(fd, command, argument) };
    }
    // What the structure says is not looked at: it may be none.
    let locking = begins(fd);
    // SAFETY: as promised by the caller.
    let result = unsafe { next::fcntl(fd, command, argument) };
    ended(locking);
    result
}

/// `lockf`: it locks inside the C library.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lockf(fd: c_int, command: c_int, length: off_t) -> c_int {
    if command == libc::F_TEST {
        // SAFETY: as promised by the caller.
        return unsafe { next::lockf(fd, command, length) };
    }
    let locking = begins(fd);
    // SAFETY: as promised by the caller.
    let result = unsafe { next::lockf(fd, command, length) };
    ended(locking);
    result
}

exports! {
    /// `fcntl` with large files, and another name of it.
    fn [fcntl64 __fcntl](fd: c_int, command: c_int, argument: usize) -> c_int =
        fcntl(fd, command, argument);
    /// `lockf` with large files.
    fn [lockf64](fd: c_int, command: c_int, length: off_t) -> c_int =
        lockf(fd, command, length);
}
