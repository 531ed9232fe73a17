//! The steps of a request: each is one operation of the ring, or over at once.

use super::data;
use super::engine::Engine;
use super::requests::{Clearing, Request, Work};
use crate::bits::Status;
use crate::counters::count;
use crate::request::{Extent, Range};
use farlane_block::bounce::Bounce;
use farlane_block::ring::{Durable, Fallocate};
use farlane_block::syncs::UnderWay;
use farlane_block::vectors::{skip, transfer_now};
use std::io;

/// Most bytes that one request has in a buffer of ours.
const COPY_BYTES: u64 = 1 << 20;
/// Most requests that have such a buffer; others wait.
pub const MAX_COPIES: usize = 16;

#[repr(C, align(4096))]
struct Zeroes([u8; 1 << 16]);
static ZEROES: Zeroes = Zeroes([0; 1 << 16]);
/// Vectors of zeroes in one operation.
const ZEROES_AT_ONCE: usize = 16;

/// Where a request is after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The ring will tell.
    Pending,
    /// It waits for others to end.
    Waiting,
    /// It waits for a path.
    Stranded,
    /// It has ended.
    Done(Status),
}

impl Engine {
    /// Does what comes next.
    pub(super) fn step(&mut self, slot: usize, request: &mut Request) -> io::Result<Step> {
        match &request.work {
            Work::Read(extent) => {
                let extent = *extent;
                self.step_data(slot, request, extent, None)
            }
            Work::Write(extent) => {
                let extent = *extent;
                self.step_data(slot, request, extent, Some(self.durable()))
            }
            Work::Flush => self.step_sync(slot, request),
            Work::Discard(_) | Work::Zero(_) => self.step_ranges(slot, request),
        }
    }

    fn step_data(
        &mut self,
        slot: usize,
        request: &mut Request,
        extent: Extent,
        write: Option<Durable>,
    ) -> io::Result<Step> {
        let syncs_after = write == Some(Durable(true)) && self.syncs_after(request);
        if request.done >= extent.bytes {
            if syncs_after {
                return self.step_sync(slot, request);
            }
            // The device may have dropped what it had cached when another one's flush failed,
            // before its own succeeded.
            if request.is_durable && self.disk.failed_syncs() != request.failed_syncs {
                let lost = io::Error::from_raw_os_error(libc::EIO);
                return Ok(Step::Done(self.failed(&lost)));
            }
            return Ok(Step::Done(Status::Ok));
        }
        if request.done == 0 {
            request.failed_syncs = self.disk.failed_syncs();
        }
        let write = write.map(|durable| Durable(durable.0 && !syncs_after));
        request.is_durable = write == Some(Durable(true));
        let offset = extent.offset + request.done;
        if request.copies && !request.is_copying {
            if self.copying >= MAX_COPIES {
                self.waiting.push_back(slot);
                return Ok(Step::Waiting);
            }
            self.copying += 1;
            request.is_copying = true;
            count(&self.disk.counters().copied, 1);
        }
        if request.limb.is_some() {
            if self.hand(slot, request, write, offset) {
                return Ok(Step::Pending);
            }
            // It cannot now: the worker does it itself.
            request.limb = None;
            request.by = self.home;
        }
        if self.disk.in_memory() && !request.copies {
            // What is in memory is never opened again.
            let storage = self.ring.storage(request.path);
            let storage = storage.ok_or(io::ErrorKind::NotFound)?;
            // SAFETY: the vectors name memory that the request keeps mapped.
            let moved = unsafe { transfer_now(&storage.file, write, &mut request.vectors, offset) };
            return Ok(Step::Done(match moved {
                Ok(()) => Status::Ok,
                Err(e) => self.failed(&e),
            }));
        }
        let file = self.ring.file(request.path)?;
        if !request.copies {
            // SAFETY: as above; the request is kept in its slot until its completion is taken.
            unsafe {
                self.ring
                    .transfer(file, write, &request.vectors, offset, slot)
            }?;
            return Ok(Step::Pending);
        }
        let part = (extent.bytes - request.done).min(COPY_BYTES);
        let bytes = usize::try_from(part).map_err(io::Error::other)?;
        let mut bounce = match request.bounce.take() {
            Some(bounce) if bounce.len() == bytes => bounce,
            _ => Bounce::new(bytes),
        };
        if write.is_some() {
            // SAFETY: the vectors name memory that the request keeps mapped; the copy is ours.
            unsafe { data::copy(&request.vectors, &mut bounce, false) };
        }
        request.own_vectors.clear();
        request.own_vectors.push(libc::iovec {
            iov_base: bounce.as_mut_ptr().cast(),
            iov_len: bytes,
        });
        request.bounce = Some(bounce);
        // SAFETY: the copy belongs to the request, which is kept in its slot until its completion
        // is taken.
        unsafe {
            self.ring
                .transfer(file, write, &request.own_vectors, offset, slot)
        }?;
        Ok(Step::Pending)
    }

    /// An operation of the ring has ended with `result`: a number of bytes, or an error.
    pub(super) fn stepped(
        &mut self,
        slot: usize,
        request: &mut Request,
        result: i32,
    ) -> io::Result<Step> {
        if request.repeats.again(result, request.syncing) {
            return self.step(slot, request);
        }
        let Ok(moved) = u64::try_from(result) else {
            return self.refused(slot, request, -result);
        };
        let has_data = matches!(request.work, Work::Read(_) | Work::Write(_));
        let writes = !matches!(request.work, Work::Read(_) | Work::Flush) && !request.syncing;
        if writes
            && (moved > 0 || !has_data)
            && self.paths.several()
            && let Some(path) = self.paths.get(request.path)
        {
            path.wrote();
        }
        let is_cut = match (&request.work, request.clearing) {
            (Work::Flush, _) => false,
            (Work::Read(_) | Work::Write(_), _) | (_, Some(Clearing::Writing)) => moved == 0,
            // Of blocks that are not there any more `fallocate` says nothing: it zeroes what is
            // left, and succeeds.
            (Work::Zero(_), _) => self.is_beyond(request),
            (Work::Discard(_), _) => false,
        };
        if request.syncing || !is_cut {
            self.succeeded(request);
        }
        if request.syncing {
            request.beside = request.sync.take().map(UnderWay::end);
            return self.step(slot, request);
        }
        if is_cut {
            return self.cut(slot, request);
        }
        match &request.work {
            Work::Read(_) | Work::Write(_) => {
                let bytes = usize::try_from(moved).map_err(io::Error::other)?;
                if matches!(request.work, Work::Read(_))
                    && let Some(bounce) = &mut request.bounce
                {
                    let length = bytes.min(bounce.len());
                    // SAFETY: the vectors name memory that the request keeps mapped, and that was
                    // found to be writable; the copy is ours.
                    unsafe { data::copy(&request.vectors, &mut bounce[..length], true) };
                }
                skip(&mut request.vectors, bytes);
                request.done += moved;
            }
            Work::Flush => (),
            Work::Discard(_) | Work::Zero(_) => {
                if request.clearing == Some(Clearing::Writing) {
                    request.done += moved;
                } else {
                    request.done = u64::MAX;
                }
            }
        }
        self.step(slot, request)
    }

    /// Not all of the blocks are there.
    fn cut(&mut self, slot: usize, request: &mut Request) -> io::Result<Step> {
        if self.can_redo(request, libc::ENODEV) {
            // A device that has been pulled has no blocks.
            return self.redo(slot, request, libc::ENODEV);
        }
        // The disk has become smaller.
        Ok(Step::Done(
            self.failed(&io::ErrorKind::UnexpectedEof.into()),
        ))
    }

    fn refused(&mut self, slot: usize, request: &mut Request, errno: i32) -> io::Result<Step> {
        let clears = matches!(request.work, Work::Discard(_) | Work::Zero(_)) && !request.syncing;
        let of_path = match errno {
            // Blocks that a pulled device does not have are also said not to be valid.
            libc::EINVAL if clears && self.is_beyond(request) => libc::ENODEV,
            errno => errno,
        };
        if self.can_redo(request, of_path) {
            return self.redo(slot, request, of_path);
        }
        // Blocks that the disk has no more were not written, and nothing else is lost by that.
        let is_gone = self.paths.fails_over() && self.is_gone(request);
        if self.is_of_a_sync(request, errno) && !is_gone {
            self.disk.sync_has_failed(errno);
        }
        // Those that wait for it find that.
        request.sync = None;
        let unsupported = matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV);
        match &request.work {
            Work::Discard(_) if !request.syncing => {
                let command = request.clearing == Some(Clearing::Discarding);
                // Of blocks that are none of the device EINVAL is said again.
                if command && (unsupported || errno == libc::EINVAL) {
                    request.clearing = Some(Clearing::By(Fallocate::PunchHole));
                    return self.step(slot, request);
                }
                let status = match unsupported {
                    true => Status::Unsupp,
                    false => self.failed(&io::Error::from_raw_os_error(errno)),
                };
                Ok(Step::Done(status))
            }
            Work::Zero(_) if unsupported && !request.syncing => match request.clearing {
                // What cannot be given back can be zeroed all the same.
                Some(Clearing::By(Fallocate::PunchHole)) => {
                    request.clearing = Some(self.zeroing());
                    self.step(slot, request)
                }
                Some(Clearing::By(Fallocate::ZeroRange)) => {
                    if errno != libc::ENODEV {
                        self.disk.cannot_zero();
                    }
                    request.clearing = Some(Clearing::Writing);
                    self.step(slot, request)
                }
                Some(Clearing::Writing | Clearing::Discarding) | None => Ok(Step::Done(
                    self.failed(&io::Error::from_raw_os_error(errno)),
                )),
            },
            _ => Ok(Step::Done(
                self.failed(&io::Error::from_raw_os_error(errno)),
            )),
        }
    }

    fn is_device(&self, path: usize) -> bool {
        let storage = self.ring.storage(path);
        storage.is_some_and(|storage| storage.is_device)
    }

    /// How a range is zeroed that need not be given back.
    fn zeroing(&self) -> Clearing {
        if self.disk.can_zero() {
            Clearing::By(Fallocate::ZeroRange)
        } else {
            Clearing::Writing
        }
    }

    fn step_ranges(&mut self, slot: usize, request: &mut Request) -> io::Result<Step> {
        loop {
            let (range, discards) = match &request.work {
                Work::Discard(ranges) => (ranges.get(request.range), true),
                Work::Zero(ranges) => (ranges.get(request.range), false),
                _ => (None, false),
            };
            let Some(&Range { extent, unmap }) = range else {
                if !self.durable().0 {
                    return Ok(Step::Done(Status::Ok));
                }
                return self.step_sync(slot, request);
            };
            if request.done >= extent.bytes {
                request.range += 1;
                request.done = 0;
                request.clearing = None;
                continue;
            }
            let clearing = match request.clearing {
                Some(clearing) => clearing,
                None if discards && self.is_device(request.path) => Clearing::Discarding,
                None if discards || unmap => Clearing::By(Fallocate::PunchHole),
                None => self.zeroing(),
            };
            request.clearing = Some(clearing);
            let offset = extent.offset + request.done;
            let left = extent.bytes - request.done;
            let file = self.ring.file(request.path)?;
            match clearing {
                Clearing::Discarding => {
                    self.ring.discard(file, offset, left, slot)?;
                    return Ok(Step::Pending);
                }
                // It may have all of them again when it has been cut.
                Clearing::By(_) if !discards && self.is_beyond(request) => {
                    return self.cut(slot, request);
                }
                Clearing::By(how) => {
                    self.ring.fallocate(file, how, offset, left, slot)?;
                    return Ok(Step::Pending);
                }
                Clearing::Writing => (),
            }
            let chunk = ZEROES.0.len();
            let mut left = usize::try_from(left)
                .unwrap_or(usize::MAX)
                .min(chunk * ZEROES_AT_ONCE);
            request.own_vectors.clear();
            while left > 0 {
                request.own_vectors.push(libc::iovec {
                    iov_base: ZEROES.0.as_ptr().cast_mut().cast(),
                    iov_len: left.min(chunk),
                });
                left -= left.min(chunk);
            }
            let write = Some(Durable(false));
            // SAFETY: the zeroes are static and only read; the request, with its vectors, is kept
            // in its slot until its completion is taken.
            unsafe {
                self.ring
                    .transfer(file, write, &request.own_vectors, offset, slot)
            }?;
            return Ok(Step::Pending);
        }
    }
}
