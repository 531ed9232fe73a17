//! What lies beneath a file system: the disks, and every layer between.

use std::path::{Path, PathBuf};

/// Layers upon layers that are followed: deeper ones are not known.
const MAX_DEPTH: usize = 8;
/// Length of the UUID that LVM gives a logical volume's device: volume group and volume, 32 characters each. What is longer names a
/// part of a volume, such as the data of a thin pool.
const LVM_UUID: usize = 64;

/// What lies beneath a file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stack {
    /// Serial numbers of the virtio disks that sectors of the file system go to, unchanged. None where some layer may change them,
    /// read them, or keep copies, or is not known.
    pub serials: Option<Vec<String>>,
    /// The system's read-ahead window for it in bytes; zero where there is none.
    pub window_bytes: u64,
}

impl Stack {
    /// Looks at the block device with this number, in a sysfs at `sys`.
    #[must_use]
    pub fn look(sys: &Path, major: u32, minor: u32) -> Self {
        let number = format!("{major}:{minor}");
        let device = std::fs::canonicalize(sys.join("dev/block").join(&number)).ok();
        let mut serials = Vec::new();
        let known = device
            .as_ref()
            .is_some_and(|device| leaves(device, MAX_DEPTH, &mut serials));
        let windows = [
            device
                .as_ref()
                .map(|device| device.join("queue/read_ahead_kb")),
            device
                .as_ref()
                .map(|device| device.join("../queue/read_ahead_kb")),
            Some(sys.join("class/bdi").join(&number).join("read_ahead_kb")),
        ];
        let window_kib = windows
            .into_iter()
            .flatten()
            .find_map(|path| number_in(&path));
        Self {
            serials: (known && !serials.is_empty()).then_some(serials),
            window_bytes: window_kib.unwrap_or(0).saturating_mul(1024),
        }
    }
}

/// Adds the disks beneath `device`; false when something is not known.
fn leaves(device: &Path, depth: usize, found: &mut Vec<String>) -> bool {
    if depth == 0 {
        return false;
    }
    if device.join("partition").exists() {
        let Some(disk) = device.parent() else {
            return false;
        };
        return leaves(disk, depth - 1, found);
    }
    let Ok(slaves) = slaves(device) else {
        return false;
    };
    if device.join("dm").exists() {
        let is_volume = text(&device.join("dm/uuid")).is_some_and(|uuid| {
            uuid.strip_prefix("LVM-")
                .is_some_and(|rest| rest.len() == LVM_UUID)
        });
        let on_mapper = slaves.iter().any(|slave| slave.join("dm").exists());
        if !is_volume || on_mapper || slaves.is_empty() {
            return false;
        }
    } else if device.join("md").exists() {
        let level = text(&device.join("md/level"));
        if !matches!(level.as_deref(), Some("raid0" | "linear")) || slaves.is_empty() {
            return false;
        }
    } else {
        return slaves.is_empty() && leaf(device, found);
    }
    let mut slaves = slaves.iter();
    slaves.all(|slave| leaves(slave, depth - 1, found))
}

/// A disk with nothing beneath it that the guest can see.
fn leaf(device: &Path, found: &mut Vec<String>) -> bool {
    let driver = std::fs::canonicalize(device.join("device/driver")).ok();
    let is_virtio = driver
        .as_ref()
        .and_then(|driver| driver.file_name())
        .is_some_and(|name| name == "virtio_blk");
    match text(&device.join("serial")) {
        Some(serial) if is_virtio && !serial.is_empty() => {
            found.push(serial);
            true
        }
        _ => false,
    }
}

fn slaves(device: &Path) -> std::io::Result<Vec<PathBuf>> {
    let folder = match std::fs::read_dir(device.join("slaves")) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let slaves = folder.map(|entry| std::fs::canonicalize(entry?.path()));
    let mut slaves: Vec<_> = slaves.collect::<Result<_, _>>()?;
    slaves.sort();
    Ok(slaves)
}

fn text(path: &Path) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

fn number_in(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// A sysfs with block devices.
    struct Sys(tempfile::TempDir);

    impl Sys {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            for part in [
                "dev/block",
                "class/bdi",
                "drivers/virtio_blk",
                "drivers/nvme",
                "block",
            ] {
                fs::create_dir_all(folder.path().join(part)).unwrap();
            }
            Self(folder)
        }

        fn block(&self, name: &str) -> PathBuf {
            self.0.path().join("block").join(name)
        }

        fn device(&self, number: &str, name: &str, files: &[(&str, &str)], slaves: &[&str]) {
            let folder = self.block(name);
            fs::create_dir_all(folder.join("slaves")).unwrap();
            for (file, text) in files {
                fs::create_dir_all(folder.join(file).parent().unwrap()).unwrap();
                fs::write(folder.join(file), text).unwrap();
            }
            for slave in slaves {
                let base = slave.rsplit('/').next().unwrap();
                symlink(self.block(slave), folder.join("slaves").join(base)).unwrap();
            }
            symlink(&folder, self.0.path().join("dev/block").join(number)).unwrap();
        }

        fn virtio(&self, number: &str, name: &str, serial: &str) {
            let files = [("serial", serial), ("queue/read_ahead_kb", "128\n")];
            self.device(number, name, &files, &[]);
            fs::create_dir(self.block(name).join("device")).unwrap();
            let driver = self.0.path().join("drivers/virtio_blk");
            symlink(driver, self.block(name).join("device/driver")).unwrap();
        }

        fn serials(&self, minor: u32) -> Option<Vec<String>> {
            Stack::look(self.0.path(), 1, minor).serials
        }
    }

    fn volume() -> String {
        format!("LVM-{}\n", "a".repeat(LVM_UUID))
    }

    #[test]
    fn a_partition_of_a_virtio_disk_is_that_disk() {
        let sys = Sys::new();
        sys.virtio("1:0", "vda", "one");
        sys.device("1:1", "vda/vda1", &[("partition", "1")], &[]);
        let found = Stack::look(sys.0.path(), 1, 1);
        assert_eq!(found.serials, Some(vec!["one".into()]));
        assert_eq!(found.window_bytes, 128 << 10);
    }

    #[test]
    fn striped_and_linear_layers_are_seen_through() {
        let sys = Sys::new();
        sys.virtio("1:0", "vda", "one");
        sys.virtio("1:1", "vdb", "two");
        sys.device("1:2", "md0", &[("md/level", "raid0\n")], &["vda", "vdb"]);
        sys.device("1:3", "dm-0", &[("dm/uuid", &volume())], &["md0"]);
        assert_eq!(sys.serials(3), Some(vec!["one".into(), "two".into()]));
    }

    #[test]
    fn layers_that_read_or_copy_data_are_not() {
        let sys = Sys::new();
        sys.virtio("1:0", "vda", "one");
        sys.virtio("1:1", "vdb", "two");
        sys.device("1:2", "md1", &[("md/level", "raid1\n")], &["vda", "vdb"]);
        sys.device("1:3", "dm-0", &[("dm/uuid", "CRYPT-LUKS2-x")], &["vda"]);
        sys.device("1:4", "dm-1", &[("dm/uuid", &volume())], &["vda"]);
        let part = format!("{}-tdata", volume().trim());
        sys.device("1:5", "dm-2", &[("dm/uuid", &part)], &["vda"]);
        sys.device("1:6", "dm-3", &[("dm/uuid", &volume())], &["dm-2"]);
        sys.device("1:7", "bcache0", &[], &["vda"]);
        sys.device("1:8", "sda", &[("serial", "disk")], &[]);
        let known: Vec<u32> = (0..10)
            .filter(|minor| sys.serials(*minor).is_some())
            .collect();
        assert_eq!(known, [0, 1, 4]);
    }

    #[test]
    fn layers_in_a_circle_end() {
        let sys = Sys::new();
        sys.device("1:0", "md0", &[("md/level", "linear")], &["md1"]);
        sys.device("1:1", "md1", &[("md/level", "linear")], &["md0"]);
        assert_eq!(sys.serials(0), None);
    }
}
