//! Files whose bytes windows show.

use crate::NtbError;
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use std::fmt;
use std::os::fd::BorrowedFd;

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
        let size = u64::try_from(stat.st_size).map_err(|_| Errno::OVERFLOW);
        let size = size.map_err(NtbError::io("examine a file"))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        Ok(Self {
            id: FileId {
                device: stat.st_dev,
                inode: stat.st_ino,
            },
            size,
            regular: kind == FileType::RegularFile,
            character_device: (kind == FileType::CharacterDevice).then_some((
                rustix::fs::major(stat.st_rdev),
                rustix::fs::minor(stat.st_rdev),
            )),
        })
    }

    /// Whether the file has these bytes.
    pub fn check_range(&self, offset: u64, length: u64) -> Result<(), NtbError> {
        check_range(offset, length, self.size)
    }
}

/// Whether these bytes are some, and all among the first `size`.
pub(crate) fn check_range(offset: u64, length: u64, size: u64) -> Result<(), NtbError> {
    let end = offset.checked_add(length).filter(|_| length > 0);
    match end.ok_or(NtbError::Range { offset, length })? {
        end if end > size => Err(NtbError::Beyond {
            offset,
            length,
            size,
        }),
        _ => Ok(()),
    }
}
