//! The way of a guest: the files that the kernel shows of a PCI function.

use crate::{Bars, GpuError};
use farlane_abi::gpu as abi;
use farlane_abi::width::to_usize;
use farlane_sys::{Mmap, PciAddress};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

/// Offset of the command register in configuration space (PCI 3.0, 6.2.2).
const COMMAND: u64 = 4;
/// Its bits: memory decoding, and bus mastering.
const COMMAND_BITS: u16 = 0x6;

/// A resource file, and all of it mapped. The file is kept for its lock, where it has one.
fn map(path: &Path) -> Result<(Mmap, File), GpuError> {
    let failed = GpuError::system(format!("map {}", path.display()));
    let map = || {
        let file = File::options().read(true).write(true).open(path)?;
        let length = to_usize(file.metadata()?.len());
        let memory = Mmap::shared(&file, 0, length, Mmap::READ_WRITE)?;
        Ok((memory, file))
    };
    map().map_err(failed)
}

/// A function's regions by `/sys/bus/pci/devices/ADDRESS/resource0` and `resource2`, or
/// `resource2_wc`, by which stores are combined. One process at a time: `resource0` is locked. The
/// function needs no driver, and nobody hears its interrupts.
#[derive(Debug)]
pub struct SysfsBars {
    registers: Mmap,
    memory: Mmap,
    _lock: File,
}

impl SysfsBars {
    /// Enables and maps a function. `sysfs` is where sysfs is mounted.
    ///
    /// # Errors
    /// There is none such, it is another kind of device, in use, or this user may not.
    pub fn open(sysfs: &Path, address: &str) -> Result<Self, GpuError> {
        let device = || address.to_owned();
        let parsed = address.parse::<PciAddress>();
        let folder = parsed.ok().map(|parsed| parsed.folder(sysfs));
        let folder = folder.filter(|folder| folder.is_dir());
        let folder = folder.ok_or_else(|| GpuError::None { device: device() })?;
        let (vendor, id) = (number(&folder, "vendor")?, number(&folder, "device")?);
        if (vendor, id) != (abi::VENDOR.into(), abi::DEVICE.into()) {
            return Err(GpuError::Kind {
                device: device(),
                why: format!("{vendor:04x}:{id:04x}"),
            });
        }
        let (registers, lock) = map(&folder.join("resource0"))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => (),
            Err(Errno::WOULDBLOCK) => return Err(GpuError::Busy(device())),
            Err(e) => return Err(GpuError::system("lock the device")(e.into())),
        }
        enable(&folder)?;
        let combined = folder.join("resource2_wc");
        let (memory, _) = if combined.exists() {
            map(&combined)?
        } else {
            map(&folder.join("resource2"))?
        };
        if registers.len() < to_usize(abi::REGISTER_BYTES) {
            return Err(GpuError::Kind {
                device: device(),
                why: format!("BAR 0 has {:#x} bytes", registers.len()),
            });
        }
        Ok(Self {
            registers,
            memory,
            _lock: lock,
        })
    }

    /// The register at an offset, where there is one.
    fn register(&self, offset: u32) -> Option<NonNull<u32>> {
        let at = to_usize(offset.into());
        let register = self.registers.get(at, size_of::<u32>())?.cast::<u32>();
        register.is_aligned().then_some(register)
    }
}

/// Has the kernel enable the function, and lets it do DMA.
fn enable(folder: &Path) -> Result<(), GpuError> {
    let path = folder.join("enable");
    let failed = || GpuError::system(format!("enable {}", folder.display()));
    let count = std::fs::read_to_string(&path).map_err(failed())?;
    if count.trim() == "0" {
        std::fs::write(&path, "1").map_err(failed())?;
    }
    let config = File::options()
        .read(true)
        .write(true)
        .open(folder.join("config"))
        .map_err(failed())?;
    let mut bytes = [0; 2];
    config
        .read_exact_at(&mut bytes, COMMAND)
        .map_err(failed())?;
    let command = u16::from_le_bytes(bytes);
    if command & COMMAND_BITS != COMMAND_BITS {
        let bytes = (command | COMMAND_BITS).to_le_bytes();
        config.write_all_at(&bytes, COMMAND).map_err(failed())?;
    }
    Ok(())
}

/// A number of a function, such as `0x1234`.
fn number(folder: &Path, name: &str) -> Result<u32, GpuError> {
    let path = folder.join(name);
    let what = || GpuError::system(format!("read {}", path.display()));
    let text = std::fs::read_to_string(&path).map_err(what())?;
    let digits = text.trim().trim_start_matches("0x");
    u32::from_str_radix(digits, 16).map_err(|e| what()(std::io::Error::other(e)))
}

/// Addresses of all software GPUs, in order.
///
/// # Errors
/// There is no PCI bus.
pub fn find_devices(sysfs: &Path) -> Result<Vec<String>, GpuError> {
    let folder = sysfs.join("bus/pci/devices");
    let entries = std::fs::read_dir(&folder)
        .map_err(GpuError::system(format!("read {}", folder.display())))?;
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let ids = (number(&path, "vendor"), number(&path, "device"));
        // What goes while one looks is not there.
        if let (Ok(vendor), Ok(id)) = ids
            && (vendor, id) == (abi::VENDOR.into(), abi::DEVICE.into())
        {
            found.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    found.sort();
    Ok(found)
}

// SAFETY: the mapping lives as long as the value, and always is the same; its resource file is
// locked against other processes, and this process maps it once.
unsafe impl Bars for SysfsBars {
    fn read32(&self, offset: u32) -> u32 {
        let Some(register) = self.register(offset) else {
            return u32::MAX;
        };
        // SAFETY: in bounds and aligned; reading a register has no effect on memory.
        unsafe { register.read_volatile() }
    }

    fn write32(&self, offset: u32, value: u32) {
        let Some(register) = self.register(offset) else {
            return;
        };
        // What was written to video memory is there before the device is told.
        fence(Ordering::SeqCst);
        // SAFETY: as above; what the device does then, it does to what commands name.
        unsafe { register.write_volatile(value) };
    }

    fn memory(&self) -> (*mut u8, usize) {
        (self.memory.base().as_ptr(), self.memory.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(sysfs: &Path, address: &str, vendor: &str, device: &str) {
        let folder = sysfs.join("bus/pci/devices").join(address);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("vendor"), vendor).unwrap();
        std::fs::write(folder.join("device"), device).unwrap();
    }

    #[test]
    fn devices_are_found_by_their_numbers() {
        let sysfs = tempfile::tempdir().unwrap();
        assert!(find_devices(sysfs.path()).is_err());
        function(sysfs.path(), "0000:02:00.0", "0x1234\n", "0xfa9b\n");
        function(sysfs.path(), "0000:01:00.0", "0x1234\n", "0xfa9b\n");
        function(sysfs.path(), "0000:00:00.0", "0x1234\n", "0xfa1e\n");
        let found = find_devices(sysfs.path()).unwrap();
        assert_eq!(found, ["0000:01:00.0", "0000:02:00.0"]);
    }

    #[test]
    fn other_devices_and_absurd_addresses_are_refused() {
        let sysfs = tempfile::tempdir().unwrap();
        function(sysfs.path(), "0000:00:00.0", "0x1234\n", "0xfa1e\n");
        let open = |address| SysfsBars::open(sysfs.path(), address);
        assert!(matches!(open("0000:00:00.0"), Err(GpuError::Kind { .. })));
        for address in ["0000:07:00.0", "..", "../../..", "a/b"] {
            assert!(matches!(open(address), Err(GpuError::None { .. })));
        }
    }
}
