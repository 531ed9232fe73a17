//! A random load for a device over the disk, and the power-loss replay of what came of it.

use super::disk::VolatileDisk;
use super::history::{Attempt, Checked, History};
use super::log::{PowerLoss, SECTOR, mix};
use std::collections::{BTreeMap, BTreeSet};

/// Places on the disk, each of which has one request at a time.
const SLOTS: u64 = 32;
const SLOT_SECTORS: u64 = 8;
/// Most requests under way.
const DEPTH: usize = 8;

/// Bytes of the disk that a load uses, from its beginning on.
pub const LOAD_BYTES: usize = 32 * 8 * 512;

/// A request to the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// To write.
    Write {
        /// First byte on the disk, of a sector.
        offset: u64,
        /// Whole sectors.
        bytes: Vec<u8>,
        /// Whether it is to be durable by itself (FUA).
        forced: bool,
    },
    /// To zero sectors.
    Zero {
        /// First byte on the disk, of a sector.
        offset: u64,
        /// Bytes of whole sectors.
        length: u64,
        /// Whether by giving them back.
        discard: bool,
    },
    /// To make durable what is complete.
    Flush,
}

/// A device under test, as its driver has it.
pub trait Device {
    /// Submits a request, and does not wait for it. `tag` is free, and less than eight.
    fn submit(&mut self, tag: usize, request: &Request);

    /// Waits until a request that was submitted is complete. The tags of those that are; all of
    /// them have succeeded.
    fn await_completions(&mut self) -> Vec<usize>;
}

/// What is to be done to a device.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Of the generator.
    pub seed: u64,
    /// How many requests.
    pub requests: usize,
    /// Whether the device has a volatile write cache: only then there are flushes, and only then a
    /// write may be lost that is complete.
    pub write_cache: bool,
    /// Whether some writes are to be durable by themselves.
    pub forced_writes: bool,
}

enum UnderWay {
    Change {
        attempt: Attempt,
        slot: u64,
        forced: bool,
    },
    Flush(BTreeSet<Attempt>),
}

struct Running<'a> {
    disk: &'a VolatileDisk,
    load: Load,
    history: History,
    under_way: BTreeMap<usize, UnderWay>,
}

impl Load {
    /// Does it, beginning with all durable that is on the disk, and looks at what a power loss at
    /// any time would have left.
    ///
    /// # Errors
    /// Something of which the driver was told that it is durable would have been lost.
    pub fn run(self, disk: &VolatileDisk, device: &mut dyn Device) -> Result<Checked, String> {
        disk.restart_log();
        let mut running = Running {
            disk,
            load: self,
            history: History::new(disk.content()),
            under_way: BTreeMap::new(),
        };
        for number in 0..self.requests as u64 {
            let random = mix(self.seed ^ mix(number));
            if random >> 60 < 6 && !running.under_way.is_empty() {
                running.complete(device);
            }
            while running.under_way.len() >= DEPTH {
                running.complete(device);
            }
            running.submit(device, number, random);
        }
        while !running.under_way.is_empty() {
            running.complete(device);
        }
        let log = disk.log();
        let is_volatile = |position| {
            log.image(position, PowerLoss::LosesAll) != log.image(position, PowerLoss::LosesNothing)
        };
        if self.write_cache && !(0..=log.len()).any(is_volatile) {
            return Err(
                "There was never anything in the write cache that could be lost".to_owned(),
            );
        }
        running.history.check(&log)
    }
}

impl Running<'_> {
    fn submit(&mut self, device: &mut dyn Device, number: u64, random: u64) {
        let Some(tag) = (0..DEPTH).find(|tag| !self.under_way.contains_key(tag)) else {
            return;
        };
        if self.load.write_cache && random.is_multiple_of(8) {
            let reached = self.history.submit_flush();
            self.under_way.insert(tag, UnderWay::Flush(reached));
            return device.submit(tag, &Request::Flush);
        }
        let Some(slot) = self.free_slot(random >> 8) else {
            return;
        };
        let first = random >> 16 & (SLOT_SECTORS - 1);
        let sectors = 1 + (random >> 24) % (SLOT_SECTORS - first);
        let offset = (slot * SLOT_SECTORS + first) * SECTOR;
        let length = sectors * SECTOR;
        let forced = self.load.forced_writes && random >> 32 & 3 == 0;
        let (request, bytes, forced) = match random >> 40 & 15 {
            discard @ 0..2 => {
                let discard = discard == 1;
                let zeroes = (0..length).map(|_| 0).collect();
                (
                    Request::Zero {
                        offset,
                        length,
                        discard,
                    },
                    zeroes,
                    false,
                )
            }
            _ => {
                // Another one for each sector of each write.
                let stamp = |n: u64| (number << 16 | (n + 1)).to_le_bytes();
                let bytes: Vec<u8> = (0..sectors).flat_map(|n| stamp(n).repeat(64)).collect();
                let request = Request::Write {
                    offset,
                    bytes: bytes.clone(),
                    forced,
                };
                (request, bytes, forced)
            }
        };
        let attempt = self.history.submit(offset, bytes);
        let change = UnderWay::Change {
            attempt,
            slot,
            forced,
        };
        self.under_way.insert(tag, change);
        device.submit(tag, &request);
    }

    fn free_slot(&self, random: u64) -> Option<u64> {
        let is_busy = |wanted: u64| {
            let mut all = self.under_way.values();
            all.any(|u| matches!(u, UnderWay::Change { slot, .. } if *slot == wanted))
        };
        (0..SLOTS)
            .map(|n| (random + n) % SLOTS)
            .find(|slot| !is_busy(*slot))
    }

    fn complete(&mut self, device: &mut dyn Device) {
        for tag in device.await_completions() {
            let position = self.disk.position();
            match self.under_way.remove(&tag) {
                Some(UnderWay::Flush(reached)) => self.history.flushed(&reached, position),
                Some(UnderWay::Change {
                    attempt, forced, ..
                }) => {
                    if forced || !self.load.write_cache {
                        self.history.completed_durably(attempt, position);
                    } else {
                        self.history.completed(attempt);
                    }
                }
                None => (),
            }
        }
    }
}
