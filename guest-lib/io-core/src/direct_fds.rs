//! Descriptors of ours for direct I/O with one file of the program.
//!
//! Closing any descriptor of a file drops the process's POSIX locks on it. So a file that has some
//! gets none of ours, and what there is of ours is closed before it gets some: see [`locks`].
//! Numbers that it does not know of it may close, too: see [`guard`].

use crate::file_id::{FileId, borrow};
use crate::lock::Lock;
use crate::locks;
use farlane_transport::guard::{self, Guarded, InUse, Kind};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Most descriptors of ours: further files go without direct I/O. The table has room for a few
/// others.
const MOST: usize = 256;
const _: () = assert!(MOST < guard::ROOM);

/// After as many requests to a locked file it is asked whether it still is, and then each time
/// after twice as many: what that costs (a look at every descriptor of the process) is little
/// beside the requests.
const PLAIN_REQUESTS: u32 = 16;

/// A descriptor of ours, and the flags that it was opened with.
#[derive(Debug)]
struct DirectFd {
    flags: OFlags,
    fd: Arc<Guarded>,
}

/// Those of one file, and what is known of the program's POSIX locks of it.
#[derive(Debug)]
pub(crate) struct DirectFds {
    /// Nothing is opened or closed without the lock.
    list: Lock<Vec<DirectFd>>,
    /// The program has POSIX locks of the file, as far as is known: nothing that could end them has
    /// happened since they were seen. It changes with the lock of `list`.
    is_locked: AtomicBool,
    /// Requests that have gone the plain way since then.
    plain: AtomicU32,
}

impl DirectFds {
    pub(crate) fn new() -> Self {
        Self {
            list: Lock::new(Vec::new()),
            is_locked: AtomicBool::new(false),
            plain: AtomicU32::new(0),
        }
    }

    /// Whether the program has POSIX locks of the file, as far as is known: then there is no direct
    /// I/O.
    pub(crate) fn is_locked(&self) -> bool {
        self.is_locked.load(Ordering::Relaxed)
    }

    /// Whether a request goes the plain way because of them. Now and then one does not, and the
    /// kernel is asked again: who reads while another thread closes the file finds locks that end
    /// with that, after it was told of the close.
    pub(crate) fn goes_plain(&self) -> bool {
        if !self.is_locked() {
            return false;
        }
        let plain = self.plain.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if plain < PLAIN_REQUESTS || !plain.is_power_of_two() {
            return true;
        }
        let _list = self.list.lock();
        self.set_locked(false);
        false
    }

    /// To be called with the lock of `list`.
    fn set_locked(&self, is_locked: bool) {
        self.is_locked.store(is_locked, Ordering::Relaxed);
    }

    /// The program's locks have changed, or do so now: it is asked when that is of interest. Where
    /// that must not be waited for, this may be left out.
    pub(crate) fn locks_changed(&self, waits: bool) {
        if let Some(_list) = self.list.lock_if(waits) {
            self.forget_locks();
        }
    }

    /// To be called with the lock of `list`.
    fn forget_locks(&self) {
        self.set_locked(false);
        self.plain.store(0, Ordering::Relaxed);
    }

    /// Whether all have been closed for good.
    pub(crate) fn are_shut(&self) -> bool {
        self.list.lock().iter().all(|own| own.fd.is_shut())
    }

    /// The program is about to close a descriptor, which ends its locks: ours go before it, as far
    /// as none of them is in use.
    pub(crate) fn close_unused(&self) {
        let mut list = self.list.lock();
        list.retain(|own| Arc::strong_count(&own.fd) > 1);
        self.forget_locks();
    }

    /// The program is about to lock the file: ours are closed. If it `waits`, those that others
    /// use, too, when they do so no more.
    pub(crate) fn shut(&self, id: FileId, waits: bool) {
        loop {
            let in_use = {
                let Some(list) = self.list.lock_if(waits) else {
                    return;
                };
                if list.iter().all(|own| own.fd.is_shut()) {
                    return;
                }
                // Locks that were taken around the C library would go now, and stay until `execve`
                // otherwise.
                if locks::are_held(id) == Ok(true) {
                    return;
                }
                let is_in_use = |own: &&DirectFd| own.fd.shut(false).is_err();
                list.iter().find(is_in_use).map(|own| Arc::clone(&own.fd))
            };
            match in_use {
                // Nobody gets it any more who has not got it yet.
                Some(in_use) if waits && in_use.shut(true).is_ok() => (),
                _ => return,
            }
        }
    }

    /// Some descriptor of the file, if there is one.
    pub(crate) fn any(&self) -> Option<InUse<Arc<Guarded>>> {
        self.list
            .lock()
            .first()
            .and_then(|own| own.fd.enter_shared())
    }

    /// A descriptor for direct I/O with the same rights as `fd`, the program's of file `id`, which
    /// was opened with `flags`.
    ///
    /// # Errors
    /// `EBUSY` where the program has POSIX locks of the file, or may be about to get some; `EMFILE`
    /// where there are too many; `ESTALE` where `fd` is another file's by now; otherwise what
    /// `open` says.
    pub(crate) fn enter(
        &self,
        id: FileId,
        fd: RawFd,
        flags: OFlags,
    ) -> Result<InUse<Arc<Guarded>>, Errno> {
        let keep = OFlags::RWMODE | OFlags::SYNC | OFlags::DSYNC | OFlags::NOATIME;
        let flags = (flags & keep) | OFlags::DIRECT | OFlags::CLOEXEC;
        let mut list = self.list.lock();
        if locks::is_under_way(id) || self.is_locked() {
            return Err(Errno::BUSY);
        }
        if let Some(at) = list.iter().position(|own| own.flags == flags) {
            // A program may close numbers around the C library, and get them again.
            let found = list[at].fd.enter_shared();
            if let Some(found) = found.filter(|fd| is_direct(fd.number(), id)) {
                return Ok(found);
            }
            list.remove(at);
        }
        if guard::count() >= MOST {
            return Err(Errno::MFILE);
        }
        if locks::are_held(id)? {
            self.set_locked(true);
            return Err(Errno::BUSY);
        }
        // The number may be another file's by now, whose locks are not known.
        let path = locks::path_of(fd)?;
        if FileId::of(&rustix::fs::fstat(&path)?) != id {
            return Err(Errno::STALE);
        }
        let path = format!("/proc/self/fd/{}", path.as_fd().as_raw_fd());
        let fd = rustix::fs::open(path, flags, Mode::empty())?;
        let is_right = is_direct(fd.as_raw_fd(), id);
        let fd = Arc::new(Guarded::new(fd, Kind::File));
        let entered = fd.enter_shared().filter(|_| is_right);
        // Of another file it is where the program has replaced a number that it does not know: then
        // that one's locks are not known either, and it must not be closed again.
        list.push(DirectFd { flags, fd });
        entered.ok_or(Errno::STALE)
    }
}

/// Whether `fd` is open for direct I/O on this file.
fn is_direct(fd: RawFd, id: FileId) -> bool {
    FileId::of_fd(fd) == Some(id)
        && borrow(fd).is_some_and(|fd| {
            rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::DIRECT))
        })
}
