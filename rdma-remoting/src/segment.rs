//! Segments that queues lie in: each in a part of its own, many in one segment.

use farlane_abi::Errno;
use farlane_abi::queue::QUEUE_ALIGN;
use farlane_abi::width::{to_u64, to_usize};
use farlane_abi::zerocopy::little_endian::U32;
use farlane_sys::sync::lock;
use farlane_zero_copy::SharedMemory;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Memory that a process shares, in which its queues lie.
#[derive(Debug)]
pub(crate) struct Segment {
    memory: SharedMemory,
    /// Parts that are in use: where each begins, and its length.
    taken: Mutex<BTreeMap<usize, usize>>,
}

/// A part of a segment, of one queue: no other has a byte of it.
#[derive(Debug)]
pub(crate) struct Part {
    /// Its memory.
    pub memory: SharedMemory,
    offset: usize,
    segment: Arc<Segment>,
}

impl Segment {
    /// A segment without queues.
    pub fn new(memory: SharedMemory) -> Arc<Self> {
        Arc::new(Self {
            memory,
            taken: Mutex::default(),
        })
    }

    /// Its memory.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Takes `length` bytes at `offset` for a queue.
    ///
    /// # Errors
    /// `EINVAL` for a part that is not aligned or not inside, `EBUSY` for one that overlaps a
    /// queue's.
    pub fn take(self: &Arc<Self>, offset: U32, length: u64) -> Result<Part, Errno> {
        let (offset, length) = (to_usize(offset.get().into()), to_usize(length));
        if length == 0 || !to_u64(offset).is_multiple_of(QUEUE_ALIGN) {
            return Err(Errno::EINVAL);
        }
        let memory = self.memory.part(offset, length);
        let memory = memory.map_err(|_| Errno::EINVAL)?;
        let mut taken = lock(&self.taken);
        let before = taken.range(..offset).next_back();
        let after = taken.range(offset..).next();
        if before.is_some_and(|(start, length)| start + length > offset)
            || after.is_some_and(|(start, _)| *start < offset + length)
        {
            return Err(Errno::EBUSY);
        }
        taken.insert(offset, length);
        drop(taken);
        Ok(Part {
            memory,
            offset,
            segment: Arc::clone(self),
        })
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        lock(&self.segment.taken).remove(&self.offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_zero_copy::Mapping;
    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd as _;
    use std::sync::atomic::Ordering;

    fn segment() -> Arc<Segment> {
        let fd = memfd_create("segment", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 0x2000).unwrap();
        let mapping = Mapping::new(fd.as_fd(), 0, 0x2000, true).unwrap();
        Segment::new(SharedMemory::new(mapping))
    }

    #[test]
    fn queues_lie_beside_each_other_and_give_their_parts_back() {
        let segment = segment();
        let take = |offset: u32, length| segment.take(offset.into(), length);
        let first = take(0, 0x140).unwrap();
        let second = take(0x140, 0x40).unwrap();
        for (offset, length, error) in [
            (0, 0x140, Errno::EBUSY),
            (0x100, 0x40, Errno::EBUSY),
            (0x140, 1, Errno::EBUSY),
            (0, 0x2000, Errno::EBUSY),
            (0x180, 0, Errno::EINVAL),
            (0x188, 0x40, Errno::EINVAL),
            (0x180, 0x2000, Errno::EINVAL),
            (0x2000, 0x40, Errno::EINVAL),
            (u32::MAX - 63, u64::MAX, Errno::EINVAL),
        ] {
            assert_eq!(take(offset, length).unwrap_err(), error, "{offset:#x}");
        }
        second.memory.word(0).unwrap().store(7, Ordering::Relaxed);
        let word = segment.memory().word(0x140).unwrap();
        assert_eq!(word.load(Ordering::Relaxed), 7);
        assert!(first.memory.word(0x140).is_err() && second.memory.word(0x40).is_err());
        drop(second);
        take(0x140, 0x40).unwrap();
        drop(first);
        take(0, 0x2000).unwrap();
    }

    proptest! {
        #[test]
        fn no_byte_is_two_queues(
            steps in prop::collection::vec((0_u32..130, 0_u64..0x400, any::<bool>()), 0..80),
        ) {
            let segment = segment();
            let mut parts: Vec<Part> = Vec::new();
            for (at, length, give) in steps {
                if give && !parts.is_empty() {
                    parts.swap_remove(to_usize(at.into()) % parts.len());
                }
                let offset = to_usize((at * 64).into());
                let end = offset + to_usize(length);
                let is_free = parts.iter().all(|part| {
                    end <= part.offset || part.offset + part.memory.len() <= offset
                });
                match segment.take((at * 64).into(), length) {
                    Ok(part) => {
                        prop_assert!(is_free && length > 0 && end <= 0x2000);
                        parts.push(part);
                    }
                    Err(Errno::EBUSY) => prop_assert!(!is_free),
                    Err(_) => prop_assert!(length == 0 || end > 0x2000),
                }
            }
        }
    }
}
