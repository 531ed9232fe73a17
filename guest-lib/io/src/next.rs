//! The C library's own functions, as this library calls them.

use crate::original::{Original, originals};
use libc::{c_int, c_long, iovec, off_t, size_t, ssize_t, syscall};
use std::ffi::{c_char, c_uint, c_void};

/// A system call's result as the C library's functions of this type return it: the kernel's is no
/// wider.
fn narrow(result: c_long) -> c_int {
    let [a, b, c, d, ..] = result.to_le_bytes();
    c_int::from_le_bytes([a, b, c, d])
}

fn wide(result: c_long) -> ssize_t {
    isize::from_ne_bytes(result.to_ne_bytes())
}

/// `posix_fadvise` returns its error and leaves `errno` alone.
fn error_of(result: c_long) -> c_int {
    if result == 0 {
        return 0;
    }
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

originals! {
    read = c"read": fn(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t,
        or wide(syscall(libc::SYS_read, fd, buffer, length));
    pread = c"pread64":
        fn(fd: c_int, buffer: *mut c_void, length: size_t, offset: off_t) -> ssize_t,
        or wide(syscall(libc::SYS_pread64, fd, buffer, length, offset));
    readv = c"readv": fn(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t,
        or wide(syscall(libc::SYS_readv, fd, buffers, count));
    preadv = c"preadv64":
        fn(fd: c_int, buffers: *const iovec, count: c_int, offset: off_t) -> ssize_t,
        or wide(syscall(libc::SYS_preadv, fd, buffers, count, offset, 0));
    preadv2 = c"preadv64v2":
        fn(fd: c_int, buffers: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t,
        or wide(syscall(libc::SYS_preadv2, fd, buffers, count, offset, 0, flags));
    write = c"write": fn(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t,
        or wide(syscall(libc::SYS_write, fd, buffer, length));
    pwrite = c"pwrite64":
        fn(fd: c_int, buffer: *const c_void, length: size_t, offset: off_t) -> ssize_t,
        or wide(syscall(libc::SYS_pwrite64, fd, buffer, length, offset));
    writev = c"writev": fn(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t,
        or wide(syscall(libc::SYS_writev, fd, buffers, count));
    pwritev = c"pwritev64":
        fn(fd: c_int, buffers: *const iovec, count: c_int, offset: off_t) -> ssize_t,
        or wide(syscall(libc::SYS_pwritev, fd, buffers, count, offset, 0));
    pwritev2 = c"pwritev64v2":
        fn(fd: c_int, buffers: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t,
        or wide(syscall(libc::SYS_pwritev2, fd, buffers, count, offset, 0, flags));
    read_chk = c"__read_chk":
        fn(fd: c_int, buffer: *mut c_void, length: size_t, room: size_t) -> ssize_t,
        or checked(length, room, || read(fd, buffer, length));
    pread_chk = c"__pread64_chk":
        fn(fd: c_int, buffer: *mut c_void, length: size_t, offset: off_t, room: size_t) -> ssize_t,
        or checked(length, room, || pread(fd, buffer, length, offset));
    mmap = c"mmap64":
        fn(address: *mut c_void, length: size_t, protection: c_int, flags: c_int, fd: c_int,
           offset: off_t) -> *mut c_void,
        or std::ptr::with_exposed_provenance_mut(usize::from_ne_bytes(
            syscall(libc::SYS_mmap, address, length, protection, flags, fd, offset).to_ne_bytes()));
    mremap = c"mremap":
        fn(old: *mut c_void, old_length: size_t, new_length: size_t, flags: c_int,
           new: *mut c_void) -> *mut c_void,
        or std::ptr::with_exposed_provenance_mut(usize::from_ne_bytes(
            syscall(libc::SYS_mremap, old, old_length, new_length, flags, new).to_ne_bytes()));
    munmap = c"munmap": fn(address: *mut c_void, length: size_t) -> c_int,
        or narrow(syscall(libc::SYS_munmap, address, length));
    close = c"close": fn(fd: c_int) -> c_int,
        or narrow(syscall(libc::SYS_close, fd));
    dup2 = c"dup2": fn(old: c_int, new: c_int) -> c_int,
        or if old == new {
            libc::fcntl(old, libc::F_GETFD).min(0) | old
        } else {
            narrow(syscall(libc::SYS_dup3, old, new, 0))
        };
    dup3 = c"dup3": fn(old: c_int, new: c_int, flags: c_int) -> c_int,
        or narrow(syscall(libc::SYS_dup3, old, new, flags));
    close_range = c"close_range": fn(first: c_uint, last: c_uint, flags: c_int) -> c_int,
        or narrow(syscall(libc::SYS_close_range, first, last, flags));
    fadvise = c"posix_fadvise64":
        fn(fd: c_int, offset: off_t, length: off_t, advice: c_int) -> c_int,
        or error_of(syscall(libc::SYS_fadvise64, fd, offset, length, advice));
    fclose = c"fclose": fn(file: *mut libc::FILE) -> c_int,
        or late(&table::fclose, libc::EOF, || fclose(file));
    freopen = c"freopen64":
        fn(path: *const c_char, mode: *const c_char, file: *mut libc::FILE) -> *mut libc::FILE,
        or late(&table::freopen, std::ptr::null_mut(), || freopen(path, mode, file));
    // Declared with any arguments: those that it has are passed as here.
    fcntl = c"fcntl": fn(fd: c_int, command: c_int, argument: usize) -> c_int,
        or narrow(syscall(libc::SYS_fcntl, fd, command, argument));
    lockf = c"lockf64": fn(fd: c_int, command: c_int, length: off_t) -> c_int,
        or late(&table::lockf, -1, || lockf(fd, command, length));
}

/// As the C library's checks: a buffer that is too small ends the program.
fn checked(length: size_t, room: size_t, plain: impl FnOnce() -> ssize_t) -> ssize_t {
    if length > room {
        std::process::abort();
    }
    plain()
}

/// What no system call does alone is looked up now: `otherwise` where it is not there.
fn late<T>(original: &Original, otherwise: T, call: impl FnOnce() -> T) -> T {
    if original.resolve().is_null() {
        return otherwise;
    }
    call()
}
