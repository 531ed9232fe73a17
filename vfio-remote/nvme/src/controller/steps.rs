//! What requests do, step by step: between a command and its completion.

use super::{Controller, State};
use crate::bits::Status;
use crate::bounce::Bounce;
use crate::controller::requests::{Owner, Request, Work, Zeroing};
use crate::counters::count;
use crate::namespace::Storage;
use crate::remote::Job;
use crate::ring::{Durable, Fallocate};
use crate::vectors::{fill_with_zeroes, skip, transfer_now};
use farlane_sys::warn_limited;

/// What is written where a file cannot be zeroed otherwise, and how often at once.
static ZEROES: [u8; 65536] = [0; 65536];
const ZEROES_AT_ONCE: u64 = 16;

/// What a step of a request leads to.
pub(super) enum Step {
    /// Something is under way.
    Pending,
    /// It waits for others to end.
    Waiting,
    /// The transfer with the namespace has ended.
    Done(Status),
}

impl Controller {
    /// Begins a request whose data is in place, or that has none.
    pub(super) fn begin(&mut self, request: Request) {
        let copies = request.copies(request.data.len());
        let slot = self.requests.claim(&request, copies);
        self.advance(slot, request);
    }

    /// Begins a request whose data has to be read by messages first.
    pub(super) fn begin_gather(&mut self, mut request: Request, length: usize) {
        request.awaits_data = true;
        let slot = self.requests.claim(&request, request.copies(length));
        let pointer = request.pointer;
        self.requests.put(slot, request);
        self.remote.submit(Job::Gather {
            slot,
            pointer,
            length,
        });
    }

    /// Begins a request that only writes data by messages.
    pub(super) fn begin_scatter(&mut self, request: Request, data: Bounce) {
        let slot = self.requests.claim(&request, request.copies(data.len()));
        self.scatter(slot, request, data);
    }

    fn scatter(&mut self, slot: usize, request: Request, data: Bounce) {
        let pointer = request.pointer;
        let bytes = u64::try_from(data.len()).unwrap_or(0);
        count(&self.shared.counters.bounced_bytes, bytes);
        self.requests.put(slot, request);
        self.remote.submit(Job::Scatter {
            slot,
            pointer,
            data,
        });
    }

    /// A command's data has been read by messages.
    pub(super) fn gathered(&mut self, slot: usize, data: Result<Bounce, Status>) {
        let Some(mut request) = self.requests.take(slot) else {
            return;
        };
        request.awaits_data = false;
        let data = match data {
            _ if request.owner == Owner::Nobody => Err(Status::ABORT_REQUESTED),
            // Nothing is begun any more.
            Ok(_) if self.state != State::Running => Err(Status::INTERNAL_ERROR),
            other => other,
        };
        match data {
            Err(status) => self.finish(slot, request, status),
            Ok(data) => {
                let bytes = u64::try_from(data.len()).unwrap_or(0);
                count(&self.shared.counters.bounced_bytes, bytes);
                request.data = data;
                match request.work {
                    Work::Admin(command) => {
                        let Owner::Command(id) = request.owner else {
                            return;
                        };
                        let data = std::mem::take(&mut request.data);
                        self.requests.release(slot, request.iovecs);
                        self.admin_with_data(&id, command, &data);
                    }
                    Work::Ranges => {
                        let data = std::mem::take(&mut request.data);
                        match self.extents(request.namespace, &data) {
                            Ok(extents) => {
                                request.work = Work::Trim(extents);
                                self.advance(slot, request);
                            }
                            Err(status) => self.finish(slot, request, status),
                        }
                    }
                    _ => self.advance(slot, request),
                }
            }
        }
    }

    /// A command's data has been written by messages.
    pub(super) fn scattered(&mut self, slot: usize, result: Result<(), Status>) {
        if let Some(request) = self.requests.take(slot) {
            let status = result.err().unwrap_or(Status::SUCCESS);
            self.finish(slot, request, status);
        }
    }

    /// An operation of the ring has ended.
    pub(super) fn transferred(&mut self, slot: usize, result: i32) {
        let Some(mut request) = self.requests.take(slot) else {
            return;
        };
        let is_sync = request.sync.is_some();
        if request.repeats.again(result, is_sync) {
            self.advance(slot, request);
            return;
        }
        if is_sync {
            self.synced(&mut request, result);
            self.advance(slot, request);
            return;
        }
        let moved = u64::try_from(result);
        let write = matches!(request.work, Work::Write(_) | Work::Zero { .. });
        match (&mut request.work, moved) {
            (Work::Trim(extents), result) => {
                // A hint: what cannot be given back stays (6.7).
                if result.is_err() {
                    log::debug!(
                        "Blocks cannot be given back: {}",
                        -result.unwrap_or(0).cast_signed()
                    );
                }
                extents.pop_front();
            }
            (
                Work::Zero {
                    how: Zeroing::By(_),
                    ..
                },
                Ok(_),
            ) => {
                if self.is_beyond(&request) {
                    let status = self.storage_failed(libc::EIO, true);
                    self.finish(slot, request, status);
                    return;
                }
                request.done = request.length;
            }
            (
                Work::Zero {
                    how: how @ Zeroing::By(_),
                    ..
                },
                Err(_),
            ) if matches!(-result, libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV) => {
                *how = match how {
                    Zeroing::By(Fallocate::ZeroRange) => Zeroing::By(Fallocate::PunchHole),
                    _ => Zeroing::Writing,
                };
            }
            (_, Err(_)) => {
                self.note_failed_sync(&request, -result);
                let status = self.storage_failed(-result, write);
                self.finish(slot, request, status);
                return;
            }
            // The file has become shorter.
            (_, Ok(0)) => {
                let status = self.storage_failed(libc::EIO, write);
                self.finish(slot, request, status);
                return;
            }
            (_, Ok(moved)) => {
                request.done += moved;
                skip(
                    &mut request.iovecs,
                    usize::try_from(moved).unwrap_or(usize::MAX),
                );
            }
        }
        self.advance(slot, request);
    }

    /// Whether nobody waits for what is left of a request: the controller is reset, or has failed.
    fn is_over(&self, request: &Request) -> bool {
        match request.owner {
            Owner::Shutdown => self.state == State::Resetting,
            Owner::Command(_) | Owner::Nobody => self.state != State::Running,
        }
    }

    /// Goes on with a request until it waits or has ended.
    pub(super) fn advance(&mut self, slot: usize, mut request: Request) {
        if self.is_over(&request) {
            self.finish(slot, request, Status::INTERNAL_ERROR);
            return;
        }
        match self.step(slot, &mut request) {
            Ok(Step::Pending | Step::Waiting) => self.requests.put(slot, request),
            Ok(Step::Done(status)) => self.moved_all(slot, request, status),
            Err(e) => {
                warn_limited!(self.identity.limit, "The ring takes no operation: {e}");
                self.finish(slot, request, Status::INTERNAL_ERROR);
            }
        }
    }

    /// Everything between memory and the namespace is done.
    fn moved_all(&mut self, slot: usize, mut request: Request, status: Status) {
        if !status.is_success() {
            self.finish(slot, request, status);
            return;
        }
        match &request.work {
            Work::Read if request.view.is_none() => {
                let data = std::mem::take(&mut request.data);
                self.scatter(slot, request, data);
            }
            Work::Compare(other) if **other != *request.data => {
                self.finish(slot, request, Status::COMPARE_FAILURE);
            }
            _ => self.finish(slot, request, Status::SUCCESS),
        }
    }

    fn step(&mut self, slot: usize, request: &mut Request) -> std::io::Result<Step> {
        let file = u32::try_from(request.namespace).unwrap_or(u32::MAX);
        match &mut request.work {
            Work::Flush { .. } => self.step_flush(slot, request),
            Work::Trim(extents) => {
                let Some(&(offset, length)) = extents.front() else {
                    return Ok(Step::Done(Status::SUCCESS));
                };
                let how = Fallocate::PunchHole;
                self.ring.fallocate(file, how, offset, length, slot)?;
                Ok(Step::Pending)
            }
            Work::Zero { .. } => self.step_zero(slot, request),
            Work::Read => self.step_transfer(slot, request, None),
            Work::Write(durable) => {
                let durable = *durable;
                if request.done == 0 {
                    request.failed_syncs = self.failed_syncs(request.namespace);
                }
                let syncs_after = durable.0 && self.syncs_after(request);
                if syncs_after && request.done >= request.length {
                    return self.step_sync(slot, request);
                }
                // The device may have dropped what it had cached when another one's flush failed,
                // before its own succeeded.
                let is_as_it_was = self.failed_syncs(request.namespace) == request.failed_syncs;
                if durable.0 && request.done >= request.length && !is_as_it_was {
                    return Ok(Step::Done(Status::WRITE_FAULT));
                }
                let durable = Durable(durable.0 && !syncs_after);
                self.step_transfer(slot, request, Some(durable))
            }
            Work::Compare(other) => {
                if request.iovecs.is_empty() && request.done == 0 {
                    *other = Bounce::new(request.data.len());
                    request.iovecs.push(libc::iovec {
                        iov_base: other.as_mut_ptr().cast(),
                        iov_len: other.len(),
                    });
                }
                self.step_transfer(slot, request, None)
            }
            Work::Ranges | Work::Admin(_) | Work::Answer { .. } => {
                Ok(Step::Done(Status::INTERNAL_ERROR))
            }
        }
    }

    fn step_transfer(
        &mut self,
        slot: usize,
        request: &mut Request,
        write: Option<Durable>,
    ) -> std::io::Result<Step> {
        if request.done >= request.length {
            return Ok(Step::Done(Status::SUCCESS));
        }
        if request.iovecs.is_empty() {
            // The copy.
            request.iovecs.push(libc::iovec {
                iov_base: request.data.as_mut_ptr().cast(),
                iov_len: request.data.len(),
            });
        }
        let offset = request.offset + request.done;
        let Some(namespace) = self.identity.namespaces.get(request.namespace) else {
            return Ok(Step::Done(Status::INTERNAL_ERROR));
        };
        match &namespace.storage {
            Storage::Null => {
                if write.is_none() {
                    // SAFETY: the vectors name the guest's memory, mapped as long as the request's
                    // view, or the request's own copy.
                    unsafe { fill_with_zeroes(&request.iovecs) };
                }
                Ok(Step::Done(Status::SUCCESS))
            }
            Storage::Memory { file } => {
                // SAFETY: as above.
                let result = unsafe { transfer_now(file, write, &mut request.iovecs, offset) };
                let status = result.err().map_or(Status::SUCCESS, |e| {
                    self.storage_failed(e.raw_os_error().unwrap_or(libc::EIO), write.is_some())
                });
                Ok(Step::Done(status))
            }
            Storage::Ring { .. } => {
                let file = u32::try_from(request.namespace).unwrap_or(u32::MAX);
                // SAFETY: as above; the request, with its vectors, view and copy, is kept in its
                // slot until its completion is taken.
                unsafe {
                    self.ring
                        .transfer(file, write, &request.iovecs, offset, slot)
                }?;
                Ok(Step::Pending)
            }
        }
    }

    /// Whether not all blocks of a request are there any more. `fallocate` zeroes what is left of
    /// them then, and succeeds.
    fn is_beyond(&self, request: &Request) -> bool {
        let end = request.offset + request.length;
        let namespace = self.identity.namespaces.get(request.namespace);
        namespace.is_some_and(|namespace| namespace.storage.ends_before(end))
    }

    fn step_zero(&mut self, slot: usize, request: &mut Request) -> std::io::Result<Step> {
        let file = u32::try_from(request.namespace).unwrap_or(u32::MAX);
        let Work::Zero { how, durable } = &request.work else {
            return Ok(Step::Done(Status::INTERNAL_ERROR));
        };
        if request.done >= request.length {
            if !durable.0 {
                return Ok(Step::Done(Status::SUCCESS));
            }
            return self.step_sync(slot, request);
        }
        let offset = request.offset + request.done;
        let rest = request.length - request.done;
        match *how {
            // They may all be there again when some have been zeroed.
            Zeroing::By(_) if self.is_beyond(request) => {
                return Ok(Step::Done(self.storage_failed(libc::EIO, true)));
            }
            Zeroing::By(how) => {
                self.ring.fallocate(file, how, offset, rest, slot)?;
            }
            Zeroing::Writing => {
                let chunk = u64::try_from(ZEROES.len()).unwrap_or(1);
                let mut left = rest.min(chunk * ZEROES_AT_ONCE);
                request.iovecs.clear();
                while left > 0 {
                    let length = left.min(chunk);
                    request.iovecs.push(libc::iovec {
                        iov_base: ZEROES.as_ptr().cast_mut().cast(),
                        iov_len: usize::try_from(length).unwrap_or(0),
                    });
                    left -= length;
                }
                let durable = Some(Durable(false));
                // SAFETY: the zeroes are static and only read; the request, with its vectors, is
                // kept in its slot until its completion is taken.
                unsafe {
                    self.ring
                        .transfer(file, durable, &request.iovecs, offset, slot)
                }?;
            }
        }
        Ok(Step::Pending)
    }

    /// Ends a request.
    fn finish(&mut self, slot: usize, request: Request, status: Status) {
        if status.is_success() {
            let counters = &self.shared.counters;
            match &request.work {
                Work::Read => {
                    count(&counters.reads, 1);
                    count(&counters.read_bytes, request.length);
                }
                Work::Write(_) => {
                    count(&counters.writes, 1);
                    count(&counters.written_bytes, request.length);
                }
                Work::Flush { .. } => count(&counters.flushes, 1),
                Work::Compare(_) | Work::Zero { .. } | Work::Trim(_) | Work::Ranges => {
                    count(&counters.others, 1);
                }
                Work::Admin(_) | Work::Answer { .. } => count(&counters.admin, 1),
            }
        }
        self.requests.release(slot, request.iovecs);
        match request.owner {
            Owner::Nobody => (),
            Owner::Shutdown => self.end_shutdown(status),
            Owner::Command(id) => {
                let dw0 = match request.work {
                    Work::Answer { dw0 } => dw0,
                    _ => 0,
                };
                self.complete(&id, status, dw0);
            }
        }
    }
}
