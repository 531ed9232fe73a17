//! What was found, by names that stay what they are.

use farlane_daemon::terminal::printable;
use serde::Serialize;
use std::ffi::OsStr;
use std::path::Path;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Something does not work.
    Problem,
    /// Something is lacking that not everybody needs.
    Note,
    /// It is as it should be.
    Ok,
}

impl Level {
    /// As it is printed.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Problem => "problem",
            Self::Note => "note",
            Self::Ok => "ok",
        }
    }
}

macro_rules! names {
    ($($(#[$about:meta])* $name:ident = $text:literal,)*) => {
        /// What was looked at.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
        pub enum Name {
            $($(#[$about])* #[serde(rename = $text)] $name,)*
        }

        impl Name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// As it is printed.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text),*
                }
            }
        }
    };
}

names! {
    /// There is a QEMU.
    QemuMissing = "qemu-missing",
    /// It is new enough.
    QemuVersion = "qemu-version",
    /// It has the devices that backends are connected by.
    QemuDevices = "qemu-devices",
    /// Memory can be shared with VMs.
    SharedMemory = "shared-memory",
    /// Memory can be locked.
    Memlock = "memlock",
    /// There may be enough mappings.
    MaxMapCount = "max-map-count",
    /// Huge pages are left.
    Hugepages = "hugepages",
    /// There is an IOMMU.
    Iommu = "iommu",
    /// All of an IOMMU group is for VFIO.
    VfioGroup = "vfio-group",
    /// This user may open it.
    VfioRights = "vfio-rights",
    /// io_uring can be used.
    IoUring = "io-uring",
    /// Programs can be loaded into the kernel.
    Bpf = "bpf",
    /// Somebody listens at each socket.
    SocketStale = "socket-stale",
    /// libvirt's VMs may connect to them.
    SocketRights = "socket-rights",
    /// The guest driver has taken the device.
    GuestModule = "guest-module",
    /// It speaks our version.
    GuestAbi = "guest-abi",
    /// This user may open the device.
    GuestRights = "guest-rights",
    /// The device can be opened at all.
    GuestDevice = "guest-device",
    /// Programs find our libraries.
    RdmaLibraries = "rdma-libraries",
    /// UCX finds the device.
    RdmaDeviceFile = "rdma-device-file",
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub name: Name,
    /// How bad it is.
    pub level: Level,
    /// What is so.
    pub what: String,
    /// What to do; none where nothing is to be done.
    pub remedy: Option<String>,
}

impl Finding {
    /// Something does not work.
    #[must_use]
    pub fn problem(name: Name, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            name,
            level: Level::Problem,
            what: what.into(),
            remedy: Some(remedy.into()),
        }
    }

    /// Something is lacking that not everybody needs.
    #[must_use]
    pub fn note(name: Name, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            level: Level::Note,
            ..Self::problem(name, what, remedy)
        }
    }

    /// It is as it should be.
    #[must_use]
    pub fn ok(name: Name, what: impl Into<String>) -> Self {
        Self {
            name,
            level: Level::Ok,
            what: what.into(),
            remedy: None,
        }
    }
}

/// Text of a file, or of an error about one, as it may stand in a finding.
#[must_use]
pub fn shown(text: impl AsRef<OsStr>) -> String {
    printable(&text.as_ref().to_string_lossy()).into_owned()
}

/// A path, in the same way.
#[must_use]
pub fn shown_path(path: &Path) -> String {
    shown(path.as_os_str())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The levels and names of findings.
    pub fn levels(findings: &[Finding]) -> Vec<(Level, &'static str)> {
        findings
            .iter()
            .map(|f| (f.level, f.name.as_str()))
            .collect()
    }

    #[test]
    fn each_name_stands_in_the_document() {
        let document = include_str!("../../../../docs/doctor.md");
        for name in Name::ALL {
            let row = format!("\n| `{}` |", name.as_str());
            assert!(document.contains(&row), "{row}");
        }
    }

    #[test]
    fn names_are_the_same_in_json() {
        for name in Name::ALL {
            assert_eq!(serde_json::to_value(name).unwrap(), name.as_str());
        }
        for level in [Level::Problem, Level::Note, Level::Ok] {
            assert_eq!(serde_json::to_value(level).unwrap(), level.as_str());
        }
    }
}
