//! Error numbers as libibverbs reports them: functions that return a pointer return NULL and set
//! `errno`; functions that return a number return the error number, and set `errno` too, because
//! half of all programs print it.

use farlane_abi::Errno;
use std::ffi::c_int;

pub use libc::{EBUSY, EINVAL, ENODATA, ENODEV, ENOENT, ENOMEM, ENOSYS, EOPNOTSUPP};

/// Sets the calling thread's `errno`.
pub fn set(errno: c_int) {
    // SAFETY: the C library returns a valid pointer to the calling thread's own errno.
    unsafe { *libc::__errno_location() = errno };
}

/// Sets `errno` and returns the number.
pub fn fail(errno: c_int) -> c_int {
    set(errno);
    errno
}

/// Sets `errno` and returns NULL.
#[must_use]
pub fn fail_null<T>(errno: c_int) -> *mut T {
    set(errno);
    std::ptr::null_mut()
}

/// A result as a number: zero, or the error number.
pub fn answer(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => fail(errno.raw_os_error()),
    }
}

/// A result as a pointer: NULL with `errno` set where it is an error.
#[must_use]
pub fn pointer<T>(result: Result<*mut T, Errno>) -> *mut T {
    match result {
        Ok(pointer) => pointer,
        Err(errno) => fail_null(errno.raw_os_error()),
    }
}
