//! Flushes (NVMe 1.4, 6.8), and the shutdown of the controller (7.6.2), which is one of everything.

use super::{Controller, State};
use crate::bits::{ALL_NAMESPACES, Status};
use crate::controller::requests::{Owner, Request, Work};
use crate::namespace::{Namespace, Storage};
use crate::ring::{Durable, is_of_the_write};
use farlane_zero_copy::warn_limited;

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
    /// A flush of the namespaces that have something to flush. What is only read has nothing, and its file system may have no
    /// `fsync`.
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

    /// Whether the page cache of the host takes part in what a namespace holds: a durable write is a write and then a sync there.
    /// Of an operation that does both nobody can say which has failed, and it would use up the error of an earlier write.
    pub(super) fn is_cached(&self, namespace: usize) -> bool {
        let namespace = self.identity.namespaces.get(namespace);
        namespace.is_some_and(|namespace| {
            let storage = &namespace.storage;
            matches!(storage, Storage::Ring { is_cached, .. } if *is_cached)
        })
    }

    /// Whether what has ended is a sync through the page cache, which must not be done again: the kernel has forgotten by then what it could
    /// not write back.
    pub(super) fn is_final(&self, request: &Request) -> bool {
        let synced = match &request.work {
            Work::Flush { left, .. } => left.front().copied(),
            _ => request.syncing.then_some(request.namespace),
        };
        synced.is_some_and(|namespace| self.is_cached(namespace))
    }

    /// A write has failed: if it was to be durable by itself, that may have been the device's flush.
    pub(super) fn note_failed_sync(&self, request: &Request, errno: i32) {
        let is_durable = matches!(request.work, Work::Write(Durable(true)));
        let is_cached = self.is_cached(request.namespace);
        if is_durable
            && !is_cached
            && !is_of_the_write(errno, true)
            && let Some(namespace) = self.identity.namespaces.get(request.namespace)
        {
            namespace.sync_has_failed(errno);
        }
    }

    /// A sync of a namespace has ended. Returns what that is for the command.
    pub(super) fn synced(&self, namespace: usize, result: i32) -> Status {
        if result < 0 {
            if let Some(namespace) = self.identity.namespaces.get(namespace) {
                namespace.sync_has_failed(-result);
            }
            return self.storage_failed(libc::EIO, true);
        }
        // Of two syncs under way that write-back has failed for, one is told of it.
        if self.can_sync(namespace) {
            Status::SUCCESS
        } else {
            Status::WRITE_FAULT
        }
    }
}
