//! Events of a process of this host: each index has an eventfd of the process.

use farlane_abi::control::MAX_EVENTS;
use farlane_abi::width::to_usize;
use farlane_daemon::eventfd;
use farlane_rdma_remoting::{EventSink, Share};
use farlane_sys::sync::{read, write};
use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The eventfds of one context.
#[derive(Debug, Default)]
pub(crate) struct ProcessEvents {
    bound: RwLock<Bound>,
}

#[derive(Debug, Default)]
struct Bound {
    /// By event index, which is below [`MAX_EVENTS`].
    descriptors: Vec<Option<Descriptor>>,
    /// Raised while nothing was bound.
    missed: BTreeSet<u32>,
}

#[derive(Debug)]
struct Descriptor {
    fd: OwnedFd,
    /// What it is of the descriptors that there are; none where its connection has that.
    _share: Option<Share>,
}

impl Bound {
    fn signal(&self, index: u32) -> bool {
        let index = to_usize(index.into());
        match self.descriptors.get(index) {
            Some(Some(bound)) => {
                eventfd::signal(bound.fd.as_fd());
                true
            }
            _ => false,
        }
    }
}

impl ProcessEvents {
    fn read(&self) -> RwLockReadGuard<'_, Bound> {
        read(&self.bound)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Bound> {
        write(&self.bound)
    }

    /// Binds `fd`, an eventfd, to `index`. It is signalled at once if the event
    /// was raised before.
    pub fn bind(&self, index: u32, fd: OwnedFd, share: Option<Share>) {
        let at = to_usize(index.into());
        let mut bound = self.write();
        if bound.descriptors.len() <= at {
            bound.descriptors.resize_with(at + 1, || None);
        }
        if let Some(slot) = bound.descriptors.get_mut(at) {
            *slot = Some(Descriptor { fd, _share: share });
        }
        if bound.missed.remove(&index) {
            bound.signal(index);
        }
    }

    /// Unbinds `index`. Says whether it was bound.
    pub fn unbind(&self, index: u32) -> bool {
        let at = to_usize(index.into());
        let mut bound = self.write();
        let slot = bound.descriptors.get_mut(at);
        slot.and_then(Option::take).is_some()
    }
}

impl EventSink for ProcessEvents {
    fn raise(&self, index: u32) {
        if index < MAX_EVENTS && !self.read().signal(index) {
            let mut bound = self.write();
            // It may have been bound in between.
            if !bound.signal(index) {
                bound.missed.insert(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::EventfdFlags;

    #[test]
    fn an_event_waits_for_its_eventfd() {
        let events = ProcessEvents::default();
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let ours = fd.try_clone().unwrap();
        events.raise(7);
        events.raise(MAX_EVENTS);
        events.bind(7, fd, None);
        assert_eq!(eventfd::drain(ours.as_fd()), 1);
        events.raise(7);
        events.raise(7);
        assert_eq!(eventfd::drain(ours.as_fd()), 2);
        assert!(events.unbind(7));
        assert!(!events.unbind(7));
        events.raise(7);
        assert_eq!(eventfd::drain(ours.as_fd()), 0);
    }
}
