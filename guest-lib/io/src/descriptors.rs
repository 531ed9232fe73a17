//! Calls that say what becomes of descriptors and of mappings.

use crate::next;
use farlane_io_core::descriptors::{self, DescriptorOwner};
use farlane_io_core::sys::{SavedErrno, page_bytes, set_errno};
use farlane_io_core::{automatic, files, may_overlap, stream};
use libc::{off_t, size_t};
use std::ffi::{c_char, c_int, c_uint, c_void};

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
    if closing == DescriptorOwner::Ours {
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
    // SAFETY: as promised by the caller.
    unsafe {
        closing_stream(file);
        next::fclose(file)
    }
}

/// Before a stream's descriptor is closed.
///
/// # Safety
/// `file` is null or a stream.
unsafe fn closing_stream(file: *mut libc::FILE) {
    if files::is_any_known() && !file.is_null() {
        let saved = SavedErrno::new();
        // SAFETY: the program's own stream.
        let fd = unsafe { libc::fileno(file) };
        let _ = descriptors::closing(fd);
        drop(saved);
    }
}

/// `freopen`: it closes or replaces the stream's descriptor inside the C library.
///
/// # Safety
/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freopen(
    path: *const c_char,
    mode: *const c_char,
    file: *mut libc::FILE,
) -> *mut libc::FILE {
    // SAFETY: as promised by the caller.
    unsafe {
        closing_stream(file);
        next::freopen(path, mode, file)
    }
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
    // From the first of all, where a number below zero is given.
    let first = first.max(0).cast_unsigned();
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
        stream::advised(fd, advice);
        drop(saved);
    }
    result
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

/// `mremap`: device memory that moves stays registered.
///
/// # Safety
/// As the C library's function of this name, which has `new` only with some flags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_length: size_t,
    new_length: size_t,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    let with_new = flags & (libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) != 0;
    let new = if with_new { new } else { std::ptr::null_mut() };
    if flags & libc::MREMAP_FIXED != 0 {
        unmapping(new, new_length);
    }
    // Of a shared mapping that is mapped once more (a length of zero) all that is mapped again is
    // looked at.
    if !may_overlap(old.addr(), old_length.max(new_length)) {
        // SAFETY: as promised by the caller.
        return unsafe { next::mremap(old, old_length, new_length, flags, new) };
    }
    let saved = SavedErrno::new();
    let moving = automatic::moving(old.addr(), old_length, new_length);
    drop(saved);
    // SAFETY: as promised by the caller.
    let moved = unsafe { next::mremap(old, old_length, new_length, flags, new) };
    let saved = SavedErrno::new();
    let stays = flags & libc::MREMAP_DONTUNMAP != 0;
    moving.ended(
        (moved != libc::MAP_FAILED).then(|| moved.expose_provenance()),
        stays,
    );
    drop(saved);
    moved
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

exports! {
    /// `freopen` with large files.
    fn [freopen64](path: *const c_char, mode: *const c_char, file: *mut libc::FILE)
        -> *mut libc::FILE =
        freopen(path, mode, file);
    /// `posix_fadvise` with large offsets.
    fn [posix_fadvise64](fd: c_int, offset: off_t, length: off_t, advice: c_int) -> c_int =
        posix_fadvise(fd, offset, length, advice);
    /// `mmap` with large offsets.
    fn [mmap64](address: *mut c_void, length: size_t, protection: c_int, flags: c_int, fd: c_int,
        offset: off_t) -> *mut c_void =
        mmap(address, length, protection, flags, fd, offset);
}
