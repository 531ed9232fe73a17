//! Descriptors that others have sent, or can have sent, and that are closed.
//!
//! `close` may ask whoever serves a file (`FUSE_FLUSH`), or wait for the peer of a socket
//! (`SO_LINGER`): for ever. That is so also of descriptors that nobody has received and that end
//! with the socket in which they lie. So they are closed on threads of their own. Where none can be
//! started they stay open: until one can be, or one that was started before has time for them.

use crate::log_limit::LogLimit;
use crate::sync::lock;
use crate::warn_limited;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

/// Bytes of a thread's stack: it makes system calls.
const STACK: usize = 64 << 10;

/// How many descriptors of each sender are being closed.
pub struct Closing<K>(Arc<Shared<K>>);

struct Shared<K> {
    state: Mutex<State<K>>,
    /// Each failure to start a thread may be of a sender's doing.
    limit: LogLimit,
}

struct State<K> {
    counts: HashMap<K, usize>,
    /// Those that no thread has taken yet. Where none could be started, a thread that is done with
    /// others takes them, or one that the next call of [`Closing::close`] or [`Closing::of`] starts.
    waiting: VecDeque<Batch<K>>,
}

impl<K> Drop for State<K> {
    /// What has found no thread stays open: closing it here might wait for ever.
    fn drop(&mut self) {
        std::mem::take(&mut self.waiting)
            .into_iter()
            .for_each(std::mem::forget);
    }
}

/// What one thread closes.
struct Batch<K> {
    sender: K,
    descriptors: Vec<OwnedFd>,
    taken: Box<dyn Send>,
}

impl<K> std::fmt::Debug for Closing<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Closing").finish_non_exhaustive()
    }
}

impl<K> Default for Closing<K> {
    fn default() -> Self {
        Self(Arc::new(Shared {
            state: Mutex::new(State {
                counts: HashMap::new(),
                waiting: VecDeque::new(),
            }),
            limit: LogLimit::new(),
        }))
    }
}

impl<K: Hash + Eq + Clone + Send + 'static> Closing<K> {
    fn state(&self) -> MutexGuard<'_, State<K>> {
        lock(&self.0.state)
    }

    /// How many of a sender's are. Those that have found no thread look for one again.
    #[must_use]
    pub fn of(&self, sender: &K) -> usize {
        let is_waiting = !self.state().waiting.is_empty();
        if is_waiting {
            self.start();
        }
        self.state().counts.get(sender).copied().unwrap_or_default()
    }

    /// Closes `descriptors`. Afterwards what was taken for them is dropped, too.
    pub fn close(&self, sender: K, descriptors: Vec<OwnedFd>, taken: impl Send + 'static) {
        if descriptors.is_empty() {
            return;
        }
        let mut state = self.state();
        *state.counts.entry(sender.clone()).or_default() += descriptors.len();
        state.waiting.push_back(Batch {
            sender,
            descriptors,
            taken: Box::new(taken),
        });
        drop(state);
        self.start();
    }

    /// Starts a thread that closes what waits, if that is possible now.
    fn start(&self) {
        let closing = Self(Arc::clone(&self.0));
        let close = move || {
            while let Some(batch) = closing.take() {
                closing.end(batch);
            }
        };
        let thread = std::thread::Builder::new()
            .name("close".to_owned())
            .stack_size(STACK);
        if let Err(e) = thread.spawn(close) {
            warn_limited!(
                self.0.limit,
                "Cannot close descriptors that were sent yet: {e}"
            );
        }
    }

    fn take(&self) -> Option<Batch<K>> {
        self.state().waiting.pop_front()
    }

    fn end(&self, batch: Batch<K>) {
        let count = batch.descriptors.len();
        drop(batch.descriptors);
        drop(batch.taken);
        let mut state = self.state();
        if let Some(open) = state.counts.get_mut(&batch.sender) {
            *open -= count;
            if *open == 0 {
                state.counts.remove(&batch.sender);
            }
        }
    }
}
