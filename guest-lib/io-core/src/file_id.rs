//! Which file a descriptor is of.

use rustix::fs::{Stat, major, minor};
use std::os::fd::{BorrowedFd, RawFd};

/// A file, whatever it is called.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId {
    /// Device number of the file system.
    pub device: u64,
    /// Inode number in it.
    pub inode: u64,
}

impl FileId {
    pub(crate) fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }

    /// The file that a number of the program's stands for now; none when it stands for nothing.
    pub(crate) fn of_fd(fd: RawFd) -> Option<Self> {
        Some(Self::of(&stat(fd)?))
    }

    /// Major and minor number of the file system's device.
    pub(crate) fn device_number(self) -> (u32, u32) {
        (major(self.device), minor(self.device))
    }
}

pub(crate) fn borrow(fd: RawFd) -> Option<BorrowedFd<'static>> {
    // SAFETY: the program's descriptor over one of its own calls; the kernel checks it.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

pub(crate) fn stat(fd: RawFd) -> Option<Stat> {
    rustix::fs::fstat(borrow(fd)?).ok()
}
