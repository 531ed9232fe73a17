//! A request from its call to its bytes.
//!
//! Every function here answers `None` for a call that is not ours: the caller gives it to the C
//! library as it is.

use crate::config::{self, Mode};
use crate::decide::{P2pPath, plan_read, plan_write, reach};
use crate::files::{self, OpenFile};
use crate::fork::Inside;
use crate::plan::trace::{Piece, Way, Why};
use crate::position::{self, CallBuffer, KernelCall, Position};
use crate::provider::Provider as _;
use crate::region::{Buffer, Region};
use crate::stream;
use crate::sys::{self, Direction};
use crate::trace::{CallReport, CallStart};
use crate::tunnel::TransferReceipt;
use crate::{direct, plain, provider, registry, stats, trace, tunnel};
use farlane_abi::width::to_usize;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::ops::Range;
use std::os::fd::RawFd;

/// A call with one buffer.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Its name, for the trace.
    pub name: &'static str,
    /// The program's descriptor.
    pub fd: RawFd,
    /// Address of the buffer.
    pub address: usize,
    /// Its length in bytes.
    pub length: usize,
    /// Where in the file.
    pub position: Position,
}

/// Reads to, or writes from, a buffer that may be device memory.
pub fn serve(call: &Call, direction: Direction) -> Option<Result<usize, Errno>> {
    let mode = config::mode();
    if mode == Mode::Off || call.length == 0 {
        return None;
    }
    let region = registry::find(call.address, call.length)?;
    if direction == Direction::Read
        && let Some(result) =
            on_credit(call, &region, mode).or_else(|| small_and_cached(call, &region, mode))
    {
        return Some(result);
    }
    let _inside = Inside::enter()?;
    let region = registry::still_there(region, call.address, call.length)?;
    let opened = files::open(call.fd)?;
    if !may(&opened, direction) {
        return None;
    }
    if let Position::At(offset) = call.position
        && !position::is_needed(&opened, call.position, direction)
    {
        return Some(at(&opened, call, &region, offset, direction, mode));
    }
    let part = CallBuffer {
        address: call.address,
        length: call.length,
        region: Some(&region),
    };
    Some(position::serve(&KernelCall {
        opened: &opened,
        name: call.name,
        parts: &[part],
        position: call.position,
        direction,
        mode,
    }))
}

/// Whether the descriptor is one that the router serves in this direction: the C library says what
/// is wrong with others.
pub(crate) fn may(opened: &OpenFile, direction: Direction) -> bool {
    let mode = opened.flags & OFlags::RWMODE;
    let needed = match direction {
        Direction::Read => OFlags::RDONLY,
        Direction::Write => OFlags::WRONLY,
    };
    mode == needed || mode == OFlags::RDWR
}

/// A short read of a sequence that has been looked at: the plain call and nothing else.
fn on_credit(call: &Call, region: &Region, mode: Mode) -> Option<Result<usize, Errno>> {
    if mode != Mode::Auto || !region.provider.is_mapped() || trace::is_on() {
        return None;
    }
    let offset = match call.position {
        Position::At(offset) => Some(offset),
        Position::Current => None,
    };
    let way = stream::spend(call.fd, offset, call.length as u64)?;
    let to = std::ptr::with_exposed_provenance_mut(call.address);
    // SAFETY: registered memory, which the program gave for this.
    let result = unsafe {
        match offset {
            Some(offset) => sys::transfer(Direction::Read, call.fd, to, call.length, offset),
            None => sys::read(call.fd, to, call.length),
        }
    };
    match result {
        Ok(moved) => {
            stats::request();
            stats::add(way, moved as u64);
            if moved < call.length {
                stream::revoke(call.fd);
            }
            Some(Ok(moved))
        }
        // No file position: then the descriptor is something else by now.
        Err(_) => {
            stream::revoke(call.fd);
            None
        }
    }
}

/// Up to this size a request is in the page cache or is not, and what is asked of the kernel before
/// it is felt.
const SMALL_BYTES: u64 = 16 << 10;

/// A small read that continues nothing, of what is cached: one question and the plain call.
fn small_and_cached(call: &Call, region: &Region, mode: Mode) -> Option<Result<usize, Errno>> {
    let Position::At(offset) = call.position else {
        return None;
    };
    let length = call.length as u64;
    if mode != Mode::Auto
        || length > SMALL_BYTES
        || !region.provider.is_mapped()
        || trace::is_on()
        || !stream::stands_alone(call.fd, offset)
    {
        return None;
    }
    let page = sys::page_bytes() as u64;
    let first = offset / page * page;
    let end = offset.checked_add(length)?;
    let pages = (end - first).div_ceil(page);
    let found = sys::cachestat(call.fd, first, pages * page).ok()?;
    if found.cached < pages {
        return None;
    }
    let to = std::ptr::with_exposed_provenance_mut(call.address);
    // SAFETY: registered memory, which the program gave for this.
    let moved = unsafe { sys::transfer(Direction::Read, call.fd, to, call.length, offset) }.ok()?;
    stats::request();
    stats::add(Way::Cache, moved as u64);
    stream::expect(call.fd, end);
    Some(Ok(moved))
}

fn at(
    opened: &OpenFile,
    call: &Call,
    region: &Region,
    offset: u64,
    direction: Direction,
    mode: Mode,
) -> Result<usize, Errno> {
    if offset > i64::MAX.unsigned_abs() {
        return Err(Errno::INVAL);
    }
    let buffer = Buffer {
        address: call.address,
        length: call.length.min(sys::MAX_BYTES),
        region,
    };
    one(opened, call.name, &buffer, offset, direction, mode)
}

/// One buffer at an offset: decides, moves, counts, tells.
pub(crate) fn one(
    opened: &OpenFile,
    name: &'static str,
    buffer: &Buffer<'_>,
    offset: u64,
    direction: Direction,
    mode: Mode,
) -> Result<usize, Errno> {
    let began = CallStart::now();
    let plan = match direction {
        Direction::Read => plan_read(opened, buffer, offset, mode),
        Direction::Write => plan_write(opened, buffer, offset, mode),
    };
    let mut work = RoutedRequest {
        opened,
        buffer: *buffer,
        offset,
        direction,
        pieces: Vec::new(),
        failed: false,
    };
    let result = work.run(&plan.pieces);
    stats::request();
    for piece in &work.pieces {
        stats::add(piece.way, piece.bytes);
    }
    if let Some(began) = began {
        let account = CallReport {
            pieces: work.pieces,
            cached: plan.cached,
            why: if work.failed {
                Why::P2pFailed
            } else {
                plan.why
            },
        };
        let length = buffer.length as u64;
        began.ended(name, opened, (Some(offset), length), result, account);
    }
    result
}

/// A request under way.
struct RoutedRequest<'a> {
    opened: &'a OpenFile,
    buffer: Buffer<'a>,
    offset: u64,
    direction: Direction,
    /// How bytes really went.
    pieces: Vec<Piece>,
    /// P2P did not work, and the rest went the plain way.
    failed: bool,
}

impl RoutedRequest<'_> {
    fn run(&mut self, pieces: &[Piece]) -> Result<usize, Errno> {
        let mut done = 0;
        for piece in pieces {
            let end = done + to_usize(piece.bytes);
            let moved = match self.piece(piece.way, done..end) {
                Ok(moved) => moved,
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            };
            done += moved;
            if done < end {
                break;
            }
        }
        Ok(done)
    }

    fn piece(&mut self, way: Way, range: Range<usize>) -> Result<usize, Errno> {
        if way != Way::P2p {
            return self.plain(way, &range);
        }
        let TransferReceipt {
            bytes: moved,
            landed,
        } = match self.p2p(&range) {
            Ok(moved) => moved,
            // What the plain way would say too, and what has been signalled already.
            Err(error @ (Errno::FBIG | Errno::NOSPC | Errno::DQUOT)) => return Err(error),
            Err(_) => TransferReceipt::default(),
        };
        self.note(Way::P2p, landed);
        self.note(Way::Cache, moved - landed);
        let rest = range.start + moved..range.end;
        if rest.is_empty() {
            return Ok(moved);
        }
        self.failed |= moved == 0;
        match self.plain(Way::Cache, &rest) {
            Ok(more) => Ok(moved + more),
            Err(_) if moved > 0 => Ok(moved),
            Err(error) => Err(error),
        }
    }

    fn p2p(&self, range: &Range<usize>) -> Result<TransferReceipt, Errno> {
        let (opened, direction) = (self.opened, self.direction);
        let (buffer, offset) = self.part(range);
        let request = offset..offset + buffer.length as u64;
        let (reach, body) =
            reach(opened, &buffer, &request, direction).map_err(|_| Errno::OPNOTSUPP)?;
        if body != request {
            return Err(Errno::OPNOTSUPP);
        }
        match reach {
            P2pPath::Tunnel(pinned) => {
                let memory = (buffer.address, buffer.length);
                let provider = &*buffer.region.provider;
                tunnel::transfer(opened, pinned, provider, direction, memory, offset)
            }
            P2pPath::Direct => {
                let bytes = direct::transfer(opened, &buffer, direction, offset)?;
                let landed = bytes;
                Ok(TransferReceipt { bytes, landed })
            }
        }
    }

    fn plain(&mut self, way: Way, range: &Range<usize>) -> Result<usize, Errno> {
        let (buffer, offset) = self.part(range);
        let memory = (buffer.address, buffer.length);
        let provider = &*buffer.region.provider;
        let moved = plain::transfer(self.opened, provider, self.direction, memory, offset)?;
        self.note(way, moved);
        Ok(moved)
    }

    /// A part of the request.
    fn part(&self, range: &Range<usize>) -> (Buffer<'_>, u64) {
        (self.buffer.part(range), self.offset + range.start as u64)
    }

    fn note(&mut self, way: Way, moved: usize) {
        let bytes = moved as u64;
        if bytes == 0 {
            return;
        }
        match self.pieces.last_mut() {
            Some(last) if last.way == way => last.bytes += bytes,
            _ => self.pieces.push(Piece { way, bytes }),
        }
    }
}

/// Whether a buffer may be memory of a CUDA device: the program has loaded the driver.
pub fn may_adopt() -> bool {
    config::mode() != Mode::Off && provider::Cuda::if_loaded().is_some()
}

/// After a plain call has failed with `EFAULT`: whether the buffer is memory of a CUDA device that
/// the program has not registered. Then it is from now on, and the call is to be made again.
pub fn adopt(address: usize, length: usize) -> bool {
    let Some(_inside) = Inside::enter() else {
        return false;
    };
    let Some(cuda) = provider::Cuda::if_loaded() else {
        return false;
    };
    if config::mode() == Mode::Off || !cuda.holds(address, length) {
        return false;
    }
    let allocation = cuda.allocation(address);
    allocation.is_some_and(|(start, bytes)| registry::adopt(start, bytes, cuda).is_ok())
}
