//! Flushes (NVMe 1.4, 6.8), and the shutdown of the controller (7.6.2), which is one of everything.

use super::{Controller, State};
use crate::bits::Status;
use crate::controller::requests::{Owner, Request, Task};
use crate::counters::count;
use crate::ids::NamespaceId;
use crate::namespace::Storage;
use farlane_block::engine::Operation;
use farlane_sys::warn_limited;
use std::collections::VecDeque;

/// Shutdown processing (CSTS.SHST).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shutdown {
    /// None.
    #[default]
    Idle,
    /// Everything is being flushed.
    UnderWay,
    /// The same, and it was requested again meanwhile: one more flush follows.
    AskedAgain,
}

impl Controller {
    /// Flushes the namespaces that have something to flush. What is only read has nothing, and its
    /// file system may have no `fsync`.
    pub(super) fn begin_flush(&mut self, owner: Owner, nsid: NamespaceId) {
        let named = self.identity.numbered().filter(|&(id, namespace)| {
            let named = nsid == NamespaceId::ALL || nsid == id;
            let is_ring = matches!(namespace.storage, Storage::Ring { .. });
            named && is_ring && !namespace.read_only
        });
        let mut left: VecDeque<_> = named.map(|(id, _)| id).collect();
        let Some(first) = left.pop_front() else {
            count(&self.shared.counters.flushes, 1);
            self.answer_owner(owner, Status::SUCCESS, 0);
            return;
        };
        let status = Status::SUCCESS;
        let task = Task::Flush { left, status };
        self.begin(Request::run(owner, task, Operation::sync_of(first)));
    }

    /// A shutdown has been asked for.
    pub(super) fn begin_shutdown(&mut self) {
        if self.shutdown != Shutdown::Idle {
            self.shutdown = Shutdown::AskedAgain;
            return;
        }
        self.shutdown = Shutdown::UnderWay;
        self.begin_flush(Owner::Shutdown, NamespaceId::ALL);
    }

    /// The flush of a shutdown has ended.
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounce::Bounce;
    use crate::config::{Backing, Cache, Host, NamespaceConfig};
    use crate::controller::{CommandId, Permit};
    use crate::counters::Counters;
    use crate::doorbells::{self, DoorbellPage};
    use crate::identify::Identity;
    use crate::namespace::Namespace;
    use crate::ring::Durable;
    use crate::shared::Shared;
    use crate::uuid::Names;
    use farlane_block::engine::{Extent, Memory, Slot, Work};
    use farlane_sys::log_limit::LogLimit;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    const FLUSHES: [Slot; 2] = [Slot(0), Slot(1)];
    const NAMESPACE: NamespaceId = NamespaceId::new(1);

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
            let cid = u16::try_from(slot.0).unwrap();
            let owner = Owner::Command(Permit::new(CommandId::admin(cid)));
            controller.begin_flush(owner, NAMESPACE);
        }
        controller
    }

    /// A durable write of a block.
    fn write(from_device: bool) -> Request {
        let owner = Owner::Command(Permit::new(CommandId::admin(2)));
        let work = Work::Write(Durable(true));
        let extent = Extent {
            offset: 0,
            bytes: 512,
        };
        let memory = Memory::of_own(Bounce::new(512));
        let operation = Operation::new(NAMESPACE, work, extent, memory, from_device);
        Request::run(owner, Task::Write, operation)
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
        for [told, untold] in [FLUSHES, [FLUSHES[1], FLUSHES[0]]] {
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
        controller.transferred(Slot(1), 0);
        assert_eq!(answered(controller), (0, 0));
        controller.transferred(Slot(0), 0);
        assert_eq!(answered(controller), (2, 0));
        // Around the page cache each is told of its own errors.
        let controller = &mut flushing(false);
        controller.transferred(Slot(1), 0);
        assert_eq!(answered(controller), (1, 0));
        controller.transferred(Slot(0), -libc::EIO);
        assert_eq!(answered(controller), (1, 1));
    }

    #[test]
    fn memory_of_another_device_that_the_disk_does_not_reach_is_no_failed_flush() {
        for (from_device, can_sync) in [(true, true), (false, false)] {
            let controller = &mut flushing(false);
            controller.begin(write(from_device));
            controller.transferred(Slot(2), -libc::EREMOTEIO);
            assert_eq!(controller.files.is_sound(NAMESPACE), can_sync);
        }
        // It is written and then flushed: an error of that is the flush's.
        let controller = &mut flushing(false);
        controller.begin(write(true));
        controller.transferred(Slot(2), 512);
        assert!(controller.files.is_sound(NAMESPACE));
        controller.transferred(Slot(2), -libc::EREMOTEIO);
        assert!(!controller.files.is_sound(NAMESPACE));
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
            controller.begin(write(from_device));
            let results = if from_device { &[512, 0][..] } else { &[512] };
            for (step, &result) in results.iter().enumerate() {
                if fails_at == Some(step) {
                    controller.identity.namespaces[0].sync_has_failed(libc::EIO);
                }
                controller.transferred(Slot(2), result);
            }
            assert_eq!(answered(controller).1, errors + u64::from(!well));
            assert_eq!(writes(controller), before + u64::from(well));
        }
    }

    #[test]
    fn a_flush_that_waits_for_others_ends_with_a_reset() {
        let controller = &mut flushing(true);
        controller.transferred(Slot(1), 0);
        controller.begin_reset();
        assert_eq!(answered(controller), (0, 0));
        assert!(controller.unsettled.is_empty() && !controller.requests.is_empty());
        // It is not answered any more, but the error is not forgotten.
        controller.transferred(Slot(0), -libc::EIO);
        assert!(controller.requests.is_empty() && !controller.files.is_sound(NAMESPACE));
    }
}
