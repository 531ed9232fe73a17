//! Children of a process whose memory lies in files.
//!
//! What lies there a child would share with its parent: the heap's own data, too. So the kernel
//! keeps these pages from children (`MADV_DONTFORK`), and a child gets copies of its own: made
//! before it is (pthread_atfork(3)), in memory that it inherits, and put into their places when it
//! begins.
//!
//! Between the copy and the child other threads may change what the C library has in the heap: as
//! POSIX has it, a child of several threads calls what is safe in a handler of signals and nothing
//! else. Whoever makes a child without the C library (`clone`), or needs such a page before the
//! copies are in their places, as one does that makes a child from a stack of which something is
//! registered, finds nothing there.

use super::{Files, LEDGER, Ledger, file_of, mappings};
use crate::maps::{FileId, Run};
use farlane_sys::Mmap;
use rustix::mm::{MremapFlags, mremap_fixed};
use std::cell::UnsafeCell;
use std::os::fd::{AsRawFd as _, RawFd};
use std::ptr::with_exposed_provenance_mut;
use std::sync::{MutexGuard, Once};

/// Sees to it that children get copies.
pub(super) fn prepare_for() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handlers are those of a program that may do anything before it makes a
        // child; in the child they only rearrange mappings and close descriptors. It fails for
        // want of memory, and then a child lacks these pages.
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
}

/// What the thread that makes a child holds meanwhile. No variable of the thread's: the C library
/// takes memory of the heap for the first one of a thread that has a destructor.
static FORKING: Slot = Slot(UnsafeCell::new(None));

struct Slot(UnsafeCell<Option<Forking>>);

// SAFETY: it is touched by the thread alone that has the ledger's lock, and by a child's only one.
unsafe impl Sync for Slot {}

struct Forking {
    /// No other thread moves something meanwhile.
    ledger: MutexGuard<'static, Ledger>,
    copies: Option<Copies>,
}

/// Copies of pages, in memory that a child inherits.
struct Copies {
    pages: Mmap,
    /// `count` of [`Copy`], and the files' numbers, each with whose it is to be: memory of the heap
    /// may be missing in the child.
    list: Mmap,
    count: usize,
    files: usize,
}

/// Where a copy belongs. It is behind those before it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Copy {
    address: usize,
    length: usize,
    /// What is copied.
    from: *mut u8,
}

/// A descriptor, and the file that it is to be of.
type Number = (RawFd, FileId);

impl Copies {
    fn new(files: &Files) -> Option<Self> {
        let copies = Self::plan(files)?;
        // Nothing is allocated or freed from here on: that would change the heap, of which some
        // may have been copied by then.
        let list = copies.list.base().cast::<Copy>();
        let mut at = 0;
        for index in 0..copies.count {
            // SAFETY: so many were written; what they name is mapped as long as its files are
            // there, and there is room for all of it.
            unsafe {
                let Copy { length, from, .. } = list.add(index).read();
                let to = copies.pages.get(at, length)?;
                std::ptr::copy_nonoverlapping(from.cast_const(), to.as_ptr(), length);
                at += length;
            }
        }
        Some(copies)
    }

    /// Which there are to be, and the room for them.
    fn plan(files: &Files) -> Option<Self> {
        let all = mappings().ok()?;
        let is_own = |run: &&Run| !files.iter().any(|file| file.has(run));
        let moved = all.iter().filter(is_own).filter_map(|run| {
            let (of, offset) = file_of(files, run.pages)?;
            let at = usize::try_from(offset).ok()?;
            let (address, length) = (run.range.start, run.range.len());
            let from = of.pages.get(at, length)?.as_ptr();
            Some(Copy {
                address,
                length,
                from,
            })
        });
        let moved: Vec<_> = moved.collect();
        let bytes: usize = moved.iter().map(|copy| copy.length).sum();
        if bytes == 0 {
            return None;
        }
        let room = moved.len() * size_of::<Copy>() + files.len() * size_of::<Number>();
        let (pages, list) = (Mmap::anonymous(bytes).ok()?, Mmap::anonymous(room).ok()?);
        let first = list.base().cast::<Copy>();
        for (index, copy) in moved.iter().enumerate() {
            // SAFETY: there is room for all of them.
            unsafe { first.add(index).write(*copy) };
        }
        for (index, file) in files.iter().enumerate() {
            // SAFETY: there is room for them behind the copies.
            unsafe {
                let first = first.add(moved.len()).cast::<Number>();
                first.add(index).write((file.file.as_raw_fd(), file.id));
            }
        }
        Some(Self {
            pages,
            list,
            count: moved.len(),
            files: files.len(),
        })
    }

    /// Puts them into their places.
    ///
    /// # Safety
    /// This is a child just made, where nothing is at these addresses.
    unsafe fn settle(self) {
        let copies = self.list.base().cast::<Copy>();
        let mut at = 0;
        for index in 0..self.count {
            // SAFETY: so many were written.
            let Copy {
                address, length, ..
            } = unsafe { copies.add(index).read() };
            let Some(from) = self.pages.get(at, length) else {
                break;
            };
            let to = with_exposed_provenance_mut(address);
            // SAFETY: the child's own pages; nothing is where they come to.
            let _ = unsafe {
                let (from, flags) = (from.as_ptr().cast(), MremapFlags::MAYMOVE);
                mremap_fixed(from, length, length, flags, to)
            };
            at += length;
        }
        for index in 0..self.files {
            // SAFETY: so many were written; what is closed are the parent's files, of which the
            // child has nothing, and not what the parent has opened in their place.
            unsafe {
                let first = copies.add(self.count).cast::<Number>();
                let (number, id) = first.add(index).read();
                let mut stat = std::mem::zeroed();
                if libc::fstat(number, &raw mut stat) == 0 && id.is_of(stat.st_dev, stat.st_ino) {
                    libc::close(number);
                }
            }
        }
        // Its pages are elsewhere now.
        std::mem::forget(self.pages);
    }
}

/// Runs in the thread that makes a child, before.
unsafe extern "C" fn before() {
    let ledger = farlane_sys::sync::lock(LEDGER.get());
    let copies = Copies::new(&ledger.files);
    // SAFETY: this thread has the lock. Nothing is in it that would have to be dropped.
    unsafe { FORKING.0.get().write(Some(Forking { ledger, copies })) };
}

/// Afterwards.
unsafe extern "C" fn in_parent() {
    // SAFETY: `before` has left this thread the lock, which is given back behind that.
    let forking = unsafe { (*FORKING.0.get()).take() };
    drop(forking);
}

/// In the child.
unsafe extern "C" fn in_child() {
    // SAFETY: a child has no other thread.
    let forking = unsafe { (*FORKING.0.get()).take() };
    let Some(Forking { ledger, copies }) = forking else {
        return;
    };
    // The parent's, in memory of the heap.
    std::mem::forget(ledger);
    if let Some(copies) = copies {
        // SAFETY: it is one.
        unsafe { copies.settle() };
    }
}
