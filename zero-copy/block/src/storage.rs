//! What holds the bytes of a disk: a file or block device, opened once and for all.

use crate::lock::{enter, leave, lock};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::ioctl::{Getter, Opcode, opcode};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long a file may be in use by a process that still runs, and by one that has ended: the
/// kernel winds up its `io_uring` first, on a busy machine after seconds. And pauses between two
/// looks, which become longer.
const PATIENCE: Duration = Duration::from_secs(3);
const LAST_PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_millis(250);

/// `BLKGETSIZE64` (linux/fs.h): the bytes of a block device.
const DEVICE_SIZE: Opcode = opcode::read::<usize>(0x12, 114);
/// Requests of `ioctl` that are made of an open file.
pub const IOCTLS: &[u64] = &[DEVICE_SIZE as u64];

/// What direct I/O demands (`statx(2)`, `STATX_DIOALIGN`).
const STATX_DIOALIGN: u32 = 0x2000;
/// `statfs(2)`.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Why a disk cannot be had.
#[derive(Debug, Error)]
pub enum StorageError {
    /// A file cannot be opened or examined.
    #[error("Cannot {what} {}", path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// It is no file that can hold a disk.
    #[error("{} is neither a regular file nor a block device", .0.display())]
    Kind(PathBuf),
}

/// What direct I/O on a file demands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of addresses in memory, in bytes: a power of two.
    pub memory: u64,
    /// Of offsets in the file and of lengths, in bytes: a power of two.
    pub offset: u64,
}

impl Alignment {
    /// Whether direct I/O takes `bytes` of memory at this address. Each length, too, is to be one
    /// of whole blocks: kernels differ in whether they ask for it.
    #[must_use]
    pub fn is_met_by(self, address: usize, bytes: usize) -> bool {
        let align = |number: usize, align: u64| {
            usize::try_from(align).is_ok_and(|align| number & (align - 1) == 0)
        };
        align(address | bytes, self.memory) && align(bytes, self.offset)
    }
}

/// What tells files and block devices apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// A regular file, whatever it is called.
    File {
        /// Number of its file system.
        device: u64,
        /// Its inode.
        inode: u64,
    },
    /// A block device.
    Device {
        /// Its major number.
        major: u32,
        /// Its minor number.
        minor: u32,
    },
}

impl Place {
    /// That of whatever `path` names.
    ///
    /// # Errors
    /// It is not there, or neither a regular file nor a block device.
    pub fn of(path: &Path) -> Result<Self, StorageError> {
        let stat = rustix::fs::stat(path).map_err(failed("examine", path))?;
        Self::of_stat(&stat).ok_or_else(|| StorageError::Kind(path.to_owned()))
    }

    fn of_stat(stat: &rustix::fs::Stat) -> Option<Self> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Some(Self::File {
                device: stat.st_dev,
                inode: stat.st_ino,
            }),
            FileType::BlockDevice => Some(Self::Device {
                major: rustix::fs::major(stat.st_rdev),
                minor: rustix::fs::minor(stat.st_rdev),
            }),
            _ => None,
        }
    }
}

/// A file or block device that is nobody else's to write.
#[derive(Debug)]
pub struct Storage {
    /// The file. Blocks are read and written around the page cache once
    /// [`go_direct`](Self::go_direct) has said so.
    pub file: OwnedFd,
    /// Its size in bytes when it was opened.
    pub bytes: u64,
    /// Whether it is a block device.
    pub is_device: bool,
    /// Which file or device it is.
    pub place: Place,
    /// Whether its file system keeps it in memory (tmpfs). Such transfers never wait for a device,
    /// but `io_uring` would give each to a kernel thread, because tmpfs does not say that it does
    /// not block: 3 us and a switch in place of 0.8 us for 4 KiB. They are to be made by `preadv`
    /// and `pwritev`: see [`transfer_now`](crate::vectors::transfer_now).
    pub in_memory: bool,
}

impl Storage {
    /// Opens a regular file or a block device. Nobody else who asks has it then, or, where it is
    /// only read, nobody who writes: see [`lock`](crate::lock).
    ///
    /// # Errors
    /// See [`StorageError`].
    pub fn open(path: &Path, read_only: bool) -> Result<Self, StorageError> {
        Self::open_within(path, read_only, LAST_PATIENCE)
    }

    /// The same, without patience for who has it now.
    ///
    /// # Errors
    /// See [`StorageError`].
    pub fn open_now(path: &Path, read_only: bool) -> Result<Self, StorageError> {
        Self::open_within(path, read_only, Duration::ZERO)
    }

    fn open_within(path: &Path, read_only: bool, patience: Duration) -> Result<Self, StorageError> {
        let fail = |what| failed(what, path);
        let stat = rustix::fs::stat(path).map_err(fail("examine"))?;
        let named = Place::of_stat(&stat).ok_or_else(|| StorageError::Kind(path.to_owned()))?;
        // A block device that is mounted, or in use by another, is not ours to write.
        let exclusive = match named {
            Place::Device { .. } if !read_only => OFlags::EXCL,
            Place::Device { .. } | Place::File { .. } => OFlags::empty(),
        };
        let flags = flags(read_only) | exclusive;
        let told = std::cell::Cell::new(false);
        let wait = |own: Option<&OwnedFd>, waited: Duration| {
            if waited < PATIENCE.min(patience) {
                return true;
            }
            let waits = waited < patience && !is_used(named) && !is_open(named, stat.st_ino, own);
            if waits && !told.replace(true) {
                let path = path.display();
                log::info!("{path} is in use, but by no process that can be seen: waiting");
            }
            waits
        };
        let file = patiently(
            |waited| wait(None, waited),
            || rustix::fs::open(path, flags, Mode::empty()),
        )
        .map_err(fail("open"))?;
        patiently(
            |waited| wait(Some(&file), waited),
            || lock(&file, read_only),
        )
        .map_err(fail("lock"))?;
        let system = rustix::fs::fstatfs(&file).map_err(fail("examine"))?;
        // What is open, not what had that name a moment ago.
        let stat = rustix::fs::fstat(&file).map_err(fail("examine"))?;
        let place = Place::of_stat(&stat).ok_or_else(|| StorageError::Kind(path.to_owned()))?;
        let is_device = matches!(place, Place::Device { .. });
        Ok(Self {
            bytes: size(&file).map_err(fail("size"))?,
            in_memory: !is_device && u64::try_from(system.f_type) == Ok(TMPFS_MAGIC),
            is_device,
            place,
            file,
        })
    }

    /// The same once more: an open file and its lock that both share.
    ///
    /// # Errors
    /// There are no more descriptors.
    pub fn share(&self) -> std::io::Result<Self> {
        Ok(Self {
            file: self.file.try_clone()?,
            ..*self
        })
    }

    /// Says that bytes are going to be moved between this and the memory of `user`, for which
    /// somebody else may be doing so who has just ended: see [`enter`]. `waits` is called once if
    /// there is somebody.
    ///
    /// # Errors
    /// Somebody else has not ended, or what the system says.
    pub fn enter(&self, user: u64, waits: impl FnOnce()) -> std::io::Result<()> {
        let mut waits = Some(waits);
        let wait = |waited| waited < PATIENCE;
        let entered = patiently(wait, || {
            let result = enter(&self.file, user);
            if result.is_err()
                && let Some(waits) = waits.take()
            {
                waits();
            }
            result
        });
        Ok(entered?)
    }

    /// The same, without patience.
    ///
    /// # Errors
    /// See [`enter`](Self::enter).
    pub fn enter_now(&self, user: u64) -> std::io::Result<()> {
        Ok(enter(&self.file, user)?)
    }

    /// The memory of `user` is not touched any more.
    pub fn leave(&self, user: u64) {
        leave(&self.file, user);
    }

    /// Has the page cache not take part from now on. `None` where the file system cannot do that,
    /// or only in larger blocks than `most_bytes`; nothing has changed then.
    #[must_use]
    pub fn go_direct(&self, most_bytes: u64) -> Option<Alignment> {
        let mask = StatxFlags::from_bits_retain(STATX_DIOALIGN);
        let stat = rustix::fs::statx(self.file.as_fd(), c"", AtFlags::EMPTY_PATH, mask).ok()?;
        let known = stat.stx_mask & STATX_DIOALIGN != 0;
        let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
        let fits = memory.is_power_of_two()
            && offset.is_power_of_two()
            && most_bytes.is_multiple_of(offset.into());
        if !known || !fits {
            return None;
        }
        let flags = rustix::fs::fcntl_getfl(&self.file).ok()?;
        rustix::fs::fcntl_setfl(&self.file, flags | OFlags::DIRECT).ok()?;
        Some(Alignment {
            memory: memory.into(),
            offset: offset.into(),
        })
    }
}

/// The size of a file or block device in bytes, as it is now. This does not wait for who reads,
/// writes or zeroes it: `lseek` takes the lock of a block device's inode, which `fallocate` holds
/// while the device zeroes.
///
/// # Errors
/// What the system says.
pub fn size(file: &OwnedFd) -> rustix::io::Result<u64> {
    size_as(file, AtFlags::STATX_SYNC_AS_STAT)
}

/// The same, as far as this host knows: a file system's server is not asked, which may not answer.
///
/// # Errors
/// What the system says.
pub fn known_size(file: &OwnedFd) -> rustix::io::Result<u64> {
    size_as(file, AtFlags::STATX_DONT_SYNC)
}

fn size_as(file: &OwnedFd, sync: AtFlags) -> rustix::io::Result<u64> {
    let mask = StatxFlags::TYPE | StatxFlags::SIZE;
    let stat = rustix::fs::statx(file.as_fd(), c"", AtFlags::EMPTY_PATH | sync, mask)?;
    match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::BlockDevice => {
            // SAFETY: the request writes a number of 64 bits, and reads nothing.
            unsafe { rustix::ioctl::ioctl(file, Getter::<DEVICE_SIZE, u64>::new()) }
        }
        _ => Ok(stat.stx_size),
    }
}

fn flags(read_only: bool) -> OFlags {
    let access = if read_only {
        OFlags::RDONLY
    } else {
        OFlags::RDWR
    };
    access | OFlags::CLOEXEC | OFlags::NOCTTY
}

fn failed(what: &'static str, path: &Path) -> impl Fn(rustix::io::Errno) -> StorageError {
    move |e| StorageError::File {
        what,
        path: path.to_owned(),
        source: e.into(),
    }
}

/// Tries again what somebody else still keeps from being done, as long as `wait` says so, which is
/// told for how long that has been tried.
fn patiently<T>(
    wait: impl Fn(Duration) -> bool,
    mut attempt: impl FnMut() -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    let since = Instant::now();
    loop {
        match attempt() {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::BUSY) if wait(since.elapsed()) => {
                std::thread::sleep(PAUSE.max(since.elapsed() / 8).min(LAST_PAUSE));
            }
            result => return result,
        }
    }
}

/// Whether the kernel uses a device: for a file system, or for another device.
fn is_used(place: Place) -> bool {
    let Place::Device { major, minor } = place else {
        return false;
    };
    let number = format!("{major}:{minor}");
    // `proc_pid_mountinfo(5)`: the third word.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut mounts = mounts.lines().map(|mount| mount.split(' ').nth(2));
    let holders = std::fs::read_dir(format!("/sys/dev/block/{number}/holders"));
    mounts.any(|device| device == Some(&number))
        || holders.is_ok_and(|mut holders| holders.next().is_some())
}

/// Whether a process that has not ended has a file open, by another descriptor than `own`. Of
/// processes whose descriptors this one may not see (`proc_pid_fd(5)`) that is not known.
fn is_open(place: Place, inode: u64, own: Option<&OwnedFd>) -> bool {
    let folder = |pid: &str| std::fs::read_dir(format!("/proc/{pid}/fd"));
    let own = own.map(|own| (std::process::id().to_string(), own.as_raw_fd().to_string()));
    let names = |folder: std::fs::ReadDir| {
        folder.filter_map(|entry| entry.ok()?.file_name().into_string().ok())
    };
    let processes = std::fs::read_dir("/proc").into_iter().flat_map(names);
    processes
        .filter(|name| name.bytes().all(|b| b.is_ascii_digit()))
        .any(|pid| {
            folder(&pid).into_iter().flat_map(names).any(|number| {
                // Files of other inodes are not asked themselves: a dead server does not answer.
                let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"));
                let inodes = info.unwrap_or_default();
                let mut inodes = inodes.lines().filter_map(|line| line.strip_prefix("ino:"));
                if inodes.any(|found| found.trim().parse() != Ok(inode)) {
                    return false;
                }
                let stat = rustix::fs::stat(format!("/proc/{pid}/fd/{number}"));
                stat.is_ok_and(|stat| Place::of_stat(&stat) == Some(place))
                    && own.as_ref() != Some(&(pid.clone(), number))
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_by_one_and_read_by_many() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, vec![0; 1200]).unwrap();
        let storage = Storage::open(&path, false).unwrap();
        assert_eq!(storage.bytes, 1200);
        assert!(matches!(
            Storage::open(&path, false),
            Err(StorageError::File { what: "lock", .. })
        ));
        drop(storage);
        let first = Storage::open(&path, true).unwrap();
        let second = Storage::open(&path, true).unwrap();
        assert!(!first.is_device && !second.is_device);
    }

    /// A mapping keeps an open file, and its lock, without a descriptor, as what a killed process
    /// has under way does.
    #[test]
    fn what_no_process_has_open_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, vec![0; 4096]).unwrap();
        let storage = Storage::open(&path, false).unwrap();
        // SAFETY: a new mapping, which nothing refers to.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ,
                libc::MAP_SHARED,
                storage.file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(address, libc::MAP_FAILED);
        drop(storage);
        assert!(matches!(
            Storage::open_now(&path, false),
            Err(StorageError::File { what: "lock", .. })
        ));
        let address = address.addr();
        let unmaps = std::thread::spawn(move || {
            std::thread::sleep(PATIENCE + Duration::from_millis(500));
            // SAFETY: the mapping made above, which nothing refers to.
            unsafe { libc::munmap(std::ptr::without_provenance_mut(address), 4096) }
        });
        assert!(Storage::open(&path, false).is_ok());
        assert_eq!(unmaps.join().unwrap(), 0);
    }

    #[test]
    fn folders_and_character_devices_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let open = |path: &Path| Storage::open(path, true);
        assert!(matches!(open(folder.path()), Err(StorageError::Kind(_))));
        assert!(matches!(
            open(Path::new("/dev/null")),
            Err(StorageError::Kind(_))
        ));
        assert!(matches!(
            open(&folder.path().join("no")),
            Err(StorageError::File { .. })
        ));
    }

    #[test]
    fn files_in_memory_are_known() {
        let memory = tempfile::tempfile_in("/dev/shm").unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memory));
        let storage = Storage::open(Path::new(&path), false).unwrap();
        assert!(storage.in_memory);
        memory.set_len(1 << 20).unwrap();
        assert_eq!((storage.bytes, size(&storage.file)), (0, Ok(1 << 20)));
    }
}
