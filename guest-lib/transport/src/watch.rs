//! Notices that a socket's backend has gone, and wakes everybody who would wait for it. The thread
//! that does lasts as long as the program, by which the backend notices that this one has gone.

use crate::guard::Guarded;
use crate::owner::Hold;
use crate::{Map, Origin, TransportError, spawn_quiet};
use farlane_abi::arena::OFF_DEAD;
use farlane_sys::sync::lock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;

/// What transport and watcher share.
#[derive(Debug)]
pub(crate) struct Fate {
    dead: AtomicBool,
    header: OnceLock<Arc<Map>>,
    /// Wakes a caller: `EVENT_WAKE`.
    pub(crate) wake: OwnedFd,
    /// The eventfds to wake with it, by event index.
    bound: Mutex<BTreeMap<u32, OwnedFd>>,
}

impl Fate {
    pub(crate) fn new(wake: OwnedFd) -> Self {
        Self {
            dead: AtomicBool::new(false),
            header: OnceLock::new(),
            wake,
            bound: Mutex::new(BTreeMap::new()),
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Makes `header` the segment that tells the process of the backend's death.
    pub(crate) fn set_header(&self, header: &Arc<Map>) {
        let header = self.header.get_or_init(|| Arc::clone(header));
        if self.is_dead() {
            header.word(OFF_DEAD).store(1, Ordering::Release);
        }
    }

    pub(crate) fn bound(&self) -> MutexGuard<'_, BTreeMap<u32, OwnedFd>> {
        lock(&self.bound)
    }

    /// The backend is gone: says so in the header and signals every eventfd once.
    pub(crate) fn die(&self) {
        if self.dead.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(header) = self.header.get() {
            header.word(OFF_DEAD).store(1, Ordering::Release);
        }
        signal(self.wake.as_fd());
        for fd in self.bound().values() {
            signal(fd.as_fd());
        }
    }
}

/// Adds one to an eventfd.
pub(crate) fn signal(fd: BorrowedFd<'_>) {
    // Fails only where the counter is at its limit, and then the fd is readable anyway.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// The watching thread; ends when dropped.
#[derive(Debug)]
pub(crate) struct Watcher {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
    origin: Origin,
    /// The thread's, which the kernel looks at when it ends.
    _hold: Arc<Hold>,
}

impl Watcher {
    /// Watches `socket` from a thread of its own, which blocks all signals: they belong to the
    /// program's threads. When this returns the thread holds the owner word of `header`.
    pub(crate) fn start(
        socket: Arc<Guarded>,
        fate: Arc<Fate>,
        header: &Arc<Map>,
    ) -> Result<Self, TransportError> {
        let failed = |source| TransportError::os("eventfd", source);
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(failed)?;
        let stopped = stop
            .try_clone()
            .map_err(|source| TransportError::os("dup", source))?;
        let hold = Hold::new(header);
        let (holds, held) = channel();
        let of_thread = Arc::clone(&hold);
        let thread = spawn_quiet("farlane-watch", 64 << 10, move || {
            // SAFETY: the watcher keeps it until the thread has been waited for, or for ever. There
            // are no other such locks here.
            unsafe { of_thread.take() };
            let _ = holds.send(());
            watch(&socket, &stopped, &fate);
        })
        .map_err(|source| TransportError::os("Starting a thread", source))?;
        let watcher = Self {
            stop,
            thread: Some(thread),
            origin: Origin::here(),
            _hold: hold,
        };
        let _ = held.recv();
        Ok(watcher)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // A child process has no such thread, and must not end its parent's.
        if self.origin.is_here()
            && let Some(thread) = self.thread.take()
        {
            signal(self.stop.as_fd());
            let _ = thread.join();
        }
    }
}

fn watch(socket: &Guarded, stop: &OwnedFd, fate: &Fate) {
    // Not in use meanwhile: its number may have to make way.
    let number = || socket.enter().map(|socket| socket.number());
    while let Some(at) = number() {
        // SAFETY: a number that is asked about.
        let watched = unsafe { BorrowedFd::borrow_raw(at) };
        let mut fds = [
            PollFd::from_borrowed_fd(watched, PollFlags::RDHUP | PollFlags::HUP),
            PollFd::new(stop, PollFlags::IN),
        ];
        if poll(&mut fds, None).is_err() {
            continue;
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        if !fds[0].revents().is_empty() && number() == Some(at) {
            fate.die();
            return;
        }
    }
}
