//! Error numbers as librdmacm reports them: -1, or NULL, and `errno`.

use farlane_abi::Errno;
use farlane_rdma_client::Error;
use std::ffi::c_int;

/// Sets the calling thread's `errno`.
pub fn set(errno: c_int) {
    // SAFETY: the C library returns a valid pointer to the calling thread's own errno.
    unsafe { *libc::__errno_location() = errno };
}

/// The calling thread's `errno`, as a call of another library has left it.
#[must_use]
pub fn last() -> Errno {
    // SAFETY: as above.
    let errno = unsafe { *libc::__errno_location() };
    number(errno)
}

/// An error number as the C library has it.
#[must_use]
pub fn number(errno: c_int) -> Errno {
    let errno = u32::try_from(errno).ok().and_then(Errno::from_wire);
    errno.unwrap_or(Errno::EIO)
}

/// The outcome of a function of `libibverbs.so.1` that returns an error number.
///
/// # Errors
/// That.
pub fn of(returned: c_int) -> Result<(), Errno> {
    match returned {
        0 => Ok(()),
        errno => Err(number(errno.saturating_abs())),
    }
}

/// The outcome of a call that not every backend knows.
///
/// # Errors
/// The call's.
pub fn called<T>(answered: Result<T, Error>) -> Result<T, Errno> {
    answered.map_err(|error| match error.errno() {
        Errno::ENOSYS => Errno::EOPNOTSUPP,
        errno => errno,
    })
}

/// Zero, or -1 and `errno`.
pub fn answer(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => fail(errno),
    }
}

/// Sets `errno` and returns -1.
pub fn fail(errno: Errno) -> c_int {
    set(errno.raw_os_error());
    -1
}

/// A result as a pointer: NULL with `errno` set where it is an error.
#[must_use]
pub fn pointer<T>(result: Result<*mut T, Errno>) -> *mut T {
    result.unwrap_or_else(|errno| {
        fail(errno);
        std::ptr::null_mut()
    })
}
