//! The size of a disk, and whether it has become smaller: a path that is failing may show fewer bytes, too.

use super::health::Health;
use super::{DiskPath, Paths};
use farlane_file_io::storage::size;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A disk has become smaller if that is seen again after so long.
const APART: Duration = Duration::from_millis(500);

/// What was seen at each look since, if it is not believed yet.
#[derive(Debug, Default)]
pub(super) struct Shrinking(Option<(u64, Instant)>);

impl Shrinking {
    /// The paths were seen to have fewer bytes. Returns whether they have had so many for long enough.
    fn seen(&mut self, bytes: u64, now: Instant) -> bool {
        match self.0 {
            Some((before, since)) if before == bytes => {
                now.saturating_duration_since(since) >= APART
            }
            _ => {
                self.0 = Some((bytes, now));
                false
            }
        }
    }
}

impl Paths {
    /// The size of the disk in bytes, if all paths that are up agree in it. While others are not, it becomes smaller only when two looks
    /// apart have shown that, and none in between anything else: those that are up may be failing. Paths that have failed are not asked: what
    /// they show may be that, or be old.
    #[must_use]
    pub fn size(&self, now: Instant) -> Option<u64> {
        let mut shrinking = self
            .shrinking
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Asked once: they may change meanwhile.
        let is_up = |path: &&DiskPath| path.health() == Health::Up;
        let up: Vec<&DiskPath> = self.all.iter().filter(is_up).collect();
        let found = match self.agreed(&up) {
            Some(bytes)
                if bytes < self.bytes.load(Ordering::Relaxed) && up.len() < self.all.len() =>
            {
                shrinking.seen(bytes, now).then_some(bytes)
            }
            found => {
                *shrinking = Shrinking::default();
                found
            }
        };
        if let Some(bytes) = found {
            self.bytes.store(bytes, Ordering::Relaxed);
        }
        found
    }

    /// The size in which these paths agree.
    fn agreed(&self, up: &[&DiskPath]) -> Option<u64> {
        let mut found = None;
        for path in up {
            let bytes = size(&path.storage().file).ok()?;
            if found.is_some_and(|found| found != bytes) {
                return None;
            }
            found = Some(bytes);
        }
        // A device that has been pulled has no blocks; a disk does not become empty by that.
        found.filter(|bytes| *bytes > 0 || !self.several())
    }
}
