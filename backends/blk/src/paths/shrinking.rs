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
    /// apart have shown that, and none in between anything else: those that are up may be failing. Where no path is up, they
    /// may have been found to be broken because the disk has become smaller: those that still have blocks are asked.
    #[must_use]
    pub fn size(&self, now: Instant) -> Option<u64> {
        let mut shrinking = self
            .shrinking
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let before = self.bytes.load(Ordering::Relaxed);
        // Asked once: they may change meanwhile.
        let up: Vec<bool> = self.all.iter().map(is_up).collect();
        let found = self.agreed(&up, before);
        let all_are_up = !up.contains(&false);
        let found = match found {
            Some(bytes) if bytes < before && !all_are_up => {
                shrinking.seen(bytes, now).then_some(bytes)
            }
            _ => {
                *shrinking = Shrinking::default();
                found
            }
        };
        if let Some(bytes) = found {
            self.bytes.store(bytes, Ordering::Relaxed);
        }
        found
    }

    /// The size in which the paths agree that can be asked. Where none is up, only whether it is smaller than `before`.
    fn agreed(&self, up: &[bool], before: u64) -> Option<u64> {
        let one_is_up = up.contains(&true);
        let mut sizes = Vec::new();
        for (path, is_up) in self.all.iter().zip(up) {
            let shown = size(&path.storage().file);
            if *is_up {
                sizes.push(shown.ok()?);
            } else if !one_is_up {
                sizes.extend(shown.ok().filter(|bytes| *bytes > 0));
            }
        }
        let first = sizes.first().copied()?;
        // A device that has been pulled has no blocks; a disk does not become empty by that.
        let is_size = (first > 0 || !self.several()) && (one_is_up || first < before);
        (is_size && sizes.iter().all(|bytes| *bytes == first)).then_some(first)
    }
}

fn is_up(path: &DiskPath) -> bool {
    path.health() == Health::Up
}
