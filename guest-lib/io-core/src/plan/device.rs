//! Names of devices that outlast a restart.

use rustix::fs::{Stat, major, minor};
use std::path::{Path, PathBuf};

/// Longest name that is read from sysfs.
const LONGEST: usize = 128;

/// The name under which the device of a file is kept: its serial number, or else its numbers and
/// model. For a block device's own node, of that device.
pub fn name(of: &Stat) -> String {
    let is_block = rustix::fs::FileType::from_raw_mode(of.st_mode).is_block_device();
    let number = if is_block { of.st_rdev } else { of.st_dev };
    name_in(Path::new("/sys"), major(number), minor(number))
}

/// The name of device `major`:`minor`, with sysfs at `sys`.
pub fn name_in(sys: &Path, major: u32, minor: u32) -> String {
    let number = format!("{major}:{minor}");
    let Some(disk) = disk(sys, &number) else {
        // No block device: an anonymous number, as tmpfs and network file systems have.
        return number;
    };
    for attribute in ["serial", "device/serial", "dm/uuid", "md/uuid"] {
        if let Some(serial) = attribute_of(&disk, attribute) {
            return format!("serial {serial}");
        }
    }
    match attribute_of(&disk, "device/model") {
        Some(model) => format!("{number} {model}"),
        None => number,
    }
}

/// The folder of a disk; of a partition, that of the disk it is on.
fn disk(sys: &Path, number: &str) -> Option<PathBuf> {
    let folder = sys.join("dev/block").join(number).canonicalize().ok()?;
    if folder.join("partition").exists() {
        return folder.parent().map(Path::to_owned);
    }
    Some(folder)
}

fn attribute_of(disk: &Path, attribute: &str) -> Option<String> {
    let text = std::fs::read_to_string(disk.join(attribute)).ok()?;
    let printable: String = text
        .trim()
        .chars()
        .filter(|c| !c.is_control())
        .take(LONGEST)
        .collect();
    Some(printable).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;

    #[test]
    fn a_disk_is_named_by_its_serial_and_its_partitions_like_it() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("devices/pci/block/vda");
        create_dir_all(disk.join("vda1")).unwrap();
        create_dir_all(sys.path().join("dev/block")).unwrap();
        write(disk.join("serial"), "ABC-1\n").unwrap();
        write(disk.join("vda1/partition"), "1\n").unwrap();
        symlink(&disk, sys.path().join("dev/block/254:0")).unwrap();
        symlink(disk.join("vda1"), sys.path().join("dev/block/254:1")).unwrap();
        assert_eq!(name_in(sys.path(), 254, 0), "serial ABC-1");
        assert_eq!(name_in(sys.path(), 254, 1), "serial ABC-1");
    }

    #[test]
    fn a_device_without_a_serial_is_named_by_number_and_model() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("devices/sda");
        create_dir_all(disk.join("device")).unwrap();
        create_dir_all(sys.path().join("dev/block")).unwrap();
        write(disk.join("serial"), "\n").unwrap();
        write(disk.join("device/model"), "Fast disk  \n").unwrap();
        symlink(&disk, sys.path().join("dev/block/8:0")).unwrap();
        assert_eq!(name_in(sys.path(), 8, 0), "8:0 Fast disk");
        assert_eq!(name_in(sys.path(), 0, 35), "0:35");
    }
}
