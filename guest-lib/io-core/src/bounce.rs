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
}

impl Bounce {
    /// A buffer of at least `length` bytes, with anything in it.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn take(length: usize) -> Result<Self, Errno> {
        let (bytes, mut home) = if length <= SMALL_BYTES {
            (SMALL_BYTES, Some(&SMALL))
        } else if length <= LARGE_BYTES {
            (LARGE_BYTES, Some(&LARGE))
        } else {
            (length, None)
        };
        let kept = home.map_or(Ok(None), |kept| kept.lock().take(bytes))?;
        let memory = kept.map_or_else(
            || {
                home = None;
                Mmap::anonymous(bytes)
            },
            Ok,
        )?;
        Ok(Self {
            memory: ManuallyDrop::new(memory),
            home,
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
}

impl Drop for Bounce {
    fn drop(&mut self) {
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
    fn buffers_that_stay_are_bounded_and_used_again() {
        let mut used: Vec<_> = (0..KEPT)
            .map(|_| Bounce::take(LARGE_BYTES).unwrap())
            .collect();
        let homes =
            |used: &[Bounce]| -> Vec<_> { used.iter().filter_map(Bounce::lasting).collect() };
        let lasting = homes(&used);
        assert_eq!(lasting.len(), KEPT);
        used.push(Bounce::take(LARGE_BYTES).unwrap());
        used.push(Bounce::take(LARGE_BYTES + 1).unwrap());
        assert_eq!(homes(&used).len(), KEPT, "One for once is not to be pinned");
        assert_eq!(
            used[KEPT + 1].bytes(0..LARGE_BYTES + 1).len(),
            LARGE_BYTES + 1
        );
        drop(used);
        let again = Bounce::take(SMALL_BYTES + 1).unwrap();
        assert!(lasting.contains(&again.lasting().unwrap()));
    }
}
