//! Buffers between files and memory that the kernel does not copy to by itself. They are kept for
//! the next call: a new mapping costs a fault a page, and pinning costs more.

use crate::fork::ParentState;
use crate::lock::Lock;
use farlane_sys::Mmap;
use rustix::io::Errno;
use std::mem::ManuallyDrop;
use std::ops::Range;

/// Up to so many bytes a buffer is of the small kind, which is never pinned: of what is not pinned
/// the CUDA driver copies little at once (64 KiB of the page cache to an H200: 4.3 GB/s, and 3.5
/// from pinned memory).
pub(crate) const SMALL_BYTES: usize = 256 << 10;
/// Up to so many bytes a buffer is of the large kind, which a device may have pinned.
pub(crate) const LARGE_BYTES: usize = 2 << 20;
/// Most buffers of a kind. They stay for good: what a device has pinned must not be unmapped. Who
/// comes when all are in use gets one for once.
const KEPT: usize = 16;

pub(crate) static SMALL: Lock<Kept> = Lock::new(Kept::new());
pub(crate) static LARGE: Lock<Kept> = Lock::new(Kept::new());

/// Buffers of one kind.
#[derive(Debug)]
pub(crate) struct Kept {
    idle: Vec<Mmap>,
    made: usize,
}

impl Kept {
    const fn new() -> Self {
        Self {
            idle: Vec::new(),
            made: 0,
        }
    }

    /// One that is idle or new; none when all are in use.
    fn take(&mut self, bytes: usize) -> Result<Option<Mmap>, Errno> {
        if let Some(memory) = self.idle.pop() {
            return Ok(Some(memory));
        }
        if self.made >= KEPT {
            return Ok(None);
        }
        let memory = Mmap::anonymous(bytes)?;
        self.made += 1;
        Ok(Some(memory))
    }
}

impl ParentState for Kept {
    /// A child's are copies, of which its parent's threads use some.
    fn forget(&mut self) {
        self.idle.drain(..).for_each(std::mem::forget);
        self.made = 0;
    }
}

/// A buffer, which begins at a page: descriptors of the program may be for direct I/O.
#[derive(Debug)]
pub(crate) struct Bounce {
    memory: ManuallyDrop<Mmap>,
    /// Where it goes back to.
    home: Option<&'static Lock<Kept>>,
    /// Whether a device may still be using it: then nobody else ever does.
    is_lost: bool,
}

impl Bounce {
    /// A buffer of at least `length` bytes, with anything in it.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn take(length: usize) -> Result<Self, Errno> {
        if length <= SMALL_BYTES {
            Self::of(&SMALL, SMALL_BYTES, length)
        } else if length <= LARGE_BYTES {
            Self::of(&LARGE, LARGE_BYTES, length)
        } else {
            Self::once(length)
        }
    }

    /// A buffer of the large kind; when all are in use, one of at least `length` bytes for once.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn take_large(length: usize) -> Result<Self, Errno> {
        Self::of(&LARGE, LARGE_BYTES, length)
    }

    fn of(home: &'static Lock<Kept>, bytes: usize, length: usize) -> Result<Self, Errno> {
        let kept = home.lock().take(bytes)?;
        let Some(memory) = kept else {
            return Self::once(length);
        };
        Ok(Self {
            memory: ManuallyDrop::new(memory),
            home: Some(home),
            is_lost: false,
        })
    }

    fn once(length: usize) -> Result<Self, Errno> {
        Ok(Self {
            memory: ManuallyDrop::new(Mmap::anonymous(length)?),
            home: None,
            is_lost: false,
        })
    }

    /// Bytes of it, as far as it has them.
    pub(crate) fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        let memory = self.memory.get(range.start, range.len());
        memory.map_or(&mut [], |base| {
            // SAFETY: anonymous memory of this process, lent out by `&mut self`.
            unsafe { std::slice::from_raw_parts_mut(base.as_ptr(), range.len()) }
        })
    }

    /// Address and length of all of it, if it stays mapped for good.
    pub(crate) fn lasting(&self) -> Option<(usize, usize)> {
        let (base, length) = (self.memory.base().as_ptr(), self.memory.len());
        self.home.map(|_| (base.expose_provenance(), length))
    }

    /// Says that a device may still be copying to or from it, for all that can be known.
    pub(crate) fn lose(&mut self) {
        self.is_lost = true;
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        if self.is_lost {
            return;
        }
        // SAFETY: nobody uses the field after this.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        if let Some(kept) = self.home {
            kept.lock().idle.push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_may_still_use_nobody_gets() {
        static OWN: Lock<Kept> = Lock::new(Kept::new());
        let take = || Bounce::of(&OWN, LARGE_BYTES, 1).unwrap();
        let mut lost = take();
        let place = lost.lasting();
        lost.lose();
        drop(lost);
        let others: Vec<_> = (0..KEPT).map(|_| take()).collect();
        assert!(others.iter().all(|other| other.lasting() != place));
        assert!(others.iter().any(|other| other.lasting().is_none()));
    }

    #[test]
    fn buffers_that_stay_are_bounded_and_used_again() {
        static OWN: Lock<Kept> = Lock::new(Kept::new());
        let take = |length| Bounce::of(&OWN, LARGE_BYTES, length).unwrap();
        let mut used: Vec<_> = (0..KEPT).map(|_| take(LARGE_BYTES)).collect();
        let homes =
            |used: &[Bounce]| -> Vec<_> { used.iter().filter_map(Bounce::lasting).collect() };
        let lasting = homes(&used);
        assert_eq!(lasting.len(), KEPT);
        used.push(take(LARGE_BYTES));
        used.push(Bounce::take(LARGE_BYTES + 1).unwrap());
        assert_eq!(homes(&used).len(), KEPT, "One for once is not to be pinned");
        let longest = used[KEPT + 1].bytes(0..LARGE_BYTES + 1);
        assert_eq!(longest.len(), LARGE_BYTES + 1);
        drop(used);
        assert!(lasting.contains(&take(1).lasting().unwrap()));
    }
}
