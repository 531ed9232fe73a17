//! A disk: the file that holds it, what it says of itself, and who is told when its size changes.

use crate::bits::{Config, ID_BYTES, SECTOR, feature};
use crate::counters::{Counters, RequestTimes};
use crate::paths::open::{Manner, PathError};
use crate::paths::{PathConfig, Paths, prober};
use crate::per_node::executor::Executor;
use crate::request::{Limits, MAX_RANGE_SECTORS, MAX_RANGES};
use crate::surroundings::Surroundings;
use farlane_block::storage::Alignment;
use farlane_daemon::locality::Locality;
use farlane_daemon::log_limit::LogLimit;
use farlane_sys::sync::lock;
use farlane_vhost_user::bits::feature as common;
use farlane_zero_copy::tokens::Tokens;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;
use thiserror::Error;

/// Most data segments of a request that are asked of drivers: with header and status, the 128
/// descriptors that QEMU gives a queue where nothing else is said.
const SEG_MAX: u32 = 126;
/// Bytes of a physical block, as file systems and disks have them.
const PHYSICAL_BLOCK: u32 = 4096;

/// What reads and writes need not exceed to be fast. Linux reads ahead twice as much; where nothing
/// is said, it takes a virtio disk for one that rotates and reads ahead 8 MiB.
const OPTIMAL_BYTES: u32 = 256 << 10;

/// Why there is no disk.
#[derive(Debug, Error)]
pub enum DiskError {
    /// What is to hold it cannot.
    #[error(transparent)]
    Path(#[from] PathError),
    /// How large it is cannot be found out.
    #[error("The size of {} cannot be read, or its paths do not agree in it", .0.display())]
    Size(PathBuf),
    /// Less than a block.
    #[error("{bytes} bytes of {} are less than a block", path.display())]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// Not one that fits.
    #[error("Serial number {0:?} is not 1 to 20 printable ASCII characters")]
    Serial(String),
}

/// Whether the host's page cache takes part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Around it, where the file system can: guests have one of their own, and what a flush has
    /// made durable was on its way before.
    #[default]
    Direct,
    /// Through it.
    Buffered,
}

/// Configuration of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// The file or block device, or several ways to it.
    pub paths: Vec<PathConfig>,
    /// Whether further ways are looked for.
    pub discovers: bool,
    /// Serial number; where there is none, one is made of the first path.
    pub serial: Option<String>,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Most queues.
    pub queues: u16,
    /// Whether the page cache takes part.
    pub cache: Cache,
    /// Bytes of a block: 512 or 4096.
    pub block: u32,
}

/// Whoever is told that a disk has another size.
pub trait Watcher: Send + Sync {
    /// It has.
    fn resized(&self);
}

/// A disk, open.
pub struct Disk {
    config: DiskConfig,
    serial: String,
    paths: Arc<Paths>,
    around: Surroundings,
    /// Per-node workers, where requests are steered.
    executors: OnceLock<Vec<Executor>>,
    locality: Locality,
    sectors: AtomicU64,
    watchers: Mutex<Vec<Weak<dyn Watcher>>>,
    tokens: OnceLock<Arc<Tokens>>,
    /// The file system cannot zero a range in place.
    cannot_zero: AtomicBool,
    /// Error number of the first sync that has failed; zero where none has.
    sync_failed: AtomicI32,
    /// How many have failed.
    failed_syncs: AtomicU64,
    counters: Counters,
    times: RequestTimes,
    limit: LogLimit,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk")
            .field("config", &self.config)
            .field("serial", &self.serial)
            .finish_non_exhaustive()
    }
}

impl Disk {
    /// Opens a disk.
    ///
    /// # Errors
    /// See [`DiskError`].
    pub fn open(config: DiskConfig, around: &Surroundings) -> Result<Arc<Self>, DiskError> {
        let device = config.paths.first().map(|path| path.device.clone());
        let device = device.ok_or(PathError::Number(0))?;
        let serial = match &config.serial {
            Some(serial) => serial.clone(),
            None => serial_of(&device),
        };
        let printable = |c: char| c.is_ascii_graphic() || c == ' ';
        if serial.is_empty() || serial.len() > ID_BYTES || !serial.chars().all(printable) {
            return Err(DiskError::Serial(serial));
        }
        let manner = Manner {
            read_only: config.read_only,
            cache: config.cache,
            block: config.block,
            discovers: config.discovers,
        };
        let paths = Paths::open(&config.paths, manner, around)?;
        if config.cache == Cache::Direct && !paths.in_memory() && paths.alignment().is_none() {
            log::warn!(
                "{}: no direct I/O in blocks of {} bytes, so it goes through the page cache",
                device.display(),
                config.block
            );
        }
        let bytes = paths.size(Instant::now());
        let bytes = bytes.ok_or_else(|| DiskError::Size(device.clone()))?;
        let sectors = sectors(bytes, config.block);
        if sectors == 0 {
            return Err(DiskError::TooSmall {
                path: device,
                bytes,
            });
        }
        let names = paths.all().iter().map(|path| path.name().to_owned());
        Ok(Arc::new(Self {
            serial,
            locality: Locality::new(around.nodes.numbers(), names.collect()),
            paths: Arc::new(paths),
            around: around.clone(),
            executors: OnceLock::new(),
            sectors: AtomicU64::new(sectors),
            watchers: Mutex::default(),
            tokens: OnceLock::new(),
            cannot_zero: AtomicBool::new(false),
            sync_failed: AtomicI32::new(0),
            failed_syncs: AtomicU64::new(0),
            counters: Counters::default(),
            times: RequestTimes::default(),
            limit: LogLimit::new(),
            config,
        }))
    }

    /// Starts its per-node workers, where there are several nodes and several paths to steer to,
    /// and looks after its paths from now on.
    ///
    /// # Errors
    /// What the system says.
    pub fn start(&self) -> io::Result<()> {
        prober::start(&self.paths)?;
        let nodes = self.around.nodes.all();
        if nodes.len() > 1 && self.paths.several() && self.around.steers {
            let start = |node| Executor::start(node, Arc::clone(&self.paths));
            let executors = nodes.iter().map(start).collect::<io::Result<_>>()?;
            let _ = self.executors.set(executors);
        }
        Ok(())
    }

    /// Its per-node workers; none where nothing is steered.
    #[must_use]
    pub fn executors(&self) -> &[Executor] {
        self.executors.get().map_or(&[], Vec::as_slice)
    }

    /// The ways to its blocks.
    #[must_use]
    pub fn paths(&self) -> &Arc<Paths> {
        &self.paths
    }

    /// What it is served in.
    #[must_use]
    pub fn around(&self) -> &Surroundings {
        &self.around
    }

    /// Bytes moved between nodes.
    #[must_use]
    pub fn locality(&self) -> &Locality {
        &self.locality
    }

    /// Has its requests open tokens from now on. The first call counts.
    pub fn open_tokens(&self, tokens: Arc<Tokens>) {
        let _ = self.tokens.set(tokens);
    }

    /// The tokens that its requests may carry.
    #[must_use]
    pub fn tokens(&self) -> Option<&Tokens> {
        self.tokens.get().map(AsRef::as_ref)
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &DiskConfig {
        &self.config
    }

    /// Its serial number.
    #[must_use]
    pub fn serial(&self) -> &str {
        &self.serial
    }

    /// The answer to GET_ID: the serial number, zeroes after it.
    #[must_use]
    pub fn id(&self) -> [u8; ID_BYTES] {
        let mut id = [0; ID_BYTES];
        for (to, from) in id.iter_mut().zip(self.serial.bytes()) {
            *to = from;
        }
        id
    }

    /// Whether transfers are over when their system call is, see
    /// [`Storage`](farlane_block::storage::Storage).
    #[must_use]
    pub fn in_memory(&self) -> bool {
        self.paths.in_memory()
    }

    /// What direct I/O demands, where it is used.
    #[must_use]
    pub fn alignment(&self) -> Option<Alignment> {
        self.paths.alignment()
    }

    /// Limits that requests are checked against.
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits {
            sectors: self.sectors.load(Ordering::Relaxed),
            read_only: self.config.read_only,
        }
    }

    /// Its counters.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// How long its requests take.
    #[must_use]
    pub fn times(&self) -> &RequestTimes {
        &self.times
    }

    /// How often its VM can have something logged.
    #[must_use]
    pub fn limit(&self) -> &LogLimit {
        &self.limit
    }

    /// Whether ranges can be zeroed in place, as far as is known.
    #[must_use]
    pub fn can_zero(&self) -> bool {
        !self.cannot_zero.load(Ordering::Relaxed)
    }

    /// They cannot.
    pub fn cannot_zero(&self) {
        self.cannot_zero.store(true, Ordering::Relaxed);
    }

    /// Why what was written cannot be made durable, if a sync has failed before. The kernel tells
    /// of write-back that has failed once, and the next `fdatasync` succeeds although the bytes are
    /// not there (fsync(2)): only who opens the disk again, and reads it, knows what it has.
    ///
    /// # Errors
    /// That of the first sync that has failed.
    pub fn can_sync(&self) -> io::Result<()> {
        match self.sync_failed.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// How many syncs have failed.
    #[must_use]
    pub fn failed_syncs(&self) -> u64 {
        self.failed_syncs.load(Ordering::Acquire)
    }

    /// A sync has failed, and its request is answered with an error.
    pub fn sync_has_failed(&self, errno: i32) {
        let none = &self.sync_failed;
        let first = none.compare_exchange(0, errno, Ordering::AcqRel, Ordering::Relaxed);
        self.failed_syncs.fetch_add(1, Ordering::AcqRel);
        if first.is_ok() {
            let (serial, why) = (&self.serial, io::Error::from_raw_os_error(errno));
            log::error!(
                "Disk {serial}: a flush has failed: {why}; what was written before may \
                 be lost, and flushes fail until the disk is opened again"
            );
        }
    }

    /// Looks at the size of its file, and tells all watchers if it is another one.
    pub fn look_at_size(&self) {
        let Some(bytes) = self.paths.size(Instant::now()) else {
            return;
        };
        let now = sectors(bytes, self.config.block);
        let before = self.sectors.swap(now, Ordering::Relaxed);
        if before == now {
            return;
        }
        log::info!("Disk {}: {before} sectors have become {now}", self.serial);
        let mut watchers = lock(&self.watchers);
        watchers.retain(|watcher| watcher.strong_count() > 0);
        let told: Vec<_> = watchers.iter().filter_map(Weak::upgrade).collect();
        drop(watchers);
        for watcher in told {
            watcher.resized();
        }
    }

    /// Tells `watcher` of new sizes for as long as it lives.
    pub fn watch(&self, watcher: Weak<dyn Watcher>) {
        let mut watchers = lock(&self.watchers);
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(watcher);
    }

    /// The features that it offers to drivers.
    #[must_use]
    pub fn features(&self) -> u64 {
        let always = feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::TOPOLOGY
            | feature::FLUSH
            | feature::CONFIG_WCE
            | feature::MQ
            | common::INDIRECT_DESC
            | common::EVENT_IDX
            | common::VERSION_1
            | common::PROTOCOL_FEATURES;
        if self.config.read_only {
            always | feature::RO
        } else {
            always | feature::DISCARD | feature::WRITE_ZEROES
        }
    }

    /// Its configuration space, with its write cache on or off.
    #[must_use]
    pub fn config_space(&self, writeback: bool) -> Config {
        let block = self.config.block;
        let mut config = Config {
            capacity: self.sectors.load(Ordering::Relaxed).into(),
            seg_max: SEG_MAX.into(),
            blk_size: block.into(),
            physical_block_exp: if block < PHYSICAL_BLOCK { 3 } else { 0 },
            min_io_size: 1.into(),
            opt_io_size: (OPTIMAL_BYTES / block.max(1)).into(),
            writeback: writeback.into(),
            num_queues: self.config.queues.into(),
            ..Config::default()
        };
        if !self.config.read_only {
            config.max_discard_sectors = MAX_RANGE_SECTORS.into();
            config.max_discard_seg = MAX_RANGES.into();
            config.discard_sector_alignment = (PHYSICAL_BLOCK / 512).into();
            config.max_write_zeroes_sectors = MAX_RANGE_SECTORS.into();
            config.max_write_zeroes_seg = MAX_RANGES.into();
            config.write_zeroes_may_unmap = 1;
        }
        config
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.paths.end();
    }
}

/// Whole blocks of a file, in sectors; no more than an `off_t` can address.
fn sectors(bytes: u64, block: u32) -> u64 {
    let bytes = bytes.min(1 << 62);
    let block = u64::from(block.max(512));
    bytes / block * block / SECTOR
}

/// A serial number that a path has today and tomorrow: a hash (FNV-1a, 64 bits) of its real name.
fn serial_of(path: &Path) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let hash = path
        .as_os_str()
        .as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("FL{hash:016X}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn config(path: &Path) -> DiskConfig {
        DiskConfig {
            paths: vec![PathConfig::new(path.to_owned())],
            discovers: false,
            serial: None,
            read_only: false,
            queues: 4,
            cache: Cache::Direct,
            block: 512,
        }
    }

    fn open(config: DiskConfig) -> Result<Arc<Disk>, DiskError> {
        Disk::open(config, &Surroundings::default())
    }

    #[derive(Default)]
    struct Told(AtomicU32);

    impl Watcher for Told {
        fn resized(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_file_that_grows_is_a_larger_disk_and_watchers_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 1100]).unwrap();
        let disk = open(config(&path)).unwrap();
        assert_eq!(disk.config_space(true).capacity.get(), 2);
        let told = Arc::new(Told::default());
        let watcher: Arc<dyn Watcher> = told.clone();
        disk.watch(Arc::downgrade(&watcher));
        disk.look_at_size();
        assert_eq!(told.0.load(Ordering::SeqCst), 0);
        std::fs::write(&path, [0; 4096]).unwrap();
        disk.look_at_size();
        assert_eq!(told.0.load(Ordering::SeqCst), 1);
        assert_eq!(disk.limits().sectors, 8);
    }

    #[test]
    fn serial_numbers_stay_and_fit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 4096]).unwrap();
        let first = open(config(&path)).unwrap().serial().to_owned();
        let again = open(config(&folder.path().join(".").join("disk"))).unwrap();
        assert_eq!(first, again.serial());
        assert_eq!(first.len(), 18);
        assert_eq!(again.id()[18..], [0, 0]);
        drop(again);
        for serial in ["", "123456789012345678901", "a\n"] {
            let config = DiskConfig {
                serial: Some(serial.to_owned()),
                ..config(&path)
            };
            assert!(matches!(open(config), Err(DiskError::Serial(_))));
        }
    }

    #[test]
    fn a_read_only_disk_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 4096]).unwrap();
        let disk = open(DiskConfig {
            read_only: true,
            ..config(&path)
        })
        .unwrap();
        assert_eq!(disk.features() & feature::DISCARD, 0);
        assert_ne!(disk.features() & feature::RO, 0);
        assert!(disk.limits().read_only);
        let crumb = folder.path().join("crumb");
        std::fs::write(&crumb, [0; 511]).unwrap();
        assert!(matches!(
            open(config(&crumb)),
            Err(DiskError::TooSmall { bytes: 511, .. })
        ));
    }
}
