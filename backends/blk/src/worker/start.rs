//! What is begun for a request of the driver.

use super::requests::{Answer, Failure, Request, Whole};
use super::virtqueue::{Completion, Head};
use super::{Broken, QueueWorker, data};
use crate::bits::{SECTOR, Status};
use crate::counters::count;
use crate::paths::{PathId, PathSet};
use crate::per_node::steering::{self, NumaSpan, Part};
use crate::request::{HEADER_BYTES, Request as Kind, RequestError, parse, parse_ranges};
use farlane_abi::width::to_usize;
use farlane_block::engine::clear::Goal;
use farlane_block::engine::{Clear, Extent, Memory, Operation, Range, Work};
use farlane_block::ring::Durable;
use farlane_block::vectors::transfer_now;
use farlane_vhost_user::chain::Chain;
use farlane_vhost_user::segment::{Segment, take_front, take_last_byte, total};
use farlane_vhost_user::vring::Rings;
use farlane_zero_copy::slices::{GuestByte, GuestSlices};
use farlane_zero_copy::tokens::Direction;
use farlane_zero_copy::topology::Node;
use farlane_zero_copy::{AddressSpaceError, View};
use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// Parts of a request: bytes each, and where they lie.
type Parts = Vec<Part>;

impl QueueWorker {
    /// Whether writes are to be durable when they are complete.
    fn durable(&self) -> Durable {
        Durable(!self.writeback.load(Ordering::Relaxed))
    }

    /// Begins a request of the driver.
    pub(super) fn start(
        &mut self,
        rings: &Rings,
        head: Head,
        chain: &mut Chain,
    ) -> Result<(), Broken> {
        chain.follow(rings, head.descriptor)?;
        let view = rings.view();
        let Chain { readable, writable } = chain;
        let incomplete = Broken::Incomplete {
            readable: total(readable),
            writable: total(writable),
        };
        let Some(status) = take_last_byte(writable) else {
            return Err(incomplete);
        };
        let status = GuestByte::new(Rc::clone(view), status)?;
        let Some(header) = read_front(view, readable)? else {
            return Err(incomplete);
        };
        let limits = self.disk.limits();
        let parsed = parse(&header, total(readable), total(writable), limits);
        let parsed = match parsed {
            Ok(kind @ (Kind::Discard | Kind::WriteZeroes)) => {
                let bytes = read_all(view, readable)?;
                parse_ranges(kind, &bytes, limits).map(|ranges| (kind, ranges))
            }
            other => other.map(|kind| (kind, Vec::new())),
        };
        match parsed {
            Ok((kind, ranges)) => {
                let completion = self.queue.begin(head, status, kind);
                self.begin_kind(view, completion, ranges, head, chain);
            }
            Err(e) => {
                let answer = match e {
                    // 5.2.6.2
                    RequestError::Unknown(_) | RequestError::Flags(_) => Status::Unsupp,
                    _ => Status::IoErr,
                };
                log::debug!("Disk {}: {e}", self.disk.serial());
                let completion = self.queue.begin(head, status, Kind::GetId);
                self.complete(completion, answer, 0);
            }
        }
        Ok(())
    }

    fn begin_kind(
        &mut self,
        view: &Rc<View>,
        completion: Completion,
        ranges: Vec<Range>,
        head: Head,
        chain: &mut Chain,
    ) {
        let durable = self.durable();
        let goal = match completion.kind {
            Kind::GetId => {
                let written = self.tell_id(view, &mut chain.writable);
                let answer = if written > 0 {
                    Status::Ok
                } else {
                    Status::IoErr
                };
                self.queue.answer(completion, answer, written);
                return;
            }
            Kind::Read(extent) => {
                let (work, segments) = (Work::Read, &chain.writable);
                let extent = extent.into();
                self.begin_data(view, completion, work, extent, segments, head.is_begun);
                return;
            }
            Kind::Write(extent) => {
                let (work, segments) = (Work::Write(durable), &chain.readable);
                self.begin_data(view, completion, work, extent, segments, head.is_begun);
                return;
            }
            Kind::Flush => {
                self.begin_flush(completion, None);
                return;
            }
            Kind::Discard => Goal::Discard { is_hint: false },
            Kind::WriteZeroes => Goal::Zero,
        };
        let work = Work::Clear(Clear::new(goal, ranges, durable));
        let (extent, memory) = (Extent::default(), Memory::default());
        let operation = Operation::new(PathId::FIRST, work, extent, memory, false);
        let span = NumaSpan::Single(Node(0));
        self.begin(Request::new(Answer::Driver(completion), operation, span));
    }

    /// Begins a read or a write, in parts where its data lies on several nodes.
    fn begin_data(
        &mut self,
        view: &Rc<View>,
        completion: Completion,
        work: Work,
        extent: Extent,
        segments: &[Segment],
        is_begun: bool,
    ) {
        let Some(slices) = self.locate(view, &work, extent, segments, is_begun) else {
            self.complete(completion, Status::IoErr, 0);
            return;
        };
        let from_device = slices.is_tunnelled();
        let (span, parts) = self.span(segments, from_device);
        if let Some(parts) = parts {
            self.begin_parts(completion, &work, extent, slices, parts);
            return;
        }
        if self.disk.in_memory() && !self.files.paths.several() {
            self.move_now(completion, &work, extent, slices, &span);
            return;
        }
        let memory = Memory::of_guest(slices, self.disk.alignment());
        let operation = Operation::new(PathId::FIRST, work, extent, memory, from_device);
        self.begin(Request::new(Answer::Driver(completion), operation, span));
    }

    /// Does a read or a write of what is in memory: it is over at once.
    fn move_now(
        &mut self,
        completion: Completion,
        work: &Work,
        extent: Extent,
        mut slices: GuestSlices<Rc<View>>,
        span: &NumaSpan,
    ) {
        let write = match work {
            Work::Write(durable) => Some(*durable),
            _ => None,
        };
        let moved = match self.files.ring.storage(PathId::FIRST) {
            Some(storage) => transfer_now(&storage.file, write, &mut slices, extent.offset),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        let (status, tunnelled) = match moved {
            Ok(()) => {
                self.count_locality(span, self.home, PathId::FIRST, extent.bytes);
                (Status::Ok, slices.landed())
            }
            Err(e) => (self.failed(&e), 0),
        };
        self.requests.give_list(slices.into_list());
        self.complete(completion, status, tunnelled);
    }

    /// Begins a request, or a part of one, at the node of its data and over that one's path.
    fn begin(&mut self, mut request: Request) {
        let node = self.node_of(&mut request);
        request.executing_node = node;
        request.is_remote = node != self.home;
        self.follow(node);
        match self.files.paths.choose(node, PathSet::EMPTY) {
            Some(path) => {
                request.operation.move_to(path);
                let slot = self.requests.slots.insert(request);
                self.advance(slot);
            }
            None => {
                let slot = self.requests.slots.insert(request);
                self.strand(slot, libc::ENODEV);
            }
        }
    }

    /// Follows the data: a request goes to `node`.
    fn follow(&mut self, node: usize) {
        let offload = self.offload.as_mut();
        if let Some(home) = offload.and_then(|offload| offload.follow(node, self.home))
            && let Some(worker_node) = self.disk.around().nodes.all().get(home)
        {
            worker_node.enter();
            self.home = home;
            count(&self.disk.counters().rehomed, 1);
        }
    }

    /// The node that is to do a request.
    fn node_of(&self, request: &mut Request) -> usize {
        let around = self.disk.around();
        if self.offload.is_none() || !around.steers {
            return self.home;
        }
        // Device memory is reached through this worker's tokens.
        match request.operation.memory().guest_mut() {
            Some(guest) if !guest.is_tunnelled() => around.nodes.index_of(request.span.node()),
            _ => self.home,
        }
    }

    /// Begins the parts of a request.
    fn begin_parts(
        &mut self,
        completion: Completion,
        work: &Work,
        extent: Extent,
        mut slices: GuestSlices<Rc<View>>,
        parts: Parts,
    ) {
        count(&self.disk.counters().split, 1);
        let whole = Rc::new(Whole {
            completion,
            status: Cell::new(Status::Ok),
        });
        let alignment = self.files.paths.alignment();
        let mut rest = extent;
        let mut left = parts.len();
        let mut begun = Vec::with_capacity(left);
        for Part { bytes, span } in parts {
            left -= 1;
            // The last one takes what is left.
            let bytes = if left == 0 {
                rest.bytes
            } else {
                bytes.min(rest.bytes)
            };
            let part = Extent {
                offset: rest.offset,
                bytes,
            };
            rest = Extent {
                offset: rest.offset + bytes,
                bytes: rest.bytes - bytes,
            };
            let work = match work {
                Work::Write(durable) => Work::Write(*durable),
                _ => Work::Read,
            };
            let front = slices.split_front(to_usize(bytes), self.requests.list());
            let memory = Memory::of_guest(front, alignment);
            let operation = Operation::new(PathId::FIRST, work, part, memory, false);
            let answer = Answer::Whole(Rc::clone(&whole));
            begun.push(Request::new(answer, operation, span));
        }
        self.requests.give_list(slices.into_list());
        drop(whole);
        for part in begun {
            self.begin(part);
        }
    }

    /// Begins to make durable what was written over all paths. It may have found none before.
    pub(super) fn begin_flush(&mut self, completion: Completion, failure: Option<Box<Failure>>) {
        if self.disk.limits().read_only {
            // There is nothing to flush, and its file system may have no `fsync` (EROFS, SquashFS).
            self.complete(completion, Status::Ok, 0);
            return;
        }
        let (marks, paths) = if self.files.paths.several() {
            let marks = self.files.paths.marks();
            let paths = self.files.paths.to_sync();
            (marks, paths)
        } else {
            (Vec::new(), vec![PathId::FIRST])
        };
        let sync = |answer, path| {
            let span = NumaSpan::Single(Node(0));
            Request::new(answer, Operation::sync_of(path), span)
        };
        if let [] | [_] = paths[..] {
            let path = paths.first().copied();
            let mut request = sync(Answer::Driver(completion), path.unwrap_or(PathId::FIRST));
            (request.failure, request.marks) = (failure, marks);
            let slot = self.requests.slots.insert(request);
            match path {
                Some(_) => self.advance(slot),
                // All have failed.
                None => self.strand(slot, libc::ENODEV),
            }
            return;
        }
        let whole = Rc::new(Whole {
            completion,
            status: Cell::new(Status::Ok),
        });
        let parts = paths.into_iter().map(|path| {
            let mut part = sync(Answer::Whole(Rc::clone(&whole)), path);
            part.marks.clone_from(&marks);
            self.requests.slots.insert(part)
        });
        let slots: Vec<_> = parts.collect();
        drop(whole);
        for slot in slots {
            self.advance(slot);
        }
    }

    /// Finds a request's data, if it can be moved.
    fn locate(
        &mut self,
        view: &Rc<View>,
        work: &Work,
        extent: Extent,
        segments: &[Segment],
        is_begun: bool,
    ) -> Option<GuestSlices<Rc<View>>> {
        if let Some(alignment) = self.disk.alignment()
            && (extent.offset | extent.bytes) & (alignment.offset - 1) != 0
        {
            log::debug!("Disk {}: less than a block", self.disk.serial());
            return None;
        }
        let direction = match work {
            Work::Read => Direction::IntoDevice,
            _ => Direction::OutOfDevice,
        };
        let segments = if extent.bytes == 0 { &[] } else { segments };
        let list = self.requests.list();
        data::locate(&self.disk, view, direction, segments, is_begun, list).ok()
    }

    /// Where a request's data lies, and the parts that it is to be done in, if there are several.
    fn span(&mut self, segments: &[Segment], from_device: bool) -> (NumaSpan, Option<Parts>) {
        let Some(steering) = self.steering.as_mut().filter(|_| !segments.is_empty()) else {
            return (NumaSpan::Single(Node(0)), None);
        };
        let map = steering.map();
        if let Some(node) = steering::single_node(map, segments) {
            return (NumaSpan::Single(node), None);
        }
        let around = self.disk.around();
        if self.offload.is_none() || !around.steers || from_device {
            return (steering::span(map, segments), None);
        }
        let alignment = self.disk.alignment();
        let align = alignment.map_or(SECTOR, |alignment| alignment.offset.max(SECTOR));
        let mut parts = steering::cut(map, segments, align, around.tuning.split());
        match parts.pop() {
            Some(only) if parts.is_empty() => (only.span, None),
            Some(last) => {
                parts.push(last);
                (NumaSpan::Single(Node(0)), Some(parts))
            }
            None => (NumaSpan::Single(Node(0)), None),
        }
    }

    /// Answers GET_ID. Returns the bytes written.
    fn tell_id(&self, view: &View, writable: &mut Vec<Segment>) -> u32 {
        let id = self.disk.id();
        let mut left: &[u8] = &id;
        let mut failed = false;
        take_front(writable, id.len() as u64, |part| {
            let (bytes, after) = left.split_at(to_usize(part.bytes).min(left.len()));
            failed |= view.write(part.address, bytes).is_err();
            left = after;
        });
        if failed { 0 } else { 20 }
    }
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
        let end = at + to_usize(part.bytes);
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

/// Reads all segments: few bytes.
fn read_all(view: &View, segments: &[Segment]) -> Result<Vec<u8>, AddressSpaceError> {
    let mut bytes = vec![0; to_usize(total(segments))];
    let mut rest = &mut bytes[..];
    for segment in segments {
        let (part, after) = rest.split_at_mut(to_usize(segment.bytes).min(rest.len()));
        view.read(segment.address, part)?;
        rest = after;
    }
    Ok(bytes)
}
