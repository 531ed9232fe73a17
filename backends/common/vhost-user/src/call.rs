//! Eventfds by which drivers are told.

use farlane_sys::eventfd;
use farlane_sys::sync::lock;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Mutex, MutexGuard};

/// Where a queue's driver is told of used buffers, or its VMM that it cannot go on; it may
/// change while the queue is in use.
#[derive(Debug, Default)]
pub struct Call(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    target: Option<OwnedFd>,
    /// There was something to tell when there was nowhere to.
    unheard: bool,
}

impl Call {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    /// Tells a driver there from now on, or nowhere; and tells at once. A backend that was killed
    /// may have published used buffers without telling of them, and with event indices (VIRTIO 1.2,
    /// 2.7.7) its successor never would: those that the driver waits for are behind what is
    /// published then. To a driver that knows of them it is one interrupt too many.
    pub fn set(&self, fd: Option<OwnedFd>) {
        self.forget();
        self.set_quietly(fd);
        self.signal();
    }

    /// Tells there from now on, or nowhere, when there is something to tell: at once what nobody
    /// has heard.
    pub fn set_quietly(&self, fd: Option<OwnedFd>) {
        let mut state = self.state();
        if let Some(fd) = &fd
            && std::mem::take(&mut state.unheard)
        {
            eventfd::signal(fd.as_fd());
        }
        state.target = fd;
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
        let signal = |fd: &OwnedFd| eventfd::signal(fd.as_fd());
        target.as_ref().map(signal).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd as make};
    use rustix::fs::OFlags;

    /// Its owner may change it at any time.
    #[test]
    fn an_eventfd_that_has_come_to_block_blocks_nobody() {
        // Where there are no asynchronous requests, it is looked at first.
        eventfd::install();
        let owners = make(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let call = Call::default();
        call.set(Some(owners.try_clone().unwrap()));
        assert_eq!(eventfd::drain(owners.as_fd()), 1);
        rustix::io::write(&owners, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        rustix::fs::fcntl_setfl(&owners, OFlags::empty()).unwrap();
        for _ in 0..3 {
            assert!(call.signal());
        }
        assert!(eventfd::drain(owners.as_fd()) >= u64::MAX - 1);
    }
}
