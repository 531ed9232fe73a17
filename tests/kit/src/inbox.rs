//! What a thread takes from a connection, for those who wait for it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shared by the thread that receives and those who wait.
#[derive(Debug, Default)]
pub struct Inbox<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State<T> {
    received: T,
    closed: bool,
}

/// Why a wait has found nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missed {
    /// Nothing comes any more.
    Closed,
    /// The time is over.
    TimedOut,
}

impl<T> Inbox<T> {
    /// Looks at what has been received, or changes it; who waits looks again.
    pub fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        let result = act(&mut self.lock().received);
        self.changed.notify_all();
        result
    }

    /// Nothing comes any more.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits until `find` finds something.
    ///
    /// # Errors
    /// When it does not within `timeout`, or never will.
    pub fn wait<R>(
        &self,
        timeout: Duration,
        mut find: impl FnMut(&mut T) -> Option<R>,
    ) -> Result<R, Missed> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if let Some(found) = find(&mut state.received) {
                return Ok(found);
            }
            if state.closed {
                return Err(Missed::Closed);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Missed::TimedOut);
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
