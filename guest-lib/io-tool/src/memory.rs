//! Device memory to read into.

use anyhow::{Context as _, Result, bail};
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, open};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::null_mut;
use std::str::FromStr;
use std::time::{Duration, Instant};

const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Kind of device memory to calibrate with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A memfd of this process, which stands in for device memory on a host.
    Soft,
    /// Peer-to-peer memory of a PCI device, named by its address.
    P2pmem(String),
}

impl Kind {
    /// As the store of calibrations names it.
    pub fn provider(&self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::P2pmem(_) => "p2pmem",
        }
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            None if text == "soft" => Ok(Self::Soft),
            Some(("p2pmem", address)) if is_pci_address(address) => {
                Ok(Self::P2pmem(address.into()))
            }
            _ => Err(format!(
                "{text:?} is neither soft nor p2pmem=DDDD:BB:DD.F with the address of a PCI device"
            )),
        }
    }
}

fn is_pci_address(text: &str) -> bool {
    let hexadecimal = |part: &str, digits| {
        part.len() == digits && part.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let Some((slot, function)) = text.split_once('.') else {
        return false;
    };
    let parts: Vec<_> = slot.split(':').collect();
    matches!(parts[..], [domain, bus, device]
        if hexadecimal(domain, 4) && hexadecimal(bus, 2) && hexadecimal(device, 2))
        && hexadecimal(function, 1)
}

/// A huge page: soft memory is made of these, as a BAR is contiguous and a transfer to it one
/// piece.
const HUGE: usize = 2 << 20;

/// A mapping of device memory.
#[derive(Debug)]
pub struct Memory {
    /// Everything that is mapped.
    mapped: *mut c_void,
    mapped_bytes: usize,
    start: *mut c_void,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process; there are no other references to it.
unsafe impl Send for Memory {}

impl Memory {
    /// Maps `bytes` of new device memory.
    pub fn new(kind: &Kind, bytes: usize) -> Result<Self> {
        match kind {
            Kind::Soft => Self::soft(bytes),
            Kind::P2pmem(address) => Self::p2pmem(address, bytes),
        }
        .with_context(|| format!("Cannot map {bytes} bytes of device memory"))
    }

    fn soft(bytes: usize) -> Result<Self> {
        let file = memfd_create("device memory", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, u64::try_from(bytes)?)?;
        let mapped_bytes = bytes.checked_add(HUGE).context("Too long")?;
        // SAFETY: a new mapping where the kernel likes.
        let mapped = unsafe {
            mmap_anonymous(
                null_mut(),
                mapped_bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE,
            )?
        };
        let before = mapped.align_offset(HUGE);
        let memory = Self {
            mapped,
            mapped_bytes,
            start: mapped.wrapping_byte_add(before),
            bytes,
        };
        // SAFETY: `before` is less than HUGE, so this lies within the mapping just made, which
        // nobody else knows.
        unsafe {
            mmap(
                memory.start,
                bytes,
                ACCESS,
                MapFlags::SHARED | MapFlags::FIXED,
                &file,
                0,
            )?;
            // So that no transfer pays for the first use of a page.
            std::ptr::write_bytes(memory.start.cast::<u8>(), 0, bytes);
        }
        // SAFETY: the kernel may put the same bytes into other pages. Without huge pages it does
        // not, and transfers are in many pieces: slower, which is then what is measured.
        unsafe { libc::madvise(memory.start, bytes, libc::MADV_COLLAPSE) };
        Ok(memory)
    }

    fn p2pmem(address: &str, bytes: usize) -> Result<Self> {
        let path = format!("/sys/bus/pci/devices/{address}/p2pmem/allocate");
        let file = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .with_context(|| format!("{address} offers no peer-to-peer memory ({path})"))?;
        // SAFETY: a new mapping where the kernel likes.
        let start = unsafe { mmap(null_mut(), bytes, ACCESS, MapFlags::SHARED, &file, 0)? };
        Ok(Self {
            mapped: start,
            mapped_bytes: bytes,
            start,
            bytes,
        })
    }

    /// Pointer to the first byte.
    pub fn start(&self) -> *mut u8 {
        self.start.cast()
    }

    /// Reads `bytes` at `offset` of `file` into the memory by one call; how long that took.
    pub fn read(&mut self, file: BorrowedFd<'_>, offset: u64, bytes: usize) -> Result<Duration> {
        if bytes > self.bytes {
            bail!("{bytes} bytes exceed the {} of the memory", self.bytes);
        }
        let at = i64::try_from(offset)?;
        let start = Instant::now();
        // SAFETY: the mapping is at least this long and exclusively this object's.
        let got = unsafe { libc::pread(file.as_raw_fd(), self.start, bytes, at) };
        let took = start.elapsed();
        match usize::try_from(got) {
            Ok(got) if got == bytes => Ok(took),
            Ok(got) => bail!("{got} of {bytes} bytes at {offset} were read"),
            Err(_) => Err(std::io::Error::last_os_error())
                .with_context(|| format!("Cannot read {bytes} bytes at {offset}")),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and not used after this.
        let unmapped = unsafe { munmap(self.mapped, self.mapped_bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_soft_or_that_of_a_pci_device() {
        assert_eq!("soft".parse(), Ok(Kind::Soft));
        assert_eq!(
            "p2pmem=0000:03:00.0".parse(),
            Ok(Kind::P2pmem("0000:03:00.0".into()))
        );
        for wrong in [
            "",
            "hard",
            "soft=1",
            "p2pmem",
            "p2pmem=",
            "p2pmem=../..",
            "p2pmem=0000:03.00:0",
            "p2pmem=0000:03:00.0/x",
        ] {
            assert!(wrong.parse::<Kind>().is_err(), "{wrong}");
        }
    }
}
