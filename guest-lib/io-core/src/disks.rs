//! What lies beneath a file system: the disks, and every layer between.
//!
//! Layers change under a file system in use: a volume becomes a mirror while it is moved, an array
//! gets another level. The kernel tells of most changes of devices (`/sys/kernel/uevent_seqnum`
//! counts them), but not of an array's level, and of a volume that lies on other devices only after
//! requests have gone there: what a volume is to lie on are its slaves from before that
//! (drivers/md/dm-ioctl.c: `table_load`, `do_resume`).

use crate::lock::Lock;
use farlane_transport::guard::{Guarded, Kind};
use rustix::fs::{Mode, OFlags};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Layers upon layers that are followed: deeper ones are not known.
const MAX_DEPTH: usize = 8;
/// Length of the UUID that LVM gives a logical volume's device: volume group and volume, 32
/// characters each. What is longer names a part of a volume, such as the data of a thin pool.
const LVM_UUID: usize = 64;

/// What lies beneath a file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stack {
    /// Serial numbers of the virtio disks that sectors of the file system go to, unchanged. None
    /// where some layer may change them, read them, or keep copies, or is not known.
    pub serials: Option<Vec<String>>,
    /// The system's read-ahead window for it in bytes; zero where there is none.
    pub window_bytes: u64,
    /// What is looked at each time.
    signs: Vec<Sign>,
}

/// What is in sysfs of a layer and may change before the kernel tells of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Sign {
    /// A file that says of what kind the layer is, and what it says.
    Kind(PathBuf, String),
    /// A device that others are beneath, and their names.
    Slaves(PathBuf, Vec<OsString>),
}

impl Sign {
    fn is_still_so(&self) -> bool {
        match self {
            Self::Kind(file, said) => text(file).as_ref() == Some(said),
            Self::Slaves(device, known) => slave_names(device).is_ok_and(|names| names == *known),
        }
    }
}

/// What lies beneath a file system now.
#[derive(Debug, Default)]
pub struct DiskStack {
    /// Layers of block devices.
    pub stack: Stack,
    /// A tunnelled read of it has arrived.
    pub tunnel_proven: AtomicBool,
}

/// What lies beneath a file system, which may change.
#[derive(Debug)]
pub struct StackWatch {
    sys: PathBuf,
    number: (u32, u32),
    /// Counts changes of devices; none where that cannot be read.
    changes: Option<Guarded>,
    seen: Lock<Observation>,
}

#[derive(Debug)]
struct Observation {
    /// As it was then.
    changes: Option<u64>,
    beneath: Arc<DiskStack>,
}

impl StackWatch {
    /// Watches the block device with this number, in a sysfs at `sys`.
    #[must_use]
    pub fn new(sys: &Path, major: u32, minor: u32) -> Self {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let changes = rustix::fs::open(sys.join("kernel/uevent_seqnum"), flags, Mode::empty());
        let mut watched = Self {
            sys: sys.to_owned(),
            number: (major, minor),
            changes: changes.ok().map(|fd| Guarded::new(fd, Kind::Inherited)),
            seen: Lock::new(Observation {
                changes: None,
                beneath: Arc::default(),
            }),
        };
        watched.seen = Lock::new(watched.look());
        watched
    }

    fn look(&self) -> Observation {
        // What changes while it is looked at is looked at again.
        let changes = self.changes();
        let stack = Stack::look(&self.sys, self.number.0, self.number.1);
        let beneath = DiskStack {
            stack,
            tunnel_proven: AtomicBool::new(false),
        };
        Observation {
            changes,
            beneath: Arc::new(beneath),
        }
    }

    fn changes(&self) -> Option<u64> {
        let fd = self.changes.as_ref().filter(|fd| fd.is_intact())?.enter()?;
        let mut text = [0; 24];
        let length = rustix::io::pread(&fd, &mut text, 0).ok()?;
        std::str::from_utf8(text.get(..length)?)
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    /// As it was found last.
    #[must_use]
    pub fn last(&self) -> Arc<DiskStack> {
        Arc::clone(&self.seen.lock().beneath)
    }

    /// As it is now: the same one again, unless something has changed.
    #[must_use]
    pub fn now(&self) -> Arc<DiskStack> {
        let changes = self.changes();
        let (before, known) = {
            let seen = self.seen.lock();
            (seen.changes, Arc::clone(&seen.beneath))
        };
        let signs = &known.stack.signs;
        if changes.is_some() && changes == before && signs.iter().all(Sign::is_still_so) {
            return known;
        }
        let found = self.look();
        let mut seen = self.seen.lock();
        seen.changes = found.changes;
        if seen.beneath.stack != found.beneath.stack {
            seen.beneath = found.beneath;
        }
        Arc::clone(&seen.beneath)
    }
}

impl Stack {
    /// Looks at the block device with this number, in a sysfs at `sys`.
    #[must_use]
    pub fn look(sys: &Path, major: u32, minor: u32) -> Self {
        let number = format!("{major}:{minor}");
        let device = std::fs::canonicalize(sys.join("dev/block").join(&number)).ok();
        let mut found = LayerScan::default();
        let known = device
            .as_ref()
            .is_some_and(|device| leaves(device, MAX_DEPTH, &mut found));
        let LayerScan { serials, signs } = found;
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
            signs,
        }
    }
}

/// What is found beneath a device.
#[derive(Debug, Default)]
struct LayerScan {
    serials: Vec<String>,
    signs: Vec<Sign>,
}

/// Adds the disks beneath `device`; false when something is not known.
fn leaves(device: &Path, depth: usize, found: &mut LayerScan) -> bool {
    if depth == 0 {
        return false;
    }
    if device.join("partition").exists() {
        let Some(disk) = device.parent() else {
            return false;
        };
        return leaves(disk, depth - 1, found);
    }
    let Ok(names) = slave_names(device) else {
        return false;
    };
    let slaves = names
        .iter()
        .map(|name| std::fs::canonicalize(device.join("slaves").join(name)));
    let Ok(slaves) = slaves.collect::<std::io::Result<Vec<_>>>() else {
        return false;
    };
    if device.join("dm").exists() {
        let is_volume = text(&device.join("dm/uuid")).is_some_and(|uuid| {
            uuid.strip_prefix("LVM-")
                .is_some_and(|rest| rest.len() == LVM_UUID)
        });
        let on_mapper = slaves.iter().any(|slave| slave.join("dm").exists());
        found.signs.push(Sign::Slaves(device.to_owned(), names));
        if !is_volume || on_mapper || slaves.is_empty() {
            return false;
        }
    } else if device.join("md").exists() {
        let file = device.join("md/level");
        let Some(level) = text(&file) else {
            return false;
        };
        let is_known = matches!(level.as_str(), "raid0" | "linear");
        found.signs.push(Sign::Kind(file, level));
        if !is_known || slaves.is_empty() {
            return false;
        }
    } else {
        return slaves.is_empty() && leaf(device, found);
    }
    let mut slaves = slaves.iter();
    slaves.all(|slave| leaves(slave, depth - 1, found))
}

/// A disk with nothing beneath it that the guest can see.
fn leaf(device: &Path, found: &mut LayerScan) -> bool {
    let driver = std::fs::canonicalize(device.join("device/driver")).ok();
    let is_virtio = driver
        .as_ref()
        .and_then(|driver| driver.file_name())
        .is_some_and(|name| name == "virtio_blk");
    match text(&device.join("serial")) {
        Some(serial) if is_virtio && !serial.is_empty() => {
            found.serials.push(serial);
            true
        }
        _ => false,
    }
}

/// The names of the devices beneath one.
fn slave_names(device: &Path) -> std::io::Result<Vec<OsString>> {
    let folder = match std::fs::read_dir(device.join("slaves")) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let names = folder.map(|entry| Ok(entry?.file_name()));
    let mut names: Vec<_> = names.collect::<std::io::Result<_>>()?;
    names.sort();
    Ok(names)
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
    use std::sync::atomic::Ordering;

    /// A sysfs with block devices.
    struct Sys(tempfile::TempDir);

    impl Sys {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            for part in [
                "dev/block",
                "kernel",
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

    #[test]
    fn a_stack_that_changes_is_another_one_and_has_to_prove_itself() {
        let sys = Sys::new();
        let changes = sys.0.path().join("kernel/uevent_seqnum");
        fs::write(&changes, "7\n").unwrap();
        sys.virtio("1:0", "vda", "one");
        sys.virtio("1:1", "vdb", "two");
        sys.device("1:2", "md0", &[("md/level", "raid0\n")], &["vda", "vdb"]);
        sys.device("1:3", "dm-0", &[("dm/uuid", &volume())], &["md0"]);
        let watched = StackWatch::new(sys.0.path(), 1, 3);
        let serials = |beneath: &DiskStack| beneath.stack.serials.clone();
        let both = Some(vec!["one".into(), "two".into()]);
        let first = watched.now();
        assert_eq!(serials(&first), both);
        first.tunnel_proven.store(true, Ordering::Relaxed);
        // Something else has changed.
        fs::write(&changes, "8\n").unwrap();
        assert!(Arc::ptr_eq(&watched.now(), &first));
        // As pvmove does it: a mirror comes between.
        sys.device("1:4", "dm-1", &[("dm/uuid", "LVM-mirror\n")], &["vda"]);
        fs::remove_file(sys.block("dm-0").join("slaves/md0")).unwrap();
        symlink(sys.block("dm-1"), sys.block("dm-0").join("slaves/dm-1")).unwrap();
        fs::write(&changes, "9\n").unwrap();
        assert_eq!(serials(&watched.now()), None);
        // And is gone again.
        fs::remove_file(sys.block("dm-0").join("slaves/dm-1")).unwrap();
        symlink(sys.block("md0"), sys.block("dm-0").join("slaves/md0")).unwrap();
        fs::write(&changes, "10\n").unwrap();
        let last = watched.now();
        assert_eq!(serials(&last), both);
        assert!(!last.tunnel_proven.load(Ordering::Relaxed));
        // An array gets another level, of which the kernel does not tell.
        fs::write(sys.block("md0").join("md/level"), "raid1\n").unwrap();
        assert_eq!(serials(&watched.now()), None);
    }

    #[test]
    fn a_volume_that_is_to_lie_on_other_devices_is_another_one_before_the_kernel_tells() {
        let sys = Sys::new();
        fs::write(sys.0.path().join("kernel/uevent_seqnum"), "7\n").unwrap();
        sys.virtio("1:0", "vda", "one");
        sys.virtio("1:1", "vdb", "two");
        sys.device("1:2", "dm-0", &[("dm/uuid", &volume())], &["vda"]);
        sys.device("1:3", "dm-1", &[("dm/uuid", "CRYPT-x\n")], &["vdb"]);
        let watched = StackWatch::new(sys.0.path(), 1, 2);
        let serials = || watched.now().stack.serials.clone();
        assert_eq!(serials(), Some(vec!["one".into()]));
        let link = sys.block("dm-0").join("slaves/vdb");
        symlink(sys.block("vdb"), &link).unwrap();
        assert_eq!(serials(), Some(vec!["one".into(), "two".into()]));
        fs::remove_file(link).unwrap();
        symlink(sys.block("dm-1"), sys.block("dm-0").join("slaves/dm-1")).unwrap();
        assert_eq!(serials(), None);
    }

    #[test]
    fn where_changes_are_not_counted_a_stack_is_looked_at_each_time() {
        let sys = Sys::new();
        sys.virtio("1:0", "vda", "one");
        let watched = StackWatch::new(sys.0.path(), 1, 0);
        let first = watched.now();
        assert!(Arc::ptr_eq(&watched.now(), &first));
        fs::write(sys.block("vda").join("serial"), "other").unwrap();
        assert_eq!(watched.now().stack.serials, Some(vec!["other".into()]));
        assert!(Arc::ptr_eq(&watched.last(), &watched.now()));
    }
}
