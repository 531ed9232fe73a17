//! Namespaces: what holds their bytes, opened once and for all.

use crate::config::{Backing, BlockSize, Cache, NamespaceConfig, NvmeError};
use crate::syncs::Syncs;
use farlane_block::engine::Extent;
use farlane_block::storage;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// The storage of a namespace.
#[derive(Debug)]
pub enum Storage {
    /// In a file or block device, reached through `io_uring`.
    Ring {
        /// The file.
        file: OwnedFd,
        /// Alignment in bytes that memory must have, a power of two; 1 with the page cache.
        memory_align: u64,
        /// Whether the page cache of the host takes part.
        is_cached: bool,
    },
    /// In a file whose file system keeps it in memory, see [`storage::Storage::in_memory`].
    Memory {
        /// The file.
        file: OwnedFd,
    },
    /// Nowhere.
    Null,
}

impl Storage {
    /// Whether there are fewer bytes now, or nobody knows.
    pub fn ends_before(&self, end: u64) -> bool {
        match self {
            Self::Ring { file, .. } | Self::Memory { file } => {
                storage::known_size(file).map_or(true, |bytes| bytes < end)
            }
            Self::Null => false,
        }
    }
}

/// A namespace.
#[derive(Debug)]
pub struct Namespace {
    /// Its storage.
    pub storage: Storage,
    /// Size of a block.
    pub block_size: BlockSize,
    /// Blocks.
    pub blocks: u64,
    /// Whether it is write-protected.
    pub read_only: bool,
    /// Syncs of its file that are under way.
    pub syncs: Syncs,
    /// Name of its storage, for log lines.
    what: String,
    /// Syncs that have failed.
    failed_syncs: AtomicU64,
}

impl Namespace {
    /// Opens its storage.
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
            syncs: Syncs::default(),
            what,
            failed_syncs: AtomicU64::new(0),
        })
    }

    /// Whether a sync can still make what was written durable: none has failed before. The kernel
    /// tells of write-back that has failed once, and the next `fdatasync` succeeds although the
    /// bytes are not there (fsync(2)): only who opens the file again, and reads it, knows what it
    /// has.
    pub fn can_sync(&self) -> bool {
        self.failed_syncs() == 0
    }

    /// How many syncs have failed.
    pub fn failed_syncs(&self) -> u64 {
        self.failed_syncs.load(Ordering::Relaxed)
    }

    /// A sync has failed, and its command is answered with an error.
    pub fn sync_has_failed(&self, errno: i32) {
        if self.failed_syncs.fetch_add(1, Ordering::Relaxed) == 0 {
            let (what, why) = (&self.what, io::Error::from_raw_os_error(errno));
            log::error!(
                "{what}: a flush has failed: {why}; what was written before may be lost, and \
                 flushes fail until it is opened again"
            );
        }
    }

    /// The bytes of these blocks, if they are all of this namespace.
    pub fn extent(&self, lba: u64, blocks: u64) -> Option<Extent> {
        let end = lba.checked_add(blocks)?;
        let shift = self.block_size.shift();
        (end <= self.blocks).then_some(Extent {
            offset: lba << shift,
            bytes: blocks << shift,
        })
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

fn open(
    path: &Path,
    read_only: bool,
    cache: Cache,
    block_size: BlockSize,
) -> Result<(Storage, u64), NvmeError> {
    let storage = storage::Storage::open(path, read_only)?;
    let bytes = storage.bytes;
    if storage.in_memory {
        let file = storage.file;
        return Ok((Storage::Memory { file }, bytes));
    }
    let align = match cache {
        Cache::Direct => storage.go_direct(block_size.bytes()),
        Cache::Buffered => None,
    };
    if align.is_none() && cache == Cache::Direct {
        log::info!("{}: through the page cache", path.display());
    }
    let memory_align = align.map_or(1, |align| align.memory);
    let file = storage.file;
    let ring = Storage::Ring {
        file,
        memory_align,
        is_cached: align.is_none(),
    };
    Ok((ring, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_block::storage::StorageError;

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
            Err(NvmeError::Storage(StorageError::File { what: "lock", .. }))
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
        assert!(matches!(
            open(folder.path()),
            Err(NvmeError::Storage(StorageError::Kind(_)))
        ));
        assert!(matches!(
            open(Path::new("/dev/null")),
            Err(NvmeError::Storage(StorageError::Kind(_)))
        ));
        let path = folder.path().join("crumb");
        std::fs::write(&path, [0; 511]).unwrap();
        assert!(matches!(
            open(&path),
            Err(NvmeError::TooSmall { bytes: 511, .. })
        ));
        assert!(matches!(
            open(&folder.path().join("no")),
            Err(NvmeError::Storage(StorageError::File { .. }))
        ));
    }

    #[test]
    fn extents_end_with_the_namespace_and_do_not_wrap() {
        let config = NamespaceConfig::from(Backing::Null { bytes: 4096 });
        let namespace = Namespace::open(&config, Cache::Direct).unwrap();
        assert_eq!(
            namespace.extent(7, 1),
            Some(Extent {
                offset: 7 * 512,
                bytes: 512
            })
        );
        assert_eq!(namespace.extent(7, 2), None);
        assert_eq!(namespace.extent(u64::MAX, 1), None);
        assert_eq!(namespace.extent(u64::MAX - 2, 65536), None);
    }
}
