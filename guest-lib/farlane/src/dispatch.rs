//! Running callbacks: in the program's thread or in one of the library's own.

use crate::Error;
use crate::instance::Instance;
use farlane_rdma_client::Errno;
use farlane_transport::Origin;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

impl Instance {
    /// Runs the callbacks that are ready, waiting for one if there is none; returns early when
    /// `stop` is raised.
    pub(crate) fn dispatch(
        &self,
        timeout: Option<Duration>,
        stop: Option<&Stop>,
    ) -> Result<usize, Error> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let ran = self.run_ready()?;
            if ran > 0 {
                return Ok(ran);
            }
            // Fails on a dead device, which the next look at the queue finds too.
            let _ = self.queue.arm(false);
            // What completed before the queue was armed raises no event.
            let ran = self.run_ready()?;
            if ran > 0 {
                return Ok(ran);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if !self.sleep(left, stop)? {
                return Ok(0);
            }
        }
    }

    fn run_ready(&self) -> Result<usize, Error> {
        self.transfers.progress(&self.queue);
        let mut ran = 0;
        loop {
            match self.transfers.next_ready() {
                Ok(Some(ready)) => {
                    ready.call();
                    ran += 1;
                }
                Err(errno) if ran == 0 => return Err(errno.into()),
                _ => return Ok(ran),
            }
        }
    }

    /// Sleeps until the completion queue raises an event. `false`: it is time to return.
    fn sleep(&self, left: Option<Duration>, stop: Option<&Stop>) -> Result<bool, Error> {
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = vec![PollFd::from_borrowed_fd(self.channel.fd(), PollFlags::IN)];
        fds.extend(stop.map(|stop| PollFd::new(&stop.event, PollFlags::IN)));
        match poll(&mut fds, left.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) if fds.get(1).is_some_and(|stop| !stop.revents().is_empty()) => return Ok(false),
            Ok(_) => {}
            // A signal: the program wants to act on it.
            Err(rustix::io::Errno::INTR) => return Ok(false),
            Err(error) => return Err(Error::System(error.into())),
        }
        match self.channel.wait() {
            // Another dispatcher may have been faster; a dead device is found by polling.
            Ok(_) | Err(Errno::EAGAIN | Errno::ENODEV) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }
}

/// Tells a dispatcher to end.
#[derive(Debug)]
pub(crate) struct Stop {
    raised: AtomicBool,
    /// Readable once it is raised.
    event: OwnedFd,
}

impl Stop {
    fn new() -> Result<Self, Error> {
        Ok(Self {
            raised: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::CLOEXEC)
                .map_err(|error| Error::System(error.into()))?,
        })
    }

    fn raise(&self) {
        self.raised.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }
}

/// The thread that runs callbacks. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Dispatcher {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
    origin: Origin,
}

impl Dispatcher {
    /// Stack of the thread: what glibc gives by default, as callbacks are the program's.
    const STACK_BYTES: usize = 8 << 20;

    pub(crate) fn start(instance: &Arc<Instance>) -> Result<Self, Error> {
        let stop = Arc::new(Stop::new()?);
        let (instance, stopped) = (Arc::clone(instance), Arc::clone(&stop));
        let thread = farlane_transport::spawn_quiet("farlane-call", Self::STACK_BYTES, move || {
            // A dead device ends the thread after the last callback has heard of it.
            while !stopped.is_raised() && instance.dispatch(None, Some(&stopped)).is_ok() {}
        })
        .map_err(Error::System)?;
        Ok(Self {
            stop,
            thread: Some(thread),
            origin: Origin::here(),
        })
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        // A child process has no such thread, and must not end its parent's.
        if !self.origin.is_here() {
            return;
        }
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
            // A callback may end its own dispatcher.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
