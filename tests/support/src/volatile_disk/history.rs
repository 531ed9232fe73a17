//! What a driver was told, held against what a power loss leaves.

use super::log::{Log, PowerLoss, SECTOR};
use std::collections::{BTreeMap, BTreeSet};

/// Images with random subsets of the volatile writes, for each point of the log.
const SUBSETS: u64 = 4;

/// A write, from its submission on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attempt(usize);

#[derive(Debug)]
struct Write {
    offset: u64,
    bytes: Vec<u8>,
    completed: bool,
    /// From which position of the log on it is promised to be durable.
    durable_at: Option<usize>,
}

/// The writes of a driver, in order of submission, and which of them were said to be durable.
///
/// A driver does not submit a write of a sector while another one of the same sector is under way:
/// which of the two is last would be anybody's guess.
#[derive(Debug)]
pub struct History {
    initial: Vec<u8>,
    writes: Vec<Write>,
}

/// What a check looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    /// Images of the disk.
    pub images: usize,
    /// Sectors of them of which something was promised.
    pub sectors: usize,
}

impl History {
    /// That of a disk whose content is durable and this.
    #[must_use]
    pub fn new(initial: Vec<u8>) -> Self {
        Self {
            initial,
            writes: Vec::new(),
        }
    }

    /// A write of whole sectors is submitted (or the zeroing of them).
    pub fn submit(&mut self, offset: u64, bytes: Vec<u8>) -> Attempt {
        self.writes.push(Write {
            offset,
            bytes,
            completed: false,
            durable_at: None,
        });
        Attempt(self.writes.len() - 1)
    }

    /// The driver has been told that it is complete.
    pub fn completed(&mut self, attempt: Attempt) {
        if let Some(write) = self.writes.get_mut(attempt.0) {
            write.completed = true;
        }
    }

    /// The driver has been told that it is complete, and by that durable. `position` is where the
    /// log was then.
    pub fn completed_durably(&mut self, attempt: Attempt, position: usize) {
        self.completed(attempt);
        if let Some(write) = self.writes.get_mut(attempt.0) {
            write.durable_at = Some(position);
        }
    }

    /// What a flush that is submitted now has to make durable: the writes that are complete.
    #[must_use]
    pub fn submit_flush(&self) -> BTreeSet<Attempt> {
        let all = self.writes.iter().enumerate();
        all.filter(|(_, write)| write.completed && write.durable_at.is_none())
            .map(|(index, _)| Attempt(index))
            .collect()
    }

    /// The driver has been told that such a flush is complete. `position` is where the log was
    /// then.
    pub fn flushed(&mut self, attempts: &BTreeSet<Attempt>, position: usize) {
        for attempt in attempts {
            if let Some(write) = self.writes.get_mut(attempt.0) {
                let at = write.durable_at.unwrap_or(position);
                write.durable_at = Some(at.min(position));
            }
        }
    }

    /// Looks at the disk after a power loss at each position of the log, with nothing, all, and
    /// some subsets of the volatile writes kept. Each sector has to hold what the driver was last
    /// promised of it, or something that it wrote later.
    ///
    /// # Errors
    /// The first sector that does not.
    pub fn check(&self, log: &Log) -> Result<Checked, String> {
        let sectors = self.sectors();
        let mut checked = Checked {
            images: 0,
            sectors: 0,
        };
        for position in 0..=log.len() {
            let subsets = (0..SUBSETS).map(|n| PowerLoss::LosesSome(n << 32 | position as u64));
            let losses = [PowerLoss::LosesAll, PowerLoss::LosesNothing];
            for loss in losses.into_iter().chain(subsets) {
                let image = log.image(position, loss);
                checked.images += 1;
                for (sector, writes) in &sectors {
                    let promised = writes
                        .iter()
                        .rposition(|index| self.is_durable(*index, position));
                    let start = usize::try_from(sector * SECTOR).map_err(|e| e.to_string())?;
                    let range = start..start + 512;
                    let found = image.get(range.clone()).ok_or("A sector beyond the end")?;
                    checked.sectors += usize::from(promised.is_some());
                    let newer = writes.get(promised.unwrap_or(0)..).unwrap_or_default();
                    let was = promised.is_none() && self.initial.get(range) == Some(found);
                    if !was
                        && !newer
                            .iter()
                            .any(|index| self.part(*index, *sector) == found)
                    {
                        return Err(format!(
                            "After a power loss at {position} of {} that {loss:?}, sector \
                             {sector} begins with {:?}, not with what \
                             write {promised:?} of {} to it has made durable or a later one",
                            log.len(),
                            &found[..8],
                            writes.len(),
                        ));
                    }
                }
            }
        }
        if checked.sectors == 0 {
            return Err("Nothing was promised to the driver".to_owned());
        }
        Ok(checked)
    }

    fn is_durable(&self, index: usize, position: usize) -> bool {
        let at = self.writes.get(index).and_then(|write| write.durable_at);
        at.is_some_and(|at| at <= position)
    }

    fn part(&self, index: usize, sector: u64) -> &[u8] {
        let part = self.writes.get(index).and_then(|write| {
            let start = usize::try_from(sector * SECTOR - write.offset).ok()?;
            write.bytes.get(start..start + 512)
        });
        part.unwrap_or_default()
    }

    /// The writes of each sector, in order.
    fn sectors(&self) -> BTreeMap<u64, Vec<usize>> {
        let mut sectors: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (index, write) in self.writes.iter().enumerate() {
            let first = write.offset / SECTOR;
            for sector in first..first + write.bytes.len() as u64 / SECTOR {
                sectors.entry(sector).or_default().push(index);
            }
        }
        sectors
    }
}

#[cfg(test)]
mod tests {
    use super::super::log::{Caches, Entry};
    use super::*;

    fn written(log: &mut Log, byte: u8, durable: bool) {
        log.entries.push(Entry::Write {
            handle: 1,
            offset: 512,
            bytes: vec![byte; 1024],
            durable,
        });
    }

    fn flushed(log: &mut Log) {
        let covers = log.len();
        log.entries.push(Entry::Flush { handle: 1, covers });
    }

    #[test]
    fn what_was_flushed_is_found_and_may_be_overwritten_later() {
        let mut log = Log::new(vec![0; 4096], Caches::Shared);
        let mut history = History::new(vec![0; 4096]);
        let first = history.submit(512, vec![1; 1024]);
        written(&mut log, 1, false);
        history.completed(first);
        let flush = history.submit_flush();
        flushed(&mut log);
        history.flushed(&flush, log.len());
        let second = history.submit(512, vec![2; 1024]);
        written(&mut log, 2, false);
        history.completed(second);
        let checked = history.check(&log).unwrap();
        assert_eq!(
            checked,
            Checked {
                images: 24,
                sectors: 24
            }
        );
    }

    #[test]
    fn a_flush_that_was_answered_but_not_done_is_found() {
        let mut log = Log::new(vec![0; 4096], Caches::Shared);
        let mut history = History::new(vec![0; 4096]);
        let write = history.submit(512, vec![1; 1024]);
        written(&mut log, 1, false);
        history.completed(write);
        let flush = history.submit_flush();
        assert!(
            history
                .check(&log)
                .unwrap_err()
                .contains("Nothing was promised")
        );
        history.flushed(&flush, log.len());
        // Too late.
        flushed(&mut log);
        let error = history.check(&log).unwrap_err();
        assert!(
            error.contains("at 1 of 2 that LosesAll, sector 1"),
            "{error}"
        );
        history.flushed(&flush, log.len());
    }

    #[test]
    fn what_comes_back_after_it_was_overwritten_durably_is_found() {
        let mut log = Log::new(vec![0; 4096], Caches::Shared);
        let mut history = History::new(vec![0; 4096]);
        for (byte, durable) in [(1, true), (2, false)] {
            let write = history.submit(512, vec![byte; 1024]);
            written(&mut log, byte, durable);
            history.completed_durably(write, log.len());
        }
        let error = history.check(&log).unwrap_err();
        assert!(error.contains("at 2 of 2"), "{error}");
    }
}
