//! `read`, `write` and their like.

use crate::buffers::BufferList;
use crate::next;
use farlane_io_core::route::{self, Call};
use farlane_io_core::sys::{SavedErrno, set_errno};
use farlane_io_core::vector::{self, VectorCall};
use farlane_io_core::{Direction, Errno, Position, is_registered, may_hold};
use libc::{iovec, off_t, size_t, ssize_t};
use std::ffi::{c_int, c_void};
use std::iter;

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
    if !is_adopted(iter::once((call.address, call.length))) {
        return result;
    }
    routed(call, direction).unwrap_or(result)
}

/// After a failed call: whether it failed with `EFAULT`, and some of its buffers are device memory
/// that the call is to be made with again.
fn is_adopted(buffers: impl Iterator<Item = (usize, usize)>) -> bool {
    let saved = SavedErrno::new();
    let is_fault = std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT);
    let adopted = |&(address, length): &(usize, usize)| {
        length > 0 && !is_registered(address, length) && route::adopt(address, length)
    };
    let found = is_fault && buffers.filter(adopted).count() > 0;
    drop(saved);
    found
}

/// An offset that is none is the kernel's to refuse.
fn position(offset: off_t) -> Option<Position> {
    u64::try_from(offset).ok().map(Position::At)
}

fn several(
    name: &'static str,
    fd: c_int,
    buffers: *const iovec,
    count: c_int,
    position: Option<Position>,
    direction: Direction,
) -> Several {
    Several {
        name,
        fd,
        list: BufferList::new(buffers, count),
        position,
        direction,
    }
}

/// A call with several buffers.
#[derive(Clone, Copy)]
struct Several {
    name: &'static str,
    fd: c_int,
    list: BufferList,
    position: Option<Position>,
    direction: Direction,
}

impl Several {
    /// Ours if the router takes it, else the C library's.
    ///
    /// # Safety
    /// The list is one that the kernel can read, or that it refuses.
    unsafe fn serve(self, plain: impl Fn() -> ssize_t) -> ssize_t {
        // SAFETY: as promised by the caller.
        if let Some(result) = unsafe { self.routed() } {
            return result;
        }
        let result = plain();
        if result < 0
            // SAFETY: as promised by the caller.
            && unsafe { self.is_adopted() }
            // SAFETY: as promised by the caller.
            && let Some(result) = unsafe { self.routed() }
        {
            return result;
        }
        result
    }

    /// # Safety
    /// As [`serve`](Self::serve).
    unsafe fn routed(self) -> Option<ssize_t> {
        // Without registered memory nothing is looked at.
        if !farlane_io_core::may_overlap(0, usize::MAX) {
            return None;
        }
        let position = self.position?;
        let ours = |buffer: &iovec| is_registered(buffer.iov_base.addr(), buffer.iov_len);
        let saved = SavedErrno::new();
        let serve = |buffers: &[iovec]| {
            let call = VectorCall {
                name: self.name,
                fd: self.fd,
                buffers,
                position,
            };
            vector::serve(&call, self.direction)
        };
        // SAFETY: as promised by the caller.
        let result = unsafe { self.list.copied(ours, serve) }?;
        drop(saved);
        Some(answer(result))
    }

    /// After a failed call: as [`is_adopted`]. The kernel may have refused the list itself.
    ///
    /// # Safety
    /// As [`serve`](Self::serve).
    #[cold]
    unsafe fn is_adopted(self) -> bool {
        if !route::may_adopt() {
            return false;
        }
        let bounds = |buffer: &iovec| (buffer.iov_base.expose_provenance(), buffer.iov_len);
        let adopted = |list: &[iovec]| Some(is_adopted(list.iter().map(bounds)));
        // SAFETY: as promised by the caller.
        unsafe { self.list.copied(|_| true, adopted) }.unwrap_or(false)
    }
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
            .serve(|| next::readv(fd, buffers, count));
    /// `preadv`; `64`: with large offsets.
    fn [preadv preadv64](fd: c_int, buffers: *const iovec, count: c_int, offset: off_t) -> ssize_t =
        several(NAME, fd, buffers, count, position(offset), Read)
            .serve(|| next::preadv(fd, buffers, count, offset));
    /// `preadv2`; `64`: with large offsets.
    fn [preadv2 preadv64v2](fd: c_int, buffers: *const iovec, count: c_int, offset: off_t,
        flags: c_int) -> ssize_t =
        several(NAME, fd, buffers, count, position_with(offset, flags), Read)
            .serve(|| next::preadv2(fd, buffers, count, offset, flags));
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
            .serve(|| next::writev(fd, buffers, count));
    /// `pwritev`; `64`: with large offsets.
    fn [pwritev pwritev64](fd: c_int, buffers: *const iovec, count: c_int, offset: off_t)
        -> ssize_t =
        several(NAME, fd, buffers, count, position(offset), Write)
            .serve(|| next::pwritev(fd, buffers, count, offset));
    /// `pwritev2`; `64`: with large offsets.
    fn [pwritev2 pwritev64v2](fd: c_int, buffers: *const iovec, count: c_int, offset: off_t,
        flags: c_int) -> ssize_t =
        several(NAME, fd, buffers, count, position_with(offset, flags), Write)
            .serve(|| next::pwritev2(fd, buffers, count, offset, flags));
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
