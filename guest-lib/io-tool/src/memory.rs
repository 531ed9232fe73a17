//! Device memory to read into.

use anyhow::{Context as _, Result, bail};
use farlane_sys::Mmap;
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, open};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::str::FromStr;
use std::time::{Duration, Instant};

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
    _mapping: Mmap,
    /// First byte, in the mapping.
    start: NonNull<u8>,
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
        let mut mapping = Mmap::reserve(bytes.checked_add(HUGE).context("Too long")?)?;
        let before = mapping.base().as_ptr().align_offset(HUGE);
        mapping.overlay(before, &file, 0, bytes)?;
        let start = mapping.get(before, bytes).context("Not aligned")?;
        // SAFETY: within the mapping just made, which nobody else knows: so that no transfer pays
        // for the first use of a page.
        unsafe { start.write_bytes(0, bytes) };
        // SAFETY: the kernel may put the same bytes into other pages. Without huge pages it does
        // not, and transfers are in many pieces: slower, which is then what is measured.
        unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_COLLAPSE) };
        Ok(Self {
            _mapping: mapping,
            start,
            bytes,
        })
    }

    fn p2pmem(address: &str, bytes: usize) -> Result<Self> {
        let path = format!("/sys/bus/pci/devices/{address}/p2pmem/allocate");
        let file = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .with_context(|| format!("{address} offers no peer-to-peer memory ({path})"))?;
        let mapping = Mmap::shared(&file, 0, bytes, Mmap::READ_WRITE)?;
        Ok(Self {
            start: mapping.base(),
            _mapping: mapping,
            bytes,
        })
    }

    /// Pointer to the first byte.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Reads `bytes` at `offset` of `file` into the memory by one call; how long that took.
    pub fn read(&mut self, file: BorrowedFd<'_>, offset: u64, bytes: usize) -> Result<Duration> {
        if bytes > self.bytes {
            bail!("{bytes} bytes exceed the {} of the memory", self.bytes);
        }
        let at = i64::try_from(offset)?;
        let start = Instant::now();
        // SAFETY: the mapping is at least this long and exclusively this object's.
        let got = unsafe { libc::pread(file.as_raw_fd(), self.start.as_ptr().cast(), bytes, at) };
        let took = start.elapsed();
        match usize::try_from(got) {
            Ok(got) if got == bytes => Ok(took),
            Ok(got) => bail!("{got} of {bytes} bytes at {offset} were read"),
            Err(_) => Err(std::io::Error::last_os_error())
                .with_context(|| format!("Cannot read {bytes} bytes at {offset}")),
        }
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
