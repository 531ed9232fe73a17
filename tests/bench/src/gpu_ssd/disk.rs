//! The file that is read, and what of it is in the page cache.

use crate::job::word_at;
use anyhow::{Context as _, Result, bail, ensure};
use farlane_io_core::plan::Run;
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;
/// How often a state of the page cache is brought about.
const ATTEMPTS: u32 = 5;
/// The same number on all architectures.
const CACHESTAT: libc::c_long = 451;
/// How long reads that are under way may take to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A file whose bytes are known.
pub struct Disk {
    folder: tempfile::TempDir,
    file: File,
}

impl Disk {
    /// Writes `bytes` bytes to a file of `length` bytes in `folder`, gone on drop.
    pub fn new(folder: &Path, bytes: u64, length: u64) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("gpu-ssd-")
            .tempdir_in(folder)
            .with_context(|| format!("Cannot use {}", folder.display()))?;
        let path = folder.path().join("file");
        let mut file = File::create_new(&path)?;
        let mut piece = Vec::with_capacity(1 << 20);
        let mut index = 0;
        while index * 8 < bytes {
            piece.clear();
            piece.extend((index..index + (1 << 17)).flat_map(|i| word_at(i).to_le_bytes()));
            file.write_all(&piece).context("Cannot write the file")?;
            index += 1 << 17;
        }
        file.set_len(length)?;
        file.sync_all()?;
        Ok(Self {
            folder,
            file: File::open(path)?,
        })
    }

    /// Its path.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("file")
    }

    /// The folder, which is on the disk.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Takes all of it out of the page cache. What read-ahead is still fetching is waited for.
    pub fn evict(&self) -> Result<()> {
        let start = Instant::now();
        loop {
            fadvise(&self.file, 0, None, Advice::DontNeed)?;
            let left = self.resident()?;
            if left == 0 {
                return Ok(());
            }
            ensure!(
                start.elapsed() < PATIENCE,
                "{left} pages stay in the page cache"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Brings `start..end` into the page cache.
    pub fn warm(&self, start: u64, end: u64) -> Result<()> {
        let mut piece = vec![0; 1 << 20];
        let mut at = start;
        while at < end {
            let length = usize::try_from(end - at)?.min(piece.len());
            self.file.read_exact_at(&mut piece[..length], at)?;
            at += u64::try_from(length)?;
        }
        Ok(())
    }

    /// Of the file from its begin on, the cached runs are in the page cache, and nothing else. The
    /// system may take pages back at any time: then it is done again.
    pub fn arrange(&self, runs: &[Run]) -> Result<()> {
        let cached = runs.iter().filter(|run| run.cached);
        let wanted = cached.map(|run| run.bytes / PAGE).sum::<u64>();
        let mut found = 0;
        for _ in 0..ATTEMPTS {
            self.evict()?;
            // No read-ahead beyond a run.
            fadvise(&self.file, 0, None, Advice::Random)?;
            let mut at = 0;
            for run in runs {
                if run.cached {
                    self.warm(at, at + run.bytes)?;
                }
                at += run.bytes;
            }
            fadvise(&self.file, 0, None, Advice::Normal)?;
            found = self.resident()?;
            if found.abs_diff(wanted) <= wanted / 50 {
                return Ok(());
            }
        }
        bail!("{found} pages are cached instead of {wanted}")
    }

    /// Pages in the page cache, with those that are being read (`cachestat`, Linux 6.5).
    pub fn resident(&self) -> Result<u64> {
        // Offset and length; no length is all.
        let range = [0_u64; 2];
        // Cached, dirty, under writeback, evicted, recently evicted.
        let mut found = [0_u64; 5];
        // SAFETY: both have the size of the structures of the call.
        let done = unsafe {
            libc::syscall(
                CACHESTAT,
                self.file.as_raw_fd(),
                range.as_ptr(),
                found.as_mut_ptr(),
                0,
            )
        };
        let failed = std::io::Error::last_os_error();
        ensure!(done == 0, "cachestat fails: {failed}");
        Ok(found[0])
    }
}
