//! POSIX locks of the program (`fcntl(F_SETLK)`, `lockf`). They belong to the process and the file:
//! closing any descriptor of the file drops them, ours too, and `execve` closes ours. So a file has
//! either a lock or a descriptor of ours, never both.
//!
//! **Why never both.** A call that may lock a file begins (`descriptors::lock_begins`) before the
//! kernel knows of it: it counts itself in `UNDER_WAY`, then looks for the file among the known
//! ones, and closes what there is of ours under the lock of the file's `DirectFds`. Who opens one
//! (`DirectFds::enter`) does so under that lock, after it has found no such call counted and no
//! lock in the kernel's list.
//! * The file was known when the call looked: whoever opened before the call had that lock is
//!   closed by it, and waited for while others use it; who has it afterwards finds the call
//!   counted.
//! * The file was not known: it becomes so under the lock of all files, after the call had that
//!   one; whoever opens does so later, and finds the call counted.
//! * When the call has ended, the kernel's list has the lock. It had it before the call was no
//!   more counted.
//!
//! Locks that are taken by system calls around the C library are seen in the kernel's list, where a
//! descriptor is to be opened. Where there is one already, it stays: to close it would drop them at
//! once.

use crate::file_id::{FileId, stat};
use crate::{fork, sys};
use rustix::fs::{FileType, Mode, OFlags, RawDir};
use rustix::io::Errno;
use std::ffi::CStr;
use std::io::Write as _;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

/// How many counters there are: files that share one with a file on which a lock is waited for go
/// the plain way meanwhile.
const COUNTERS: usize = 256;

/// Calls under way that may lock a file, by its number. A call that never returns, because its
/// thread is cancelled or its signal handler jumps away, stays counted.
static UNDER_WAY: [AtomicU32; COUNTERS] = [const { AtomicU32::new(0) }; COUNTERS];

/// How often this process and those before it have forked: a child has none of its parent's calls
/// under way.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// A call that may lock a file, from before it to after it. It does not end by itself: a thread
/// that waits for a lock may be cancelled, and nothing of ours must be in the way of that.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LockCall {
    /// False of what is no file.
    is_counted: bool,
    forks: u32,
    file: FileId,
}

impl LockCall {
    /// Counts a call that is about to be made. Takes no memory and gives none back.
    pub(crate) fn begin(fd: RawFd) -> Self {
        let stat = stat(fd).filter(|stat| {
            FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && !fork::is_foreign()
        });
        let call = Self {
            is_counted: stat.is_some(),
            forks: FORKS.load(Ordering::Relaxed),
            file: stat.map_or(FileId::default(), |stat| FileId::of(&stat)),
        };
        if call.is_counted {
            counter(call.file).fetch_add(1, Ordering::SeqCst);
        }
        call
    }

    /// The file that it may lock; none in a child of the process that makes the call.
    pub(crate) fn file(&self) -> Option<FileId> {
        let is_here = self.forks == FORKS.load(Ordering::Relaxed);
        (self.is_counted && is_here).then_some(self.file)
    }

    /// The call has returned.
    pub(crate) fn end(self) {
        if let Some(file) = self.file() {
            counter(file).fetch_sub(1, Ordering::SeqCst);
        }
    }
}

fn counter(file: FileId) -> &'static AtomicU32 {
    // Neighbours have different ones; the device's upper half is its minor number's.
    let mixed = file.inode ^ file.device.rotate_left(8);
    &UNDER_WAY[usize::from(mixed.to_le_bytes()[0])]
}

/// Whether a call may be locking the file now.
pub(crate) fn is_under_way(file: FileId) -> bool {
    counter(file).load(Ordering::SeqCst) > 0
}

/// In a child, which has one thread.
pub(crate) fn forget() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for counter in &UNDER_WAY {
        counter.store(0, Ordering::Relaxed);
    }
}

/// Where a lock is told of in `/proc/self/fdinfo` (fs/locks.c: `lock_get_status`); those of open
/// files are `OFDLCK` and `FLOCK`.
const POSIX: &[u8] = b": POSIX ";

/// The file that a descriptor is of, as a path. To close a descriptor of a path drops no locks
/// (fs/open.c: `filp_flush`).
pub(crate) fn path_of(fd: RawFd) -> Result<UnhookedFd, Errno> {
    open_own("fd", fd, OFlags::PATH)
}

/// Opens something of a descriptor in `/proc/self`. Takes no memory: signal handlers get here.
fn open_own(folder: &str, fd: RawFd, flags: OFlags) -> Result<UnhookedFd, Errno> {
    let mut name = [0; 40];
    write!(&mut name[..], "/proc/self/{folder}/{fd}\0").map_err(|_| Errno::BADF)?;
    let name = CStr::from_bytes_until_nul(&name).map_err(|_| Errno::BADF)?;
    rustix::fs::open(name, flags | OFlags::CLOEXEC, Mode::empty())
        .map(|fd| UnhookedFd(ManuallyDrop::new(fd)))
}

/// Whether the process has POSIX locks of a file. The kernel tells of each by the open file that it
/// was taken by (fs/locks.c: `__show_fd_locks`), and not of those that others have taken by the
/// same one. That one is still open: closing it would have dropped the lock.
///
/// # Errors
/// When that cannot be found out.
pub(crate) fn are_held(file: FileId) -> Result<bool, Errno> {
    let folder = rustix::fs::open(
        c"/proc/self/fd",
        OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let folder = UnhookedFd(ManuallyDrop::new(folder));
    let mut entries = [MaybeUninit::uninit(); 1024];
    let mut entries = RawDir::new(&folder, &mut entries);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let number = entry.file_name().to_str().ok();
        let Some(number) = number.and_then(|number| number.parse().ok()) else {
            continue;
        };
        if FileId::of_fd(number) == Some(file) && are_held_by(number)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the process has POSIX locks that were taken by the open file of a descriptor.
fn are_held_by(fd: RawFd) -> Result<bool, Errno> {
    let info = match open_own("fdinfo", fd, OFlags::RDONLY) {
        // Closed meanwhile, and the locks with it.
        Err(Errno::NOENT) => return Ok(false),
        info => info?,
    };
    // What is read, behind the end of what was read before: what is looked for may begin there.
    let mut bytes = [0; 512 + POSIX.len()];
    let mut kept = 0;
    loop {
        let read = rustix::io::read(&info, &mut bytes[kept..])?;
        let filled = kept + read;
        if bytes[..filled]
            .windows(POSIX.len())
            .any(|part| part == POSIX)
        {
            return Ok(true);
        }
        if read == 0 {
            return Ok(false);
        }
        kept = filled.min(POSIX.len() - 1);
        bytes.copy_within(filled - kept..filled, 0);
    }
}

/// A descriptor of a moment, which is closed past the C library's function: that is ours, and looks
/// at what the program closes.
#[derive(Debug)]
pub(crate) struct UnhookedFd(ManuallyDrop<OwnedFd>);

impl AsFd for UnhookedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for UnhookedFd {
    fn drop(&mut self) {
        sys::close(self.0.as_raw_fd());
    }
}

#[cfg(test)]
mod tests;
