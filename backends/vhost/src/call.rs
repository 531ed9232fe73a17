//! Eventfds by which drivers are told.

use rustix::fs::OFlags;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Where a queue's driver is told of used buffers, or its front-end that it cannot go on; it may change while the queue is in use.
#[derive(Debug, Default)]
pub struct Call(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    target: Option<Target>,
    /// There was something to tell when there was nowhere to.
    unheard: bool,
}

#[derive(Debug)]
struct Target {
    fd: OwnedFd,
    /// Whether writing it blocks when its counter is at its limit.
    may_block: bool,
}

impl Target {
    fn signal(&self) {
        if self.may_block {
            farlane_zero_copy::eventfd::signal(self.fd.as_fd());
        } else {
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }
}

impl Call {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells a driver there from now on, or nowhere; and tells at once. A backend that was killed may have published used buffers without
    /// telling of them, and with event indices (VIRTIO 1.2, 2.7.7) its successor never would: those that the driver waits for
    /// are behind what is published then. To a driver that knows of them it is one interrupt too many.
    pub fn set(&self, fd: Option<OwnedFd>) {
        self.forget();
        self.set_quietly(fd);
        self.signal();
    }

    /// Tells there from now on, or nowhere, when there is something to tell: at once what nobody has heard.
    pub fn set_quietly(&self, fd: Option<OwnedFd>) {
        let target = fd.map(|fd| Target {
            may_block: !rustix::fs::fcntl_getfl(&fd)
                .is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)),
            fd,
        });
        let mut state = self.state();
        if let Some(target) = &target
            && std::mem::take(&mut state.unheard)
        {
            target.signal();
        }
        state.target = target;
    }

    /// What nobody has heard is not so any more.
    pub fn forget(&self) {
        self.state().unheard = false;
    }

    /// Tells. Returns whether there was somebody to be told.
    pub fn signal(&self) -> bool {
        let mut state = self.state();
        let State { target, unheard } = &mut *state;
        *unheard = target.is_none();
        target.as_ref().map(Target::signal).is_some()
    }
}
