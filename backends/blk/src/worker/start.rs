//! What is begun for a request of the driver.

use super::engine::Engine;
use super::requests::{Request, StatusByte, Whole, Work};
use super::steps::Step;
use super::{Broken, data};
use crate::bits::Status;
use crate::counters::count;
use crate::limb::steering::{self, Lies, Part};
use crate::request::{Extent, HEADER_BYTES, Request as Parsed, parse, parse_ranges};
use farlane_block::vectors::take_front as take_vectors;
use farlane_vhost_user::chain::Chain;
use farlane_vhost_user::segment::{Segment, take_front, take_last_byte, total};
use farlane_vhost_user::vring::Rings;
use farlane_zero_copy::tokens::Direction;
use farlane_zero_copy::{AddressSpaceError, View};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Bytes of a sector: what parts of requests are multiples of.
const SECTOR: u64 = crate::bits::SECTOR;

impl Engine {
    /// Begins the request of the driver at descriptor `head`, which another backend may have begun.
    pub(super) fn start(
        &mut self,
        rings: &Rc<Rings>,
        head: u16,
        is_begun: bool,
        chain: &mut Chain,
    ) -> Result<(), Broken> {
        chain.follow(rings, head)?;
        let view = rings.view();
        let Chain { readable, writable } = chain;
        let crippled = Broken::Crippled {
            readable: total(readable),
            writable: total(writable),
        };
        let Some(status) = take_last_byte(writable) else {
            return Err(crippled);
        };
        let mut found = None;
        view.resolve(status, 1, true, |base, _| found = Some(base))?;
        let Some(status) = found else {
            return Err(crippled);
        };
        // SAFETY: `resolve` has found it to be mapped and writable as long as the view, which the
        // request keeps.
        let status = unsafe { StatusByte::new(status) };
        let Some(header) = read_front(view, readable)? else {
            return Err(crippled);
        };
        let limits = self.disk.limits();
        let parsed = parse(&header, total(readable), total(writable), limits);
        let parsed = match parsed {
            Ok(parsed) => parsed,
            Err(e) => {
                let answer = match e {
                    crate::request::RequestError::Unknown(_) => Status::Unsupp,
                    _ => Status::IoErr,
                };
                log::debug!("Disk {}: {e}", self.disk.serial());
                count(&self.disk.counters().errors, 1);
                self.answer(head, status, answer, 0);
                return Ok(());
            }
        };
        let work = match parsed {
            Parsed::GetId => {
                let written = self.tell_id(view, writable);
                let answer = if written > 0 {
                    Status::Ok
                } else {
                    Status::IoErr
                };
                self.answer(head, status, answer, written);
                return Ok(());
            }
            Parsed::Read(extent) => Work::Read(extent),
            Parsed::Write(extent) => Work::Write(extent),
            Parsed::Flush => Work::Flush,
            Parsed::Discard | Parsed::WriteZeroes => {
                let mut bytes = vec![0; usize::try_from(total(readable)).unwrap_or(0)];
                read_all(view, readable, &mut bytes)?;
                match parse_ranges(parsed, &bytes, limits) {
                    Ok(ranges) if parsed == Parsed::Discard => Work::Discard(ranges),
                    Ok(ranges) => Work::Zero(ranges),
                    Err(e) => {
                        log::debug!("Disk {}: {e}", self.disk.serial());
                        let answer = match e {
                            // 5.2.6.2
                            crate::request::RequestError::Flags(_) => Status::Unsupp,
                            _ => Status::IoErr,
                        };
                        count(&self.disk.counters().errors, 1);
                        self.answer(head, status, answer, 0);
                        return Ok(());
                    }
                }
            }
        };
        let mut request = Box::new(Request::new(head, work, status, Rc::clone(rings)));
        let Some(parts) = self.locate(&mut request, chain, is_begun) else {
            count(&self.disk.counters().errors, 1);
            self.answer(head, status, Status::IoErr, 0);
            return Ok(());
        };
        self.taken += 1;
        if matches!(request.work, Work::Flush) {
            self.begin_flush(request);
        } else if parts.is_empty() {
            self.begin(request);
        } else {
            self.begin_parts(&mut request, parts);
        }
        Ok(())
    }

    /// Begins a request, or a part of one, at the limb of its data and over that one's path.
    fn begin(&mut self, mut request: Box<Request>) {
        let limb = self.limb_of(&request);
        request.by = limb;
        request.limb = (limb != self.home).then_some(limb);
        self.follow(limb);
        let slot = self.requests.reserve();
        let step = match self.paths.choose(limb, 0) {
            Some(path) => {
                request.path = path;
                self.step(slot, &mut request)
            }
            None => Ok(self.strand(slot, &mut request, libc::ENODEV)),
        };
        self.after(slot, request, step);
    }

    /// The limb that is to do a request.
    fn limb_of(&self, request: &Request) -> usize {
        let around = self.disk.around();
        let has_data = matches!(request.work, Work::Read(_) | Work::Write(_));
        // Device memory is reached through this worker's tokens.
        let whole = request.whole.as_ref();
        let tunnelled =
            request.opened.is_some() || whole.is_some_and(|w| w.opened.borrow().is_some());
        if self.handing.is_none() || !around.steers || !has_data || tunnelled {
            return self.home;
        }
        around.limbs.index_of(request.lies.node())
    }

    /// Begins the parts of a request.
    fn begin_parts(&mut self, request: &mut Request, parts: Vec<(Extent, Lies)>) {
        let whole = Rc::new(Whole {
            work: std::mem::replace(&mut request.work, Work::Flush),
            left: Cell::new(parts.len()),
            status: Cell::new(Status::Ok),
            opened: RefCell::new(request.opened.take()),
        });
        let mut vectors = std::mem::take(&mut request.vectors);
        for (extent, lies) in parts {
            let work = match whole.work {
                Work::Read(_) => Work::Read(extent),
                _ => Work::Write(extent),
            };
            let rings = Rc::clone(&request.rings);
            let mut part = Box::new(Request::new(request.head, work, request.status, rings));
            part.whole = Some(Rc::clone(&whole));
            part.lies = lies;
            let length = usize::try_from(extent.bytes).unwrap_or(usize::MAX);
            part.vectors = take_vectors(&mut vectors, length);
            part.copies = !data::can_be_transferred(&part.vectors, self.paths.alignment());
            self.begin(part);
        }
        self.requests.give_vectors(vectors);
    }

    /// Begins to make durable what was written over all paths.
    pub(super) fn begin_flush(&mut self, mut request: Box<Request>) {
        if self.disk.limits().read_only {
            // There is nothing to flush, and its file system may have no `fsync` (EROFS, SquashFS).
            let slot = self.requests.reserve();
            self.after(slot, request, Ok(Step::Done(Status::Ok)));
            return;
        }
        let paths = if self.paths.several() {
            request.marks = self.paths.marks();
            self.paths.to_sync()
        } else {
            vec![0]
        };
        match paths[..] {
            [path] => {
                request.path = path;
                self.begin_sync(request);
            }
            // All have failed.
            [] => {
                let slot = self.requests.reserve();
                let step = self.strand(slot, &mut request, libc::ENODEV);
                self.after(slot, request, Ok(step));
            }
            _ => {
                let whole = Rc::new(Whole {
                    work: Work::Flush,
                    left: Cell::new(paths.len()),
                    status: Cell::new(Status::Ok),
                    opened: RefCell::default(),
                });
                for path in paths {
                    let rings = Rc::clone(&request.rings);
                    let (head, status) = (request.head, request.status);
                    let mut part = Box::new(Request::new(head, Work::Flush, status, rings));
                    part.whole = Some(Rc::clone(&whole));
                    part.path = path;
                    part.marks.clone_from(&request.marks);
                    self.begin_sync(part);
                }
            }
        }
    }

    fn begin_sync(&mut self, mut request: Box<Request>) {
        let slot = self.requests.reserve();
        let step = self.step(slot, &mut request);
        self.after(slot, request, step);
    }

    /// Finds a request's data. Returns the parts that it is to be done in, none if it is to be done
    /// as it is; `None` if it cannot be moved.
    fn locate(
        &mut self,
        request: &mut Request,
        chain: &Chain,
        is_begun: bool,
    ) -> Option<Vec<(Extent, Lies)>> {
        let (&extent, direction, segments) = match &request.work {
            Work::Read(extent) => (extent, Direction::IntoDevice, &chain.writable),
            Work::Write(extent) => (extent, Direction::OutOfDevice, &chain.readable),
            _ => return Some(Vec::new()),
        };
        let alignment = self.disk.alignment();
        if let Some(alignment) = alignment
            && (extent.offset | extent.bytes) & (alignment.offset - 1) != 0
        {
            log::debug!("Disk {}: less than a block", self.disk.serial());
            return None;
        }
        if extent.bytes == 0 {
            return Some(Vec::new());
        }
        let mut vectors = self.requests.vectors();
        let view = request.rings.view();
        let found = data::locate(
            &self.disk,
            view,
            direction,
            segments,
            is_begun,
            &mut vectors,
        );
        request.copies = !data::can_be_transferred(&vectors, alignment);
        request.vectors = vectors;
        request.opened = found.ok()?;
        let Some(steering) = &mut self.steering else {
            return Some(Vec::new());
        };
        let map = steering.map();
        if let Some(node) = steering::single_node(map, segments) {
            request.lies = Lies::On(node);
            return Some(Vec::new());
        }
        let around = self.disk.around();
        let splits = self.handing.is_some() && around.steers && request.opened.is_none();
        let least = if splits { around.split } else { u64::MAX / 4 };
        let align = alignment.map_or(SECTOR, |alignment| alignment.offset.max(SECTOR));
        let mut parts = steering::cut(map, segments, align, least);
        if parts.len() > 1 {
            count(&self.disk.counters().split, 1);
            return Some(one_after_the_other(extent, parts));
        }
        if let Some(part) = parts.pop() {
            request.lies = part.lies;
        }
        Some(Vec::new())
    }

    /// Answers GET_ID. Returns the bytes written.
    fn tell_id(&self, view: &View, writable: &mut Vec<Segment>) -> u32 {
        let id = self.disk.id();
        let mut left: &[u8] = &id;
        let mut failed = false;
        take_front(writable, id.len() as u64, |part| {
            let (bytes, after) =
                left.split_at(usize::try_from(part.bytes).unwrap_or(0).min(left.len()));
            failed |= view.write(part.address, bytes).is_err();
            left = after;
        });
        if failed { 0 } else { 20 }
    }
}

/// Parts of an extent, which follow each other.
fn one_after_the_other(extent: Extent, parts: Vec<Part>) -> Vec<(Extent, Lies)> {
    let mut rest = extent;
    let extents = parts.into_iter().map(|Part { bytes, lies }| {
        let part = Extent {
            offset: rest.offset,
            bytes: bytes.min(rest.bytes),
        };
        rest = Extent {
            offset: rest.offset + part.bytes,
            bytes: rest.bytes - part.bytes,
        };
        (part, lies)
    });
    extents.collect()
}

/// Takes a request's header from the front of what it has to be read.
fn read_front(
    view: &View,
    readable: &mut Vec<Segment>,
) -> Result<Option<[u8; HEADER_BYTES]>, AddressSpaceError> {
    let mut header = [0; HEADER_BYTES];
    let mut at = 0;
    let mut result = Ok(());
    let taken = take_front(readable, HEADER_BYTES as u64, |part| {
        let end = at + usize::try_from(part.bytes).unwrap_or(0);
        if let Some(bytes) = header.get_mut(at..end)
            && let Err(e) = view.read(part.address, bytes)
        {
            result = Err(e);
        }
        at = end;
    });
    result?;
    Ok(taken.then_some(header))
}

/// Reads all segments, which have as many bytes.
fn read_all(view: &View, segments: &[Segment], bytes: &mut [u8]) -> Result<(), AddressSpaceError> {
    let mut rest = bytes;
    for segment in segments {
        let length = usize::try_from(segment.bytes).unwrap_or(usize::MAX);
        let (part, after) = rest.split_at_mut(length.min(rest.len()));
        view.read(segment.address, part)?;
        rest = after;
    }
    Ok(())
}
