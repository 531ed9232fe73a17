//! What the kernel tells of block devices: whether two are ways to the same blocks, and where they
//! are attached.

use farlane_block::storage::Place;
use farlane_zero_copy::topology::Node;
use std::path::{Path, PathBuf};

/// The kernel's own sysfs: asked where a described one does not know a device.
const SYSFS: &str = "/sys";

/// What is known of a block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// What devices with the same blocks have in common, and no others; `None` where the kernel
    /// does not tell.
    pub blocks: Option<String>,
    /// The PCI function that it is attached through, such as `0000:01:00.0`.
    pub function: Option<String>,
    /// The node of that, or of whatever it is attached through.
    pub node: Option<Node>,
}

impl Identity {
    /// That of a device, as the sysfs at `root` tells; files have none.
    #[must_use]
    pub fn of(root: &Path, place: Place) -> Self {
        let Place::Device { major, minor } = place else {
            return Self::default();
        };
        let link = format!("dev/block/{major}:{minor}");
        let folders = [root, Path::new(SYSFS)].into_iter();
        let folder = folders.map(|root| root.join(&link)).find(|f| f.exists());
        folder.map_or_else(Self::default, |folder| Self::in_folder(&folder))
    }

    /// That of the device which `folder` of a sysfs describes.
    fn in_folder(folder: &Path) -> Self {
        let folder = std::fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        let function = folder.iter().rev().find_map(|part| {
            let part = part.to_str()?;
            is_function(part).then(|| part.to_owned())
        });
        let node = folder.ancestors().find_map(|folder| {
            // -1 where the firmware does not say.
            let number = word(&folder.join("numa_node"))?.parse().ok()?;
            Some(Node(number))
        });
        Self {
            blocks: blocks(&folder),
            function,
            node,
        }
    }
}

fn word(file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

fn blocks(folder: &Path) -> Option<String> {
    if folder.join("partition").exists() {
        let whole = blocks(folder.parent()?)?;
        let start = word(&folder.join("start"))?;
        return Some(format!("{whole} from sector {start}"));
    }
    // NVMe namespaces, then SCSI disks, device mapper, virtio disks. A loop device is its file.
    let told = ["wwid", "device/wwid", "dm/uuid", "serial"];
    let told = told.iter().find_map(|name| word(&folder.join(name)));
    told.or_else(|| {
        let file = word(&folder.join("loop/backing_file"))?;
        let offset = word(&folder.join("loop/offset"))?;
        Some(format!("{file} from byte {offset}"))
    })
}

/// Whether this is the address of a PCI function: `0000:01:00.0`.
fn is_function(text: &str) -> bool {
    let groups: Vec<&str> = text.split([':', '.']).collect();
    let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
    let hex = |group: &&str| group.chars().all(|c| c.is_ascii_hexdigit());
    matches!(lengths[..], [domain, 2, 2, 1] if domain >= 4) && groups.iter().all(hex)
}

/// All block devices with the blocks of `wanted`, by name: `/dev/nvme0n1`, `/dev/nvme1n1`.
#[must_use]
pub fn discover(root: &Path, wanted: &str) -> Vec<(PathBuf, Identity)> {
    let roots = [root, Path::new(SYSFS)].into_iter();
    let list = roots
        .map(|root| root.join("class/block"))
        .find_map(|folder| {
            let list = std::fs::read_dir(folder).ok()?;
            Some(list.flatten().map(|entry| entry.path()).collect::<Vec<_>>())
        });
    let mut found: Vec<_> = list
        .unwrap_or_default()
        .into_iter()
        .filter_map(|folder| {
            let device = Path::new("/dev").join(folder.file_name()?);
            let identity = Identity::in_folder(&folder);
            // The single ways below the kernel's own multipath have no device node.
            let is_way = identity.blocks.as_deref() == Some(wanted) && device.exists();
            is_way.then_some((device, identity))
        })
        .collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, write};

    #[test]
    fn ways_to_the_same_namespace_are_known_by_its_name() {
        let root = tempfile::tempdir().unwrap();
        let function = |bus: &str| format!("devices/pci0000:{bus}/0000:{bus}:00.0");
        for (bus, node, minor, name) in [("20", "0", 1, "nvme0"), ("40", "1", 2, "nvme1")] {
            let folder = root.path().join(function(bus));
            let namespace = folder.join(format!("nvme/{name}/{name}n1"));
            create_dir_all(&namespace).unwrap();
            write(folder.join("numa_node"), node).unwrap();
            write(namespace.join("wwid"), "uuid.1\n").unwrap();
            let part = namespace.join("p1");
            create_dir_all(&part).unwrap();
            write(part.join("partition"), "1\n").unwrap();
            write(part.join("start"), "2048\n").unwrap();
            let numbers = root.path().join("dev/block");
            create_dir_all(&numbers).unwrap();
            let link = |to: &Path, minor: u32| {
                std::os::unix::fs::symlink(to, numbers.join(format!("259:{minor}"))).unwrap();
            };
            link(&namespace, minor);
            link(&part, minor + 10);
        }
        let of = |minor| Identity::of(root.path(), Place::Device { major: 259, minor });
        let (one, two) = (of(1), of(2));
        assert_eq!(one.blocks.as_deref(), Some("uuid.1"));
        assert_eq!(one.blocks, two.blocks);
        assert_eq!((one.node, two.node), (Some(Node(0)), Some(Node(1))));
        assert_eq!(two.function.as_deref(), Some("0000:40:00.0"));
        assert_eq!(of(11).blocks.as_deref(), Some("uuid.1 from sector 2048"));
        assert_eq!(of(12).node, Some(Node(1)));
        assert_eq!(of(3), Identity::default());
        let file = Place::File {
            device: 1,
            inode: 2,
        };
        assert_eq!(Identity::of(root.path(), file), Identity::default());
    }

    #[test]
    fn functions_are_told_from_other_names() {
        assert!(is_function("0000:01:00.0") && is_function("10000:e1:00.7"));
        assert!(!is_function("pci0000:00") && !is_function("0000:01:00") && !is_function("nvme0"));
    }
}
