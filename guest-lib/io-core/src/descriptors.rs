//! Descriptors of ours for direct I/O with the program's files, and what the program does to its
//! own.
//!
//! Closing any descriptor of a file drops the process's POSIX locks on it. So a file that has some
//! gets none of ours, and what there is of ours is closed before it gets some: see [`locks`].
//! Numbers that it does not know of it may close, too: see [`guard`].

use crate::files::{self, FileId, Opened, borrow, id_of};
use crate::fork::{self, Inside};
use crate::locks;
use crate::readahead::{self, Advice};
use farlane_transport::guard::{self, Guarded, InUse, Kind};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};
use std::sync::Arc;

/// Most descriptors of ours: further files go without direct I/O. The table has room for a few
/// others.
const MOST: usize = 256;
const _: () = assert!(MOST < guard::ROOM);

/// A descriptor of ours for a file of the program.
#[derive(Debug)]
pub(crate) struct Own {
    flags: OFlags,
    fd: Arc<Guarded>,
}

impl Own {
    pub(crate) fn is_used(&self) -> bool {
        Arc::strong_count(&self.fd) > 1
    }

    pub(crate) fn enter(&self) -> Option<InUse<Arc<Guarded>>> {
        self.fd.enter_shared()
    }

    /// Whether it has been closed for good.
    pub(crate) fn is_shut(&self) -> bool {
        self.fd.is_shut()
    }

    /// What it is a descriptor of, to be waited for.
    pub(crate) fn guarded(&self) -> &Arc<Guarded> {
        &self.fd
    }
}

impl Opened {
    /// A descriptor of the same file for direct I/O, with the same rights.
    ///
    /// # Errors
    /// When it cannot be had; `EBUSY` where the program has POSIX locks of the file, or may be
    /// about to get some.
    pub fn direct(&self) -> Result<InUse<Arc<Guarded>>, Errno> {
        let keep = OFlags::RWMODE | OFlags::SYNC | OFlags::DSYNC | OFlags::NOATIME;
        let flags = (self.flags & keep) | OFlags::DIRECT | OFlags::CLOEXEC;
        let mut own = self.file.own.lock();
        if locks::is_under_way(self.file.id) || self.file.is_locked() {
            return Err(Errno::BUSY);
        }
        if let Some(at) = own.iter().position(|own| own.flags == flags) {
            // A program may close numbers around the C library, and get them again.
            let found = own[at].enter();
            if let Some(found) = found.filter(|fd| is_direct(fd.number(), self.file.id)) {
                return Ok(found);
            }
            own.remove(at);
        }
        if guard::count() >= MOST {
            return Err(Errno::MFILE);
        }
        if locks::are_held(self.file.id)? {
            self.file.set_locked(true);
            return Err(Errno::BUSY);
        }
        // The number may be another file's by now, whose locks are not known.
        let path = locks::path_of(self.fd)?;
        if id_of(&rustix::fs::fstat(&path)?) != self.file.id {
            return Err(Errno::STALE);
        }
        let path = format!("/proc/self/fd/{}", path.as_fd().as_raw_fd());
        let fd = rustix::fs::open(path, flags, Mode::empty())?;
        let is_right = is_direct(fd.as_raw_fd(), self.file.id);
        let fd = Arc::new(Guarded::new(fd, Kind::File));
        let entered = fd.enter_shared().filter(|_| is_right);
        // Of another file it is where the program has replaced a number that it does not know: then
        // that one's locks are not known either, and it must not be closed again.
        own.push(Own { flags, fd });
        entered.ok_or(Errno::STALE)
    }
}

/// Whether `fd` is open for direct I/O on this file.
fn is_direct(fd: RawFd, id: FileId) -> bool {
    borrow(fd).is_some_and(|fd| {
        rustix::fs::fstat(fd).is_ok_and(|stat| id_of(&stat) == id)
            && rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::DIRECT))
    })
}

/// What the program's close of a descriptor is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// It closes one of its own.
    Program,
    /// It does not know of the descriptor: it is ours, and open it stays.
    Ours,
}

/// Is told that the program closes `fd`: goes before it with our descriptors of the same file.
#[must_use]
pub fn closing(fd: RawFd) -> Closing {
    if guard::is_ours(fd) {
        return Closing::Ours;
    }
    readahead::advise(fd, Advice::Normal);
    if files::is_any_known()
        && fork::is_owner()
        && let Some(_inside) = Inside::enter()
        && let Some(stat) = borrow(fd).and_then(|fd| rustix::fs::fstat(fd).ok())
    {
        files::forget_one(id_of(&stat), fd);
    }
    Closing::Program
}

/// Is told that the program puts another file at number `new`, a duplicate of `old`. What is ours
/// there gets another number.
///
/// # Errors
/// What the call is to say: `old` is ours and none of the program's, or a thread that cannot go on
/// before this one does uses `new`.
pub fn replacing(old: RawFd, new: RawFd) -> Result<(), Errno> {
    if guard::is_ours(old) {
        return Err(Errno::BADF);
    }
    let is_open = |fd| borrow(fd).is_some_and(|fd| rustix::io::fcntl_getfd(fd).is_ok());
    if closing(new) == Closing::Ours && is_open(old) {
        let inside = Inside::enter();
        return guard::make_way(new, inside.is_some());
    }
    Ok(())
}

/// Calls `close(first, last)` for the ranges of numbers in `first..=last` that have none of ours,
/// in which the program closes whatever there is.
pub fn closing_range(first: u32, last: u32, mut close: impl FnMut(u32, u32)) {
    if first > last || guard::count() == 0 {
        close(first, last);
    } else {
        guard::spare(first, last, close);
    }
    if !files::is_any_known() || !fork::is_owner() {
        return;
    }
    if let Some(_inside) = Inside::enter()
        && let Some(open) = open_files()
    {
        files::forget_all_but(&open);
    }
}

/// The files of which the program has descriptors.
fn open_files() -> Option<BTreeSet<FileId>> {
    let numbers = std::fs::read_dir("/proc/self/fd").ok()?;
    let numbers = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let theirs = numbers.filter(|number: &RawFd| !guard::is_ours(*number));
    let stat = |number| rustix::fs::fstat(borrow(number)?).ok();
    Some(theirs.filter_map(stat).map(|stat| id_of(&stat)).collect())
}
