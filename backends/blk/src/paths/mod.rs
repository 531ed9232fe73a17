//! The paths to a disk: one or several ways to the same blocks, each on a NUMA node.
//!
//! * [`open`]: finding them, and making sure that they lead to the same disk.
//! * [`identity`]: what the kernel tells of block devices.
//! * [`health`]: when a path has failed; [`prober`]: how that is found out, and how it comes back.
//! * `ids`: which path is meant.
//! * `shrinking`: whether a disk has become smaller, or its paths are failing.

pub mod health;
pub mod identity;
mod ids;
pub mod open;
pub mod prober;
pub mod ring;
mod shrinking;

use farlane_block::storage::{Alignment, Place, Storage};
use farlane_block::syncs::Syncs;
use farlane_daemon::log_limit::LogLimit;
use farlane_daemon::warn_limited;
use farlane_sys::sync::{lock, read, write};
use farlane_zero_copy::topology::Node;
use health::{Changing, Health};
use identity::Identity;
use shrinking::Shrinking;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock};

pub use ids::{PathId, PathSet};

/// Most paths of a disk.
pub const MAX_PATHS: usize = 16;

/// Writes of a path at first: a predecessor may have written, and that may not be durable.
const FIRST_MARK: u64 = 1;

/// System calls that look after several paths.
pub const SYSTEM_CALLS: &[libc::c_long] = &[
    // Failed paths are opened again, and the kernel is asked where they lead.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    libc::SYS_openat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(not(target_arch = "x86_64"))]
    libc::SYS_faccessat,
    libc::SYS_getdents64,
    libc::SYS_fstatfs,
    libc::SYS_pread64,
];

/// A path that is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathConfig {
    /// The file or block device.
    pub device: PathBuf,
    /// Its NUMA node, if configured.
    pub node: Option<Node>,
    /// Its name, if configured.
    pub name: Option<String>,
}

impl PathConfig {
    /// One of which nothing else is said.
    #[must_use]
    pub fn new(device: PathBuf) -> Self {
        Self {
            device,
            ..Self::default()
        }
    }
}

/// Counters of a path.
#[derive(Debug, Default)]
pub struct PathCounters {
    /// Times that it has failed.
    pub failures: AtomicU64,
    /// Times that it has come back.
    pub returns: AtomicU64,
}

/// A way to the blocks of a disk.
#[derive(Debug)]
pub struct DiskPath {
    name: String,
    node: Node,
    device: PathBuf,
    identity: Identity,
    place: Place,
    storage: RwLock<Arc<Storage>>,
    /// Counts how often `storage` was another one.
    generation: AtomicU32,
    health: Changing,
    /// Writes that it has done, and how many of them are known to be durable.
    written: AtomicU64,
    synced: AtomicU64,
    /// Those that are under way, of all paths that are one file or device: they are one open file.
    syncs: Syncs,
    counters: PathCounters,
    /// For the prober: it is to look, or to end.
    attention: Mutex<bool>,
    wakes: Condvar,
}

impl DiskPath {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its NUMA node.
    #[must_use]
    pub fn node(&self) -> Node {
        self.node
    }

    /// Its health.
    #[must_use]
    pub fn health(&self) -> Health {
        self.health.get()
    }

    /// Its counters.
    #[must_use]
    pub fn counters(&self) -> &PathCounters {
        &self.counters
    }

    /// The storage that is open now.
    #[must_use]
    pub fn storage(&self) -> Arc<Storage> {
        Arc::clone(&read(&self.storage))
    }

    /// Counts how often something else was opened.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    fn replace(&self, storage: Storage) {
        *write(&self.storage) = Arc::new(storage);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Bytes were written over it: they are not durable yet. To be called before anybody hears that
    /// they were written.
    pub fn wrote(&self) {
        self.written.fetch_add(1, Ordering::AcqRel);
    }

    /// Up to where it has been written, for [`synced`](Self::synced).
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// What was written up to a [mark](Self::mark) is durable.
    pub fn synced(&self, mark: u64) {
        self.synced.fetch_max(mark, Ordering::AcqRel);
    }

    /// Its syncs that are under way, and those of the paths that are the same file or device.
    #[must_use]
    pub fn syncs(&self) -> &Syncs {
        &self.syncs
    }

    fn is_dirty(&self) -> bool {
        self.synced.load(Ordering::Acquire) < self.mark()
    }

    fn call_for_attention(&self) {
        *lock(&self.attention) = true;
        self.wakes.notify_all();
    }
}

/// All paths to a disk.
#[derive(Debug)]
pub struct Paths {
    all: Vec<DiskPath>,
    /// For each node: the paths, the nearest first.
    nearest: Vec<Vec<PathId>>,
    /// What direct I/O demands; none with the page cache and in memory.
    alignment: Option<Alignment>,
    in_memory: bool,
    fails_over: bool,
    read_only: bool,
    block: u32,
    sysfs: PathBuf,
    /// What all block devices have in common.
    blocks: Option<String>,
    /// Bytes that a path has to have.
    bytes: AtomicU64,
    /// What is believed of that when it is seen again.
    shrinking: Mutex<Shrinking>,
    /// Held while the size of the disk changes, and while a path comes up.
    changing: Mutex<()>,
    ending: std::sync::atomic::AtomicBool,
    /// Whose memory transfers touch, where that is said to others who read the disk. Held while a
    /// path is replaced.
    user: Mutex<Option<u64>>,
    limit: LogLimit,
}

impl Paths {
    /// All.
    #[must_use]
    pub fn all(&self) -> &[DiskPath] {
        &self.all
    }

    /// All, each with what it is known by.
    pub fn numbered(&self) -> impl Iterator<Item = (PathId, &DiskPath)> {
        PathId::all().zip(&self.all)
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, path: PathId) -> Option<&DiskPath> {
        self.all.get(path.index())
    }

    /// Whether there is more than one.
    #[must_use]
    pub fn several(&self) -> bool {
        self.all.len() > 1
    }

    /// What direct I/O demands, where it is used.
    #[must_use]
    pub fn alignment(&self) -> Option<Alignment> {
        self.alignment
    }

    /// Whether transfers go through the page cache of the host, which tells of what it could not
    /// write later, to a sync.
    #[must_use]
    pub fn are_cached(&self) -> bool {
        self.alignment.is_none() && !self.in_memory
    }

    /// Whether transfers are over when their system call is.
    #[must_use]
    pub fn in_memory(&self) -> bool {
        self.in_memory
    }

    /// The best path from a node, of those that are up and not among `tried`: the nearest. None
    /// where there is no other; a disk with one path always has that one.
    #[must_use]
    pub fn choose(&self, node: usize, tried: PathSet) -> Option<PathId> {
        if !self.several() {
            return (!tried.contains(PathId::FIRST)).then_some(PathId::FIRST);
        }
        let order = self.nearest.get(node)?;
        let mut fit = order.iter().copied();
        fit.find(|&path| {
            !tried.contains(path) && self.get(path).is_some_and(|p| p.health() == Health::Up)
        })
    }

    /// The paths in this state.
    #[must_use]
    pub fn in_state(&self, health: Health) -> PathSet {
        let found = self.numbered().filter(|(_, path)| path.health() == health);
        found.map(|(id, _)| id).collect()
    }

    /// A request has failed on a path.
    pub fn suspect(&self, path: PathId, why: &std::io::Error) {
        let Some(path) = self.get(path) else { return };
        if path.health.change(Health::Up, Health::Suspect) {
            warn_limited!(
                self.limit,
                "Path {}: a request has failed: {why}",
                path.name
            );
            path.call_for_attention();
        }
    }

    /// What has failed on these paths has succeeded on another one.
    pub fn confirm(&self, tried: PathSet) {
        for (id, path) in self.numbered() {
            if tried.contains(id) && path.health.change(Health::Suspect, Health::Failed) {
                self.has_failed(path, "what failed on it succeeds elsewhere");
            }
        }
    }

    fn has_failed(&self, path: &DiskPath, why: &str) {
        path.counters.failures.fetch_add(1, Ordering::Relaxed);
        let left = self.in_state(Health::Up).len();
        let dirty = if path.is_dirty() && path.mark() > FIRST_MARK {
            "; what it has written since the last flush is flushed over another path"
        } else {
            ""
        };
        warn_limited!(
            self.limit,
            "Path {} has failed ({why}); {left} left{dirty}",
            path.name
        );
    }

    /// The paths by which everything written so far is made durable: those that have had writes
    /// since they were last synced, one where several are one file or device, and at least one.
    /// Failed ones are not among them; none are where all have failed.
    #[must_use]
    pub fn to_sync(&self) -> Vec<PathId> {
        let mut found: Vec<PathId> = Vec::new();
        let usable = || {
            let all = self.numbered();
            all.filter(|(_, path)| path.health() != Health::Failed)
        };
        for path in self.all.iter().filter(|path| path.is_dirty()) {
            let first = usable().find(|(_, p)| p.place == path.place);
            if let Some((first, _)) = first.filter(|(first, _)| !found.contains(first)) {
                found.push(first);
            }
        }
        if found.is_empty() {
            found.extend(usable().map(|(first, _)| first).next());
        }
        found
    }

    /// A sync of a path has succeeded that began at a [mark](Self::marks).
    pub fn synced(&self, path: PathId, marks: &[u64]) {
        let Some(place) = self.get(path).map(|p| p.place) else {
            return;
        };
        for (path, mark) in self.all.iter().zip(marks) {
            if path.place == place {
                path.synced(*mark);
            }
        }
    }

    /// Up to where each path has been written.
    #[must_use]
    pub fn marks(&self) -> Vec<u64> {
        self.all.iter().map(DiskPath::mark).collect()
    }

    /// Whether a request that has failed on one path can succeed on another. Paths that are one
    /// file or one device fail together: their errors are the disk's. (Besides, Linux tells of a
    /// failed write-back once, and a sync after that succeeds.)
    #[must_use]
    pub fn fails_over(&self) -> bool {
        self.fails_over
    }

    /// Says that transfers are going to touch the memory of `user`, a number that no other VM's
    /// disk has. A disk that is written is nobody else's until the last transfer of who had it is
    /// over; one that is only read may still be read into this memory by a backend that was killed,
    /// which is waited for. `waits` is called then.
    ///
    /// # Errors
    /// It has not ended.
    pub fn enter(&self, user: u64, waits: impl Fn()) -> std::io::Result<()> {
        let mut current = lock(&self.user);
        if !self.read_only || *current == Some(user) {
            return Ok(());
        }
        for (number, path) in self.all.iter().enumerate() {
            if let Err(e) = path.storage().enter(user, &waits) {
                let entered = self.all.iter().take(number);
                entered.for_each(|path| path.storage().leave(user));
                return Err(e);
            }
        }
        if let Some(before) = current.replace(user) {
            self.all.iter().for_each(|p| p.storage().leave(before));
        }
        Ok(())
    }

    /// Nothing touches that memory any more.
    pub fn leave(&self) {
        let mut current = lock(&self.user);
        if let Some(user) = current.take() {
            self.all.iter().for_each(|path| path.storage().leave(user));
        }
    }

    /// Ends the probers.
    pub fn end(&self) {
        self.ending.store(true, Ordering::Release);
        self.all.iter().for_each(DiskPath::call_for_attention);
    }
}

#[cfg(test)]
mod tests;
