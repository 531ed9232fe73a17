//! Calls that use the file position, and calls that append: each is one call of the kernel.
//!
//! The position belongs to all who have the open file, other processes among them. Linux moves it
//! together with the bytes, under a lock that nobody else can hold; and where a file ends only the
//! kernel knows when it adds bytes. So these calls go the way that the kernel takes by itself, and
//! P2P is for those that name an offset.

use crate::bounce::Bounce;
use crate::config::Mode;
use crate::files::OpenFile;
use crate::plain;
use crate::plan::trace::{Piece, Way, Why};
use crate::region::Region;
use crate::stream::{self, Pattern};
use crate::sys::Direction;
use crate::trace::{CallReport, CallStart};
use crate::{decide, stats, sys, trace};
use libc::iovec;
use rustix::fs::OFlags;
use rustix::io::Errno;

/// Most bytes that are copied for one call of the kernel: more are several.
const COPIES: usize = 64 << 20;

/// Where in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// At this offset from the start of the file.
    At(u64),
    /// At the file position, which the call moves on.
    Current,
}

/// A buffer of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallBuffer<'a> {
    pub(crate) address: usize,
    pub(crate) length: usize,
    /// Its region; none for memory that is not registered.
    pub(crate) region: Option<&'a Region>,
}

/// A call of the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelCall<'a> {
    pub(crate) opened: &'a OpenFile,
    pub(crate) name: &'static str,
    pub(crate) parts: &'a [CallBuffer<'a>],
    pub(crate) position: Position,
    pub(crate) direction: Direction,
    pub(crate) mode: Mode,
}

/// Whether only the kernel can make a call.
pub(crate) fn is_needed(opened: &OpenFile, position: Position, direction: Direction) -> bool {
    let appends = direction == Direction::Write && opened.flags.contains(OFlags::APPEND);
    appends || position == Position::Current
}

/// Makes the call, counts it and tells of it.
pub(crate) fn serve(whole: &KernelCall<'_>) -> Result<usize, Errno> {
    let began = CallStart::now();
    let offset = whole.offset();
    let (way, why) = whole.way(offset);
    let result = whole.run();
    let moved = result.map_or(0, |bytes| whole.device_bytes(bytes));
    stats::request();
    stats::add(way, moved);
    if let Some(began) = began {
        let piece = (moved > 0).then_some(Piece { way, bytes: moved });
        let account = CallReport {
            pieces: piece.into_iter().collect(),
            cached: None,
            why,
        };
        let range = (offset, whole.length() as u64);
        began.ended(whole.name, whole.opened, range, result, account);
    }
    result
}

impl KernelCall<'_> {
    fn length(&self) -> usize {
        let lengths = self.parts.iter().map(|part| part.length);
        lengths.fold(0, usize::saturating_add).min(sys::MAX_BYTES)
    }

    /// Where it begins, for those who follow sequences: the position may be another one when the
    /// call is made.
    fn offset(&self) -> Option<u64> {
        let follows = self.direction == Direction::Read && self.mode == Mode::Auto;
        match self.position {
            Position::At(offset) => Some(offset),
            Position::Current if follows || trace::is_on() => {
                sys::seek(self.opened.fd, 0, libc::SEEK_CUR).ok()
            }
            Position::Current => None,
        }
    }

    /// How its bytes go, and why. Reads of a sequence go by read-ahead, as others do.
    fn way(&self, offset: Option<u64>) -> (Way, Why) {
        if self.mode == Mode::Cache {
            return (Way::Cache, Why::Forced);
        }
        if let (&[part], Some(offset)) = (self.parts, offset)
            && let Some(region) = part.region
            && (self.direction, self.mode) == (Direction::Read, Mode::Auto)
            && offset < self.opened.size
        {
            let request = offset..offset.saturating_add(self.length() as u64);
            match decide::sequence(self.opened, region, &request) {
                (_, Some(ahead)) => return ahead,
                (Pattern::Single, None) => stream::expect(self.opened.fd, request.end),
                (_, None) => (),
            }
        }
        (Way::Cache, Why::Position)
    }

    fn device_bytes(&self, moved: usize) -> u64 {
        let mut left = moved;
        let mut bytes = 0;
        for part in self.parts {
            let length = part.length.min(left);
            left -= length;
            if part.region.is_some() {
                bytes += length as u64;
            }
        }
        bytes
    }

    fn run(&self) -> Result<usize, Errno> {
        let is_mapped = |part: &CallBuffer<'_>| part.region.is_none_or(|r| r.provider.is_mapped());
        if self.parts.iter().all(is_mapped) {
            let vectors: Vec<_> = self.parts.iter().map(CallBuffer::vector).collect();
            // SAFETY: memory that the program gave for this.
            let result = unsafe { self.call(&vectors, 0) };
            // Direct I/O of the program itself into memory without pages.
            let is_direct = self.opened.flags.contains(OFlags::DIRECT);
            let aligned = vectors.iter().all(|vector| {
                let align = self.opened.file.memory_align;
                vector.iov_base.addr().is_multiple_of(align)
            });
            if !(is_direct && aligned && result.is_err_and(plain::is_refusal)) {
                return result;
            }
        }
        let mut done = 0;
        loop {
            let parts = self.rest(done);
            let length = parts.iter().map(|part| part.length).sum::<usize>();
            match self.copied(&parts, done) {
                Ok(moved) => {
                    done += moved;
                    if moved < length || done >= self.length() {
                        return Ok(done);
                    }
                }
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
    }

    /// What comes after the first `done` bytes, up to as much as is copied at a time.
    fn rest(&self, done: usize) -> Vec<CallBuffer<'_>> {
        let (mut skip, mut left, mut room) = (done, self.length() - done, COPIES);
        let mut rest = Vec::new();
        for part in self.parts {
            let skipped = skip.min(part.length);
            skip -= skipped;
            let mut length = (part.length - skipped).min(left);
            if part.region.is_some() {
                length = length.min(room);
                room -= length;
            }
            left -= length;
            rest.push(CallBuffer {
                address: part.address + skipped,
                length,
                region: part.region,
            });
            if skipped + length < part.length {
                break;
            }
        }
        rest
    }

    /// Makes one call with copies in place of device memory.
    fn copied(&self, parts: &[CallBuffer<'_>], done: usize) -> Result<usize, Errno> {
        let of_device = || parts.iter().filter(|part| part.region.is_some());
        let mut copy = Bounce::take(of_device().map(|part| part.length).sum())?;
        let mut at = 0;
        let mut vectors = Vec::with_capacity(parts.len());
        for part in parts {
            let Some(region) = part.region else {
                vectors.push(part.vector());
                continue;
            };
            plain::check(&*region.provider, part.address, part.length)?;
            let bytes = copy.bytes(at..at + part.length);
            if self.direction == Direction::Write {
                // SAFETY: registered memory.
                unsafe { region.provider.copy_out(bytes, part.address) }?;
            }
            vectors.push(iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            });
            at += part.length;
        }
        // SAFETY: memory that the program gave for this, and the copy.
        let moved = unsafe { self.call(&vectors, done) }?;
        if self.direction == Direction::Read {
            let (mut left, mut at) = (moved, 0);
            for part in parts {
                let length = part.length.min(left);
                left -= length;
                if let Some(region) = part.region {
                    let bytes = copy.bytes(at..at + length);
                    // SAFETY: registered memory.
                    unsafe { region.provider.copy_in(part.address, bytes) }?;
                    at += part.length;
                }
            }
        }
        Ok(moved)
    }

    /// # Safety
    /// The kernel may read or write what the vectors name.
    unsafe fn call(&self, vectors: &[iovec], done: usize) -> Result<usize, Errno> {
        let offset = match self.position {
            Position::At(at) => Some(at + done as u64),
            Position::Current => None,
        };
        // SAFETY: as promised by the caller.
        unsafe { sys::vectored(self.direction, self.opened.fd, vectors, offset) }
    }
}

impl CallBuffer<'_> {
    fn vector(&self) -> iovec {
        iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(self.address),
            iov_len: self.length,
        }
    }
}
