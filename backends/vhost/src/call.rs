//! Eventfds by which drivers are told.

use rustix::fs::OFlags;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// Where a queue's driver is told of used buffers, or its front-end that it cannot go on; it may change while the queue is in use.
#[derive(Debug, Default)]
pub struct Call(Mutex<Option<Target>>);

#[derive(Debug)]
struct Target {
    fd: OwnedFd,
    /// Whether writing it blocks when its counter is at its limit.
    may_block: bool,
}

impl Call {
    /// Tells a driver there from now on, or nowhere; and tells at once. A backend that was killed may have published used buffers without
    /// telling of them, and with event indices (VIRTIO 1.2, 2.7.7) its successor never would: those that the driver waits for
    /// are behind what is published then. To a driver that knows of them it is one interrupt too many.
    pub fn set(&self, fd: Option<OwnedFd>) {
        self.set_quietly(fd);
        self.signal();
    }

    /// Tells there from now on, or nowhere, when there is something to tell.
    pub fn set_quietly(&self, fd: Option<OwnedFd>) {
        let target = fd.map(|fd| Target {
            may_block: !rustix::fs::fcntl_getfl(&fd)
                .is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)),
            fd,
        });
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = target;
    }

    /// Tells. Returns whether there was somebody to be told.
    pub fn signal(&self) -> bool {
        let target = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(target) = &*target else {
            return false;
        };
        if target.may_block {
            farlane_zero_copy::eventfd::signal(target.fd.as_fd());
        } else {
            let _ = rustix::io::write(&target.fd, &1_u64.to_ne_bytes());
        }
        true
    }
}
