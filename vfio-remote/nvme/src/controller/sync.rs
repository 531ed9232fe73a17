//! Flushes (NVMe 1.4, 6.8), and the shutdown of the controller (7.6.2), which is one of everything.

use super::{Controller, State};
use crate::bits::{ALL_NAMESPACES, Status};
use crate::controller::requests::{Owner, Request, SyncState, Work};
use crate::controller::steps::Step;
use crate::counters::count;
use crate::namespace::{Namespace, Storage};
use crate::ring::{Durable, is_of_the_write};
use crate::syncs::UnderWay;
use farlane_sys::warn_limited;
use std::io;

/// Whether the controller makes everything durable before its registers say that it is shut down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shutdown {
    /// It does not.
    #[default]
    Idle,
    /// It does.
    UnderWay,
    /// It does, and has been asked to do so again: after that, once, however often it was.
    AskedAgain,
}

impl Controller {
    /// A flush of the namespaces that have something to flush. What is only read has nothing, and
    /// its file system may have no `fsync`.
    pub(super) fn flush_of(&self, nsid: u32) -> Work {
        let all = self.identity.namespaces.iter().enumerate();
        let named = all.filter(|(index, namespace)| {
            let named = nsid == ALL_NAMESPACES || u32::try_from(index + 1) == Ok(nsid);
            let is_ring = matches!(namespace.storage, Storage::Ring { .. });
            named && is_ring && !namespace.read_only
        });
        Work::Flush {
            left: named.map(|(index, _)| index).collect(),
            status: Status::SUCCESS,
        }
    }

    /// A shutdown has been asked for.
    pub(super) fn begin_shutdown(&mut self) {
        if self.shutdown != Shutdown::Idle {
            self.shutdown = Shutdown::AskedAgain;
            return;
        }
        self.shutdown = Shutdown::UnderWay;
        let work = self.flush_of(ALL_NAMESPACES);
        self.begin(Request::new(Owner::Shutdown, work, 0, 0, 0));
    }

    /// Its flush has ended.
    pub(super) fn end_shutdown(&mut self, status: Status) {
        let before = std::mem::take(&mut self.shutdown);
        // The driver has reset the controller: nobody waits for it.
        if self.state == State::Resetting {
            return;
        }
        if !status.is_success() {
            let limit = &self.identity.limit;
            warn_limited!(limit, "Shut down, but not all that was written is durable");
        }
        match before {
            Shutdown::AskedAgain => self.begin_shutdown(),
            Shutdown::Idle | Shutdown::UnderWay => self.shared.registers().shut_down(),
        }
    }

    /// Whether a sync of a namespace can still make what was written durable.
    pub(super) fn can_sync(&self, namespace: usize) -> bool {
        let namespace = self.identity.namespaces.get(namespace);
        namespace.is_some_and(Namespace::can_sync)
    }

    /// Whether a sync can still make durable what a request has done. What was written around the
    /// page cache after a sync has failed is not lost with what was written before.
    fn can_sync_of(&self, request: &Request, namespace: usize) -> bool {
        if matches!(request.work, Work::Write(_)) && !self.is_cached(namespace) {
            return self.failed_syncs(namespace) == request.failed_syncs;
        }
        self.can_sync(namespace)
    }

    /// How many syncs of a namespace have failed.
    pub(super) fn failed_syncs(&self, namespace: usize) -> u64 {
        let namespace = self.identity.namespaces.get(namespace);
        namespace.map_or(0, Namespace::failed_syncs)
    }

    /// Whether the page cache of the host takes part in what a namespace holds: a durable write is
    /// a write and then a sync there. Of an operation that does both nobody can say which has
    /// failed, and it would use up the error of an earlier write.
    pub(super) fn is_cached(&self, namespace: usize) -> bool {
        let namespace = self.identity.namespaces.get(namespace);
        namespace.is_some_and(|namespace| {
            let storage = &namespace.storage;
            matches!(storage, Storage::Ring { is_cached, .. } if *is_cached)
        })
    }

    /// Whether a durable write is a write and then a sync: so that it is known which of them has
    /// failed. Of one from the memory of another device that is asked, too: the disk may not reach
    /// it.
    pub(super) fn syncs_after(&self, request: &Request) -> bool {
        request.from_device || self.is_cached(request.namespace)
    }

    /// A write has failed: if it was to be durable by itself, that may have been the device's
    /// flush.
    pub(super) fn note_failed_sync(&self, request: &Request, errno: i32) {
        let is_durable = matches!(request.work, Work::Write(Durable(true)));
        if is_durable
            && !self.syncs_after(request)
            && !is_of_the_write(errno, true, false)
            && let Some(namespace) = self.identity.namespaces.get(request.namespace)
        {
            namespace.sync_has_failed(errno);
        }
    }

    /// Flushes namespaces one after the other.
    pub(super) fn step_flush(&mut self, slot: usize, request: &mut Request) -> io::Result<Step> {
        while request.syncs().is_some() {
            let step = self.step_sync(slot, request)?;
            let (Step::Done(synced), Work::Flush { left, status }) = (&step, &mut request.work)
            else {
                return Ok(step);
            };
            left.pop_front();
            // The others are flushed all the same.
            if !synced.is_success() {
                *status = *synced;
            }
        }
        Ok(Step::Done(match &request.work {
            Work::Flush { status, .. } => *status,
            _ => Status::INTERNAL_ERROR,
        }))
    }

    /// Makes durable what was written to a namespace.
    pub(super) fn step_sync(&mut self, slot: usize, request: &mut Request) -> io::Result<Step> {
        let Some(namespace) = request.syncs() else {
            return Ok(Step::Done(Status::INTERNAL_ERROR));
        };
        if let Some(SyncState::Ended(Some(beside))) = &request.sync
            && !beside.are_over()
        {
            self.unsettled.push_back(slot);
            return Ok(Step::Waiting);
        }
        let has_ended = request.sync.take().is_some();
        // Of several under way that write-back has failed for, one is told of it.
        if !self.can_sync_of(request, namespace) {
            return Ok(Step::Done(Status::WRITE_FAULT));
        }
        if has_ended {
            return Ok(Step::Done(Status::SUCCESS));
        }
        let all = &self.identity.namespaces;
        let cached = all.get(namespace).filter(|_| self.is_cached(namespace));
        let under_way = cached.map(|cached| cached.syncs.begin());
        request.sync = Some(SyncState::UnderWay(under_way));
        let file = u32::try_from(namespace).unwrap_or(u32::MAX);
        self.ring.sync(file, slot)?;
        Ok(Step::Pending)
    }

    /// The sync that a request was at has ended.
    pub(super) fn synced(&self, request: &mut Request, result: i32) {
        if result < 0 {
            let namespace = request.syncs();
            if let Some(namespace) = namespace.and_then(|n| self.identity.namespaces.get(n)) {
                namespace.sync_has_failed(-result);
            }
            count(&self.shared.counters.media_errors, 1);
        }
        let beside = match request.sync.take() {
            Some(SyncState::UnderWay(under_way)) => under_way.map(UnderWay::end),
            _ => None,
        };
        // That it has failed is known already.
        request.sync = Some(SyncState::Ended(beside.filter(|_| result >= 0)));
    }

    /// Looks at all requests that wait for syncs of others. Returns whether one does not any more.
    pub(super) fn look_at_unsettled(&mut self) -> bool {
        let waiting = self.unsettled.len();
        for _ in 0..waiting {
            if let Some(slot) = self.unsettled.pop_front()
                && let Some(request) = self.requests.take(slot)
            {
                self.advance(slot, request);
            }
        }
        self.unsettled.len() < waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Backing, Cache, Host, NamespaceConfig};
    use crate::controller::CommandId;
    use crate::counters::Counters;
    use crate::doorbells::{self, DoorbellPage};
    use crate::identify::Identity;
    use crate::shared::Shared;
    use crate::uuid::Names;
    use farlane_block::bounce::Bounce;
    use farlane_sys::log_limit::LogLimit;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    const FLUSHES: [usize; 2] = [0, 1];

    /// A controller with two flushes of its namespace under way, whose slots are those numbers. The
    /// kernel is not told of them.
    fn flushing(is_cached: bool) -> Controller {
        let config = NamespaceConfig::from(Backing::Null { bytes: 1 << 20 });
        let mut namespace = Namespace::open(&config, Cache::Buffered).unwrap();
        namespace.storage = Storage::Ring {
            file: tempfile::tempfile().unwrap().into(),
            memory_align: 1,
            is_cached,
        };
        let identity = Arc::new(Identity {
            names: Names {
                host: Host::default(),
                device: "test".into(),
                serial: "FARLANE0001".into(),
            },
            namespaces: vec![namespace],
            io_queues: 1,
            limit: LogLimit::new(),
        });
        let page = DoorbellPage::new(&doorbells::new_file(0).unwrap(), 0).unwrap();
        let shared = Shared::new(page, Arc::clone(&identity), Arc::new(Counters::default()));
        let mut controller =
            Controller::new(Arc::new(shared.unwrap()), identity, None, true).unwrap();
        controller.state = State::Running;
        for slot in FLUSHES {
            let owner = Owner::Command(CommandId::admin(u16::try_from(slot).unwrap()));
            let work = controller.flush_of(1);
            controller.begin(Request::new(owner, work, 0, 0, 0));
        }
        controller
    }

    /// How many flushes have been answered well, and how many not.
    fn answered(controller: &mut Controller) -> (u64, u64) {
        controller.reap();
        let counters = &controller.shared.counters;
        let [flushes, errors] = [&counters.flushes, &counters.errors];
        (
            flushes.load(Ordering::Relaxed),
            errors.load(Ordering::Relaxed),
        )
    }

    #[test]
    fn of_flushes_at_once_none_is_answered_well_of_which_another_has_been_told_the_error() {
        for (told, untold) in [(0, 1), (1, 0)] {
            let controller = &mut flushing(true);
            controller.transferred(untold, 0);
            assert_eq!(answered(controller), (0, 0));
            controller.transferred(told, -libc::EIO);
            assert_eq!(answered(controller), (0, 2));
            assert!(controller.requests.is_empty());
        }
    }

    #[test]
    fn a_flush_that_has_ended_well_is_answered_when_those_beside_it_have_ended() {
        let controller = &mut flushing(true);
        controller.transferred(1, 0);
        assert_eq!(answered(controller), (0, 0));
        controller.transferred(0, 0);
        assert_eq!(answered(controller), (2, 0));
        // Around the page cache each is told of its own errors.
        let controller = &mut flushing(false);
        controller.transferred(1, 0);
        assert_eq!(answered(controller), (1, 0));
        controller.transferred(0, -libc::EIO);
        assert_eq!(answered(controller), (1, 1));
    }

    #[test]
    fn memory_of_another_device_that_the_disk_does_not_reach_is_no_failed_flush() {
        for (from_device, can_sync) in [(true, true), (false, false)] {
            let controller = &mut flushing(false);
            let owner = Owner::Command(CommandId::admin(2));
            let work = Work::Write(Durable(true));
            let mut request = Request::new(owner, work, 0, 0, 512);
            request.from_device = from_device;
            controller.note_failed_sync(&request, libc::EREMOTEIO);
            assert_eq!(controller.can_sync(0), can_sync);
        }
        // It is written and then flushed: an error of that is the flush's.
        let controller = &mut flushing(false);
        let owner = Owner::Command(CommandId::admin(2));
        let mut request = Request::new(owner, Work::Write(Durable(true)), 0, 0, 512);
        (request.from_device, request.done) = (true, 512);
        controller.begin(request);
        assert!(controller.can_sync(0));
        controller.transferred(2, -libc::EREMOTEIO);
        assert!(!controller.can_sync(0));
        let errors = answered(controller).1;
        assert_eq!(errors, 1);
        // What is written after a flush has failed is not lost with what was written before; what
        // is written before one fails may be: also by an operation that flushes by itself.
        let writes =
            |controller: &Controller| controller.shared.counters.writes.load(Ordering::Relaxed);
        let from_device = [(true, None), (true, Some(0)), (true, Some(1))];
        let from_ram = [(false, None), (false, Some(0))];
        for (from_device, fails_at) in from_device.into_iter().chain(from_ram) {
            let well = fails_at.is_none();
            let (errors, before) = (answered(controller).1, writes(controller));
            let mut request = Request::new(owner, Work::Write(Durable(true)), 0, 0, 512);
            (request.from_device, request.data) = (from_device, Bounce::new(512));
            controller.begin(request);
            let results = if from_device { &[512, 0][..] } else { &[512] };
            for (step, &result) in results.iter().enumerate() {
                if fails_at == Some(step) {
                    controller.identity.namespaces[0].sync_has_failed(libc::EIO);
                }
                controller.transferred(2, result);
            }
            assert_eq!(answered(controller).1, errors + u64::from(!well));
            assert_eq!(writes(controller), before + u64::from(well));
        }
    }

    #[test]
    fn a_flush_that_waits_for_others_ends_with_a_reset() {
        let controller = &mut flushing(true);
        controller.transferred(1, 0);
        controller.begin_reset();
        assert_eq!(answered(controller), (0, 0));
        assert!(controller.unsettled.is_empty() && !controller.requests.is_empty());
        // It is not answered any more, but the error is not forgotten.
        controller.transferred(0, -libc::EIO);
        assert!(controller.requests.is_empty() && !controller.can_sync(0));
    }
}
