//! Video memory: a file that the borrower maps, too.

use farlane_abi::width::to_u64;
use farlane_zero_copy::{Mapping, punch_hole};
use rustix::fs::{MemfdFlags, SealFlags};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A range that lies in video memory of a certain size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    offset: usize,
    length: usize,
}

impl Span {
    /// `length` bytes at `offset` of `memory_bytes`, if they lie in them.
    pub fn new(memory_bytes: u64, offset: u64, length: u64) -> Option<Self> {
        let end = offset.checked_add(length)?;
        (end <= memory_bytes).then_some(())?;
        Some(Self {
            offset: usize::try_from(offset).ok()?,
            length: usize::try_from(length).ok()?,
        })
    }

    /// Bytes.
    pub fn len(self) -> usize {
        self.length
    }

    /// `length` bytes of it from byte `at` on; fewer where it ends.
    pub fn part(self, at: usize, length: usize) -> Self {
        let at = at.min(self.length);
        Self {
            offset: self.offset + at,
            length: length.min(self.length - at),
        }
    }

    /// Its parts of at most `most` bytes, in order, each with where it begins in this.
    pub fn parts(self, most: usize) -> impl DoubleEndedIterator<Item = (usize, Self)> + Clone {
        let count = self.length.div_ceil(most);
        (0..count).map(move |i| (i * most, self.part(i * most, most)))
    }

    /// Whether both have bytes in common.
    pub fn overlaps(self, other: Self) -> bool {
        self.length > 0
            && other.length > 0
            && self.offset < other.offset + other.length
            && other.offset < self.offset + self.length
    }

    /// Whether it begins before another.
    pub fn is_before(self, other: Self) -> bool {
        self.offset < other.offset
    }
}

/// A file for video memory, full of zeroes, which cannot shrink under whoever maps it.
pub fn new_file(bytes: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("farlane-video", flags)?;
    rustix::fs::ftruncate(&file, bytes)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// Video memory, mapped. Others write it at any time.
#[derive(Debug)]
pub struct VideoMemory {
    file: Arc<OwnedFd>,
    mapping: Mapping,
}

impl VideoMemory {
    /// Maps `bytes` of `file`, which has as many.
    pub fn new(file: Arc<OwnedFd>, bytes: u64) -> io::Result<Self> {
        let mapping = Mapping::new(file.as_fd(), 0, bytes, true).map_err(io::Error::other)?;
        Ok(Self { file, mapping })
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        to_u64(self.mapping.len())
    }

    /// A range of it.
    pub fn span(&self, offset: u64, length: u64) -> Option<Span> {
        Span::new(self.len(), offset, length)
    }

    /// Fills it with zeroes, and gives the pages back.
    pub fn clear(&self) -> io::Result<()> {
        punch_hole(&self.file, 0, self.len())
    }

    /// First byte of a range, of which all bytes are mapped while this lives.
    pub fn pointer(&self, span: Span) -> *mut u8 {
        // A span of another memory would be a mistake of this crate; it must not become an access
        // outside.
        assert!(span.offset + span.length <= self.mapping.len());
        self.mapping.base().wrapping_add(span.offset)
    }

    /// Copies bytes out; as many as the shorter of both has.
    pub fn read(&self, span: Span, data: &mut [u8]) {
        let span = span.part(0, data.len());
        // SAFETY: `pointer` checked that the range is mapped; `data` is ours and at least as long.
        // Whatever others write meanwhile, each byte is some byte.
        unsafe {
            std::ptr::copy_nonoverlapping(self.pointer(span), data.as_mut_ptr(), span.len());
        }
    }

    /// Copies bytes in; as many as the shorter of both has.
    pub fn write(&self, span: Span, data: &[u8]) {
        let span = span.part(0, data.len());
        // SAFETY: as in `read`; the mapping is writable.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.pointer(span), span.len()) };
    }

    /// Copies as many bytes as the shorter of both has, which may overlap.
    pub fn copy(&self, source: Span, target: Span) {
        let source = source.part(0, target.len());
        let target = target.part(0, source.len());
        // SAFETY: both are mapped and as long as each other.
        unsafe { std::ptr::copy(self.pointer(source), self.pointer(target), source.len()) };
    }

    /// The word at `offset`, if it lies in video memory and is aligned.
    pub fn word(&self, offset: u64) -> Option<&AtomicU32> {
        let span = self.span(offset, 4)?;
        let pointer = self.pointer(span);
        if !offset.is_multiple_of(4) {
            return None;
        }
        // SAFETY: four bytes of a mapping that lives as long as `self`, aligned as checked (the
        // mapping is page-aligned).
        Some(unsafe { AtomicU32::from_ptr(pointer.cast()) })
    }

    /// An access of the driver that came as a message; an aligned word is read at once.
    pub fn read_message(&self, offset: u64, data: &mut [u8]) -> Option<()> {
        let span = self.span(offset, u64::try_from(data.len()).ok()?)?;
        match (<&mut [u8; 4]>::try_from(&mut *data), self.word(offset)) {
            (Ok(word), Some(at)) => *word = at.load(Ordering::Acquire).to_le_bytes(),
            _ => self.read(span, data),
        }
        Some(())
    }

    /// The same for a write.
    pub fn write_message(&self, offset: u64, data: &[u8]) -> Option<()> {
        let span = self.span(offset, u64::try_from(data.len()).ok()?)?;
        match (<[u8; 4]>::try_from(data), self.word(offset)) {
            (Ok(word), Some(at)) => at.store(u32::from_le_bytes(word), Ordering::Release),
            _ => self.write(span, data),
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn memory(bytes: u64) -> VideoMemory {
        VideoMemory::new(Arc::new(new_file(bytes).unwrap()), bytes).unwrap()
    }

    #[test]
    fn clearing_leaves_zeroes_for_all_who_map_it() {
        let memory = memory(0x4000);
        let other = VideoMemory::new(Arc::clone(&memory.file), 0x4000).unwrap();
        let span = memory.span(0xffe, 4).unwrap();
        memory.write(span, &[1, 2, 3, 4]);
        let mut read = [0; 4];
        other.read(span, &mut read);
        assert_eq!(read, [1, 2, 3, 4]);
        memory.clear().unwrap();
        other.read(span, &mut read);
        assert_eq!(read, [0; 4]);
    }

    #[test]
    fn the_file_cannot_shrink() {
        let memory = memory(0x4000);
        assert!(rustix::fs::ftruncate(&memory.file, 0).is_err());
    }

    #[test]
    fn messages_outside_are_refused() {
        let memory = memory(0x1000);
        memory.write_message(0xffc, &7_u32.to_le_bytes()).unwrap();
        let mut word = [0; 4];
        memory.read_message(0xffc, &mut word).unwrap();
        assert_eq!(u32::from_le_bytes(word), 7);
        assert!(memory.write_message(0xffd, &[0; 4]).is_none());
        assert!(memory.read_message(u64::MAX, &mut word).is_none());
    }

    proptest! {
        #[test]
        fn a_span_lies_inside_or_is_none(offset: u64, length: u64, size in 0_u64..1 << 40) {
            let inside = u128::from(offset) + u128::from(length) <= u128::from(size);
            prop_assert_eq!(Span::new(size, offset, length).is_some(), inside);
        }

        #[test]
        fn parts_are_the_whole(offset in 0_u64..1000, length in 0_u64..1000, most in 1_usize..300) {
            let span = Span::new(4096, offset, length).unwrap();
            let mut end = 0;
            for (at, part) in span.parts(most) {
                prop_assert_eq!(at, end);
                prop_assert!(part.len() > 0 && part.len() <= most);
                end += part.len();
            }
            prop_assert_eq!(end, span.len());
        }
    }
}
