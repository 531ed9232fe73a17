//! All sizes, alignments and calls, by several threads.

use crate::transfer::{Call, GUARD, Way, buffer, place, read_checked, transfer, write_checked};
use crate::{Report, contents};
use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use farlane_gpu_driver::{Buffer, Gpu};
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Sizes in bytes: around sectors, pages and what is cut by the way.
const SIZES: &[usize] = &[
    1,
    7,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    12_289,
    65_535,
    65_536,
    65_537,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 513,
    (16 << 20) + 1,
    64 << 20,
];
/// Up to this size each combination is tried; above, each alignment with one call; from [`LARGE`]
/// on a few.
const SMALL: usize = 64 << 10;
const LARGE: usize = 4 << 20;
/// What is read before anything is written.
const LOOK: usize = 64 << 10;
/// What a thread that writes reads at first.
const FIRST_READ: usize = 1 << 20;
/// Bytes beyond a multiple of the page size, in the file and in video memory.
const FILE_ALIGNMENTS: &[usize] = &[0, 1, 511, 512, 513, 4095];
const BUFFER_ALIGNMENTS: &[usize] = &[0, 1, 64, 512, 2049, 4095];
const CALLS: &[Call] = &[Call::Plain, Call::VectorAt, Call::Seek, Call::Vector];

/// The matrix.
#[derive(Debug, Args)]
pub struct Matrix {
    /// A file of known contents, made with `make`
    file: PathBuf,
    /// What its contents are made of
    #[arg(long)]
    seed: u64,
    /// How many threads; large transfers are made by as many as there is video memory for
    #[arg(long, default_value_t = 8)]
    threads: usize,
    /// The largest transfer, in bytes
    #[arg(long, default_value_t = 64 << 20)]
    max: usize,
}

/// One transfer.
#[derive(Clone, Copy, Debug)]
struct Item {
    bytes: usize,
    file_alignment: usize,
    buffer_alignment: usize,
    call: Call,
}

/// All transfers of a range of sizes.
fn items(sizes: &[usize]) -> Vec<Item> {
    let mut items = Vec::new();
    for &bytes in sizes {
        let mut turn = 0;
        for (i, &file_alignment) in FILE_ALIGNMENTS.iter().enumerate() {
            for (j, &buffer_alignment) in BUFFER_ALIGNMENTS.iter().enumerate() {
                if bytes >= LARGE && (i != j || i % 2 == 1) {
                    continue;
                }
                for (k, &call) in CALLS.iter().enumerate() {
                    if bytes <= SMALL || k == turn % CALLS.len() {
                        items.push(Item {
                            bytes,
                            file_alignment,
                            buffer_alignment,
                            call,
                        });
                    }
                }
                turn += 1;
            }
        }
    }
    items
}

/// A number without a pattern, for where in the file.
fn spread(seed: u64, index: usize) -> u64 {
    let mut bytes = [0; 8];
    contents::fill(
        seed ^ 0xface,
        u64::try_from(index).unwrap_or(0) * 8,
        &mut bytes,
    );
    u64::from_le_bytes(bytes)
}

/// A stretch of the file that is one thread's.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    begin: u64,
    bytes: u64,
}

impl Stretch {
    /// Where in it an item goes: somewhere, with its alignment, and with a guard at both ends.
    fn offset(&self, item: &Item, random: u64) -> Result<u64> {
        let guard = u64::try_from(GUARD)?;
        let needed = u64::try_from(item.bytes)? + 4 * guard;
        let room = self
            .bytes
            .checked_sub(needed)
            .with_context(|| format!("The file is too short for {} bytes at a time", item.bytes))?;
        let page = (self.begin + guard + random % (room + 1)) / guard * guard;
        Ok(page.max(guard) + u64::try_from(item.file_alignment)?)
    }
}

/// Items, and those who take them.
struct Work<'a> {
    matrix: &'a Matrix,
    way: Way,
    next: AtomicUsize,
    failed: AtomicBool,
    checks: AtomicU64,
    bytes: AtomicU64,
}

impl Work<'_> {
    fn run(&self, gpu: &Gpu, items: &[Item], threads: usize) -> Result<()> {
        let Some(largest) = items.iter().map(|item| item.bytes).max() else {
            return Ok(());
        };
        let room = usize::try_from(gpu.free_bytes())? / (largest + 4 * GUARD);
        let length = std::fs::metadata(&self.matrix.file)?.len();
        let in_file = usize::try_from(length)? / (largest + 8 * GUARD);
        let most = match self.way {
            Way::Read => room,
            Way::Write => room.min(in_file),
        };
        let threads = threads.min(most);
        ensure!(
            threads > 0,
            "There is no room for {largest} bytes in video memory, or in the file"
        );
        self.next.store(0, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let spawn = |index: usize| {
                let stretch = match self.way {
                    Way::Read => Stretch {
                        begin: 0,
                        bytes: length,
                    },
                    Way::Write => stretch(length, index, threads),
                };
                scope.spawn(move || self.thread(gpu, items, largest, stretch))
            };
            let running: Vec<_> = (0..threads).map(spawn).collect();
            let mut result = Ok(());
            for thread in running {
                match thread.join() {
                    Ok(Ok(())) => (),
                    Ok(Err(e)) => result = Err(e),
                    Err(_) => bail!("A thread has panicked"),
                }
            }
            result
        })
    }

    fn thread(&self, gpu: &Gpu, items: &[Item], largest: usize, stretch: Stretch) -> Result<()> {
        let result = self.take_turns(gpu, items, largest, stretch);
        if result.is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        result
    }

    fn take_turns(
        &self,
        gpu: &Gpu,
        items: &[Item],
        largest: usize,
        stretch: Stretch,
    ) -> Result<()> {
        // Each thread has its own position in the file, for the calls that use it.
        let file = File::options()
            .read(true)
            .write(self.way == Way::Write)
            .open(&self.matrix.file)
            .with_context(|| format!("Cannot open {}", self.matrix.file.display()))?;
        let mut buffer = buffer(gpu, largest + GUARD)?;
        if self.way == Way::Write {
            // What is there before, from where it is: also for those that write around the page
            // cache only where they have read around it.
            let first = stretch.begin + u64::try_from(GUARD)?;
            let range = place(0, largest.min(FIRST_READ));
            read_checked(
                &mut buffer,
                &file,
                self.matrix.seed,
                first,
                range,
                Call::Plain,
            )?;
        }
        while !self.failed.load(Ordering::Relaxed) {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else {
                break;
            };
            let offset = stretch.offset(item, spread(self.matrix.seed, index))?;
            match self.way {
                Way::Read => self.read(&mut buffer, &file, item, offset)?,
                Way::Write => self.write(&mut buffer, &file, item, offset)?,
            }
            self.checks.fetch_add(1, Ordering::Relaxed);
            self.bytes
                .fetch_add(u64::try_from(item.bytes)?, Ordering::Relaxed);
        }
        Ok(())
    }

    fn read(&self, buffer: &mut Buffer, file: &File, item: &Item, offset: u64) -> Result<()> {
        let range = place(item.buffer_alignment, item.bytes);
        read_checked(buffer, file, self.matrix.seed, offset, range, item.call)
    }

    /// Writes other contents, looks beside them, and puts the old ones back.
    fn write(&self, buffer: &mut Buffer, file: &File, item: &Item, offset: u64) -> Result<()> {
        let seed = self.matrix.seed;
        let range = place(item.buffer_alignment, item.bytes);
        write_checked(buffer, file, !seed, offset, range.clone(), item.call)?;
        let guard = u64::try_from(GUARD)?;
        for at in [offset - guard, offset + u64::try_from(item.bytes)?] {
            let mut beside = vec![0; GUARD];
            let read = transfer(Way::Read, Call::Plain, file, &mut beside, at)?;
            let should = contents::make(seed, at, GUARD);
            if let Some(place) = contents::difference(&beside[..read], &should) {
                bail!(
                    "{item:?} at {offset:#x}: byte {:#x} beside it has changed",
                    at + u64::try_from(place)?
                );
            }
        }
        write_checked(buffer, file, seed, offset, range, item.call)
    }
}

/// One of several stretches of a file.
fn stretch(length: u64, index: usize, of: usize) -> Stretch {
    let bytes = length / u64::try_from(of).unwrap_or(1);
    let guard = u64::try_from(GUARD).unwrap_or(1);
    let bytes = bytes / guard * guard;
    Stretch {
        begin: bytes * u64::try_from(index).unwrap_or(0),
        bytes,
    }
}

impl Matrix {
    fn run(&self, gpu: &Gpu, way: Way, what: &'static str) -> Result<Report> {
        let sizes = |from: usize, to: usize| {
            let fits = |&&bytes: &&usize| bytes >= from && bytes < to && bytes <= self.max;
            items(&SIZES.iter().filter(fits).copied().collect::<Vec<_>>())
        };
        let work = Work {
            matrix: self,
            way,
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            checks: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        };
        for (from, to) in [(0, LARGE), (LARGE, 32 << 20), (32 << 20, usize::MAX)] {
            work.run(gpu, &sizes(from, to), self.threads)?;
        }
        Ok(Report {
            what,
            checks: work.checks.into_inner(),
            bytes: work.bytes.into_inner(),
        })
    }

    /// Reads.
    pub fn read(&self, gpu: &Gpu) -> Result<Report> {
        self.run(gpu, Way::Read, "read-matrix")
    }

    /// Writes. First it reads a little: whoever chooses the way may trust none with what is written
    /// before it has seen where it leads.
    pub fn write(&self, gpu: &Gpu) -> Result<Report> {
        let file = File::open(&self.file)
            .with_context(|| format!("Cannot open {}", self.file.display()))?;
        let bytes = usize::try_from(file.metadata()?.len())?.min(LOOK);
        let mut buffer = buffer(gpu, bytes + GUARD)?;
        read_checked(
            &mut buffer,
            &file,
            self.seed,
            0,
            place(0, bytes),
            Call::Plain,
        )?;
        drop(buffer);
        self.run(gpu, Way::Write, "write-matrix")
    }
}
