//! PCI functions of this host, through sysfs.

use crate::NtbError;
use crate::file::Examined;
use farlane_sys::PciAddress;
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

/// A function: `<root>/bus/pci/devices/<address>`.
#[derive(Debug)]
pub(crate) struct SysfsFunction {
    address: PciAddress,
    folder: PathBuf,
}

impl SysfsFunction {
    /// The function at `address`. `root` is `/sys`.
    pub fn find(root: &Path, address: PciAddress) -> Result<Self, NtbError> {
        let folder = address.folder(root);
        let function = Self { address, folder };
        if !function.folder.is_dir() {
            return Err(function.unusable("there is no such function"));
        }
        Ok(function)
    }

    pub fn unusable(&self, why: impl Into<String>) -> NtbError {
        NtbError::Function {
            function: self.address.to_string(),
            why: why.into(),
        }
    }

    fn read(&self, name: &str) -> Result<String, NtbError> {
        let path = self.folder.join(name);
        fs::read_to_string(&path)
            .map(|text| text.trim().to_owned())
            .map_err(NtbError::io(format!("read {}", path.display())))
    }

    /// Vendor and device.
    pub fn identity(&self) -> Result<(u16, u16), NtbError> {
        let number = |name| {
            let text = self.read(name)?;
            let digits = text.strip_prefix("0x").unwrap_or(&text);
            u16::from_str_radix(digits, 16)
                .map_err(|_| self.unusable(format!("its {name} reads {text:?}")))
        };
        Ok((number("vendor")?, number("device")?))
    }

    /// Has it decode its BARs.
    pub fn enable(&self) -> Result<(), NtbError> {
        // A function with a driver cannot be enabled from here, and is enabled by that.
        if self.read("enable")?.parse::<u32>().is_ok_and(|n| n > 0) {
            return Ok(());
        }
        let path = self.folder.join("enable");
        fs::write(&path, "1").map_err(NtbError::io(format!("write {}", path.display())))
    }

    /// A BAR's memory, to be mapped, and how many bytes it has.
    pub fn open_bar(&self, bar: u8, write_combining: bool) -> Result<(OwnedFd, u64), NtbError> {
        let suffix = if write_combining { "_wc" } else { "" };
        let path = self.folder.join(format!("resource{bar}{suffix}"));
        let file = open(&path)?;
        let size = Examined::new(file.as_fd())?.size;
        if size == 0 {
            return Err(self.unusable(format!("BAR {bar} is empty")));
        }
        Ok((file.into(), size))
    }
}

/// How many bytes of memory a character device has, if it is memory.
pub(crate) fn device_size(root: &Path, (major, minor): (u32, u32)) -> Result<u64, NtbError> {
    let path = root.join(format!("dev/char/{major}:{minor}/size"));
    let text =
        fs::read_to_string(&path).map_err(NtbError::io(format!("read {}", path.display())))?;
    let size = text.trim().parse();
    size.map_err(|_| NtbError::File("the size of its device is no number"))
}

/// Opens a file for mapping.
pub(crate) fn open(path: &Path) -> Result<File, NtbError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(NtbError::io(format!("open {}", path.display())))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A made-up `/sys` with one function.
    pub(crate) fn fake(address: &str, vendor: u16, device: u16, bars: &[(&str, u64)]) -> FakeSysfs {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("bus/pci/devices").join(address);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("vendor"), format!("{vendor:#06x}\n")).unwrap();
        fs::write(folder.join("device"), format!("{device:#06x}\n")).unwrap();
        fs::write(folder.join("enable"), "0\n").unwrap();
        for (name, size) in bars {
            File::create(folder.join(name))
                .unwrap()
                .set_len(*size)
                .unwrap();
        }
        FakeSysfs { root, folder }
    }

    pub(crate) struct FakeSysfs {
        pub root: tempfile::TempDir,
        pub folder: PathBuf,
    }

    #[test]
    fn a_function_that_is_not_there_is_not_found() {
        let sysfs = fake("0000:00:05.0", 1, 2, &[]);
        let find = |text: &str| SysfsFunction::find(sysfs.root.path(), text.parse().unwrap());
        assert_eq!(find("0000:00:05.0").unwrap().identity().unwrap(), (1, 2));
        let missing = find("0000:00:06.0");
        assert!(matches!(missing, Err(NtbError::Function { .. })));
    }

    #[test]
    fn a_function_is_enabled_once() {
        let sysfs = fake("0000:00:05.0", 1, 2, &[]);
        let function =
            SysfsFunction::find(sysfs.root.path(), "0000:00:05.0".parse().unwrap()).unwrap();
        function.enable().unwrap();
        let enable = sysfs.folder.join("enable");
        assert_eq!(fs::read_to_string(&enable).unwrap(), "1");
        fs::write(&enable, "3\n").unwrap();
        function.enable().unwrap();
        assert_eq!(fs::read_to_string(&enable).unwrap(), "3\n");
    }
}
