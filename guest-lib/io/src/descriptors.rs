//! Calls that say what becomes of descriptors and of mappings.

use crate::next;
use farlane_io_core::descriptors::{self, Closing};
use farlane_io_core::sys::{SavedErrno, page_bytes, set_errno};
use farlane_io_core::{automatic, files, may_overlap};
use libc::{off_t, size_t};
use std::ffi::{c_int, c_uint, c_void};

/// `CLOSE_RANGE_CLOEXEC`: nothing is closed yet.
const CLOEXEC: c_int = 1 << 2;

/// Before `new` becomes a duplicate of `old`. False where that cannot be, and `errno` says why.
fn replacing(old: c_int, new: c_int) -> bool {
    let saved = SavedErrno::new();
    let result = descriptors::replacing(old, new);
    drop(saved);
    if let Err(error) = result {
        set_errno(error.raw_os_error());
    }
    result.is_ok()
}

/// `close`.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    let saved = SavedErrno::new();
    let closing = descriptors::closing(fd);
    drop(saved);
    if closing == Closing::Ours {
        set_errno(libc::EBADF);
        return -1;
    }
    // SAFETY: as promised by the caller.
    unsafe { next::close(fd) }
}

/// `fclose`: it closes its descriptor inside the C library.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fclose(file: *mut libc::FILE) -> c_int {
    if files::is_any_known() && !file.is_null() {
        let saved = SavedErrno::new();
        // SAFETY: the program's own stream.
        let fd = unsafe { libc::fileno(file) };
        let _ = descriptors::closing(fd);
        drop(saved);
    }
    // SAFETY: as promised by the caller.
    unsafe { next::fclose(file) }
}

/// `dup2`.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if old != new && !replacing(old, new) {
        return -1;
    }
    // SAFETY: as promised by the caller.
    unsafe { next::dup2(old, new) }
}

/// `dup3`.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if old != new && !replacing(old, new) {
        return -1;
    }
    // SAFETY: as promised by the caller.
    unsafe { next::dup3(old, new, flags) }
}

/// `close_range`.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags & CLOEXEC != 0 {
        // SAFETY: as promised by the caller.
        return unsafe { next::close_range(first, last, flags) };
    }
    let mut result = 0;
    let mut error = SavedErrno::new();
    descriptors::closing_range(first, last, |first, last| {
        // SAFETY: as promised by the caller.
        if unsafe { next::close_range(first, last, flags) } != 0 {
            result = -1;
            error = SavedErrno::new();
        }
    });
    drop(error);
    result
}

/// `closefrom`.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    let saved = SavedErrno::new();
    let first = c_uint::try_from(first).unwrap_or(0);
    // SAFETY: as promised by the caller.
    unsafe { close_range(first, c_uint::MAX, 0) };
    drop(saved);
}

/// `posix_fadvise`.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_fadvise(
    fd: c_int,
    offset: off_t,
    length: off_t,
    advice: c_int,
) -> c_int {
    // SAFETY: as promised by the caller.
    let result = unsafe { next::fadvise(fd, offset, length, advice) };
    if result == 0 {
        let saved = SavedErrno::new();
        files::advised(fd, advice);
        drop(saved);
    }
    result
}

/// `posix_fadvise` with large offsets.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_fadvise64(
    fd: c_int,
    offset: off_t,
    length: off_t,
    advice: c_int,
) -> c_int {
    // SAFETY: as promised by the caller.
    unsafe { posix_fadvise(fd, offset, length, advice) }
}

/// `mmap`: mappings of device memory register themselves.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let replaces = flags & libc::MAP_FIXED != 0
        && flags & libc::MAP_FIXED_NOREPLACE != libc::MAP_FIXED_NOREPLACE;
    if replaces {
        unmapping(address, length);
    }
    // SAFETY: as promised by the caller.
    let mapped = unsafe { next::mmap(address, length, protection, flags, fd, offset) };
    if fd >= 0 && mapped != libc::MAP_FAILED && flags & libc::MAP_SHARED != 0 {
        let saved = SavedErrno::new();
        automatic::mapped(mapped.expose_provenance(), length, fd);
        drop(saved);
    }
    mapped
}

/// `mmap` with large offsets.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: as promised by the caller.
    unsafe { mmap(address, length, protection, flags, fd, offset) }
}

/// `munmap`.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, length: size_t) -> c_int {
    unmapping(address, length);
    // SAFETY: as promised by the caller.
    unsafe { next::munmap(address, length) }
}

#[inline]
fn unmapping(address: *mut c_void, length: size_t) {
    let address = address.addr();
    // What the kernel refuses takes nothing away.
    if may_overlap(address, length) && length > 0 && address.is_multiple_of(page_bytes()) {
        let saved = SavedErrno::new();
        automatic::unmapping(address, length);
        drop(saved);
    }
}
