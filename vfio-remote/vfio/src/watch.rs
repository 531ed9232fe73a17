//! What the kernel says of a function besides its interrupts.

use crate::source::Shared;
use farlane_sys::eventfd;
use farlane_sys::thread::OwnedThread;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

/// Is told that a function must not be used any more.
pub(crate) type Tell = Arc<dyn Fn() + Send + Sync>;

/// A thread that waits for errors of a function, and for the kernel to want it back.
#[derive(Debug)]
pub(crate) struct Watch {
    stop: Arc<OwnedFd>,
    _thread: OwnedThread,
}

impl Watch {
    pub fn start(shared: Arc<Shared>, tell: Tell) -> io::Result<Self> {
        let stop = Arc::new(eventfd::new()?);
        let (error, request) = (eventfd::new()?, eventfd::new()?);
        shared.kernel.watch(error.as_fd(), request.as_fd())?;
        let thread = OwnedThread::spawn("vfio-watch", {
            let stop = Arc::clone(&stop);
            move || wait(&shared, [&*stop, &error, &request], &*tell)
        })?;
        Ok(Self {
            stop,
            _thread: thread,
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        eventfd::signal(self.stop.as_fd());
    }
}

fn wait(shared: &Shared, [stop, error, request]: [&OwnedFd; 3], tell: &(dyn Fn() + Send + Sync)) {
    let name = &shared.description.name;
    loop {
        let mut fds = [stop, error, request].map(|fd| PollFd::new(fd, PollFlags::IN));
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => {
                log::error!("{name} is not watched any more: {e}");
                return;
            }
        }
        let [stops, has_failed, is_wanted] = fds.map(|fd| !fd.revents().is_empty());
        if stops {
            return;
        }
        if has_failed {
            let _ = eventfd::drain(error.as_fd());
            log::error!("{name} has reported an error");
            shared.set_quarantine("it has reported an error that is not corrected (PCIe AER)");
            tell();
        }
        if is_wanted {
            // The kernel goes on saying so until it has it.
            let _ = eventfd::drain(request.as_fd());
            log::warn!("The kernel wants {name} back");
            shared.withdraw();
            tell();
        }
    }
}
