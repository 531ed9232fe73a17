//! Files of memory that somebody else has sent, before they are mapped.
//!
//! A fault in a mapping waits for whoever serves its file: in a file of FUSE, or of a server that
//! is gone, for ever, and with it the thread that has touched it.

use farlane_abi::width::halves;
use rustix::fs::{AtFlags, FileType, OFlags, SealFlags, SeekFrom, Stat, StatxFlags};
use rustix::fs::{fstat, fstatfs, statx};

use rustix::io::Errno;
use std::io;
use std::os::fd::BorrowedFd;
use thiserror::Error;

/// `linux/magic.h`: file systems of disks of this host, which nobody without its administrator's
/// rights can mount.
const DISK: [u64; 3] = [
    0xef53,      // EXT4_SUPER_MAGIC, also ext2 and ext3
    0x5846_5342, // XFS_SUPER_MAGIC
    0xf2f5_2010, // F2FS_SUPER_MAGIC
];

/// How `statx` is asked for what the kernel knows itself, without whoever serves the file.
const UNASKED: AtFlags = AtFlags::EMPTY_PATH.union(AtFlags::STATX_DONT_SYNC);

/// Whose file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A VMM's, with memory of its VM. It may lie on a disk (ext4, XFS, F2FS): QEMU's
    /// `memory-backend-file,mem-path=`.
    Vmm,
    /// Another process's, which shows memory of its own.
    Peer,
}

/// Why a file is not mapped.
#[derive(Debug, Error)]
pub enum MemoryFileError {
    /// A device, a socket, a folder.
    #[error("it is not a regular file")]
    NotRegular,
    /// A file system that may never answer.
    #[error("it is not memory (tmpfs, hugetlbfs or a memfd)")]
    NotMemory,
    /// Fewer bytes.
    #[error("it is too short: {length:#x} bytes at {offset:#x} end beyond {size:#x}")]
    TooShort {
        /// Where the bytes begin in the file.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Bytes that it has.
        size: u64,
    },
    /// Opened for writing only, or by its path.
    #[error("its descriptor cannot be read")]
    Unreadable,
    /// Opened for reading only.
    #[error("its descriptor cannot be written")]
    Unwritable,
    /// Nobody can write it.
    #[error("it is sealed against writing")]
    Sealed,
    /// The system failed.
    #[error("it cannot be examined")]
    Io(#[source] io::Error),
}

impl From<Errno> for MemoryFileError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// Checks that a mapping of `length` bytes of `file` at `offset` (more than none) is one of memory,
/// and may be read, and written if it is to be. Says whether the file cannot shrink.
///
/// # Errors
/// Why it must not be mapped.
pub fn check(
    file: BorrowedFd<'_>,
    (offset, length): (u64, u64),
    writable: bool,
    source: Source,
) -> Result<bool, MemoryFileError> {
    let mode = access(file)?;
    // Only memory knows seals. This is asked before all that a file of FUSE waits for: whoever
    // serves it is asked by `fstat` and `fstatfs`, too.
    let seals = rustix::fs::fcntl_get_seals(file).ok();
    if seals.is_none() && (source == Source::Peer || !is_of_a_disk(file)?) {
        return Err(MemoryFileError::NotMemory);
    }
    let seals = seals.unwrap_or(SealFlags::empty());
    let stat = fstat(file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(MemoryFileError::NotRegular);
    }
    holds(&stat, (offset, length))?;
    if writable && mode != OFlags::RDWR {
        return Err(MemoryFileError::Unwritable);
    }
    if writable && seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(MemoryFileError::Sealed);
    }
    Ok(seals.contains(SealFlags::SHRINK))
}

/// Checks a file of a VM's memory table, which may also be a device that is memory (device-dax):
/// that has no length, and is its administrator's.
///
/// # Errors
/// Why it must not be mapped.
pub fn check_ram(file: BorrowedFd<'_>, range: (u64, u64)) -> Result<(), MemoryFileError> {
    let access = access(file)?;
    let mode = statx(file, "", UNASKED, StatxFlags::TYPE)?.stx_mode;
    if FileType::from_raw_mode(mode.into()) == FileType::CharacterDevice {
        return match access == OFlags::RDWR {
            true => Ok(()),
            false => Err(MemoryFileError::Unwritable),
        };
    }
    check(file, range, true, Source::Vmm).map(drop)
}

/// How a descriptor was opened: for reading, or for reading and writing. One that was opened by its
/// path (`O_PATH`) is of whatever its file claims to be, such as a device that a server of FUSE has
/// made up, which nobody could have opened: it is refused before anything is asked of the file.
fn access(file: BorrowedFd<'_>) -> Result<OFlags, MemoryFileError> {
    // The kernel answers of its own.
    let flags = rustix::fs::fcntl_getfl(file)?;
    let mode = flags & OFlags::ACCMODE;
    match flags.contains(OFlags::PATH) || mode == OFlags::WRONLY {
        true => Err(MemoryFileError::Unreadable),
        false => Ok(mode),
    }
}

/// Checks that a file has bytes (more than none). A device that is memory says that it has none:
/// there `mmap` checks that.
pub(crate) fn holds(stat: &Stat, (offset, length): (u64, u64)) -> Result<(), MemoryFileError> {
    let size = match FileType::from_raw_mode(stat.st_mode) {
        FileType::CharacterDevice => u64::MAX,
        _ => size_of(stat)?,
    };
    let end = offset.checked_add(length).filter(|_| length > 0);
    match end.is_some_and(|end| end <= size) {
        true => Ok(()),
        false => Err(MemoryFileError::TooShort {
            offset,
            length,
            size,
        }),
    }
}

/// Bytes of a file.
pub(crate) fn size_of(stat: &Stat) -> Result<u64, MemoryFileError> {
    Ok(u64::try_from(stat.st_size).map_err(|_| Errno::OVERFLOW)?)
}

/// Whether the pages of a file are those of hugetlbfs, which the system maps as a whole. The file
/// was [checked](check).
pub(crate) fn has_huge_pages(file: BorrowedFd<'_>) -> Result<bool, MemoryFileError> {
    /// `linux/magic.h`.
    const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;
    let [system, _] = halves(fstatfs(file)?.f_type.cast_unsigned());
    Ok(system == HUGETLBFS_MAGIC)
}

/// Sees to it that no pages are taken out of a memfd any more, and that it is mapped for writing by
/// nobody else. Mappings that there are stay.
pub(crate) fn seal_against_holes(file: BorrowedFd<'_>) -> Result<(), MemoryFileError> {
    if !is_sealed(file) {
        rustix::fs::fcntl_add_seals(file, SealFlags::FUTURE_WRITE)?;
    }
    Ok(())
}

/// Whether that is so.
pub(crate) fn is_sealed(file: BorrowedFd<'_>) -> bool {
    let seals = rustix::fs::fcntl_get_seals(file);
    seals.is_ok_and(|seals| seals.contains(SealFlags::FUTURE_WRITE))
}

/// Whether a memfd has all pages of a range of bytes, which it is long enough for: those that have
/// been written, or read by a mapping. Pages beyond its end, which it can have too, are none of
/// them.
pub(crate) fn has_pages(
    file: BorrowedFd<'_>,
    (offset, length): (u64, u64),
) -> Result<bool, MemoryFileError> {
    // The end of the file is a hole (lseek(2)).
    let hole = rustix::fs::seek(file, SeekFrom::Hole(offset))?;
    Ok(hole >= offset.saturating_add(length))
}

/// Whether a file lies on a disk of this host: nobody else is asked for that.
fn is_of_a_disk(file: BorrowedFd<'_>) -> Result<bool, MemoryFileError> {
    // File systems without a block device have numbers with major 0.
    if statx(file, "", UNASKED, StatxFlags::TYPE)?.stx_dev_major == 0 {
        return Ok(false);
    }
    // A number of 32 bits, with its sign extended where it is a signed one.
    let [system, _] = halves(fstatfs(file)?.f_type.cast_unsigned());
    Ok(DISK.contains(&system.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, Mode, fcntl_add_seals, ftruncate, memfd_create};
    use std::io::Write as _;
    use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

    fn memory(bytes: u64) -> OwnedFd {
        let fd = memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    }

    fn of_a_peer(
        file: &impl std::os::fd::AsFd,
        range: (u64, u64),
        writable: bool,
    ) -> Result<bool, MemoryFileError> {
        check(file.as_fd(), range, writable, Source::Peer)
    }

    #[test]
    fn a_file_is_taken_only_with_the_bytes_that_it_has() {
        let fd = memory(0x3000);
        assert!(!of_a_peer(&fd, (0x1000, 0x2000), true).unwrap());
        for range in [(0x1000, 0x3000), (0, 0), (u64::MAX, 2), (0x4000, 0x1000)] {
            let refused = of_a_peer(&fd, range, true).unwrap_err();
            assert!(matches!(refused, MemoryFileError::TooShort { .. }));
        }
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        assert!(of_a_peer(&fd, (0, 0x3000), true).unwrap());
        fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE).unwrap();
        let sealed = of_a_peer(&fd, (0, 0x1000), true).unwrap_err();
        assert!(matches!(sealed, MemoryFileError::Sealed));
        of_a_peer(&fd, (0, 0x1000), false).unwrap();
    }

    #[test]
    fn only_a_device_has_more_bytes_than_it_says() {
        let of = |kind: FileType, size: i64, range| {
            let mut stat = fstat(memory(0)).unwrap();
            stat.st_mode = kind.as_raw_mode() | 0o600;
            stat.st_size = size;
            holds(&stat, range).is_ok()
        };
        for (range, of_file, of_device) in [
            ((0, 0x1000), true, true),
            ((0x1000, 0x1000), false, true),
            ((0, 0x1001), false, true),
            ((0, 0), false, false),
            ((u64::MAX, 2), false, false),
        ] {
            assert_eq!(of(FileType::RegularFile, 0x1000, range), of_file);
            assert_eq!(of(FileType::CharacterDevice, 0, range), of_device);
        }
    }

    #[test]
    fn huge_pages_are_told_from_others() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let huge = memfd_create("t", flags).unwrap();
        assert!(has_huge_pages(huge.as_fd()).unwrap());
        assert!(!has_huge_pages(memory(0x1000).as_fd()).unwrap());
    }

    #[test]
    fn what_is_not_memory_is_refused() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        for fd in [
            OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()),
            std::fs::File::open("/proc").unwrap().into(),
            std::fs::File::open("/proc/self/maps").unwrap().into(),
            socket.into(),
        ] {
            for source in [Source::Peer, Source::Vmm] {
                let refused = check(fd.as_fd(), (0, 1), false, source).unwrap_err();
                assert!(matches!(refused, MemoryFileError::NotMemory));
            }
        }
        let mut shared = tempfile::tempfile_in("/dev/shm").unwrap();
        shared.write_all(b"memory").unwrap();
        for source in [Source::Peer, Source::Vmm] {
            assert!(!check(shared.as_fd(), (0, 6), true, source).unwrap());
        }
    }

    #[test]
    fn a_descriptor_that_cannot_be_written_is_not_taken_for_writing() {
        let fd = memory(0x1000);
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let open = |flags| rustix::fs::open(path.as_str(), flags, Mode::empty()).unwrap();
        let read_only = open(OFlags::RDONLY);
        of_a_peer(&read_only, (0, 0x1000), false).unwrap();
        let refused = of_a_peer(&read_only, (0, 0x1000), true).unwrap_err();
        assert!(matches!(refused, MemoryFileError::Unwritable));
        let refused = of_a_peer(&open(OFlags::WRONLY), (0, 0x1000), false).unwrap_err();
        assert!(matches!(refused, MemoryFileError::Unreadable));
        let by_path = open(OFlags::PATH);
        let refused = of_a_peer(&by_path, (0, 0x1000), false).unwrap_err();
        assert!(matches!(refused, MemoryFileError::Unreadable));
        let refused = check_ram(by_path.as_fd(), (0, 0x1000)).unwrap_err();
        assert!(matches!(refused, MemoryFileError::Unreadable));
    }

    #[test]
    fn a_device_is_memory_of_a_vm_only_with_a_descriptor_that_can_be_mapped() {
        let check = |flags| {
            let device = rustix::fs::open("/dev/zero", flags, Mode::empty()).unwrap();
            check_ram(device.as_fd(), (0, 0x1000))
        };
        check(OFlags::RDWR).unwrap();
        for flags in [OFlags::PATH, OFlags::PATH | OFlags::RDWR, OFlags::WRONLY] {
            let refused = check(flags).unwrap_err();
            assert!(matches!(refused, MemoryFileError::Unreadable), "{flags:?}");
        }
        let refused = check(OFlags::RDONLY).unwrap_err();
        assert!(matches!(refused, MemoryFileError::Unwritable));
    }
}
