//! Addresses of PCI functions.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use thiserror::Error;

/// Where a function is on this host, as the kernel writes it: `0000:01:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// A text that is no address, and may be something else, such as a path.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is not the address of a PCI function, which is like 0000:01:00.0")]
pub struct PciAddressError(String);

impl PciAddress {
    /// The function's folder in a sysfs that is mounted at `sysfs`.
    #[must_use]
    pub fn folder(self, sysfs: &Path) -> PathBuf {
        sysfs.join("bus/pci/devices").join(self.to_string())
    }
}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let hex = |text: &str, digits: std::ops::RangeInclusive<usize>| {
            let is_hex =
                digits.contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
            u32::from_str_radix(text, 16).ok().filter(|_| is_hex)
        };
        let parse = || {
            let (domain, rest) = text.split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            Some(Self {
                domain: hex(domain, 4..=8)?,
                bus: u8::try_from(hex(bus, 2..=2)?).ok()?,
                device: u8::try_from(hex(device, 2..=2)?).ok().filter(|&d| d < 32)?,
                function: u8::try_from(hex(function, 1..=1)?)
                    .ok()
                    .filter(|&f| f < 8)?,
            })
        };
        parse().ok_or_else(|| PciAddressError(text.to_owned()))
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        f.pad(&format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_they_are_read() {
        for text in ["0000:01:00.0", "0000:ff:1f.7", "10000:e1:00.0"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), text);
        }
        let folder = "0000:01:00.0".parse::<PciAddress>().unwrap();
        let folder = folder.folder(Path::new("/sys"));
        assert_eq!(folder, Path::new("/sys/bus/pci/devices/0000:01:00.0"));
    }

    #[test]
    fn nothing_else_is_an_address() {
        for text in [
            "",
            "01:00.0",
            "0000:01:00.8",
            "0000:01:20.0",
            "0000:01:00",
            "0000:01:00.0/",
            "0000:01:00.0:00",
            "../0000:01:00.0",
            "+000:01:00.0",
            "0000:+1:00.0",
            "a:b:c",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }
}
