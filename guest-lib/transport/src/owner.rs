//! Tells the backend when the program ends whose memory it reaches, be it that it becomes another
//! one (`execve`), as [`farlane_abi::arena`] describes.

use crate::Map;
use farlane_abi::arena::OFF_OWNER;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// What a thread tells the kernel of the locks that it holds: `struct robust_list_head` of
/// `<linux/futex.h>`.
#[repr(C)]
#[derive(Debug)]
struct ListHead {
    /// The first of a ring of locks, which ends at this word.
    next: AtomicUsize,
    /// From what is named to the lock's word, in bytes.
    futex_offset: isize,
    /// A lock that is not in the ring: the one that is being taken.
    pending: usize,
}

/// A hold of a header's owner word by one thread.
#[derive(Debug)]
pub(crate) struct Hold {
    head: ListHead,
    /// Mapped until the thread has ended.
    header: Arc<Map>,
}

impl Hold {
    pub(crate) fn new(header: &Arc<Map>) -> Arc<Self> {
        let word: *const AtomicU32 = header.word(OFF_OWNER);
        let hold = Arc::new(Self {
            head: ListHead {
                next: AtomicUsize::new(0),
                futex_offset: 0,
                pending: word.expose_provenance(),
            },
            header: Arc::clone(header),
        });
        let ring = (&raw const hold.head.next).expose_provenance();
        hold.head.next.store(ring, Ordering::Relaxed);
        hold
    }

    /// Has the calling thread hold the word until it ends. A kernel that has no such locks leaves
    /// it zero.
    ///
    /// # Safety
    /// The hold is kept until the thread has ended, and the thread has no other locks of the kind
    /// (`PTHREAD_MUTEX_ROBUST`).
    pub(crate) unsafe fn take(&self) {
        // SAFETY: what is named is there until the thread has ended, says the caller. The ring is
        // empty, and the word of the lock is shared memory, which the kernel may change.
        let set = unsafe {
            let head = &raw const self.head;
            libc::syscall(libc::SYS_set_robust_list, head, size_of::<ListHead>())
        };
        if set == 0 {
            let thread = rustix::thread::gettid().as_raw_nonzero().get();
            let word = self.header.word(OFF_OWNER);
            word.store(thread.unsigned_abs(), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_abi::arena::OWNER_DIED;
    use std::sync::mpsc::channel;

    #[test]
    fn the_word_is_the_threads_and_then_says_that_it_has_ended() {
        let header = Arc::new(Map::anonymous(4096).unwrap());
        let hold = Hold::new(&header);
        let (took, taken) = channel();
        let (end, ends) = channel::<()>();
        let held = Arc::clone(&hold);
        let thread = std::thread::spawn(move || {
            // SAFETY: the test keeps it, and the thread has no locks.
            unsafe { held.take() };
            took.send(rustix::thread::gettid().as_raw_nonzero().get())
                .unwrap();
            let _ = ends.recv();
        });
        let number: i32 = taken.recv().unwrap();
        let word = || header.word(OFF_OWNER).load(Ordering::Acquire);
        assert_eq!(word(), number.unsigned_abs());
        // Another thread's end is not the owner's.
        std::thread::spawn(|| ()).join().unwrap();
        assert_eq!(word(), number.unsigned_abs());
        drop(end);
        thread.join().unwrap();
        assert_eq!(word(), OWNER_DIED);
    }
}
