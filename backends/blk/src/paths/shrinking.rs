//! The size of a disk, and whether it has become smaller: a path that is failing may show fewer
//! bytes, too.

use super::health::Health;
use super::{DiskPath, Paths};
use farlane_block::storage::{known_size, size};
use farlane_sys::sync::lock;
use std::os::fd::OwnedFd;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A disk has become smaller if that is seen again after so long.
const APART: Duration = Duration::from_millis(500);

/// What was seen at each look since, if it is not believed yet.
#[derive(Debug, Default)]
pub(super) struct Shrinking(Option<(u64, Instant)>);

impl Shrinking {
    /// The paths were seen to have fewer bytes. Returns whether they have had so many for long
    /// enough.
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
    /// The size of the disk in bytes, if all paths that are up agree in it. While others are not,
    /// it becomes smaller only when two looks apart have shown that, and none in between anything
    /// else: those that are up may be failing. Paths that have failed are not asked: what they show
    /// may be that, or be old.
    #[must_use]
    pub fn size(&self, now: Instant) -> Option<u64> {
        // One look at a time. A path can be slow to answer: who comes up does not wait for that.
        let mut shrinking = lock(&self.shrinking);
        let up = self.all_up();
        let agreed = self.agreed(&up, size);
        let _nobody_comes_up = self.changing();
        let same = |(one, other): (&&DiskPath, &&DiskPath)| std::ptr::eq(*one, *other);
        let up_now = self.all_up();
        if up.len() != up_now.len() || !up.iter().zip(&up_now).all(same) {
            // Who is up now has not been asked. The next look will.
            return None;
        }
        let found = match agreed {
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

    /// A path that was not up could be read. It is up, if it still has as many bytes as the disk:
    /// which may have grown while it was read, as one that was not up has no say in that. Returns
    /// whether it is.
    pub(super) fn comes_up(&self, path: &DiskPath, before: Health) -> bool {
        let bytes = size(&path.storage().file);
        let _size_stays = self.changing();
        let has_all = |bytes| bytes >= self.bytes.load(Ordering::Relaxed);
        bytes.is_ok_and(has_all) && path.health.change(before, Health::Up)
    }

    /// The size of the disk changes, or a path comes up.
    fn changing(&self) -> MutexGuard<'_, ()> {
        lock(&self.changing)
    }

    /// Whether the disk ends before `end`, as far as this host knows, and not only a path that has
    /// been pulled: all paths agree in that, and none has failed.
    pub fn ends_before(&self, end: u64) -> bool {
        let all: Vec<&DiskPath> = self.all.iter().collect();
        let none_has_failed = all.iter().all(|path| path.health() != Health::Failed);
        none_has_failed
            && self
                .agreed(&all, known_size)
                .is_some_and(|bytes| bytes < end)
    }

    fn all_up(&self) -> Vec<&DiskPath> {
        let is_up = |path: &&DiskPath| path.health() == Health::Up;
        self.all.iter().filter(is_up).collect()
    }

    /// The size in which these paths agree.
    fn agreed(
        &self,
        up: &[&DiskPath],
        size: impl Fn(&OwnedFd) -> rustix::io::Result<u64>,
    ) -> Option<u64> {
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
