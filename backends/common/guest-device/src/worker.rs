//! The thread that serves the queues of one connection.

use farlane_sys::eventfd;
use farlane_sys::sync::lock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// Queues that wake it.
pub const QUEUES: usize = 2;

/// A thread that looks at queues when their drivers kick, and when they start.
#[derive(Debug)]
pub struct Worker {
    kicks: Arc<Kicks>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Kicks {
    /// Signalled when what follows has changed.
    changed: OwnedFd,
    state: Mutex<KickState>,
}

#[derive(Clone, Debug, Default)]
struct KickState {
    ended: bool,
    of: [Option<Arc<OwnedFd>>; QUEUES],
}

impl Kicks {
    fn state(&self) -> MutexGuard<'_, KickState> {
        lock(&self.state)
    }

    fn change(&self, change: impl FnOnce(&mut KickState)) {
        change(&mut self.state());
        eventfd::signal(self.changed.as_fd());
    }

    /// Calls `serve` with which queues to look at, until the end.
    fn run(&self, serve: impl Fn([bool; QUEUES])) {
        loop {
            let kicks = self.state().clone();
            if kicks.ended {
                return;
            }
            let all = [Some(&self.changed)].into_iter();
            let all = all.chain(kicks.of.iter().map(|kick| kick.as_deref()));
            let all: Vec<Option<&OwnedFd>> = all.collect();
            let mut fds: Vec<_> = all
                .iter()
                .flatten()
                .map(|fd| PollFd::new(*fd, PollFlags::IN))
                .collect();
            if poll(&mut fds, None).is_err() {
                continue;
            }
            let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
            let mut told = [false; QUEUES + 1];
            for (told, fd) in told.iter_mut().zip(all) {
                if let Some(fd) = fd
                    && ready.next() == Some(true)
                {
                    // Whoever shares it may have read it, or may have it block.
                    let _ = eventfd::drain(fd.as_fd());
                    *told = true;
                }
            }
            let [changed, of @ ..] = told;
            // A queue that has started may have been kicked before.
            serve(of.map(|kicked| kicked || changed));
        }
    }
}

impl Worker {
    /// Starts it. `serve` is called with which queues to look at.
    ///
    /// # Errors
    /// Too many open files or threads.
    pub fn start(serve: impl Fn([bool; QUEUES]) + Send + 'static) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let kicks = Arc::new(Kicks {
            changed: rustix::event::eventfd(0, flags)?,
            state: Mutex::default(),
        });
        let thread = std::thread::Builder::new()
            .name("farlane device".to_owned())
            .spawn({
                let kicks = Arc::clone(&kicks);
                move || kicks.run(serve)
            })?;
        Ok(Self {
            kicks,
            thread: Some(thread),
        })
    }

    /// A queue has started, and its driver kicks there, or never; it is looked at once in any case.
    pub fn watch(&self, queue: usize, kick: Option<OwnedFd>) {
        self.kicks.change(|kicks| {
            if let Some(place) = kicks.of.get_mut(queue) {
                *place = kick.map(Arc::new);
            }
        });
    }

    /// A queue has stopped.
    pub fn forget(&self, queue: usize) {
        self.watch(queue, None);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kicks.change(|kicks| kicks.ended = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
