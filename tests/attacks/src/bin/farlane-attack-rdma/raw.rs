//! The device file without any library: system calls with whatever arguments.

use crate::Failure;
use farlane_abi::Errno;
use farlane_abi::arena::HEADER_SEGMENT_BYTES;
use farlane_abi::ioctl::{
    BindEvent, Detach, IOC_BIND_EVENT, IOC_DETACH, IOC_PIN, IOC_SEGMENT, Pin, Segment,
};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

/// An open device file.
#[derive(Debug)]
pub struct Device(OwnedFd);

/// The error number of the last failed system call.
pub fn last() -> Errno {
    let number = std::io::Error::last_os_error().raw_os_error();
    let number = number.and_then(|number| u32::try_from(number).ok());
    number.and_then(Errno::from_wire).unwrap_or(Errno::EIO)
}

/// A mapping that a program must not have got, or had for a moment.
#[derive(Debug)]
pub struct Mapped {
    /// Its first byte.
    pub address: usize,
    length: usize,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing refers to it.
        unsafe {
            libc::munmap(
                std::ptr::with_exposed_provenance_mut(self.address),
                self.length,
            )
        };
    }
}

/// `mmap` with the kernel's choice of address.
///
/// # Errors
/// What the kernel says.
pub fn mmap(
    fd: i32,
    offset: u64,
    length: usize,
    protection: i32,
    flags: i32,
) -> Result<Mapped, Errno> {
    let offset = libc::off_t::try_from(offset).map_err(|_| Errno::ERANGE)?;
    // SAFETY: the kernel chooses addresses that nothing uses.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, fd, offset) };
    if base == libc::MAP_FAILED {
        return Err(last());
    }
    Ok(Mapped {
        address: base.expose_provenance(),
        length,
    })
}

impl Device {
    /// Opens the device file.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(Self(rustix::fs::open(path, flags, Mode::empty())?))
    }

    /// A device file that somebody else has opened.
    #[must_use]
    pub fn over(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Its descriptor's number.
    #[must_use]
    pub fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// An ioctl with an argument of the right length.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn ioctl<T>(&self, number: u64, argument: &mut T) -> Result<(), Errno> {
        let argument: *mut T = argument;
        self.ioctl_at(number, argument.expose_provenance())
    }

    /// An ioctl with whatever argument.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn ioctl_at(&self, number: u64, argument: usize) -> Result<(), Errno> {
        // SAFETY: the kernel checks the address. What it writes is a structure of this crate's, or
        // nothing, as arguments that are none of ours are not mapped or not writable.
        let result = unsafe { libc::ioctl(self.number(), number, argument) };
        if result < 0 { Err(last()) } else { Ok(()) }
    }

    /// Allocates a segment.
    ///
    /// # Errors
    /// What the driver says.
    pub fn segment(&self, length: u64) -> Result<Segment, Errno> {
        let mut segment = Segment {
            length,
            ..Segment::default()
        };
        self.ioctl(IOC_SEGMENT, &mut segment)?;
        Ok(segment)
    }

    /// Allocates the header.
    ///
    /// # Errors
    /// What the driver says.
    pub fn header(&self) -> Result<Segment, Errno> {
        self.segment(HEADER_SEGMENT_BYTES)
    }

    /// Pins memory and returns the region.
    ///
    /// # Errors
    /// What the driver says.
    pub fn pin(&self, address: u64, length: u64, flags: u32) -> Result<u32, Errno> {
        let mut pin = Pin {
            address,
            length,
            flags,
            region: 0,
        };
        self.ioctl(IOC_PIN, &mut pin)?;
        Ok(pin.region)
    }

    /// Takes a region away.
    ///
    /// # Errors
    /// What the driver says.
    pub fn detach(&self, region: u32) -> Result<(), Errno> {
        let mut detach = Detach {
            region,
            reserved: 0,
        };
        self.ioctl(IOC_DETACH, &mut detach)
    }

    /// Binds an event.
    ///
    /// # Errors
    /// What the driver says.
    pub fn bind(&self, index: u32, fd: i32) -> Result<(), Errno> {
        self.ioctl(IOC_BIND_EVENT, &mut BindEvent { index, fd })
    }

    /// Maps it, shared, readable and writable.
    ///
    /// # Errors
    /// What the driver says.
    pub fn map(&self, offset: u64, length: usize) -> Result<Mapped, Errno> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        mmap(self.number(), offset, length, protection, libc::MAP_SHARED)
    }
}
