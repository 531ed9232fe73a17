//! Device memory that this program reads into.

use anyhow::{Context as _, Result, bail};
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, open};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Whose memory.
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

/// A mapping of device memory.
#[derive(Debug)]
pub struct Memory {
    start: *mut c_void,
    bytes: usize,
}

impl Memory {
    /// Maps `bytes` of new device memory.
    pub fn new(kind: &Kind, bytes: usize) -> Result<Self> {
        let file: OwnedFd = match kind {
            Kind::Soft => {
                let file = memfd_create("device memory", MemfdFlags::CLOEXEC)?;
                ftruncate(&file, u64::try_from(bytes)?)?;
                file
            }
            Kind::P2pmem(address) => {
                let path = format!("/sys/bus/pci/devices/{address}/p2pmem/allocate");
                open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
                    .with_context(|| format!("{address} offers no peer-to-peer memory ({path})"))?
            }
        };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping where the kernel likes.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                access,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        let start = start.with_context(|| format!("Cannot map {bytes} bytes of device memory"))?;
        let memory = Self { start, bytes };
        if *kind == Kind::Soft {
            // So that no transfer pays for the first use of a page.
            // SAFETY: the mapping is this long, and nobody else has it.
            unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes) };
        }
        Ok(memory)
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
        let unmapped = unsafe { munmap(self.start, self.bytes) };
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
