//! Files in which processes have memory that they register.
//!
//! A file is sealed so that nobody takes pages out of it again, and then it can be mapped for
//! writing by nobody: neither here a second time. So it is mapped once, whole, and what is
//! registered later of the same file is found there.

use crate::memory_file::{self, MemoryFileError, Source};
use crate::registration::{Memory, Piece};
use crate::{Mapping, Region, RegionError};
use farlane_abi::PAGE_BYTES;
use farlane_abi::width::to_usize;
use farlane_sys::sync::lock;
use rustix::fs::{OFlags, fcntl_getfl, fstat};
use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

/// Files are mapped whole, however little of them is registered at first, that are no longer: of
/// others addresses run out before memory does.
const LONGEST_WHOLE: u64 = 64 << 20;

/// A file, by two numbers that no other one has while it is open.
type FileId = (u64, u64);

/// The files of which something is registered.
#[derive(Debug, Default)]
pub struct SharedFiles(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    files: HashMap<FileId, KnownFile>,
    /// How many there are when those are forgotten of which nothing is registered any more.
    most: usize,
}

/// A file that is mapped, as long as something of it is registered.
#[derive(Debug)]
struct KnownFile {
    file: Weak<OwnedFd>,
    mapping: Weak<Mapping>,
    /// Where the mapping begins in it.
    start: u64,
    is_writable: bool,
}

/// The same while it is looked at.
struct Mapped {
    file: Arc<OwnedFd>,
    mapping: Arc<Mapping>,
    start: u64,
    is_writable: bool,
}

impl KnownFile {
    fn upgrade(&self) -> Option<Mapped> {
        Some(Mapped {
            file: self.file.upgrade()?,
            mapping: self.mapping.upgrade()?,
            start: self.start,
            is_writable: self.is_writable,
        })
    }
}

impl Mapped {
    /// Whether these bytes of the file are mapped, for writing if they are to be written.
    fn has(&self, (offset, length): (u64, u64), writable: bool) -> bool {
        let end = self.start.saturating_add(self.mapping.len() as u64);
        offset >= self.start
            && offset.saturating_add(length) <= end
            && (self.is_writable || !writable)
    }
}

/// Bytes of a file that are to be registered.
struct Part {
    fd: OwnedFd,
    id: FileId,
    /// Of the file.
    size: u64,
    /// An offset, and how many.
    range: (u64, u64),
}

impl Part {
    fn new(fd: OwnedFd, range: (u64, u64)) -> Result<Self, RegionError> {
        Region::check_memfd(&fd, range, false)?;
        let stat = fstat(&fd).map_err(MemoryFileError::from)?;
        Ok(Self {
            fd,
            id: (stat.st_dev, stat.st_ino),
            size: memory_file::size_of(&stat)?,
            range,
        })
    }

    fn end(&self) -> u64 {
        self.range.0.saturating_add(self.range.1)
    }
}

/// All that a registration has of one file.
#[derive(Default)]
struct Together {
    start: u64,
    end: u64,
    /// Their lengths.
    bytes: u64,
}

impl Together {
    fn of(parts: &[Part], id: FileId) -> Self {
        let its = || parts.iter().filter(|part| part.id == id);
        let lengths = its().map(|part| part.range.1);
        Self {
            start: its().map(|part| part.range.0).min().unwrap_or_default(),
            end: its().map(Part::end).max().unwrap_or_default(),
            bytes: lengths.fold(0, u64::saturating_add),
        }
    }

    /// From where to where a file is mapped: addresses for much more than is registered are none's
    /// to take.
    fn to_map(&self, size: u64, (offset, length): (u64, u64)) -> (u64, u64) {
        let most = LONGEST_WHOLE.max(self.bytes.saturating_mul(2));
        let page = |offset: u64| offset / PAGE_BYTES * PAGE_BYTES;
        if size <= most {
            (0, size)
        } else if self.end.saturating_sub(self.start) <= most {
            (page(self.start), self.end)
        } else {
            (page(offset), offset.saturating_add(length))
        }
    }
}

impl SharedFiles {
    /// Bytes of files that another process has mapped, too, at an offset of each so many, one
    /// behind the other. Nobody can change the files any more but for their bytes: they are sealed
    /// against shrinking, this seals them against holes, and the pages of these bytes are there.
    /// So touching them neither faults nor takes memory.
    ///
    /// # Errors
    /// No bytes, or more than there are addresses for; see [`RegionError::File`],
    /// [`RegionError::Shrinks`], [`RegionError::HugePages`] and [`RegionError::Sparse`]; what
    /// `mmap` says.
    pub fn region(
        &self,
        files: Vec<(OwnedFd, u64, u64)>,
        writable: bool,
    ) -> Result<Region, RegionError> {
        let mut parts = Vec::with_capacity(files.len());
        for (fd, offset, length) in files {
            parts.push(Part::new(fd, (offset, length))?);
        }
        let of_each: Vec<_> = parts
            .iter()
            .map(|part| Together::of(&parts, part.id))
            .collect();
        let mut pieces = Vec::with_capacity(parts.len());
        let mut start = 0_u64;
        for (part, together) in parts.into_iter().zip(of_each) {
            let address = start;
            let (offset, length) = part.range;
            start = address
                .checked_add(length)
                .ok_or(RegionError::Wraps { address, length })?;
            let of = self.map(part, &together, writable)?;
            // Both may wait for whoever has the file's inode, and nobody else for them.
            memory_file::seal_against_holes(of.file.as_fd())?;
            if !memory_file::has_pages(of.file.as_fd(), (offset, length))? {
                return Err(RegionError::Sparse);
            }
            pieces.push(Piece {
                start: address,
                length,
                guest: None,
                offset: to_usize(offset - of.start),
                mapping: of.mapping,
                file: of.file,
                file_offset: offset,
            });
        }
        if pieces.is_empty() {
            return Err(RegionError::Empty);
        }
        Ok(Region::new(Memory::Mapped(pieces), start, writable))
    }

    /// The mapping of a file that has these bytes of it, and where none has them yet a new one, of
    /// what is registered of it together.
    fn map(&self, part: Part, of: &Together, writable: bool) -> Result<Mapped, RegionError> {
        let Part { fd, id, range, .. } = part;
        let mut known = lock(&self.0);
        let found = known.files.get(&id).and_then(KnownFile::upgrade);
        if let Some(found) = found.filter(|found| found.has(range, writable)) {
            // Whoever has it open for reading only does not have it written.
            let mode = fcntl_getfl(&fd).map_err(MemoryFileError::from)? & OFlags::ACCMODE;
            if writable && mode != OFlags::RDWR {
                return Err(MemoryFileError::Unwritable.into());
            }
            return Ok(found);
        }
        Region::check_memfd(&fd, range, writable)?;
        let (start, end) = of.to_map(part.size, range);
        // It cannot be mapped for writing afterwards.
        let source = Source::Peer;
        let is_writable = writable || memory_file::check(fd.as_fd(), range, true, source).is_ok();
        let mapping = Mapping::new(fd.as_fd(), start, end - start, is_writable)?;
        let mapped = Mapped {
            file: Arc::new(fd),
            mapping: Arc::new(mapping),
            start,
            is_writable,
        };
        known.insert(id, &mapped);
        Ok(mapped)
    }
}

impl Known {
    fn insert(&mut self, id: FileId, mapped: &Mapped) {
        if self.files.len() >= self.most {
            self.files.retain(|_, file| file.mapping.strong_count() > 0);
            // So that each is looked at a few times.
            self.most = 2 * self.files.len() + 16;
        }
        let known = KnownFile {
            file: Arc::downgrade(&mapped.file),
            mapping: Arc::downgrade(&mapped.mapping),
            start: mapped.start,
            is_writable: mapped.is_writable,
        };
        self.files.insert(id, known);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{copy_from_slice, copy_to_slice};
    use rustix::fs::{MemfdFlags, Mode, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::os::fd::AsRawFd as _;

    const PAGE: u64 = PAGE_BYTES;

    /// A file with so many pages, all of which are there.
    fn file(pages: u64) -> OwnedFd {
        let fd = memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, pages * PAGE).unwrap();
        for page in 0..pages {
            rustix::io::pwrite(&fd, &[u8::try_from(page).unwrap(); 8], page * PAGE).unwrap();
        }
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        fd
    }

    fn again(fd: &OwnedFd) -> OwnedFd {
        fd.try_clone().unwrap()
    }

    #[test]
    fn a_region_has_the_bytes_of_its_pieces_in_their_order() {
        let files = SharedFiles::default();
        let [one, other] = [file(3), file(2)];
        let pieces = vec![
            (again(&one), 2 * PAGE + 4, 4),
            (again(&other), PAGE, 4),
            (again(&one), PAGE, 8),
        ];
        let region = files.region(pieces, true).unwrap();
        assert_eq!((region.len(), region.own_files()), (16, 3));
        let mut bytes = [0; 16];
        copy_to_slice(&region, 0, &mut bytes).unwrap();
        assert_eq!(
            bytes,
            *b"\x02\x02\x02\x02\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01"
        );
        copy_from_slice(&region, 3, &[7, 8]).unwrap();
        let byte = |fd: &OwnedFd, at| {
            let mut byte = [0];
            rustix::io::pread(fd, &mut byte, at).unwrap();
            byte[0]
        };
        assert_eq!(byte(&one, 2 * PAGE + 7), 7);
        assert_eq!((byte(&other, PAGE), byte(&other, PAGE + 1)), (8, 1));
    }

    #[test]
    fn a_file_is_mapped_once_and_registered_as_often_as_its_process_likes() {
        let files = SharedFiles::default();
        let fd = file(4);
        let part = |offset, writable| files.region(vec![(again(&fd), offset, 100)], writable);
        let first = part(10, false).unwrap();
        // It is sealed by now; whoever does not know its mapping cannot make another one.
        let unknown = SharedFiles::default().region(vec![(again(&fd), 0, 1)], true);
        let unknown = unknown.unwrap_err();
        assert!(matches!(
            unknown,
            RegionError::File(MemoryFileError::Sealed)
        ));
        let second = part(2 * PAGE, true).unwrap();
        drop(first);
        let third = part(3 * PAGE, true).unwrap();
        copy_from_slice(&third, 0, &[9]).unwrap();
        drop((second, third));
        // Nothing is mapped, and cannot be any more.
        assert!(part(0, true).is_err());
        part(0, false).unwrap();
    }

    #[test]
    fn pieces_of_a_long_file_are_mapped_together() {
        let files = SharedFiles::default();
        let fd = memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        // More than is mapped whole, and more than twice the first piece.
        let middle = LONGEST_WHOLE / 2;
        ftruncate(&fd, 2 * LONGEST_WHOLE).unwrap();
        for place in [0, middle, LONGEST_WHOLE - PAGE] {
            rustix::io::pwrite(&fd, &[3; 8], place).unwrap();
        }
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        let piece = |place| (again(&fd), place, 8);
        let pieces = vec![piece(middle), piece(0), piece(LONGEST_WHOLE - PAGE)];
        let region = files.region(pieces, true).unwrap();
        copy_from_slice(&region, 0, &[7; 24]).unwrap();
        for place in [0, middle, LONGEST_WHOLE - PAGE] {
            let mut bytes = [0; 8];
            rustix::io::pread(&fd, &mut bytes, place).unwrap();
            assert_eq!(bytes, [7; 8], "{place:#x}");
        }
    }

    #[test]
    fn addresses_are_not_taken_for_much_more_than_is_registered() {
        let together = |start, end, bytes| Together { start, end, bytes };
        let page = PAGE;
        let long = 1 << 50;
        let small = together(page + 8, long - page, 16);
        assert_eq!(small.to_map(long, (page + 8, 8)), (page, page + 16));
        assert_eq!(
            small.to_map(LONGEST_WHOLE, (page + 8, 8)),
            (0, LONGEST_WHOLE)
        );
        let half = together(long / 4 + 1, long, long / 2);
        assert_eq!(half.to_map(long, (long / 4 + 1, 8)), (0, long));
        assert_eq!(half.to_map(2 * long, (long / 4 + 1, 8)), (long / 4, long));
    }

    #[test]
    fn who_cannot_write_a_file_does_not_have_it_written() {
        let files = SharedFiles::default();
        let fd = file(1);
        let _mapped = files.region(vec![(again(&fd), 0, 8)], true).unwrap();
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let read_only = || rustix::fs::open(&path, OFlags::RDONLY, Mode::empty()).unwrap();
        files.region(vec![(read_only(), 0, 8)], false).unwrap();
        let refused = files.region(vec![(read_only(), 0, 8)], true).unwrap_err();
        let expected = RegionError::File(MemoryFileError::Unwritable).to_string();
        assert_eq!(refused.to_string(), expected);
    }

    #[test]
    fn what_is_not_there_is_not_registered() {
        let files = SharedFiles::default();
        let fd = file(2);
        fcntl_add_seals(&fd, SealFlags::GROW).unwrap();
        for pieces in [
            vec![],
            vec![(again(&fd), 0, 0)],
            vec![(again(&fd), 0, 8), (again(&fd), 2 * PAGE - 8, 9)],
            vec![(again(&fd), 0, 8), (again(&fd), u64::MAX, 8)],
        ] {
            assert!(files.region(pieces, true).is_err());
        }
        let holes = memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&holes, 4 * PAGE).unwrap();
        rustix::io::pwrite(&holes, &[1], PAGE).unwrap();
        fcntl_add_seals(&holes, SealFlags::SHRINK).unwrap();
        let part = |offset, length| files.region(vec![(again(&holes), offset, length)], true);
        let _there = part(PAGE, PAGE).unwrap();
        for (offset, length) in [(0, 1), (PAGE, PAGE + 1), (3 * PAGE, 1)] {
            let refused = part(offset, length).unwrap_err();
            assert!(matches!(refused, RegionError::Sparse), "{offset} {length}");
        }
    }

    #[test]
    fn files_are_forgotten_of_which_nothing_is_registered() {
        let files = SharedFiles::default();
        let kept = file(1);
        let _kept = files.region(vec![(again(&kept), 0, 8)], true).unwrap();
        for _ in 0..500 {
            files.region(vec![(file(1), 0, 8)], true).unwrap();
        }
        assert!(lock(&files.0).files.len() < 40);
        files.region(vec![(again(&kept), 0, 8)], true).unwrap();
    }
}
