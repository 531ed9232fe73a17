//! One transfer between a file and video memory.

use crate::{Report, contents};
use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};
use farlane_gpu_driver::{Buffer, Gpu};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

/// Bytes beside a target that must not change.
pub const GUARD: usize = 4096;

/// By which call of the C library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Call {
    /// `pread` or `pwrite`.
    Plain,
    /// `lseek`, and `read` or `write`.
    Seek,
    /// `readv` or `writev`, after `lseek`, in three pieces.
    Vector,
    /// `preadv` or `pwritev`, in three pieces.
    VectorAt,
}

/// A transfer.
#[derive(Debug, Args)]
pub struct Transfer {
    /// The file
    pub file: PathBuf,
    /// What its contents, or those that are written, are made of
    #[arg(long)]
    pub seed: u64,
    /// Where in the file, in bytes
    #[arg(long, default_value_t = 0)]
    pub offset: u64,
    /// How many bytes
    #[arg(long)]
    pub bytes: usize,
    /// How far from the begin of a page of video memory
    #[arg(long, default_value_t = 0)]
    pub misalign: usize,
    /// By which call
    #[arg(long, value_enum, default_value_t = Call::Plain)]
    pub call: Call,
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the file.
    Read,
    /// To the file.
    Write,
}

/// Makes the call until all bytes have moved, or the file ends.
pub fn transfer(way: Way, call: Call, file: &File, data: &mut [u8], offset: u64) -> Result<usize> {
    let mut done = 0;
    while done < data.len() {
        let at = offset + u64::try_from(done)?;
        match once(way, call, file, &mut data[done..], at) {
            Ok(0) => break,
            Ok(bytes) => done += bytes,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => (),
            Err(e) => {
                let length = data.len();
                return Err(e).with_context(|| {
                    format!("{way:?} by {call:?} of {length:#x} bytes at {offset:#x} failed")
                });
            }
        }
    }
    Ok(done)
}

fn once(way: Way, call: Call, file: &File, data: &mut [u8], offset: u64) -> io::Result<usize> {
    let fd = file.as_raw_fd();
    let offset = i64::try_from(offset).map_err(io::Error::other)?;
    if matches!(call, Call::Seek | Call::Vector) {
        // SAFETY: no memory is involved.
        let at = unsafe { libc::lseek(fd, offset, libc::SEEK_SET) };
        if at != offset {
            return Err(io::Error::last_os_error());
        }
    }
    let pieces = pieces(data);
    let (all, length) = (data.as_mut_ptr().cast::<libc::c_void>(), data.len());
    let (list, count) = (pieces.as_ptr(), 3);
    // SAFETY: `all` and `length` are those of `data`, of which the pieces are disjoint parts; the
    // list has three.
    let moved = unsafe {
        match (way, call) {
            (Way::Read, Call::Plain) => libc::pread(fd, all, length, offset),
            (Way::Read, Call::Seek) => libc::read(fd, all, length),
            (Way::Read, Call::Vector) => libc::readv(fd, list, count),
            (Way::Read, Call::VectorAt) => libc::preadv(fd, list, count, offset),
            (Way::Write, Call::Plain) => libc::pwrite(fd, all, length, offset),
            (Way::Write, Call::Seek) => libc::write(fd, all, length),
            (Way::Write, Call::Vector) => libc::writev(fd, list, count),
            (Way::Write, Call::VectorAt) => libc::pwritev(fd, list, count, offset),
        }
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

/// Three pieces of it, of which the middle one begins and ends at odd places.
fn pieces(data: &mut [u8]) -> [libc::iovec; 3] {
    let (first, rest) = data.split_at_mut(data.len() / 3);
    let (second, third) = rest.split_at_mut(rest.len() / 2);
    [first, second, third].map(|piece| libc::iovec {
        iov_base: piece.as_mut_ptr().cast(),
        iov_len: piece.len(),
    })
}

/// Where a transfer goes in a buffer: there are guards before and after it.
pub fn place(misalign: usize, bytes: usize) -> std::ops::Range<usize> {
    GUARD + misalign..GUARD + misalign + bytes
}

/// A buffer with room for `bytes` at any misalignment, and guards.
pub fn buffer(gpu: &Gpu, bytes: usize) -> Result<Buffer> {
    Ok(gpu.allocate(3 * GUARD + bytes)?)
}

/// Reads, and checks what the device and the processor see, beside the target too.
pub fn read_checked(
    buffer: &mut Buffer,
    file: &File,
    seed: u64,
    offset: u64,
    range: std::ops::Range<usize>,
    call: Call,
) -> Result<()> {
    let of_file = contents::make(seed, offset, range.len());
    read_compared(buffer, file, &of_file, offset, range, call)
}

/// The same of a file that has the bytes `of_file` from `offset` on, as far as it reaches.
pub fn read_compared(
    buffer: &mut Buffer,
    file: &File,
    of_file: &[u8],
    offset: u64,
    range: std::ops::Range<usize>,
    call: Call,
) -> Result<()> {
    let what = || {
        format!(
            "{call:?} of {:#x} bytes at {offset:#x} to byte {:#x} of a page",
            range.len(),
            range.start % GUARD
        )
    };
    let whole = range.start - GUARD..range.end + GUARD;
    // What must be overwritten, and what must not.
    let mut should: Vec<u8> = vec![0x5a; whole.len()];
    for (is, of_file) in should[GUARD..].iter_mut().zip(of_file) {
        *is = !of_file;
    }
    buffer.as_mut_slice()[whole.clone()].copy_from_slice(&should);
    let end = file.metadata()?.len();
    let there = usize::try_from(end.saturating_sub(offset))?.min(range.len());
    let target = &mut buffer.as_mut_slice()[range.clone()];
    let read = transfer(Way::Read, call, file, target, offset)?;
    ensure!(read == there, "{}: {read:#x} bytes, not {there:#x}", what());
    should[GUARD..GUARD + there].copy_from_slice(&of_file[..there]);
    // From the other side: what the device sees.
    if buffer.checksum(whole.clone())? == crc32c::crc32c(&should)
        && buffer.as_slice()[whole.clone()] == should[..]
    {
        return Ok(());
    }
    let is = &buffer.as_slice()[whole];
    match contents::difference(is, &should) {
        Some(at) => bail!(
            "{}: byte {} is {:#04x}, not {:#04x}{}",
            what(),
            i128::try_from(at)? - i128::try_from(GUARD)?,
            is[at],
            should[at],
            if at < GUARD || at >= GUARD + there {
                ", which is beside the target"
            } else {
                ""
            }
        ),
        None => bail!("{}: the device sees other bytes than the processor", what()),
    }
}

/// Writes what is in video memory, and reads it back into ordinary memory.
pub fn write_checked(
    buffer: &mut Buffer,
    file: &File,
    seed: u64,
    offset: u64,
    range: std::ops::Range<usize>,
    call: Call,
) -> Result<()> {
    let source = &mut buffer.as_mut_slice()[range.clone()];
    contents::fill(seed, offset, source);
    let sum = buffer.checksum(range.clone())?;
    let source = &mut buffer.as_mut_slice()[range.clone()];
    let written = transfer(Way::Write, call, file, source, offset)?;
    let what = || {
        format!(
            "{call:?} of {:#x} bytes to {offset:#x} from byte {:#x} of a page",
            range.len(),
            range.start % GUARD
        )
    };
    ensure!(written == range.len(), "{}: {written:#x} bytes", what());
    let mut back = vec![0; range.len()];
    let read = transfer(Way::Read, Call::Plain, file, &mut back, offset)?;
    let should = contents::make(seed, offset, range.len());
    ensure!(read == back.len(), "{}: {read:#x} bytes are there", what());
    if let Some(at) = contents::difference(&back, &should) {
        bail!(
            "{}: byte {at} is {:#04x}, not {:#04x}",
            what(),
            back[at],
            should[at]
        );
    }
    ensure!(
        buffer.checksum(range.clone())? == sum,
        "{}: video memory has changed",
        what()
    );
    Ok(())
}

impl Transfer {
    fn report(&self, what: &'static str) -> Result<Report> {
        Ok(Report {
            what,
            checks: 1,
            bytes: u64::try_from(self.bytes)?,
        })
    }

    /// Reads, and checks.
    pub fn read(&self, gpu: &Gpu) -> Result<Report> {
        let (file, mut buffer, range) = self.open(gpu, false)?;
        read_checked(&mut buffer, &file, self.seed, self.offset, range, self.call)?;
        self.report("read")
    }

    /// Writes, and checks.
    pub fn write(&self, gpu: &Gpu) -> Result<Report> {
        let (file, mut buffer, range) = self.open(gpu, true)?;
        write_checked(&mut buffer, &file, self.seed, self.offset, range, self.call)?;
        self.report("write")
    }

    /// Reads, and writes contents with the seed `to` in their place; checks both.
    pub fn rewrite(&self, gpu: &Gpu, to: u64) -> Result<Report> {
        let (file, mut buffer, range) = self.open(gpu, true)?;
        let (at, call) = (self.offset, self.call);
        read_checked(&mut buffer, &file, self.seed, at, range.clone(), call)?;
        write_checked(&mut buffer, &file, to, at, range, call)?;
        self.report("rewrite")
    }

    /// Rewrites again and again, to and fro, until there is a file `end`, and then until the
    /// contents are again what they were; says how often it has.
    pub fn keep_on(&self, gpu: &Gpu, to: u64, end: &Path) -> Result<Report> {
        let (file, mut buffer, range) = self.open(gpu, true)?;
        let (at, call) = (self.offset, self.call);
        let mut rounds = 0_u64;
        while rounds == 0 || !end.exists() {
            for (old, new) in [(self.seed, to), (to, self.seed)] {
                read_checked(&mut buffer, &file, old, at, range.clone(), call)?;
                write_checked(&mut buffer, &file, new, at, range.clone(), call)?;
            }
            rounds += 1;
            println!("{rounds}");
        }
        Ok(Report {
            checks: rounds,
            ..self.report("keep-on")?
        })
    }

    /// The file, a buffer, and the place in it.
    pub fn open(&self, gpu: &Gpu, writes: bool) -> Result<(File, Buffer, std::ops::Range<usize>)> {
        ensure!(self.misalign < GUARD, "That is more than a page");
        let file = File::options().read(true).write(writes).open(&self.file);
        let file = file.with_context(|| format!("Cannot open {}", self.file.display()))?;
        let buffer = buffer(gpu, self.bytes)?;
        Ok((file, buffer, place(self.misalign, self.bytes)))
    }
}
