//! Between files and device memory that is not mapped: chunk by chunk through a buffer, in two
//! halves where the device copies by itself. Then one chunk is between file and buffer while the
//! one before, or after, is between buffer and device. Long reads are shared by threads.

use crate::bounce::{Bounce, LARGE_BYTES, SMALL_BYTES};
use crate::provider::Provider;
use crate::sys::{self, Direction};
use farlane_transport::with_signals_blocked;
use rustix::io::Errno;
use std::num::NonZero;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::thread::Builder;

/// Fewest and most bytes of a chunk; between them it is a quarter of the request. On an H200 1 MiB
/// of the page cache went at 7.2 GB/s in chunks of 256 KiB and 6.3 GB/s in one, 64 MiB at 8.3 GB/s
/// in chunks of 1 MiB and 7.8 GB/s in those of 256 KiB (`pread` alone: 8.9 GB/s).
const CHUNK_MIN: usize = SMALL_BYTES;
const CHUNK_MAX: usize = LARGE_BYTES / 2;
/// What chunks are multiples of, which direct I/O may ask for.
const ALIGNMENT: usize = 64 << 10;
/// Most threads that share a read, and fewest bytes for each: one copies out of the page cache at a
/// sixth of what the bus to the device can do. Writes are not shared, as most file systems take one
/// at a time of a file.
const READERS: usize = 4;
const READER_BYTES: usize = 4 << 20;

/// Device memory, and a buffer that its content goes through.
struct Stage<'a> {
    provider: &'a dyn Provider,
    address: usize,
    length: usize,
    chunk: usize,
    /// Whether the device copies to and from the buffer while this thread does something else.
    is_alongside: bool,
    /// Where in the memory it is copying.
    copying: Option<usize>,
    bounce: Bounce,
}

impl<'a> Stage<'a> {
    fn new(
        provider: &'a dyn Provider,
        direction: Direction,
        (address, length): (usize, usize),
    ) -> Result<Self, Errno> {
        let quarter = (length / 4).next_multiple_of(ALIGNMENT);
        let chunk = quarter.clamp(CHUNK_MIN, CHUNK_MAX);
        // To memory that is not pinned little is copied slowly, too: 64 KiB from an H200 to a file
        // went at 2.2 GB/s, and 3.3 through pinned memory.
        let wants_pinned = length > SMALL_BYTES || direction == Direction::Write;
        let bounce = if wants_pinned {
            Bounce::take_large(length.min(chunk))?
        } else {
            Bounce::take(length)?
        };
        let lasting = bounce.lasting().filter(|_| wants_pinned);
        let is_pinned = lasting.is_some_and(|buffer| provider.pin(address, buffer));
        Ok(Self {
            provider,
            address,
            length,
            chunk,
            is_alongside: is_pinned && length > chunk,
            copying: None,
            bounce,
        })
    }

    /// The chunk that begins `at` bytes into the memory: its buffer, empty at the end.
    fn buffer(&mut self, at: usize) -> &mut [u8] {
        let is_odd = self.is_alongside && !(at / self.chunk).is_multiple_of(2);
        let start = if is_odd { CHUNK_MAX } else { 0 };
        let length = self.chunk.min(self.length - at);
        self.bounce.bytes(start..start + length)
    }

    /// Copies the first `bytes` of the buffer of the chunk `at` to the device, or begins to.
    fn copy_in(&mut self, at: usize, bytes: usize) -> Result<(), Errno> {
        let (provider, address, is_alongside) =
            (self.provider, self.address + at, self.is_alongside);
        let from = self.buffer(at).get(..bytes).unwrap_or_default();
        if is_alongside {
            // SAFETY: registered memory, says `new`'s caller; the buffer is left alone until the
            // copy has ended.
            unsafe { provider.begin_copy_in(address, from) }?;
            self.copying = Some(address);
            return Ok(());
        }
        // SAFETY: registered memory.
        unsafe { provider.copy_in(address, from) }
    }

    /// Copies the chunk `at` to its buffer, or begins to.
    fn copy_out(&mut self, at: usize) -> Result<(), Errno> {
        let (provider, address, is_alongside) =
            (self.provider, self.address + at, self.is_alongside);
        let to = self.buffer(at);
        if to.is_empty() {
            return Ok(());
        }
        if is_alongside {
            // SAFETY: as in `copy_in`.
            unsafe { provider.begin_copy_out(to, address) }?;
            self.copying = Some(address);
            return Ok(());
        }
        // SAFETY: registered memory.
        unsafe { provider.copy_out(to, address) }
    }

    /// Waits for the copy that is under way. Where the device cannot be asked (it is being reset,
    /// or another thread captures a graph), nobody knows when the copy ends.
    fn finish(&mut self) -> Result<(), Errno> {
        let Some(address) = self.copying.take() else {
            return Ok(());
        };
        let result = self.provider.finish_copies(address);
        if result.is_err() {
            self.bounce.lose();
        }
        result
    }

    /// Reads from the file: the bytes that have arrived, and what ended it before.
    fn read(&mut self, fd: RawFd, offset: u64) -> Part {
        let (mut arrived, mut copying) = (0, 0);
        let mut step = || {
            while arrived + copying < self.length {
                let at = arrived + copying;
                let buffer = self.buffer(at);
                let (base, wanted) = (buffer.as_mut_ptr().cast(), buffer.len());
                // SAFETY: a buffer of our own.
                let moved = unsafe {
                    sys::transfer(Direction::Read, fd, base, wanted, offset + at as u64)
                }?;
                let copied = std::mem::take(&mut copying);
                self.finish()?;
                arrived += copied;
                if moved > 0 {
                    self.copy_in(at, moved)?;
                    copying = moved;
                }
                if moved < wanted {
                    break;
                }
            }
            Ok(())
        };
        let result = step();
        let last = self.finish();
        if last.is_ok() {
            arrived += copying;
        }
        (arrived, result.and(last))
    }

    /// Writes to the file: the bytes that it has taken, and what ended it before.
    fn write(&mut self, fd: RawFd, offset: u64) -> Part {
        let mut written = 0;
        let mut step = || {
            self.copy_out(0)?;
            while written < self.length {
                self.finish()?;
                let next = written + self.buffer(written).len();
                if self.is_alongside {
                    self.copy_out(next)?;
                }
                let buffer = self.buffer(written);
                let (base, wanted) = (buffer.as_mut_ptr().cast(), buffer.len());
                let offset = offset + written as u64;
                // SAFETY: a buffer of our own.
                let moved = unsafe { sys::transfer(Direction::Write, fd, base, wanted, offset) }?;
                written += moved;
                if moved < wanted {
                    break;
                }
                if !self.is_alongside {
                    self.copy_out(next)?;
                }
            }
            Ok(())
        };
        let result = step();
        (written, result)
    }
}

impl Drop for Stage<'_> {
    /// The buffer is not given back while the device copies.
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

/// What a part of a read has moved, and what ended it before.
type Part = (usize, Result<(), Errno>);

fn read_part(fd: RawFd, provider: &dyn Provider, memory: (usize, usize), offset: u64) -> Part {
    match Stage::new(provider, Direction::Read, memory) {
        Ok(mut stage) => stage.read(fd, offset),
        Err(error) => (0, Err(error)),
    }
}

/// How many threads share a read of that length.
fn readers(length: usize) -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    let most = (length / READER_BYTES).min(READERS);
    if most <= 1 {
        return 1;
    }
    let found = || std::thread::available_parallelism().map_or(1, NonZero::get);
    most.min(*PROCESSORS.get_or_init(found))
}

/// Reads to equal parts of the memory at the same time, in this thread and others, which get no
/// signals and end with the call. Parts count up to the first one that is short.
fn read_in_parts(
    fd: RawFd,
    provider: &dyn Provider,
    (address, length): (usize, usize),
    offset: u64,
    readers: usize,
) -> Part {
    let share = length.div_ceil(readers).next_multiple_of(CHUNK_MAX);
    let part = |start: usize| {
        let memory = (address + start, share.min(length - start));
        read_part(fd, provider, memory, offset + start as u64)
    };
    let others = (share..length).step_by(share);
    std::thread::scope(|scope| {
        let others: Vec<_> = with_signals_blocked(|| {
            let begin = |start| {
                let thread = Builder::new().name("farlane-io".into());
                (start, thread.spawn_scoped(scope, move || part(start)).ok())
            };
            others.map(begin).collect()
        });
        let (mut moved, mut result) = part(0);
        for (start, thread) in others {
            let is_whole = result.is_ok() && moved == start;
            // A program may have as many threads as it is allowed.
            let (more, end) = match thread {
                Some(thread) => thread.join().unwrap_or((0, Err(Errno::FAULT))),
                None if is_whole => part(start),
                None => (0, Ok(())),
            };
            if is_whole {
                moved += more;
                result = end;
            }
        }
        (moved, result)
    })
}

/// Moves `length` bytes between `offset` of a file and `address` in memory of `provider` that is
/// not mapped; a read ends at the end of the file.
///
/// # Errors
/// What `pread` or `pwrite` says, or `EFAULT` where the device cannot copy, when nothing was moved.
pub(crate) fn transfer(
    fd: RawFd,
    provider: &dyn Provider,
    direction: Direction,
    memory: (usize, usize),
    offset: u64,
) -> Result<usize, Errno> {
    let (moved, result) = match (direction, readers(memory.1)) {
        (Direction::Read, 1) => read_part(fd, provider, memory, offset),
        (Direction::Read, readers) => read_in_parts(fd, provider, memory, offset, readers),
        (Direction::Write, _) => Stage::new(provider, direction, memory)?.write(fd, offset),
    };
    match result {
        Err(error) if moved == 0 => Err(error),
        _ => Ok(moved),
    }
}
