//! Namespaces: what holds their bytes, opened once and for all.

use crate::config::{Backing, BlockSize, Cache, NamespaceConfig, NvmeError};
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, StatxFlags};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a file may still be in use by somebody who has just ended, and a pause between two
/// looks.
const PATIENCE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(20);

/// What direct I/O demands (`statx(2)`, `STATX_DIOALIGN`).
const STATX_DIOALIGN: u32 = 0x2000;
/// `statfs(2)`.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Where the bytes of a namespace are.
#[derive(Debug)]
pub enum Storage {
    /// In a file or block device, reached through `io_uring`.
    Ring {
        /// The file.
        file: OwnedFd,
        /// Alignment in bytes that memory must have, a power of two; 1 with the page cache.
        memory_align: u64,
    },
    /// In a file whose file system keeps it in memory. Such transfers never wait for a device, but
    /// `io_uring` would give each to a kernel thread, because tmpfs does not say that it does not
    /// block: 3 us and a switch in place of 0.8 us for 4 KiB. They are made by `preadv` and
    /// `pwritev`.
    Memory {
        /// The file.
        file: OwnedFd,
    },
    /// Nowhere.
    Null,
}

/// A namespace.
#[derive(Debug)]
pub struct Namespace {
    /// Where its bytes are.
    pub storage: Storage,
    /// Size of a block.
    pub block_size: BlockSize,
    /// Blocks.
    pub blocks: u64,
    /// Whether writes are refused.
    pub read_only: bool,
}

impl Namespace {
    /// Opens what holds it.
    pub fn open(config: &NamespaceConfig, cache: Cache) -> Result<Self, NvmeError> {
        let (storage, bytes, read_only, what) = match &config.backing {
            Backing::Null { bytes } => (Storage::Null, *bytes, false, "a null namespace".into()),
            Backing::File { path, read_only } => {
                let (storage, bytes) = open(path, *read_only, cache, config.block_size)?;
                (storage, bytes, *read_only, path.display().to_string())
            }
        };
        // What an `off_t` can count.
        let bytes = bytes.min(1 << 62);
        let blocks = bytes >> config.block_size.shift();
        if blocks == 0 {
            return Err(NvmeError::TooSmall { what, bytes });
        }
        Ok(Self {
            storage,
            block_size: config.block_size,
            blocks,
            read_only,
        })
    }

    /// Offset and length in bytes of these blocks, if they are all of this namespace.
    pub fn extent(&self, lba: u64, blocks: u64) -> Option<(u64, u64)> {
        let end = lba.checked_add(blocks)?;
        let shift = self.block_size.shift();
        (end <= self.blocks).then_some((lba << shift, blocks << shift))
    }

    /// Alignment that memory must have for transfers without a copy.
    pub fn memory_align(&self) -> u64 {
        match self.storage {
            Storage::Ring { memory_align, .. } => memory_align,
            Storage::Memory { .. } | Storage::Null => 1,
        }
    }

    /// The file, if there is one.
    pub fn file(&self) -> Option<&OwnedFd> {
        match &self.storage {
            Storage::Ring { file, .. } | Storage::Memory { file } => Some(file),
            Storage::Null => None,
        }
    }
}

/// Tries again for a while what somebody else still keeps from being done. A predecessor that was
/// killed lets go of its files some time after its end: the kernel winds up its `io_uring` first.
fn patiently<T>(mut attempt: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    let until = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::BUSY) if Instant::now() < until => {
                std::thread::sleep(PAUSE);
            }
            result => return result,
        }
    }
}

fn open(
    path: &Path,
    read_only: bool,
    cache: Cache,
    block_size: BlockSize,
) -> Result<(Storage, u64), NvmeError> {
    let fail = |what| {
        move |e: rustix::io::Errno| NvmeError::File {
            what,
            path: path.to_owned(),
            source: e.into(),
        }
    };
    let access = if read_only {
        OFlags::RDONLY
    } else {
        OFlags::RDWR
    };
    let stat = rustix::fs::stat(path).map_err(fail("examine"))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    // A block device that is mounted, or in use by another, is not ours to write.
    let exclusive = match kind {
        FileType::RegularFile => OFlags::empty(),
        FileType::BlockDevice if read_only => OFlags::empty(),
        FileType::BlockDevice => OFlags::EXCL,
        _ => return Err(NvmeError::Kind(path.to_owned())),
    };
    let flags = access | exclusive | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = patiently(|| rustix::fs::open(path, flags, Mode::empty())).map_err(fail("open"))?;
    if kind == FileType::RegularFile {
        let lock = if read_only {
            FlockOperation::NonBlockingLockShared
        } else {
            FlockOperation::NonBlockingLockExclusive
        };
        patiently(|| rustix::fs::flock(&file, lock)).map_err(fail("lock"))?;
    }
    // Also tells the size of block devices.
    let bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).map_err(fail("size"))?;
    let system = rustix::fs::fstatfs(&file).map_err(fail("examine"))?;
    if kind == FileType::RegularFile && u64::try_from(system.f_type) == Ok(TMPFS_MAGIC) {
        return Ok((Storage::Memory { file }, bytes));
    }
    let align = match cache {
        Cache::Direct => direct_alignment(&file, block_size),
        Cache::Buffered => None,
    };
    let memory_align = align.filter(|_| {
        rustix::fs::fcntl_getfl(&file)
            .and_then(|flags| rustix::fs::fcntl_setfl(&file, flags | OFlags::DIRECT))
            .is_ok()
    });
    if memory_align.is_none() && cache == Cache::Direct {
        log::info!("{}: through the page cache", path.display());
    }
    let memory_align = memory_align.unwrap_or(1);
    Ok((Storage::Ring { file, memory_align }, bytes))
}

/// Alignment that memory must have for direct I/O on `file` in whole blocks, if those are large
/// enough for it.
fn direct_alignment(file: &OwnedFd, block_size: BlockSize) -> Option<u64> {
    let mask = StatxFlags::from_bits_retain(STATX_DIOALIGN);
    let stat = rustix::fs::statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, mask).ok()?;
    let known = stat.stx_mask & STATX_DIOALIGN != 0;
    let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    let offset_fits = offset > 0 && block_size.bytes().is_multiple_of(offset.into());
    (known && memory.is_power_of_two() && offset_fits).then_some(memory.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &Path, read_only: bool) -> NamespaceConfig {
        NamespaceConfig::from(Backing::File {
            path: path.to_owned(),
            read_only,
        })
    }

    #[test]
    fn a_file_is_as_many_whole_blocks_and_written_by_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, vec![0; 1200]).unwrap();
        let namespace = Namespace::open(&file(&path, false), Cache::Direct).unwrap();
        assert_eq!(namespace.blocks, 2);
        assert!(matches!(
            Namespace::open(&file(&path, false), Cache::Direct),
            Err(NvmeError::File { what: "lock", .. })
        ));
        drop(namespace);
        let first = Namespace::open(&file(&path, true), Cache::Buffered).unwrap();
        let second = Namespace::open(&file(&path, true), Cache::Buffered).unwrap();
        assert!(first.read_only && second.read_only);
    }

    #[test]
    fn folders_devices_and_crumbs_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let open = |path: &Path| Namespace::open(&file(path, true), Cache::Direct);
        assert!(matches!(open(folder.path()), Err(NvmeError::Kind(_))));
        assert!(matches!(
            open(Path::new("/dev/null")),
            Err(NvmeError::Kind(_))
        ));
        let path = folder.path().join("crumb");
        std::fs::write(&path, [0; 511]).unwrap();
        assert!(matches!(
            open(&path),
            Err(NvmeError::TooSmall { bytes: 511, .. })
        ));
        assert!(matches!(
            open(&folder.path().join("no")),
            Err(NvmeError::File { .. })
        ));
    }

    #[test]
    fn extents_end_with_the_namespace_and_do_not_wrap() {
        let config = NamespaceConfig::from(Backing::Null { bytes: 4096 });
        let namespace = Namespace::open(&config, Cache::Direct).unwrap();
        assert_eq!(namespace.extent(7, 1), Some((7 * 512, 512)));
        assert_eq!(namespace.extent(7, 2), None);
        assert_eq!(namespace.extent(u64::MAX, 1), None);
        assert_eq!(namespace.extent(u64::MAX - 2, 65536), None);
    }
}
