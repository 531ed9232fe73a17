//! `read`, `write` and their like.

use crate::next;
use farlane_io_core::route::{self, Call};
use farlane_io_core::sys::{SavedErrno, set_errno};
use farlane_io_core::vector::{self, VectorCall};
use farlane_io_core::{Direction, Errno, Position, is_registered, may_hold};
use libc::{iovec, off_t, size_t, ssize_t};
use std::ffi::{c_int, c_void};

/// A call with one buffer: ours if the router takes it, else the C library's.
#[inline]
fn one(call: Call, direction: Direction, plain: impl Fn() -> ssize_t) -> ssize_t {
    if may_hold(call.address)
        && is_registered(call.address, call.length)
        && let Some(result) = routed(&call, direction)
    {
        return result;
    }
    let result = plain();
    if result < 0 {
        return refused(&call, direction, result);
    }
    result
}

#[inline]
fn call(
    name: &'static str,
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    position: Position,
) -> Call {
    Call {
        name,
        fd,
        address: buffer.expose_provenance(),
        length,
        position,
    }
}

#[cold]
fn routed(call: &Call, direction: Direction) -> Option<ssize_t> {
    let saved = SavedErrno::new();
    let result = route::serve(call, direction)?;
    drop(saved);
    Some(answer(result))
}

/// A result as the C library returns it.
fn answer(result: Result<usize, Errno>) -> ssize_t {
    match result {
        // A call moves no more than fits (`MAX_RW_COUNT`).
        Ok(moved) => moved.cast_signed(),
        Err(error) => {
            set_errno(error.raw_os_error());
            -1
        }
    }
}

/// A call that the kernel has refused: `EFAULT` may mean device memory that nobody has registered.
#[cold]
fn refused(call: &Call, direction: Direction, result: ssize_t) -> ssize_t {
    let saved = SavedErrno::new();
    let fault = std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT);
    let is_adopted = fault && route::adopt(call.address, call.length);
    drop(saved);
    match is_adopted {
        true => routed(call, direction).unwrap_or(result),
        false => result,
    }
}

/// An offset that is none is the kernel's to refuse.
fn position(offset: off_t) -> Option<Position> {
    u64::try_from(offset).ok().map(Position::At)
}

/// # Safety
/// `buffers` points to `count` buffers, if that is a number that the kernel takes.
unsafe fn several(
    name: &'static str,
    fd: c_int,
    buffers: *const iovec,
    count: c_int,
    position: Option<Position>,
    direction: Direction,
) -> Option<ssize_t> {
    // Without registered memory nothing is looked at.
    if !farlane_io_core::may_overlap(0, usize::MAX) || buffers.is_null() {
        return None;
    }
    let count = usize::try_from(count)
        .ok()
        .filter(|count| (1..=1024).contains(count))?;
    // SAFETY: as promised by the caller.
    let buffers = unsafe { std::slice::from_raw_parts(buffers, count) };
    let call = VectorCall {
        name,
        fd,
        buffers,
        position: position?,
    };
    let saved = SavedErrno::new();
    let result = vector::serve(&call, direction)?;
    drop(saved);
    Some(answer(result))
}

/// # Safety
/// As `pread`.
unsafe fn read_at(
    name: &'static str,
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    offset: off_t,
) -> ssize_t {
    // SAFETY: as promised by the caller.
    let plain = || unsafe { next::pread(fd, buffer, length, offset) };
    match position(offset) {
        Some(position) => one(call(name, fd, buffer, length, position), Read, plain),
        None => plain(),
    }
}

/// # Safety
/// As `pwrite`.
unsafe fn write_at(
    name: &'static str,
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    offset: off_t,
) -> ssize_t {
    // SAFETY: as promised by the caller.
    let plain = || unsafe { next::pwrite(fd, buffer, length, offset) };
    match position(offset) {
        Some(position) => one(call(name, fd, buffer, length, position), Write, plain),
        None => plain(),
    }
}

/// Flags change what a call means: those with any are the kernel's. An offset of -1 is the file
/// position.
fn position_with(offset: off_t, flags: c_int) -> Option<Position> {
    match (offset, flags) {
        (-1, 0) => Some(Position::Current),
        (_, 0) => position(offset),
        _ => None,
    }
}

use Direction::{Read, Write};
const CURRENT: Position = Position::Current;

exports! {
    /// `read`.
    fn [read](fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t =
        one(call(NAME, fd, buffer, length, CURRENT), Read, || next::read(fd, buffer, length));
    /// `pread`; `64`: with large offsets.
    fn [pread pread64](fd: c_int, buffer: *mut c_void, length: size_t, offset: off_t) -> ssize_t =
        read_at(NAME, fd, buffer, length, offset);
    /// `readv`.
    fn [readv](fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t =
        several(NAME, fd, buffers, count, Some(CURRENT), Read)
            .unwrap_or_else(|| next::readv(fd, buffers, count));
    /// `preadv`; `64`: with large offsets.
    fn [preadv preadv64](fd: c_int, buffers: *const iovec, count: c_int, offset: off_t) -> ssize_t =
        several(NAME, fd, buffers, count, position(offset), Read)
            .unwrap_or_else(|| next::preadv(fd, buffers, count, offset));
    /// `preadv2`; `64`: with large offsets.
    fn [preadv2 preadv64v2](fd: c_int, buffers: *const iovec, count: c_int, offset: off_t,
        flags: c_int) -> ssize_t =
        several(NAME, fd, buffers, count, position_with(offset, flags), Read)
            .unwrap_or_else(|| next::preadv2(fd, buffers, count, offset, flags));
    /// `write`.
    fn [write](fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t =
        one(call(NAME, fd, buffer, length, CURRENT), Write, || next::write(fd, buffer, length));
    /// `pwrite`; `64`: with large offsets.
    fn [pwrite pwrite64](fd: c_int, buffer: *const c_void, length: size_t, offset: off_t)
        -> ssize_t =
        write_at(NAME, fd, buffer, length, offset);
    /// `writev`.
    fn [writev](fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t =
        several(NAME, fd, buffers, count, Some(CURRENT), Write)
            .unwrap_or_else(|| next::writev(fd, buffers, count));
    /// `pwritev`; `64`: with large offsets.
    fn [pwritev pwritev64](fd: c_int, buffers: *const iovec, count: c_int, offset: off_t)
        -> ssize_t =
        several(NAME, fd, buffers, count, position(offset), Write)
            .unwrap_or_else(|| next::pwritev(fd, buffers, count, offset));
    /// `pwritev2`; `64`: with large offsets.
    fn [pwritev2 pwritev64v2](fd: c_int, buffers: *const iovec, count: c_int, offset: off_t,
        flags: c_int) -> ssize_t =
        several(NAME, fd, buffers, count, position_with(offset, flags), Write)
            .unwrap_or_else(|| next::pwritev2(fd, buffers, count, offset, flags));
    /// `read` of programs that are built to check sizes.
    fn [__read_chk](fd: c_int, buffer: *mut c_void, length: size_t, room: size_t) -> ssize_t =
        if length > room {
            next::read_chk(fd, buffer, length, room)
        } else {
            read(fd, buffer, length)
        };
    /// `pread` of programs that are built to check sizes.
    fn [__pread_chk](fd: c_int, buffer: *mut c_void, length: size_t, offset: off_t, room: size_t)
        -> ssize_t =
        if length > room {
            next::pread_chk(fd, buffer, length, offset, room)
        } else {
            pread(fd, buffer, length, offset)
        };
    /// The same with large offsets.
    fn [__pread64_chk](fd: c_int, buffer: *mut c_void, length: size_t, offset: off_t, room: size_t)
        -> ssize_t =
        if length > room {
            next::pread_chk(fd, buffer, length, offset, room)
        } else {
            pread64(fd, buffer, length, offset)
        };
}
