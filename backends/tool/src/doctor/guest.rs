//! In a VM: the driver of the RDMA device, and its files.

use super::Root;
use super::finding::{Finding, Name, shown, shown_path};
use farlane_abi::config::{ABI_VERSION, VIRTIO_ID};
use farlane_transport::TransportError;
use farlane_transport::device::DeviceTransport;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const DEVICES: &str = "/sys/bus/virtio/devices";
const REMEDY: &str = "modprobe farlane; where there is no such module, apt install farlane-dkms \
                      and the headers of the kernel (dkms status), and see what dmesg says of it";

/// What there is of it.
#[derive(Debug)]
pub struct Guest {
    /// Virtio devices of our id, and whether a driver has them.
    devices: Vec<(String, bool)>,
    /// Their files, and whether they can be opened.
    files: Vec<(PathBuf, Opened)>,
}

/// How a device's file is opened.
#[derive(Debug)]
enum Opened {
    Well,
    /// Its driver speaks this version of the interface.
    OtherVersion(u32),
    NoPermission,
    Not(String),
}

/// Looks for devices, and opens each.
#[must_use]
pub fn read(root: &Root) -> Guest {
    let devices = root.names(DEVICES).into_iter().filter_map(|name| {
        let folder = Path::new(DEVICES).join(&name);
        let id = root.text(folder.join("device")).ok()?;
        let id = u32::from_str_radix(id.trim().strip_prefix("0x")?, 16).ok()?;
        let has_driver = root.link_name(folder.join("driver")).is_some();
        (id == VIRTIO_ID).then(|| (shown(&name), has_driver))
    });
    let files = root.names("/dev").into_iter().filter(|name| is_ours(name));
    let files = files.map(|name| {
        let inside = Path::new("/dev").join(name);
        let opened = opened(DeviceTransport::open(&root.path(&inside)).map(drop));
        (inside, opened)
    });
    Guest {
        devices: devices.collect(),
        files: files.collect(),
    }
}

/// Whether a name is `farlane` and a number.
fn is_ours(name: &OsStr) -> bool {
    let number = name.to_str().and_then(|name| name.strip_prefix("farlane"));
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

fn opened(result: Result<(), TransportError>) -> Opened {
    match result {
        Ok(()) => Opened::Well,
        Err(TransportError::Version { found, .. }) => Opened::OtherVersion(found),
        Err(TransportError::Open { source, .. })
            if source.kind() == ErrorKind::PermissionDenied =>
        {
            Opened::NoPermission
        }
        Err(error) => Opened::Not(farlane_sys::chain(&error).to_string()),
    }
}

/// What is to be said of it.
#[must_use]
pub fn judge(guest: &Guest) -> Vec<Finding> {
    let mut found = Vec::new();
    for (name, has_driver) in &guest.devices {
        found.push(match has_driver {
            true => Finding::ok(Name::GuestModule, format!("A driver has {name}")),
            false => {
                let what = format!("No driver has {name}, a virtio device of id {VIRTIO_ID}");
                Finding::problem(Name::GuestModule, what, REMEDY)
            }
        });
    }
    for (path, opened) in &guest.files {
        let path = shown_path(path);
        found.push(match opened {
            Opened::Well => Finding::ok(Name::GuestDevice, format!("{path} can be opened")),
            Opened::OtherVersion(version) => Finding::problem(
                Name::GuestAbi,
                format!("{path} speaks version {version} of the interface, we {ABI_VERSION}"),
                "Install farlane-dkms and farlane-guest of one version, then reload the module: \
                 modprobe -r farlane_ib farlane; modprobe farlane",
            ),
            Opened::NoPermission => Finding::problem(
                Name::GuestRights,
                format!("{path} cannot be opened by this user"),
                "Let the user in by a udev rule, such as the one of farlane-guest",
            ),
            Opened::Not(error) => Finding::problem(
                Name::GuestDevice,
                format!("{path} cannot be used: {}", shown(error)),
                "See what dmesg says of it; where its backend has ended, start that again and \
                 replace the device by hot-plug (qemu-configs/README.md)",
            ),
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level::{Ok as Fine, Problem};
    use crate::doctor::finding::tests::levels;
    use std::fs;
    use std::io;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_device_without_a_driver_is_a_problem() {
        let made = tempfile::tempdir().unwrap();
        let root = Root::new(made.path());
        assert_eq!(judge(&read(&root)), []);
        for (name, id) in [
            ("virtio0", "0x0001"),
            ("virtio1", "0x0026"),
            ("virtio2", "38"),
        ] {
            let folder = root.path(DEVICES).join(name);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("device"), format!("{id}\n")).unwrap();
        }
        let found = judge(&read(&root));
        assert_eq!(levels(&found), [(Problem, "guest-module")]);
        assert!(found[0].what.contains("virtio1"), "{found:?}");
        symlink(
            "../../drivers/farlane",
            root.path(DEVICES).join("virtio1/driver"),
        )
        .unwrap();
        assert_eq!(levels(&judge(&read(&root))), [(Fine, "guest-module")]);
    }

    #[test]
    fn each_way_in_which_a_device_cannot_be_opened_is_a_problem() {
        let path = || PathBuf::from("/dev/farlane0");
        let open = |error: i32| TransportError::Open {
            path: path(),
            source: io::Error::from_raw_os_error(error),
        };
        let version = TransportError::Version {
            path: path(),
            found: 9,
        };
        for (result, expected) in [
            (Ok(()), (Fine, "guest-device")),
            (Err(version), (Problem, "guest-abi")),
            (Err(open(libc::EACCES)), (Problem, "guest-rights")),
            (Err(open(libc::EPERM)), (Problem, "guest-rights")),
            (Err(open(libc::ENXIO)), (Problem, "guest-device")),
            (Err(TransportError::Gone), (Problem, "guest-device")),
        ] {
            let guest = Guest {
                devices: Vec::new(),
                files: vec![(path(), opened(result))],
            };
            assert_eq!(levels(&judge(&guest)), [expected]);
        }
    }

    #[test]
    fn a_file_that_is_no_device_is_a_problem() {
        let made = tempfile::tempdir().unwrap();
        let root = Root::new(made.path());
        fs::create_dir(root.path("/dev")).unwrap();
        for name in ["farlane0", "farlane-0", "farlane", "xfarlane1"] {
            fs::write(root.path("/dev").join(name), "").unwrap();
        }
        let found = judge(&read(&root));
        assert_eq!(levels(&found), [(Problem, "guest-device")]);
        assert!(found[0].what.starts_with("/dev/farlane0 "), "{found:?}");
    }
}
