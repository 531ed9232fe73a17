//! Files of memory that somebody else has sent, before they are mapped.
//!
//! A fault in a mapping waits for whoever serves its file: in a file of FUSE, or of a server that is gone, for ever, and with it the
//! thread that has touched it.

use rustix::fs::{FileType, OFlags, SealFlags, fstat, fstatfs};
use rustix::io::Errno;
use std::io;
use std::os::fd::BorrowedFd;
use thiserror::Error;

/// `linux/magic.h`: file systems whose files are memory.
const MEMORY: [u64; 3] = [
    0x0102_1994, // TMPFS_MAGIC, also memfds
    0x9584_58f6, // HUGETLBFS_MAGIC
    0x8584_58f6, // RAMFS_MAGIC
];

/// File systems of disks of this host, which nobody without its administrator's rights can mount.
const DISK: [u64; 6] = [
    0xef53,      // EXT4_SUPER_MAGIC, also ext2 and ext3
    0x5846_5342, // XFS_SUPER_MAGIC
    0x9123_683e, // BTRFS_SUPER_MAGIC
    0xf2f5_2010, // F2FS_SUPER_MAGIC
    0xca45_1a4e, // BCACHEFS_SUPER_MAGIC
    0x2fc1_2fc1, // ZFS
];

/// Whose file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A VMM's, with memory of its VM. It may lie on a disk: QEMU's `memory-backend-file,mem-path=`.
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
    #[error("it is not memory (tmpfs, hugetlbfs or a memfd): its file system is {0:#x}")]
    NotMemory(u64),
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

/// Checks that a mapping of `length` bytes of `file` at `offset` (more than none) is one of memory, and may be read, and written if it
/// is to be. Says whether the file cannot shrink.
///
/// # Errors
/// Why it must not be mapped.
pub fn check(
    file: BorrowedFd<'_>,
    (offset, length): (u64, u64),
    writable: bool,
    source: Source,
) -> Result<bool, MemoryFileError> {
    let stat = fstat(file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(MemoryFileError::NotRegular);
    }
    let flags = rustix::fs::fcntl_getfl(file)?;
    let mode = flags & OFlags::ACCMODE;
    if flags.contains(OFlags::PATH) || mode == OFlags::WRONLY {
        return Err(MemoryFileError::Unreadable);
    }
    // A number of 32 bits, with its sign extended where it is a signed one.
    let system = u64::try_from(fstatfs(file)?.f_type & 0xffff_ffff).unwrap_or(0);
    let is_disk = source == Source::Vmm && DISK.contains(&system);
    if !MEMORY.contains(&system) && !is_disk {
        return Err(MemoryFileError::NotMemory(system));
    }
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let end = offset.checked_add(length).filter(|_| length > 0);
    if end.is_none_or(|end| end > size) {
        return Err(MemoryFileError::TooShort {
            offset,
            length,
            size,
        });
    }
    if writable && mode != OFlags::RDWR {
        return Err(MemoryFileError::Unwritable);
    }
    // Not every file system knows seals.
    let seals = rustix::fs::fcntl_get_seals(file).unwrap_or(SealFlags::empty());
    if writable && seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(MemoryFileError::Sealed);
    }
    Ok(seals.contains(SealFlags::SHRINK))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, Mode, fcntl_add_seals, ftruncate, memfd_create};
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
    fn what_is_not_memory_is_refused() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        for fd in [
            OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()),
            std::fs::File::open("/").unwrap().into(),
            socket.into(),
        ] {
            for source in [Source::Peer, Source::Vmm] {
                let refused = check(fd.as_fd(), (0, 1), false, source).unwrap_err();
                assert!(matches!(refused, MemoryFileError::NotRegular));
            }
        }
        // A regular file of some program's.
        let proc = std::fs::File::open("/proc/self/maps").unwrap();
        for source in [Source::Peer, Source::Vmm] {
            let refused = check(proc.as_fd(), (0, 1), false, source).unwrap_err();
            assert!(matches!(refused, MemoryFileError::NotMemory(0x9fa0)));
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
        for flags in [OFlags::WRONLY, OFlags::PATH] {
            let refused = of_a_peer(&open(flags), (0, 0x1000), false).unwrap_err();
            assert!(matches!(refused, MemoryFileError::Unreadable));
        }
    }
}
