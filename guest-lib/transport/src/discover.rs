//! Which devices there are.

use crate::Transport as _;
use crate::device::DeviceTransport;
use farlane_abi::config::FEATURE_TUNNEL;
use std::path::{Path, PathBuf};

/// The environment variable that names a backend's host socket.
pub const SOCKET_VARIABLE: &str = "FARLANE_SOCKET";

/// Where a device is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A character device of the kernel driver.
    Device(PathBuf),
    /// A backend's host socket.
    Socket(PathBuf),
}

/// A device that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number: that of the device file; a socket has the one after the last.
    pub number: u32,
    /// Device file or socket of the device.
    pub address: Address,
}

impl DeviceInfo {
    /// Its name: `farlane0`, `farlane1`, ...
    #[must_use]
    pub fn name(&self) -> String {
        format!("farlane{}", self.number)
    }
}

/// Every device with objects to call: `/dev/farlaneN` by number, then the socket that
/// [`SOCKET_VARIABLE`] names. A device that cannot be opened is listed, for opening it says why.
#[must_use]
pub fn devices() -> Vec<DeviceInfo> {
    let socket = std::env::var_os(SOCKET_VARIABLE).map(PathBuf::from);
    let mut devices = find(Path::new("/dev"), socket);
    devices.retain(|device| opens_envelopes(device) != Some(true));
    devices
}

/// Every device that opens the envelopes of [`farlane_abi::tunnel`].
#[must_use]
pub fn tunnels() -> Vec<DeviceInfo> {
    let mut devices = find(Path::new("/dev"), None);
    devices.retain(|device| opens_envelopes(device) == Some(true));
    devices
}

/// Whether a device is for tunnels, where it can be asked.
fn opens_envelopes(device: &DeviceInfo) -> Option<bool> {
    match &device.address {
        Address::Socket(_) => Some(false),
        Address::Device(path) => {
            let info = DeviceTransport::open(path).ok()?.info();
            Some(info.features & FEATURE_TUNNEL != 0)
        }
    }
}

fn find(folder: &Path, socket: Option<PathBuf>) -> Vec<DeviceInfo> {
    let mut found: Vec<(u32, PathBuf)> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((number(entry.file_name().to_str()?)?, entry.path())))
        .collect();
    found.sort();
    let next = found.last().map_or(0, |(last, _)| last.saturating_add(1));
    let mut devices: Vec<DeviceInfo> = found
        .into_iter()
        .map(|(number, path)| DeviceInfo {
            number,
            address: Address::Device(path),
        })
        .collect();
    // A path that is not there yet is listed too: opening it then says what is missing, which
    // an empty list would not.
    if let Some(path) = socket.filter(|path| !path.as_os_str().is_empty()) {
        devices.push(DeviceInfo {
            number: next,
            address: Address::Socket(path),
        });
    }
    devices
}

/// The N of `farlaneN`, written as the kernel writes it.
fn number(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("farlane")?;
    let number: u32 = digits.parse().ok()?;
    (number.to_string() == digits).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_come_by_number_and_the_socket_last() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "farlane10",
            "farlane2",
            "farlane",
            "farlane03",
            "xfarlane1",
            "farlane2x",
        ] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let found = find(folder.path(), Some("/run/s".into()));
        let names: Vec<_> = found.iter().map(DeviceInfo::name).collect();
        assert_eq!(names, ["farlane2", "farlane10", "farlane11"]);
        assert_eq!(found[2].address, Address::Socket("/run/s".into()));
    }

    #[test]
    fn without_a_device_the_socket_is_farlane0() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(find(folder.path(), None), []);
        assert_eq!(find(folder.path(), Some("".into())), []);
        assert_eq!(find(folder.path(), Some("s".into()))[0].name(), "farlane0");
    }
}
