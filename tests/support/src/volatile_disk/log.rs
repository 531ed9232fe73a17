//! What was done to a disk, and what a power loss leaves of it.

/// Bytes that a disk writes whole or not at all.
pub const SECTOR: u64 = 512;

/// Which writes a flush reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caches {
    /// All: the disk has one write cache.
    Shared,
    /// Those through the same open file: each way to the disk has a write cache of its own.
    PerHandle,
}

/// A request that has been completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Bytes were written.
    Write {
        /// Through which open file.
        handle: u64,
        /// First byte on the disk.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
        /// Whether it bypassed the write cache (`O_DSYNC`, FUA).
        durable: bool,
    },
    /// Bytes were zeroed or given back.
    Zero {
        /// Through which open file.
        handle: u64,
        /// First byte on the disk.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// The write cache was written back.
    Flush {
        /// Through which open file.
        handle: u64,
        /// Entries before this position were complete when the flush was requested: it reaches them
        /// and no others.
        covers: usize,
    },
}

/// What becomes of writes that were not flushed when the power was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerLoss {
    /// All are lost.
    LosesAll,
    /// All had been written back already.
    LosesNothing,
    /// Each of their sectors is kept or lost, by a generator with this seed.
    LosesSome(u64),
}

/// Everything that was done to a disk, in order of completion.
#[derive(Clone, Debug)]
pub struct Log {
    pub(crate) initial: Vec<u8>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) caches: Caches,
}

impl Log {
    /// That of a disk with these bytes to which nothing was done.
    #[must_use]
    pub fn new(initial: Vec<u8>, caches: Caches) -> Self {
        Self {
            initial,
            entries: Vec::new(),
            caches,
        }
    }

    /// The requests.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// How many requests there are; the position of a power loss after all of them.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing was done.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The flushes among the requests.
    #[must_use]
    pub fn flushes(&self) -> usize {
        let flushes = self.entries.iter();
        flushes.filter(|e| matches!(e, Entry::Flush { .. })).count()
    }

    /// The content of the disk after a power loss that came when the first `position` requests were
    /// complete.
    #[must_use]
    pub fn image(&self, position: usize, loss: PowerLoss) -> Vec<u8> {
        let mut image = self.initial.clone();
        let done = self.entries.get(..position).unwrap_or(&self.entries);
        for (index, entry) in done.iter().enumerate() {
            let (offset, length) = match entry {
                Entry::Write { offset, bytes, .. } => (*offset, bytes.len() as u64),
                Entry::Zero { offset, length, .. } => (*offset, *length),
                Entry::Flush { .. } => continue,
            };
            let safe = Self::is_durable(done, index, self.caches);
            let mut at = offset;
            while at < offset + length {
                let sector = at / SECTOR;
                let end = ((sector + 1) * SECTOR).min(offset + length);
                let kept = match loss {
                    _ if safe => true,
                    PowerLoss::LosesAll => false,
                    PowerLoss::LosesNothing => true,
                    PowerLoss::LosesSome(seed) => mix(seed ^ mix(index as u64) ^ sector) & 1 == 0,
                };
                if kept {
                    entry.apply(&mut image, at, end);
                }
                at = end;
            }
        }
        image
    }

    /// Whether entry `index` survives a power loss after all of `done`.
    fn is_durable(done: &[Entry], index: usize, caches: Caches) -> bool {
        let writer = match done.get(index) {
            Some(Entry::Write { durable: true, .. }) => return true,
            Some(Entry::Write { handle, .. } | Entry::Zero { handle, .. }) => *handle,
            Some(Entry::Flush { .. }) | None => return false,
        };
        done.iter().any(|entry| match entry {
            Entry::Flush { handle, covers } => {
                *covers > index && (caches == Caches::Shared || *handle == writer)
            }
            Entry::Write { .. } | Entry::Zero { .. } => false,
        })
    }
}

impl Entry {
    /// Does to `disk` what the request did to the bytes from `from` to `to`.
    pub(crate) fn apply(&self, disk: &mut [u8], from: u64, to: u64) {
        let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        let Some(target) = disk.get_mut(index(from)..index(to)) else {
            return;
        };
        match self {
            Self::Write { offset, bytes, .. } => {
                if let Some(source) = bytes.get(index(from - offset)..index(to - offset)) {
                    target.copy_from_slice(source);
                }
            }
            Self::Zero { .. } => target.fill(0),
            Self::Flush { .. } => (),
        }
    }
}

/// The output function of SplitMix64.
pub(crate) fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(handle: u64, sector: u64, byte: u8, durable: bool) -> Entry {
        Entry::Write {
            handle,
            offset: sector * SECTOR,
            bytes: vec![byte; 512],
            durable,
        }
    }

    fn log(caches: Caches, entries: Vec<Entry>) -> Log {
        Log {
            entries,
            ..Log::new(vec![0; 4096], caches)
        }
    }

    /// The first byte of each sector.
    fn sectors(image: &[u8]) -> Vec<u8> {
        image.chunks(512).map(|sector| sector[0]).collect()
    }

    #[test]
    fn a_power_loss_leaves_what_was_flushed_before_it() {
        let log = log(
            Caches::Shared,
            vec![
                write(1, 0, 1, false),
                Entry::Flush {
                    handle: 2,
                    covers: 1,
                },
                write(1, 1, 2, false),
                write(1, 2, 3, true),
                Entry::Zero {
                    handle: 1,
                    offset: 0,
                    length: 512,
                },
            ],
        );
        let after = |position, loss| sectors(&log.image(position, loss))[..3].to_vec();
        assert_eq!(after(1, PowerLoss::LosesAll), [0, 0, 0]);
        assert_eq!(after(1, PowerLoss::LosesNothing), [1, 0, 0]);
        assert_eq!(after(2, PowerLoss::LosesAll), [1, 0, 0]);
        // What bypasses the cache takes nothing else along.
        assert_eq!(after(5, PowerLoss::LosesAll), [1, 0, 3]);
        assert_eq!(after(5, PowerLoss::LosesNothing), [0, 2, 3]);
    }

    #[test]
    fn a_flush_reaches_what_was_complete_when_it_was_requested() {
        let late = log(
            Caches::Shared,
            vec![
                write(1, 0, 1, false),
                write(1, 1, 2, false),
                Entry::Flush {
                    handle: 1,
                    covers: 1,
                },
            ],
        );
        assert_eq!(sectors(&late.image(3, PowerLoss::LosesAll))[..2], [1, 0]);
        let other = log(
            Caches::PerHandle,
            vec![
                write(1, 0, 1, false),
                write(2, 1, 2, false),
                Entry::Flush {
                    handle: 2,
                    covers: 2,
                },
            ],
        );
        assert_eq!(sectors(&other.image(3, PowerLoss::LosesAll))[..2], [0, 2]);
    }

    #[test]
    fn a_subset_is_another_one_for_each_seed_and_tears_writes() {
        let whole = Entry::Write {
            handle: 1,
            offset: 0,
            bytes: vec![9; 4096],
            durable: false,
        };
        let log = log(Caches::Shared, vec![whole]);
        let image = |seed| log.image(1, PowerLoss::LosesSome(seed));
        let images: std::collections::BTreeSet<_> = (0..32).map(image).collect();
        assert!(images.len() > 16, "{}", images.len());
        assert!(images.iter().any(|i| i.contains(&9) && i.contains(&0)));
        assert_eq!(image(7), image(7));
        // No sector is torn.
        let is_whole = |sector: &[u8]| sector.iter().all(|byte| *byte == sector[0]);
        assert!(images.iter().all(|i| i.chunks(512).all(is_whole)));
    }
}
