//! The disk as a test has it.

use super::log::{Caches, Log, PowerLoss};
use super::namespace;
use super::server::{FILE, Operation, Server, Shared, State};
use fuser::{BackgroundSession, Config, MountOption};
use rustix::mount::UnmountFlags;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// After how long a request that does not come never will: a guard against hanging, which no test
/// depends on.
const PATIENCE: Duration = Duration::from_secs(30);

/// A file with a volatile write cache, unmounted when it is dropped.
#[derive(Debug)]
pub struct VolatileDisk {
    shared: Arc<Shared>,
    /// Ends the session; after it has been unmounted.
    _session: BackgroundSession,
    folder: tempfile::TempDir,
}

impl VolatileDisk {
    /// A disk of so many zeroes.
    ///
    /// # Errors
    /// There is no FUSE here, or no right to mount.
    pub fn new(bytes: usize, caches: Caches) -> io::Result<Self> {
        Self::with(vec![0; bytes], caches)
    }

    /// A disk with this content, all of which is durable.
    ///
    /// # Errors
    /// There is no FUSE here, or no right to mount.
    pub fn with(content: Vec<u8>, caches: Caches) -> io::Result<Self> {
        let failed = |what: &str, e: io::Error| {
            let why = format!(
                "Durability cannot be tested here: {what}: {e}; it needs root and /dev/fuse"
            );
            io::Error::new(e.kind(), why)
        };
        let is_there = std::fs::metadata("/dev/fuse");
        is_there.map_err(|e| failed("Cannot find /dev/fuse", e))?;
        namespace::enter().map_err(|e| failed("Cannot unshare the mount namespace", e))?;
        let folder = tempfile::tempdir()?;
        let shared = Arc::new(Shared::new(Log::new(content, caches)));
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("volatile-disk".to_owned()),
            MountOption::NoDev,
            MountOption::NoSuid,
        ];
        let session = fuser::spawn_mount(Server::new(Arc::clone(&shared)), folder.path(), &config);
        Ok(Self {
            _session: session.map_err(|e| failed("Cannot mount through FUSE", e))?,
            shared,
            folder,
        })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.folder.path().join(FILE)
    }

    /// Has `link` be a name of the file too.
    ///
    /// # Errors
    /// What the system says.
    pub fn link(&self, link: &Path) -> io::Result<()> {
        std::os::unix::fs::symlink(self.path(), link)
    }

    /// What was done to the disk until now.
    #[must_use]
    pub fn log(&self) -> Log {
        self.shared.state().log.clone()
    }

    /// Begins anew: what is on the disk is durable, and nothing was done to it.
    pub fn restart_log(&self) {
        let mut state = self.shared.state();
        state.log = Log::new(state.content.clone(), state.log.caches);
    }

    /// The position in the log of what comes next.
    #[must_use]
    pub fn position(&self) -> usize {
        self.shared.state().log.len()
    }

    /// The content of the disk if the power were lost now.
    #[must_use]
    pub fn power_loss(&self, loss: PowerLoss) -> Vec<u8> {
        let log = self.log();
        log.image(log.len(), loss)
    }

    /// The content that is read now, cached or not.
    #[must_use]
    pub fn content(&self) -> Vec<u8> {
        self.shared.state().content.clone()
    }

    /// Has all operations of this kind fail with an error number, and do nothing, until
    /// [`heal`](Self::heal).
    pub fn fail(&self, operation: Operation, errno: i32) {
        self.shared.state().faults.insert(operation, errno);
    }

    /// Has writes move at most so many bytes each, until [`heal`](Self::heal). There is no such
    /// thing for reads: `io_uring` goes on by itself with a read of a regular file that falls
    /// short, and with one through FUSE around the page cache it does so at the first offset again
    /// (Linux 6.18), so that the code under test would be told a lie.
    pub fn shorten_writes(&self, bytes: usize) {
        self.shared.state().most_written = bytes;
    }

    /// Has everything work again.
    pub fn heal(&self) {
        let mut state = self.shared.state();
        state.faults.clear();
        state.most_written = usize::MAX;
    }

    /// How many operations of this kind were asked for, failed ones included.
    #[must_use]
    pub fn requests(&self, operation: Operation) -> u64 {
        let state = self.shared.state();
        state.requests.get(&operation).copied().unwrap_or(0)
    }

    /// Has flushes that are requested from now on wait for
    /// [`release_flushes`](Self::release_flushes).
    pub fn hold_flushes(&self) {
        self.shared.state().holds_flushes = true;
    }

    /// Waits until a flush is held.
    ///
    /// # Errors
    /// None came.
    pub fn await_held_flush(&self) -> io::Result<()> {
        self.await_state("flush", |state| !state.held.is_empty())
    }

    fn await_state(&self, what: &str, is_there: impl Fn(&State) -> bool) -> io::Result<()> {
        let end = Instant::now() + PATIENCE;
        let mut state = self.shared.state();
        while !is_there(&state) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = format!("No {what} was requested");
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            state = self.shared.wait(state, left);
        }
        Ok(())
    }

    /// Has reads that are requested from now on wait for [`release_reads`](Self::release_reads).
    pub fn hold_reads(&self) {
        self.shared.state().holds_reads = true;
    }

    /// Waits until a read is held.
    ///
    /// # Errors
    /// None came.
    pub fn await_held_read(&self) -> io::Result<()> {
        self.await_state("read", |state| !state.held_reads.is_empty())
    }

    /// Answers the reads that are held; others are held no longer.
    pub fn release_reads(&self) {
        self.shared.state().release_reads();
    }

    /// Has whoever closes a descriptor of the file that is opened from now on wait for
    /// [`release_closes`](Self::release_closes).
    pub fn hold_closes(&self) {
        self.shared.state().holds_closes = true;
    }

    /// Waits until somebody closes a descriptor, and is held.
    ///
    /// # Errors
    /// Nobody did.
    pub fn await_held_close(&self) -> io::Result<()> {
        self.await_state("close", |state| !state.held_closes.is_empty())
    }

    /// Lets those go on who are held; others are held no longer.
    pub fn release_closes(&self) {
        self.shared.state().release_closes();
    }

    /// Completes the flushes that are held; others are held no longer.
    pub fn release_flushes(&self) {
        self.shared.state().release();
    }
}

impl Drop for VolatileDisk {
    fn drop(&mut self) {
        // Whoever still waits for an answer would not end.
        self.heal();
        self.release_flushes();
        self.release_reads();
        self.release_closes();
        // A process that ends while one of its threads closes such a file waits for its own answer
        // for ever.
        if let Err(e) = self.await_state("last close", |state| state.asking.is_empty()) {
            eprintln!("{}: {e}", self.folder.path().display());
        }
        // Whoever still has the file open keeps it; it is served until the last has closed it.
        if let Err(e) = rustix::mount::unmount(self.folder.path(), UnmountFlags::DETACH) {
            eprintln!("Cannot unmount {}: {e}", self.folder.path().display());
        }
    }
}
