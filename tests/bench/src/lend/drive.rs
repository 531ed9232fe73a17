//! Reads through an NVMe driver.

use anyhow::{Result, ensure};
use farlane_vm_front_end::nvme::{Command, Driver, Queue, Transport, io};
use std::time::{Duration, Instant};

/// Bytes of a page, and of a random read.
pub const PAGE: u64 = 4096;
/// Largest read.
pub const LARGEST: u64 = 1 << 20;
/// Most reads at a time.
pub const DEPTH: u32 = 256;

/// Numbers that look random, the same each time.
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// Begins.
    pub fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Where reads go: to places of the file at random, or one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// Bytes of the file.
    pub bytes: u64,
    random: Random,
    next: u64,
}

impl Places {
    /// In a file of so many bytes.
    pub fn new(bytes: u64) -> Self {
        Self {
            bytes,
            random: Random::new(),
            next: 0,
        }
    }

    /// The offset of the next read of `bytes`.
    pub fn next(&mut self, bytes: u64, random: bool) -> u64 {
        let count = self.bytes / bytes;
        if random {
            return self.random.below(count) * bytes;
        }
        self.next = (self.next + 1) % count;
        self.next * bytes
    }
}

/// A stretch of reads.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// How many.
    pub reads: u64,
    /// How long.
    pub time: Duration,
    /// Doorbell registers that had to be written by messages meanwhile.
    pub trapped: u64,
}

impl Done {
    /// Reads a second.
    pub fn per_second(&self) -> f64 {
        f64::from(u32::try_from(self.reads).unwrap_or(u32::MAX)) / self.time.as_secs_f64()
    }
}

/// A controller with one queue pair and a buffer for each read.
pub struct Drive<T> {
    driver: Driver<T>,
    queue: Queue,
    buffers: Vec<(u64, u64)>,
    nsid: u32,
    block: u64,
    places: Places,
}

impl<T: Transport> Drive<T> {
    /// Reads namespace `nsid` of an enabled controller, through a queue pair of its own.
    pub fn new(mut driver: Driver<T>, nsid: u32) -> Result<Self> {
        let queue = driver.create_queue(1, 2 * DEPTH)?;
        let (blocks, block) = driver.size(nsid)?;
        let mut buffers = Vec::new();
        for _ in 0..DEPTH {
            let buffer = driver.memory().allocate(LARGEST)?;
            buffers.push(driver.prps(buffer, LARGEST)?);
        }
        Ok(Self {
            driver,
            queue,
            buffers,
            nsid,
            block,
            places: Places::new(blocks * block),
        })
    }

    /// The driver.
    pub fn driver(&mut self) -> &mut Driver<T> {
        &mut self.driver
    }

    /// Another namespace.
    pub fn use_namespace(&mut self, nsid: u32) -> Result<()> {
        let (blocks, block) = self.driver.size(nsid)?;
        (self.nsid, self.block, self.places.bytes) = (nsid, block, blocks * block);
        Ok(())
    }

    fn command(&self, slot: u16, at: u64, bytes: u64) -> Result<Command> {
        let (first, second) = self.buffers[usize::from(slot)];
        // With two pages or fewer the second entry is a page, not a list.
        let second = if bytes <= 2 * PAGE {
            first + PAGE
        } else {
            second
        };
        let blocks = u32::try_from(bytes / self.block)?;
        let command = Command::blocks(io::READ, self.nsid, at / self.block, blocks);
        Ok(command.prp(first, second).id(slot))
    }

    /// One random read of a page; the time from the command to its answer.
    pub fn read_one(&mut self) -> Result<Duration> {
        let at = self.places.next(PAGE, true);
        let command = self.command(0, at, PAGE)?;
        let start = Instant::now();
        self.queue.push(&command);
        self.driver.ring(&mut self.queue)?;
        loop {
            if let Some(completion) = self.queue.pop() {
                let time = start.elapsed();
                self.driver.ring_head(&mut self.queue)?;
                ensure!(completion.status == 0, "status {:#x}", completion.status);
                return Ok(time);
            }
            std::hint::spin_loop();
        }
    }

    /// Reads of `bytes` each, `depth` at a time, for so long.
    pub fn read_for(
        &mut self,
        time: Duration,
        depth: u32,
        bytes: u64,
        random: bool,
    ) -> Result<Done> {
        let mut free: Vec<u16> = (0..u16::try_from(depth)?).collect();
        let start = Instant::now();
        let before = self.driver.rings;
        let mut reads = 0;
        let mut end = false;
        loop {
            if !end {
                while let Some(slot) = free.pop() {
                    let at = self.places.next(bytes, random);
                    let command = self.command(slot, at, bytes)?;
                    self.queue.push(&command);
                }
                self.driver.ring(&mut self.queue)?;
            }
            let mut taken = false;
            while let Some(completion) = self.queue.pop() {
                ensure!(completion.status == 0, "status {:#x}", completion.status);
                free.push(completion.cid);
                reads += 1;
                taken = true;
            }
            if taken {
                self.driver.ring_head(&mut self.queue)?;
                end = start.elapsed() >= time;
                if end && free.len() == usize::try_from(depth)? {
                    break;
                }
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(Done {
            reads,
            time: start.elapsed(),
            trapped: self.driver.rings - before,
        })
    }
}
