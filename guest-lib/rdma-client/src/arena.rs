//! Memory for queues: parts of a few large segments, because each segment is a mapping of the
//! backend, of which a machine has few.

use farlane_abi::Errno;
use farlane_abi::queue::QUEUE_ALIGN;
use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::{FromBytes, Immutable, IntoBytes};
use farlane_sys::sync::lock;
use farlane_transport::{Origin, Segment, Transport, TransportError};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, Weak};

/// Bytes of the first segment, and of the largest that is shared.
const FIRST: usize = 1 << 16;
const LARGEST: usize = 1 << 22;

/// The segments of a context.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    chunks: Mutex<Vec<Weak<Chunk>>>,
    /// What the backend has not given up: nobody takes it again.
    kept: Mutex<Vec<Arc<Part>>>,
}

/// A segment. It is given back when nothing lies in it.
#[derive(Debug)]
struct Chunk {
    segment: Segment,
    origin: Origin,
    /// What is free: where it begins, and its length. No two pieces touch.
    free: Mutex<BTreeMap<usize, usize>>,
}

/// A part of a segment, of one queue. Given back when it is dropped: the backend must know of that
/// queue no more, else it is [kept](Arena::keep).
#[derive(Debug)]
pub(crate) struct Part {
    chunk: Arc<Chunk>,
    offset: usize,
    length: usize,
}

impl Arena {
    /// Takes `bytes` of zeroes.
    ///
    /// # Errors
    /// As [`Segment::new`].
    pub fn take(
        &self,
        transport: &Arc<dyn Transport>,
        bytes: usize,
    ) -> Result<Part, TransportError> {
        let length = bytes.next_multiple_of(to_usize(QUEUE_ALIGN));
        let mut chunks = lock(&self.chunks);
        chunks.retain(|chunk| chunk.strong_count() > 0);
        let mut all = 0;
        for chunk in chunks.iter().filter_map(Weak::upgrade) {
            all += chunk.segment.len();
            if let Some(part) = Chunk::take(&chunk, length) {
                return Ok(part);
            }
        }
        // As much again as there is, so that there are few.
        let size = all.clamp(FIRST, LARGEST).max(length);
        let segment = Segment::new(transport, size)?;
        let rest = segment.len().checked_sub(length);
        let rest = rest.ok_or(TransportError::Protocol(
            "a segment is shorter than asked for",
        ))?;
        let free = (rest > 0).then_some((length, rest)).into_iter().collect();
        let chunk = Arc::new(Chunk {
            free: Mutex::new(free),
            segment,
            origin: Origin::here(),
        });
        chunks.push(Arc::downgrade(&chunk));
        Ok(Part {
            chunk,
            offset: 0,
            length,
        })
    }

    /// Keeps the part of a queue that the backend has not given up, as long as the context is
    /// there.
    pub fn keep(&self, part: impl Into<Arc<Part>>) {
        lock(&self.kept).push(part.into());
    }
}

impl Chunk {
    /// Takes the first piece that is long enough.
    fn take(chunk: &Arc<Self>, length: usize) -> Option<Part> {
        let mut free = lock(&chunk.free);
        let found = free.iter().find(|(_, free)| **free >= length);
        let (offset, all) = found.map(|(&offset, &all)| (offset, all))?;
        free.remove(&offset);
        if all > length {
            free.insert(offset + length, all - length);
        }
        drop(free);
        let part = Part {
            chunk: Arc::clone(chunk),
            offset,
            length,
        };
        // SAFETY: it is ours alone until the backend is told of it.
        unsafe { part.at(0, length).write_bytes(0, length) };
        Some(part)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // In a child nothing is taken any more, and another thread may have had the lock.
        if self.length == 0 || !self.chunk.origin.is_here() {
            return;
        }
        let mut free = lock(&self.chunk.free);
        let (mut offset, mut length) = (self.offset, self.length);
        if let Some(after) = free.remove(&(offset + length)) {
            length += after;
        }
        if let Some((&before, &bytes)) = free.range(..offset).next_back()
            && before + bytes == offset
        {
            (offset, length) = (before, bytes + length);
        }
        free.insert(offset, length);
    }
}

impl Part {
    /// Itself, of whose place nothing is left behind: for a queue that goes.
    pub fn leave(&mut self) -> Self {
        Self {
            chunk: Arc::clone(&self.chunk),
            offset: self.offset,
            length: std::mem::take(&mut self.length),
        }
    }

    /// Id of the region that it lies in, as calls name it.
    pub fn region(&self) -> u32 {
        self.chunk.segment.region()
    }

    /// Where it begins there.
    ///
    /// # Errors
    /// `EINVAL` where calls cannot say it: no segment is that long.
    pub fn offset(&self) -> Result<u32, Errno> {
        u32::try_from(self.offset).map_err(|_| Errno::EINVAL)
    }

    /// Where `length` bytes at `offset` of it lie in the segment.
    fn place(&self, offset: usize, length: usize) -> usize {
        let end = offset.checked_add(length);
        assert!(
            end.is_some_and(|end| end <= self.length),
            "{length} bytes at {offset} of a queue of {}",
            self.length
        );
        self.offset + offset
    }

    fn at(&self, offset: usize, length: usize) -> NonNull<u8> {
        self.chunk.segment.at(self.place(offset, length), length)
    }

    /// As [`Map::word`](farlane_transport::Map::word).
    ///
    /// # Panics
    /// As that, and beyond its own end.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        let place = self.place(offset, size_of::<AtomicU32>());
        self.chunk.segment.word(place)
    }

    /// As [`Map::read`](farlane_transport::Map::read).
    ///
    /// # Safety
    /// As that.
    #[inline]
    pub unsafe fn read<T: FromBytes>(&self, offset: usize) -> T {
        // SAFETY: as promised by the caller.
        unsafe { self.chunk.segment.read(self.place(offset, size_of::<T>())) }
    }

    /// As [`Map::write`](farlane_transport::Map::write).
    ///
    /// # Safety
    /// As that.
    #[inline]
    pub unsafe fn write<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        // SAFETY: as promised by the caller.
        unsafe { self.write_bytes(offset, value.as_bytes()) }
    }

    /// As [`Map::write_bytes`](farlane_transport::Map::write_bytes).
    ///
    /// # Safety
    /// As that.
    #[inline]
    pub unsafe fn write_bytes(&self, offset: usize, from: &[u8]) {
        let place = self.place(offset, from.len());
        // SAFETY: as promised by the caller.
        unsafe { self.chunk.segment.write_bytes(place, from) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback::Rig;
    use std::sync::atomic::Ordering;

    #[test]
    fn queues_share_segments_and_give_them_back() {
        let rig = Rig::agreeable();
        let transport = Arc::clone(rig.context.transport());
        let arena = Arena::default();
        let take = |bytes| arena.take(&transport, bytes).unwrap();
        let parts: Vec<_> = [100, 64, 1].into_iter().map(take).collect();
        let offsets: Vec<_> = parts
            .iter()
            .map(|part| (part.offset, part.length))
            .collect();
        assert_eq!(offsets, [(0, 128), (128, 64), (192, 64)]);
        assert!(parts.iter().all(|part| part.region() == parts[0].region()));
        // What is free is taken again, zeroed, and pieces become one.
        parts[1].word(60).store(7, Ordering::Relaxed);
        let mut parts = parts.into_iter();
        let (first, second, third) = (parts.next(), parts.next(), parts.next());
        drop((second, first));
        let again = take(192);
        assert_eq!(again.offset, 0);
        assert_eq!(again.word(128 + 60).load(Ordering::Relaxed), 0);
        // One that is larger has a segment of its own, and a segment goes with the last of it.
        let large = take(LARGEST + 1);
        assert!(large.offset == 0 && large.region() != again.region());
        drop((again, third));
        let next = take(1);
        assert!(next.offset == 0 && next.region() != large.region());
        assert_eq!(lock(&arena.chunks).len(), 2);
    }

    /// There may be something else where the segments of its parent are.
    #[test]
    fn a_child_takes_no_memory() {
        let rig = Rig::agreeable();
        let part = rig.context.take(64).unwrap();
        // SAFETY: the child makes two calls that take no lock, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = rig.context.take(64).map_err(|e| e.errno());
            let is_right = refused.is_err_and(|e| e == Errno::ENODEV);
            drop(part);
            // SAFETY: ends the child without running anything of the test harness.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child just made.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    }

    #[test]
    #[should_panic(expected = "4 bytes at 64 of a queue of 64")]
    fn a_word_of_the_next_queue_is_refused() {
        let rig = Rig::agreeable();
        let arena = Arena::default();
        let part = arena.take(rig.context.transport(), 64).unwrap();
        let _ = part.word(64);
    }
}
