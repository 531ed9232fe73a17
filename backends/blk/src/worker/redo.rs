//! Requests that have failed on a path: they are done again over another one, or wait for one.

use super::engine::Engine;
use super::requests::{Failure, Request, Work};
use super::steps::Step;
use crate::counters::count;
use crate::paths::bit;
use crate::paths::health::{Decision, Health, Waiting, can_be_the_path};
use farlane_block::storage::known_size;
use std::io;
use std::time::Instant;

impl Engine {
    /// Whether a request that has failed like this is to be done again: another path may lead to
    /// what this one does not, but to no blocks that the disk has no more.
    pub(super) fn can_redo(&self, request: &Request, errno: i32) -> bool {
        self.paths.fails_over() && can_be_the_path(errno) && !self.is_gone(request)
    }

    /// Whether a request reaches beyond the end of the disk, which has become smaller.
    pub(super) fn is_gone(&self, request: &Request) -> bool {
        end(request).is_some_and(|end| self.paths.ends_before(end))
    }

    /// Whether a request reaches beyond what its path shows of the disk now, or nobody knows.
    pub(super) fn is_beyond(&self, request: &Request) -> bool {
        let storage = self.ring.storage(request.path);
        let bytes = storage.and_then(|storage| known_size(&storage.file).ok());
        end(request).is_some_and(|end| bytes.is_none_or(|bytes| bytes < end))
    }

    /// Does a request again that has failed on its path.
    pub(super) fn redo(
        &mut self,
        slot: usize,
        request: &mut Request,
        errno: i32,
    ) -> io::Result<Step> {
        let path = request.path;
        self.paths
            .suspect(path, &io::Error::from_raw_os_error(errno));
        let failure = failure(request, errno);
        failure.tried |= bit(path);
        failure.errno = errno;
        let tried = failure.tried;
        // What was synced over a path was written over that one.
        request.syncing = false;
        request.sync = None;
        match request.work {
            // What the other path has done is not known to be in its cache.
            Work::Discard(_) | Work::Zero(_) => {
                request.range = 0;
                request.done = 0;
                request.clearing = None;
            }
            // It is its path's until that is known to have failed.
            Work::Flush => return Ok(self.strand(slot, request, errno)),
            Work::Read(_) | Work::Write(_) => (),
        }
        let limb = request.by;
        match self.paths.choose(limb, tried) {
            Some(next) => self.over(slot, request, next),
            None => Ok(self.strand(slot, request, errno)),
        }
    }

    fn over(&mut self, slot: usize, request: &mut Request, path: usize) -> io::Result<Step> {
        count(&self.disk.counters().redone, 1);
        request.path = path;
        self.step(slot, request)
    }

    /// Has a request wait for a path.
    pub(super) fn strand(&mut self, slot: usize, request: &mut Request, errno: i32) -> Step {
        if !std::mem::replace(&mut failure(request, errno).has_waited, true) {
            count(&self.disk.counters().waited, 1);
        }
        self.stranded.push_back(slot);
        Step::Stranded
    }

    /// A step over a path has succeeded: where it had failed before, that was the paths' fault.
    pub(super) fn succeeded(&self, request: &Request) {
        if let Some(failure) = &request.failure
            && !matches!(request.work, Work::Flush)
        {
            self.paths.confirm(failure.tried & !bit(request.path));
        }
    }

    /// Looks at all requests that wait for a path. Returns whether one does not any more.
    pub(super) fn look_at_stranded(&mut self) -> bool {
        let up = self.paths.in_state(Health::Up);
        let suspect = self.paths.in_state(Health::Suspect);
        let mut worked = false;
        for _ in 0..self.stranded.len() {
            let Some(slot) = self.stranded.pop_front() else {
                break;
            };
            let Some(mut request) = self.requests.take(slot) else {
                continue;
            };
            let (decision, errno) = self.decide(&request, up, suspect);
            if decision == Decision::Wait {
                self.requests.put(slot, request);
                self.stranded.push_back(slot);
                continue;
            }
            worked = true;
            if decision != Decision::GiveUp && is_unplanned_flush(&request) {
                // Which paths there are is found out anew.
                self.requests.release(slot);
                self.begin_flush(request);
                continue;
            }
            let step = match decision {
                Decision::GiveUp => {
                    if matches!(request.work, Work::Flush) && !is_unplanned_flush(&request) {
                        self.disk.sync_has_failed(errno);
                    }
                    Ok(Step::Done(
                        self.failed(&io::Error::from_raw_os_error(errno)),
                    ))
                }
                _ => self.again(slot, &mut request, decision),
            };
            self.after(slot, request, step);
        }
        worked
    }

    fn decide(&self, request: &Request, up: u32, suspect: u32) -> (Decision, i32) {
        let Some(failure) = &request.failure else {
            return (Decision::GiveUp, libc::EIO);
        };
        let is_flush = matches!(request.work, Work::Flush) && !is_unplanned_flush(request);
        let waiting = Waiting {
            tried: failure.tried,
            rounds: failure.rounds,
            belongs_to: is_flush.then(|| bit(request.path)),
            waited: failure.since.elapsed(),
        };
        let decision = waiting.decide(up, suspect, self.disk.around().patience);
        (decision, failure.errno)
    }

    fn again(
        &mut self,
        slot: usize,
        request: &mut Request,
        decision: Decision,
    ) -> io::Result<Step> {
        let path = request.path;
        let keeps_path = decision == Decision::NewRound && matches!(request.work, Work::Flush);
        let failure = failure(request, libc::EIO);
        if decision == Decision::NewRound {
            failure.rounds += 1;
            failure.tried = 0;
        }
        let (tried, errno) = (failure.tried, failure.errno);
        if keeps_path {
            return self.over(slot, request, path);
        }
        let limb = request.by;
        match self.paths.choose(limb, tried) {
            Some(path) => self.over(slot, request, path),
            // It has just failed.
            None => Ok(self.strand(slot, request, errno)),
        }
    }
}

/// A flush that found no path at all: it belongs to none.
fn is_unplanned_flush(request: &Request) -> bool {
    let failed_nowhere = request.failure.as_ref().is_some_and(|f| f.tried == 0);
    matches!(request.work, Work::Flush) && request.whole.is_none() && failed_nowhere
}

/// Where the blocks end that a request is busy with, in bytes.
fn end(request: &Request) -> Option<u64> {
    let extent = match &request.work {
        Work::Read(extent) | Work::Write(extent) => *extent,
        Work::Discard(ranges) | Work::Zero(ranges) => ranges.get(request.range)?.extent,
        Work::Flush => return None,
    };
    (!request.syncing).then_some(extent.offset + extent.bytes)
}

fn failure(request: &mut Request, errno: i32) -> &mut Failure {
    request.failure.get_or_insert_with(|| {
        Box::new(Failure {
            errno,
            tried: 0,
            rounds: 0,
            has_waited: false,
            since: Instant::now(),
        })
    })
}
