//! Files whose bytes windows show.

use crate::NtbError;
use rustix::fs::{FileType, OFlags, SealFlags, fstat, fstatfs};
use std::fmt;
use std::os::fd::BorrowedFd;

/// `linux/magic.h`: file systems whose files are memory. A fault in a file of another one may wait
/// for whoever serves it.
const MEMORY_FILE_SYSTEMS: [u64; 3] = [
    0x0102_1994, // TMPFS_MAGIC, also memfds
    0x9584_58f6, // HUGETLBFS_MAGIC
    0x8584_58f6, // RAMFS_MAGIC
];

/// Which file it is: two descriptors of one file have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Number of the file system.
    pub device: u64,
    /// Number in the file system.
    pub inode: u64,
}

impl FileId {
    /// Which file `file` is.
    ///
    /// # Errors
    /// What the system says.
    pub fn of(file: BorrowedFd<'_>) -> Result<Self, NtbError> {
        Ok(Examined::new(file)?.id)
    }
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}:{}", self.device, self.inode)
    }
}

/// What a descriptor is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Examined {
    pub id: FileId,
    /// Bytes; zero where the system does not say (devices).
    pub size: u64,
    pub regular: bool,
    /// Major and minor number.
    pub character_device: Option<(u32, u32)>,
}

impl Examined {
    pub fn new(file: BorrowedFd<'_>) -> Result<Self, NtbError> {
        let stat = fstat(file).map_err(NtbError::io("examine a file"))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        Ok(Self {
            id: FileId {
                device: stat.st_dev,
                inode: stat.st_ino,
            },
            size: u64::try_from(stat.st_size).unwrap_or(0),
            regular: kind == FileType::RegularFile,
            character_device: (kind == FileType::CharacterDevice).then_some((
                rustix::fs::major(stat.st_rdev),
                rustix::fs::minor(stat.st_rdev),
            )),
        })
    }

    /// Whether the file has these bytes.
    pub fn check_range(&self, offset: u64, length: u64) -> Result<(), NtbError> {
        let end = offset.checked_add(length).filter(|_| length > 0);
        let end = end.ok_or(NtbError::Range { offset, length })?;
        if end > self.size {
            return Err(NtbError::Beyond {
                offset,
                length,
                size: self.size,
            });
        }
        Ok(())
    }
}

/// Takes a file that somebody else has sent, for mapping `length` bytes at `offset`. Says whether
/// it cannot shrink.
pub(crate) fn check_foreign(
    file: BorrowedFd<'_>,
    offset: u64,
    length: u64,
    writable: bool,
) -> Result<bool, NtbError> {
    let examined = Examined::new(file)?;
    if !examined.regular {
        return Err(NtbError::File("it is not a regular file"));
    }
    let system = fstatfs(file).map_err(NtbError::io("examine a file's file system"))?;
    let magic = u64::try_from(system.f_type).unwrap_or(0) & 0xffff_ffff;
    if !MEMORY_FILE_SYSTEMS.contains(&magic) {
        return Err(NtbError::File(
            "it is not memory (tmpfs, hugetlbfs or a memfd)",
        ));
    }
    examined.check_range(offset, length)?;
    let flags = rustix::fs::fcntl_getfl(file).map_err(NtbError::io("examine a descriptor"))?;
    let mode = flags & OFlags::ACCMODE;
    if flags.contains(OFlags::PATH) || mode == OFlags::WRONLY {
        return Err(NtbError::File("its descriptor cannot be read"));
    }
    if writable && mode != OFlags::RDWR {
        return Err(NtbError::File("its descriptor cannot be written"));
    }
    // Not every file system knows seals.
    let seals = rustix::fs::fcntl_get_seals(file).unwrap_or(SealFlags::empty());
    if writable && seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(NtbError::File("it is sealed against writing"));
    }
    Ok(seals.contains(SealFlags::SHRINK))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, Mode, fcntl_add_seals, ftruncate, memfd_create};
    use std::os::fd::{AsFd as _, OwnedFd};

    fn memory(bytes: u64) -> OwnedFd {
        let fd = memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    }

    #[test]
    fn a_file_is_taken_only_with_the_bytes_that_it_has() {
        let fd = memory(0x3000);
        assert!(!check_foreign(fd.as_fd(), 0x1000, 0x2000, true).unwrap());
        for (offset, length) in [(0x1000, 0x3000), (0, 0), (u64::MAX, 2), (0x4000, 0x1000)] {
            check_foreign(fd.as_fd(), offset, length, true).unwrap_err();
        }
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        assert!(check_foreign(fd.as_fd(), 0, 0x3000, true).unwrap());
        fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE).unwrap();
        check_foreign(fd.as_fd(), 0, 0x1000, true).unwrap_err();
        check_foreign(fd.as_fd(), 0, 0x1000, false).unwrap();
    }

    #[test]
    fn what_is_not_memory_is_refused() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        for fd in [
            OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()),
            std::fs::File::open("/").unwrap().into(),
            std::fs::File::open("/proc/self/maps").unwrap().into(),
            socket.into(),
        ] {
            assert!(matches!(
                check_foreign(fd.as_fd(), 0, 1, false),
                Err(NtbError::File(_))
            ));
        }
    }

    #[test]
    fn a_descriptor_that_cannot_be_written_is_not_taken_for_writing() {
        let fd = memory(0x1000);
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let open = |flags| rustix::fs::open(path.as_str(), flags, Mode::empty()).unwrap();
        let read_only = open(OFlags::RDONLY);
        check_foreign(read_only.as_fd(), 0, 0x1000, false).unwrap();
        check_foreign(read_only.as_fd(), 0, 0x1000, true).unwrap_err();
        check_foreign(open(OFlags::WRONLY).as_fd(), 0, 0x1000, false).unwrap_err();
        assert_eq!(
            FileId::of(fd.as_fd()).unwrap(),
            FileId::of(read_only.as_fd()).unwrap()
        );
    }
}
