//! Waking the threads that give queue pairs their turns.

use crate::engine::Waker;
use farlane_worker::wake;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;

/// How threads have each other look at queue pairs.
#[derive(Default)]
pub struct Wakes {
    /// Not set where no thread gives turns by itself.
    waker: OnceLock<Waker>,
    /// A requester waits for a peer that answers it.
    awaited: AtomicU32,
}

impl Wakes {
    /// See [`Engine::set_waker`](crate::engine::Engine::set_waker).
    pub fn set_waker(&self, waker: Waker) {
        self.waker.get_or_init(|| waker);
    }

    /// Has every thread look at its queue pairs.
    pub fn wake(&self) {
        if let Some(wake) = self.waker.get() {
            wake();
        }
    }

    /// A requester waits for a peer that answers it.
    pub fn wait_for_answer(&self) {
        wake::wait_for_other(&self.awaited);
    }

    /// A queue pair has changed: it may answer now, or no longer.
    pub fn changed(&self) {
        if wake::must_pass_on(&self.awaited) {
            self.wake();
        }
    }
}
