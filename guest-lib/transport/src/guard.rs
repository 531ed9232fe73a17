//! Descriptors of ours among the program's.
//!
//! A program may close any number, or put something else there, also one that it does not know of:
//! daemons do, and shells. Then a library that goes on with its number works on the program's file.
//! Who stands in front of the C library's functions asks here first whether a number is
//! [ours](is_ours), and has it [make way](make_way) for the program.

use crate::{Origin, with_signals_blocked};
use rustix::fs::{Mode, OFlags, fcntl_getfl, fstat};
use rustix::io::Errno;
use rustix::thread::futex;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, IntoRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Once};

/// Most descriptors that are guarded.
pub const ROOM: usize = 272;
/// Descriptors that may have any number begin here: below are those that programs get by
/// themselves, and expect to get.
const HIGH: RawFd = 512;

/// What a descriptor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file of the program's, which keeps its number: to close any descriptor of a file ends the
    /// process's POSIX locks of it. Children do not have it.
    File,
    /// A device, or the connection to one. Children do not have it.
    Device,
    /// What children have, too.
    Inherited,
}

/// Nothing, or something that is being put there.
const FREE: i32 = 0;
const RESERVED: i32 = -1;
/// Said in [`Entry::users`]: the number is being changed.
const MOVING: u32 = 1 << 31;

#[derive(Debug)]
struct Entry {
    /// The number, plus one.
    number: AtomicI32,
    /// Calls that use it.
    users: AtomicU32,
    /// Which file it is: a number that the program has closed around the C library may be another
    /// one's by now.
    device: AtomicU64,
    inode: AtomicU64,
    /// Whether it is for direct I/O: a number of the same file that is not is the program's.
    direct: AtomicBool,
    /// Children have it, too.
    inherited: AtomicBool,
}

static TABLE: [Entry; ROOM] = [const {
    Entry {
        number: AtomicI32::new(FREE),
        users: AtomicU32::new(0),
        device: AtomicU64::new(0),
        inode: AtomicU64::new(0),
        direct: AtomicBool::new(false),
        inherited: AtomicBool::new(false),
    }
}; ROOM];
/// Entries that were ever used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// The process whose numbers they are: a child of `vfork` has the memory, but numbers of its own.
static PROCESS: AtomicI32 = AtomicI32::new(0);
static WATCH: Once = Once::new();

fn process() -> i32 {
    rustix::process::getpid().as_raw_pid()
}

/// A descriptor that the program is kept from, as far as there is room.
#[derive(Debug)]
pub struct Guarded {
    place: Place,
    origin: Origin,
    kind: Kind,
    /// It has been closed, and its entry may be another one's.
    is_shut: AtomicBool,
}

#[derive(Debug)]
enum Place {
    Entry(&'static Entry),
    /// There was no room.
    Own(OwnedFd),
}

/// A guarded descriptor in use: its number stays.
#[derive(Debug)]
pub struct InUse<G: Deref<Target = Guarded>> {
    number: RawFd,
    guarded: G,
}

impl Guarded {
    /// Guards a descriptor from now on.
    #[must_use]
    pub fn new(fd: OwnedFd, kind: Kind) -> Self {
        WATCH.call_once(|| {
            PROCESS.store(process(), Ordering::Relaxed);
            // SAFETY: the handler is made for it. It fails for want of memory only.
            unsafe { libc::pthread_atfork(None, None, Some(child)) };
        });
        let fd = match kind {
            Kind::File => fd,
            Kind::Device | Kind::Inherited => {
                rustix::io::fcntl_dupfd_cloexec(&fd, HIGH).unwrap_or(fd)
            }
        };
        let entry = fstat(&fd).ok().and_then(|stat| {
            let free = |entry: &&Entry| {
                let (order, ignored) = (Ordering::Acquire, Ordering::Relaxed);
                let number = &entry.number;
                number
                    .compare_exchange(FREE, RESERVED, order, ignored)
                    .is_ok()
            };
            let (at, entry) = TABLE.iter().enumerate().find(|(_, entry)| free(entry))?;
            entry.device.store(stat.st_dev, Ordering::Relaxed);
            entry.inode.store(stat.st_ino, Ordering::Relaxed);
            entry.direct.store(is_direct(fd.as_fd()), Ordering::Relaxed);
            entry
                .inherited
                .store(kind == Kind::Inherited, Ordering::Relaxed);
            USED.fetch_max(at + 1, Ordering::AcqRel);
            Some(entry)
        });
        let place = match entry {
            Some(entry) => {
                entry.number.store(fd.into_raw_fd() + 1, Ordering::Release);
                Place::Entry(entry)
            }
            None => Place::Own(fd),
        };
        Self {
            place,
            origin: Origin::here(),
            kind,
            is_shut: AtomicBool::new(false),
        }
    }

    /// Uses it. None where it is shut, and in a child that does not have it.
    #[must_use]
    pub fn enter(&self) -> Option<InUse<&Self>> {
        InUse::of(self)
    }

    /// The same, of one that has several owners.
    #[must_use]
    pub fn enter_shared(self: &Arc<Self>) -> Option<InUse<Arc<Self>>> {
        InUse::of(Arc::clone(self))
    }

    /// Whether it is still the file that it was.
    #[must_use]
    pub fn is_intact(&self) -> bool {
        self.enter().is_some_and(|fd| match &self.place {
            Place::Own(_) => true,
            Place::Entry(entry) => entry.is_at(fd.number),
        })
    }

    /// Closes it for good, when no call uses it any more. If that must not be waited for, one in
    /// use is refused. Neither takes memory nor gives any back: signal handlers may ask for it.
    ///
    /// # Errors
    /// `EBUSY` where it is in use, or has no entry.
    pub fn shut(&self, waits: bool) -> Result<(), Errno> {
        let Place::Entry(entry) = &self.place else {
            return Err(Errno::BUSY);
        };
        if self.is_shut() || !self.origin.is_here() {
            return Ok(());
        }
        entry.while_unused(waits, || {
            if !self.is_shut.swap(true, Ordering::Relaxed) {
                entry.close();
            }
        })
    }

    /// Whether it has been [shut](Self::shut).
    #[must_use]
    pub fn is_shut(&self) -> bool {
        self.is_shut.load(Ordering::Relaxed)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // A child's table was cleared.
        if let Place::Entry(entry) = &self.place
            && self.origin.is_here()
            && !self.is_shut()
        {
            // Nobody uses it any more, but a call may be giving it another number: that waits for
            // nobody. While this one is at it no handler of its thread waits for it.
            let _ = with_signals_blocked(|| entry.while_unused(true, || entry.close()));
        }
    }
}

impl<G: Deref<Target = Guarded>> AsFd for InUse<G> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as it is in use.
        unsafe { BorrowedFd::borrow_raw(self.number) }
    }
}

impl<G: Deref<Target = Guarded>> InUse<G> {
    fn of(guarded: G) -> Option<Self> {
        if !guarded.origin.is_here() && guarded.kind != Kind::Inherited {
            return None;
        }
        let number = match &guarded.place {
            Place::Own(fd) => fd.as_raw_fd(),
            Place::Entry(entry) => {
                entry.enter();
                // Whoever shuts it waits for those who have entered.
                if guarded.is_shut() {
                    entry.leave();
                    return None;
                }
                entry.number.load(Ordering::Acquire) - 1
            }
        };
        Some(Self { number, guarded })
    }

    /// Number of the descriptor.
    #[must_use]
    pub fn number(&self) -> RawFd {
        self.number
    }
}

impl<G: Deref<Target = Guarded>> Drop for InUse<G> {
    fn drop(&mut self) {
        if let Place::Entry(entry) = &self.guarded.place {
            entry.leave();
        }
    }
}

impl Entry {
    /// Whether the file that has this number is the one that was put there.
    fn is_at(&self, number: RawFd) -> bool {
        if number < 0 {
            return false;
        }
        // SAFETY: a number that is asked about.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        fstat(fd).is_ok_and(|stat| {
            let known = (&self.device, &self.inode);
            let known = (
                known.0.load(Ordering::Relaxed),
                known.1.load(Ordering::Relaxed),
            );
            let is_for_this = is_direct(fd) || !self.direct.load(Ordering::Relaxed);
            (stat.st_dev, stat.st_ino) == known && is_for_this
        })
    }

    fn enter(&self) {
        loop {
            let users = self.users.load(Ordering::Relaxed);
            if users & MOVING != 0 {
                let _ = futex::wait(&self.users, futex::Flags::PRIVATE, users, None);
                continue;
            }
            let (order, ignored) = (Ordering::Acquire, Ordering::Relaxed);
            let entered = self
                .users
                .compare_exchange(users, users + 1, order, ignored);
            if entered.is_ok() {
                return;
            }
        }
    }

    fn leave(&self) {
        // In a child of a handler that has interrupted a user there are none.
        let left = self
            .users
            .fetch_update(Ordering::Release, Ordering::Relaxed, |users| {
                (users & !MOVING > 0).then(|| users - 1)
            });
        if left == Ok(MOVING | 1) {
            let _ = futex::wake(&self.users, futex::Flags::PRIVATE, u32::MAX >> 1);
        }
    }

    /// Closes the file, if the number is still its, and gives the entry back. To be called while
    /// nobody uses the number: who gives the file another one meanwhile would do so to the next
    /// file that has the entry.
    fn close(&self) {
        let number = self.number.swap(RESERVED, Ordering::AcqRel) - 1;
        if self.is_at(number) {
            close(number);
        }
        self.number.store(FREE, Ordering::Release);
    }

    /// Does something while nobody uses the number: who comes meanwhile waits until it is done. If
    /// it must not be waited for those who are there, it is refused.
    fn while_unused<T>(&self, waits: bool, work: impl FnOnce() -> T) -> Result<T, Errno> {
        let wait = |users| {
            let _ = futex::wait(&self.users, futex::Flags::PRIVATE, users, None);
        };
        loop {
            let users = self.users.fetch_or(MOVING, Ordering::Acquire);
            if users == 0 || (users & MOVING == 0 && waits) {
                break;
            }
            if !waits {
                if users & MOVING == 0 {
                    self.moved();
                }
                return Err(Errno::BUSY);
            }
            wait(users);
        }
        loop {
            let users = self.users.load(Ordering::Acquire);
            if users == MOVING {
                break;
            }
            wait(users);
        }
        let result = work();
        self.moved();
        Ok(result)
    }

    /// Gets the file another number, while nobody uses it.
    fn make_way(&self, number: RawFd, waits: bool) -> Result<(), Errno> {
        self.while_unused(waits, || {
            if self.number.load(Ordering::Acquire) != number + 1 {
                // It has made way already.
                return Ok(());
            }
            // SAFETY: a descriptor of ours, if it still is.
            let old = unsafe { BorrowedFd::borrow_raw(number) };
            let new = rustix::io::fcntl_dupfd_cloexec(old, HIGH);
            // A process that may not have so many (`RLIMIT_NOFILE`).
            let new = new.or_else(|_| rustix::io::fcntl_dupfd_cloexec(old, 0));
            let (order, ignored) = (Ordering::AcqRel, Ordering::Relaxed);
            let moves_to = |new: RawFd| {
                let at = &self.number;
                at.compare_exchange(number + 1, new + 1, order, ignored)
            };
            match new {
                Ok(new) if moves_to(new.as_raw_fd()).is_ok() => {
                    let _ = new.into_raw_fd();
                    vacate(number);
                    Ok(())
                }
                // This is a child, made by a handler that has interrupted this: nothing of ours is
                // there any more, and the duplicate goes.
                Ok(_) => Ok(()),
                Err(_) if self.number.load(Ordering::Acquire) != number + 1 => Ok(()),
                Err(error) => Err(error),
            }
        })?
    }

    fn moved(&self) {
        self.users.fetch_and(!MOVING, Ordering::Release);
        let _ = futex::wake(&self.users, futex::Flags::PRIVATE, u32::MAX >> 1);
    }
}

/// Whether a descriptor is for direct I/O.
fn is_direct(fd: BorrowedFd<'_>) -> bool {
    fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::DIRECT))
}

/// Puts what is no file at a number of ours, until the program's call replaces it: that would end
/// POSIX locks which another thread has got since. To close a descriptor of a path ends none, and
/// before it has made way a file has none.
fn vacate(number: RawFd) {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    if let Ok(root) = rustix::fs::open("/", flags, Mode::empty()) {
        let root = root.into_raw_fd();
        // SAFETY: a number that is looked after here: dup3 replaces what it is.
        unsafe {
            libc::syscall(libc::SYS_dup3, root, number, libc::O_CLOEXEC);
        }
        close(root);
    }
}

/// Closes a number of ours that nobody uses, past the C library's function: somebody may stand in
/// front of it who asks here.
fn close(number: RawFd) {
    // SAFETY: nobody uses it any more.
    unsafe { rustix::io::close(number) };
}

fn used() -> &'static [Entry] {
    TABLE
        .get(..USED.load(Ordering::Acquire))
        .unwrap_or_default()
}

fn find(number: RawFd) -> Option<&'static Entry> {
    let ours = |entry: &&Entry| entry.number.load(Ordering::Acquire) == number.wrapping_add(1);
    let found = used().iter().find(ours).filter(|_| number >= 0)?;
    (PROCESS.load(Ordering::Relaxed) == process() && found.is_at(number)).then_some(found)
}

/// Whether a number is one of ours. Signal handlers may ask.
#[must_use]
pub fn is_ours(number: RawFd) -> bool {
    find(number).is_some()
}

/// How many there are.
#[must_use]
pub fn count() -> usize {
    let taken = |entry: &&Entry| entry.number.load(Ordering::Relaxed) != FREE;
    used().iter().filter(taken).count()
}

/// The program is going to put something else at `number`: what is ours there gets another number,
/// when no call uses it any more. If it must not be waited for that, a number in use is refused.
/// Until the program does so, the number is that of a path.
///
/// # Errors
/// `EBUSY` where it is in use, and what the system says.
pub fn make_way(number: RawFd, waits: bool) -> Result<(), Errno> {
    find(number).map_or(Ok(()), |entry| entry.make_way(number, waits))
}

/// Calls `each(first, last)` for all ranges of numbers in `first..=last` that have none of ours.
pub fn spare(first: u32, last: u32, mut each: impl FnMut(u32, u32)) {
    let mut next = Some(first);
    while let Some(first) = next.filter(|first| *first <= last) {
        let ours = used().iter().filter_map(|entry| {
            let number = entry.number.load(Ordering::Acquire).checked_sub(1)?;
            let found = u32::try_from(number).ok()?;
            ((first..=last).contains(&found) && is_ours(number)).then_some(found)
        });
        let until = ours.min();
        match until {
            Some(ours) if ours > first => each(first, ours - 1),
            Some(_) => (),
            None => each(first, last),
        }
        next = until.and_then(|ours| ours.checked_add(1));
    }
}

/// Runs in each child of `fork`.
unsafe extern "C" fn child() {
    for entry in used() {
        entry.users.store(0, Ordering::Relaxed);
        if entry.inherited.load(Ordering::Relaxed) {
            continue;
        }
        let number = entry.number.swap(FREE, Ordering::AcqRel) - 1;
        if number >= 0 {
            close(number);
        }
    }
    PROCESS.store(process(), Ordering::Relaxed);
}

#[cfg(test)]
pub(crate) mod tests;
