//! Completion channels: sleeping until a completion queue has something.

use crate::error::os;
use crate::{Context, Cq, Error, EventBinding};
use farlane_abi::Errno;
use farlane_sys::sync::lock;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

/// A completion channel: an eventfd for the events of completion queues.
#[derive(Debug)]
pub struct Channel {
    binding: EventBinding,
    /// One token an event.
    events: OwnedFd,
    /// The queues that raise events here, the one that was served last at the end.
    queues: Mutex<Vec<Weak<Cq>>>,
}

impl Channel {
    /// Creates a completion channel.
    ///
    /// # Errors
    /// `ENOMEM` where the context has no event index left, `EMFILE` where the process may open no
    /// more files, `ENODEV` where the device is gone.
    pub fn create(context: &Arc<Context>) -> Result<Arc<Self>, Error> {
        let events = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)
            .map_err(|error| Error::Refused(os(error)))?;
        let binding = EventBinding::new(context, events.as_fd())?;
        Ok(Arc::new(Self {
            binding,
            events,
            queues: Mutex::default(),
        }))
    }

    /// The context it belongs to.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        self.binding.context()
    }

    /// An eventfd that is readable when there is an event. The program may poll it and may make
    /// it non-blocking; reading it is this object's business.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Waits for an event and says whose it is.
    ///
    /// # Errors
    /// `EINTR` when a signal came first, `EAGAIN` when the program has made the fd non-blocking
    /// and there is none, `ENODEV` when the device is gone.
    pub fn wait(&self) -> Result<Arc<Cq>, Errno> {
        // Tokens are the parent's, too.
        if !self.context().header().is_here() {
            return Err(Errno::ENODEV);
        }
        loop {
            rustix::io::read(&self.events, &mut [0; 8]).map_err(os)?;
            if let Some(queue) = self.take_event() {
                return Ok(queue);
            }
            if self.context().is_dead() {
                // The one token that announced it is for everybody.
                let _ = rustix::io::write(&self.events, &1_u64.to_ne_bytes());
                return Err(Errno::ENODEV);
            }
            // The event of a queue that is gone.
        }
    }

    /// Releases it at the backend.
    ///
    /// # Errors
    /// `EBUSY` while a completion queue uses it.
    pub fn destroy(&self) -> Result<(), Error> {
        if lock(&self.queues)
            .iter()
            .any(|queue| queue.strong_count() > 0)
        {
            return Err(Error::Busy);
        }
        self.binding.destroy()
    }

    pub(crate) fn index(&self) -> u32 {
        self.binding.index()
    }

    pub(crate) fn add(&self, queue: &Arc<Cq>) {
        let mut queues = lock(&self.queues);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(queue));
    }

    /// Takes one raised event of one queue, each queue in its turn.
    fn take_event(&self) -> Option<Arc<Cq>> {
        let mut queues = lock(&self.queues);
        let (at, queue) = queues.iter().enumerate().find_map(|(at, queue)| {
            let queue = queue.upgrade()?;
            queue.take_event().then_some((at, queue))
        })?;
        queues[at..].rotate_left(1);
        Some(queue)
    }
}
