//! Requests that have failed on a path: they are done again over another one, or wait for one.

use super::QueueWorker;
use super::requests::{Answer, Request};
use crate::counters::count;
use crate::paths::health::{Decision, Health, Waiting};
use crate::paths::{PathId, PathSet};
use farlane_block::engine::{Slot, Work};
use std::io;

impl QueueWorker {
    /// Does a request again that has failed on its path.
    pub(super) fn redo(&mut self, slot: Slot, errno: i32) {
        let Some(request) = self.requests.slots.get_mut(slot) else {
            return;
        };
        let path = request.operation.file();
        self.files
            .paths
            .suspect(path, &io::Error::from_raw_os_error(errno));
        let failure = request.failure(errno);
        failure.tried = failure.tried.with(path);
        failure.errno = errno;
        let tried = failure.tried;
        // A sync is its path's until that is known to have failed.
        let is_sync = matches!(request.operation.work(), Work::Sync);
        let node = request.executing_node;
        match self.files.paths.choose(node, tried) {
            Some(next) if !is_sync => self.over(slot, next),
            _ => self.strand(slot, errno),
        }
    }

    fn over(&mut self, slot: Slot, path: PathId) {
        count(&self.disk.counters().redone, 1);
        if let Some(request) = self.requests.slots.get_mut(slot) {
            request.operation.move_to(path);
        }
        self.advance(slot);
    }

    /// Has a request wait for a path.
    pub(super) fn strand(&mut self, slot: Slot, errno: i32) {
        let Some(request) = self.requests.slots.get_mut(slot) else {
            return;
        };
        if !std::mem::replace(&mut request.failure(errno).has_waited, true) {
            count(&self.disk.counters().waited, 1);
        }
        self.requests.stranded.push_back(slot);
    }

    /// Looks at all requests that wait for a path. Returns whether one does not any more.
    pub(super) fn look_at_stranded(&mut self) -> bool {
        let up = self.files.paths.in_state(Health::Up);
        let suspect = self.files.paths.in_state(Health::Suspect);
        let mut worked = false;
        for _ in 0..self.requests.stranded.len() {
            let Some(slot) = self.requests.stranded.pop_front() else {
                break;
            };
            let Some(request) = self.requests.slots.get_mut(slot) else {
                continue;
            };
            let is_sync = matches!(request.operation.work(), Work::Sync);
            let is_unplanned = is_unplanned_sync(request);
            let belongs_to = (is_sync && !is_unplanned).then(|| request.operation.file());
            let failure = request.failure(libc::EIO);
            let waiting = Waiting {
                tried: failure.tried,
                rounds: failure.rounds,
                belongs_to,
                waited: failure.since.elapsed(),
            };
            let errno = failure.errno;
            match waiting.decide(up, suspect, self.disk.around().tuning.patience()) {
                Decision::Wait => {
                    self.requests.stranded.push_back(slot);
                    continue;
                }
                Decision::GiveUp => {
                    if belongs_to.is_some() {
                        self.disk.sync_has_failed(errno);
                    }
                    let status = self.failed(&io::Error::from_raw_os_error(errno));
                    self.end(slot, status);
                }
                // Which paths there are is found out anew.
                _ if is_unplanned => {
                    if let Some(request) = self.requests.slots.remove(slot)
                        && let Answer::Driver(completion) = request.answer
                    {
                        self.begin_flush(completion, request.failure);
                    }
                }
                decision => self.again(slot, decision),
            }
            worked = true;
        }
        worked
    }

    fn again(&mut self, slot: Slot, decision: Decision) {
        let Some(request) = self.requests.slots.get_mut(slot) else {
            return;
        };
        let path = request.operation.file();
        let is_sync = matches!(request.operation.work(), Work::Sync);
        let failure = request.failure(libc::EIO);
        if decision == Decision::NewRound {
            failure.rounds += 1;
            failure.tried = PathSet::EMPTY;
        }
        let (tried, errno) = (failure.tried, failure.errno);
        if decision == Decision::NewRound && is_sync {
            return self.over(slot, path);
        }
        let node = request.executing_node;
        match self.files.paths.choose(node, tried) {
            Some(path) => self.over(slot, path),
            // It has just failed.
            None => self.strand(slot, errno),
        }
    }
}

/// A flush that found no path at all: it belongs to none.
fn is_unplanned_sync(request: &Request) -> bool {
    let failed_nowhere = request.failure.as_ref().is_some_and(|f| f.tried.is_empty());
    let is_sync = matches!(request.operation.work(), Work::Sync);
    is_sync && matches!(request.answer, Answer::Driver(_)) && failed_nowhere
}
