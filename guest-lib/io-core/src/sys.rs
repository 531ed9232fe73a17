//! System calls that the program's own names must not be used for: `pread` and its like are what
//! this library stands in front of.
//!
//! Everything here goes to the kernel directly and leaves `errno` as it was.

use farlane_abi::width::to_usize;
use rustix::io::Errno;
use std::ffi::{c_int, c_long, c_void};
use std::os::fd::RawFd;

/// Most bytes that Linux moves in one call (`MAX_RW_COUNT` with pages of 4 KiB).
pub const MAX_BYTES: usize = 0x7fff_f000;

/// From or to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The file is read.
    Read,
    /// The file is written.
    Write,
}

/// Keeps the calling thread's `errno` over a scope.
pub struct SavedErrno(c_int);

impl SavedErrno {
    /// What it is now.
    #[must_use]
    pub fn new() -> Self {
        // SAFETY: the address of the calling thread's own variable.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl Default for SavedErrno {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for SavedErrno {
    fn drop(&mut self) {
        set_errno(self.0);
    }
}

/// Sets the calling thread's `errno`.
pub fn set_errno(value: c_int) {
    // SAFETY: the address of the calling thread's own variable.
    unsafe { *libc::__errno_location() = value };
}

/// # Safety
/// The arguments are right for call `number`.
unsafe fn call(number: c_long, arguments: [usize; 6]) -> Result<usize, Errno> {
    let saved = SavedErrno::new();
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: as promised by the caller.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    let result = usize::try_from(result).map_err(|_| {
        // SAFETY: the address of the calling thread's own variable.
        Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
    });
    drop(saved);
    result
}

/// A C integer as the kernel takes it in a register: the upper half is not looked at.
fn word(value: c_int) -> usize {
    to_usize(u32::from_ne_bytes(value.to_ne_bytes()).into())
}

/// `read`.
///
/// # Safety
/// As [`transfer`].
pub unsafe fn read(fd: RawFd, buffer: *mut c_void, length: usize) -> Result<usize, Errno> {
    // SAFETY: as promised by the caller.
    unsafe { call(libc::SYS_read, [word(fd), buffer.addr(), length, 0, 0, 0]) }
}

/// `pread` or `pwrite`.
///
/// # Safety
/// The kernel may write (of a read) or reads (of a write) `length` bytes at `buffer`; it checks
/// that they are mapped.
pub unsafe fn transfer(
    direction: Direction,
    fd: RawFd,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
) -> Result<usize, Errno> {
    let number = match direction {
        Direction::Read => libc::SYS_pread64,
        Direction::Write => libc::SYS_pwrite64,
    };
    let arguments = [word(fd), buffer.addr(), length, to_usize(offset), 0, 0];
    // SAFETY: as promised by the caller.
    unsafe { call(number, arguments) }
}

/// `pwritev2` of one buffer with `RWF_*` flags.
///
/// # Safety
/// As [`transfer`].
pub unsafe fn pwrite_with(
    fd: RawFd,
    buffer: *const c_void,
    length: usize,
    offset: u64,
    flags: c_int,
) -> Result<usize, Errno> {
    let vector = libc::iovec {
        iov_base: buffer.cast_mut(),
        iov_len: length,
    };
    let arguments = [
        word(fd),
        (&raw const vector).addr(),
        1,
        to_usize(offset),
        0,
        word(flags),
    ];
    // SAFETY: as promised by the caller; `vector` lives over the call.
    unsafe { call(libc::SYS_pwritev2, arguments) }
}

/// `preadv` or `pwritev`; without an offset `readv` or `writev`.
///
/// # Safety
/// The kernel may write (of a read) or reads (of a write) what the vectors name; it checks that it
/// is mapped.
pub(crate) unsafe fn vectored(
    direction: Direction,
    fd: RawFd,
    vectors: &[libc::iovec],
    offset: Option<u64>,
) -> Result<usize, Errno> {
    let number = match (direction, offset) {
        (Direction::Read, None) => libc::SYS_readv,
        (Direction::Write, None) => libc::SYS_writev,
        (Direction::Read, Some(_)) => libc::SYS_preadv,
        (Direction::Write, Some(_)) => libc::SYS_pwritev,
    };
    let (base, count) = (vectors.as_ptr().addr(), vectors.len());
    let offset = offset.map_or(0, to_usize);
    // SAFETY: as promised by the caller.
    unsafe { call(number, [word(fd), base, count, offset, 0, 0]) }
}

/// `lseek`.
pub fn seek(fd: RawFd, offset: i64, whence: c_int) -> Result<u64, Errno> {
    let offset = usize::from_ne_bytes(offset.to_ne_bytes());
    // SAFETY: touches no memory.
    let position = unsafe { call(libc::SYS_lseek, [word(fd), offset, word(whence), 0, 0, 0]) }?;
    Ok(position as u64)
}

/// `posix_fadvise`; a length of zero means up to the end.
pub fn advise(fd: RawFd, offset: u64, length: u64, advice: c_int) -> Result<(), Errno> {
    let arguments = [
        word(fd),
        to_usize(offset),
        to_usize(length),
        word(advice),
        0,
        0,
    ];
    // SAFETY: touches no memory.
    unsafe { call(libc::SYS_fadvise64, arguments) }.map(drop)
}

/// `sync_file_range` that writes dirty pages of the range and waits for all of them.
pub fn write_back(fd: RawFd, offset: u64, length: u64) -> Result<(), Errno> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let arguments = [
        word(fd),
        to_usize(offset),
        to_usize(length),
        to_usize(flags.into()),
        0,
        0,
    ];
    // SAFETY: touches no memory.
    unsafe { call(libc::SYS_sync_file_range, arguments) }.map(drop)
}

/// Does to a file what a write at `offset` does before it moves anything: sets its modification
/// time, takes rights away that files lose when they are written, and finds out that it has none.
/// The block there is one that a write would allocate.
pub fn modify(fd: RawFd, offset: u64) {
    let mode = word(libc::FALLOC_FL_KEEP_SIZE);
    let arguments = [word(fd), mode, to_usize(offset), 1, 0, 0];
    // SAFETY: touches no memory.
    if unsafe { call(libc::SYS_fallocate, arguments) }.is_err() {
        touch(fd);
    }
}

/// Sets a file's modification time to now.
fn touch(fd: RawFd) {
    let never = libc::timespec {
        tv_sec: 0,
        tv_nsec: libc::UTIME_OMIT,
    };
    let now = libc::timespec {
        tv_nsec: libc::UTIME_NOW,
        ..never
    };
    let times = [never, now];
    let arguments = [word(fd), 0, (&raw const times).addr(), 0, 0, 0];
    // SAFETY: both times live over the call.
    let _ = unsafe { call(libc::SYS_utimensat, arguments) };
}

/// `close`, past the function of the C library.
pub fn close(fd: RawFd) {
    // SAFETY: touches no memory.
    let _ = unsafe { call(libc::SYS_close, [word(fd), 0, 0, 0, 0, 0]) };
}

/// `FS_IOC_FSGETXATTR` and `struct fsxattr` (linux/fs.h): its words, of which the first are the
/// flags.
const IOC_FSGETXATTR: usize = 0x801c_581f;
const FSXATTR_WORDS: usize = 7;

/// The `FS_XFLAG_*` of a file, where its file system has any.
pub(crate) fn extended_flags(fd: RawFd) -> Option<u32> {
    let mut words = [0_u32; FSXATTR_WORDS];
    let arguments = [word(fd), IOC_FSGETXATTR, (&raw mut words).addr(), 0, 0, 0];
    // SAFETY: the kernel writes as many words, which live over the call.
    unsafe { call(libc::SYS_ioctl, arguments) }.ok()?;
    Some(words[0])
}

/// Pages of a range of a file that are in the page cache.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStat {
    /// Pages in the cache.
    pub cached: u64,
    /// Of them, dirty ones.
    pub dirty: u64,
    /// Of them, ones being written back.
    pub writeback: u64,
    /// Pages that were there.
    pub evicted: u64,
    /// Of them, those that would still be there in a slightly larger cache.
    pub recently_evicted: u64,
}

/// `cachestat` (Linux 6.5): one number, the same on all architectures.
const SYS_CACHESTAT: c_long = 451;

/// `cachestat` of `length` bytes at `offset`, a length that is not zero.
pub fn cachestat(fd: RawFd, offset: u64, length: u64) -> Result<CacheStat, Errno> {
    let range = [offset, length];
    let mut found = CacheStat::default();
    let arguments = [
        word(fd),
        (&raw const range).addr(),
        (&raw mut found).addr(),
        0,
        0,
        0,
    ];
    // SAFETY: both structures live over the call and have the kernel's layout.
    unsafe { call(SYS_CACHESTAT, arguments) }?;
    Ok(found)
}

/// `mincore`: a byte for each page of the mapping at `address`; bit 0 says that it is in memory.
///
/// # Errors
/// `ENOMEM` when something there is not mapped.
pub fn mincore(address: usize, length: usize, pages: &mut [u8]) -> Result<(), Errno> {
    if pages.len() < length.div_ceil(page_bytes()) {
        return Err(Errno::INVAL);
    }
    let arguments = [address, length, pages.as_mut_ptr().addr(), 0, 0, 0];
    // SAFETY: writes one byte a page, for which there is room.
    unsafe { call(libc::SYS_mincore, arguments) }.map(drop)
}

/// Bytes of a page.
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd as _;

    #[test]
    fn an_error_is_returned_and_errno_stays() {
        set_errno(77);
        // SAFETY: the descriptor is none.
        let result = unsafe { transfer(Direction::Read, -1, std::ptr::null_mut(), 1, 0) };
        assert_eq!(result, Err(Errno::BADF));
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(77));
    }

    #[test]
    fn seeks_go_backwards_too() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(seek(file.as_raw_fd(), 10, libc::SEEK_SET), Ok(10));
        assert_eq!(seek(file.as_raw_fd(), -4, libc::SEEK_CUR), Ok(6));
        assert_eq!(
            seek(file.as_raw_fd(), -7, libc::SEEK_CUR),
            Err(Errno::INVAL)
        );
    }
}
