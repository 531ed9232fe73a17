//! Descriptors that others have sent, or can have sent, and that are closed; and their memory,
//! which takes as long to free as there is of it.
//!
//! `close` may ask whoever serves a file (`FUSE_FLUSH`), or wait for the peer of a socket
//! (`SO_LINGER`): for ever. That is so also of descriptors that nobody has received and that end
//! with the socket in which they lie. So they are closed on threads of their own. Where none can be
//! started they stay open: until one can be, or one that was started before has time for them.
//!
//! To free memory waits for nobody: one thread does that for all. How much waits for it is bounded
//! by what was taken for that memory, not counted here: others may be before it.

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
///
/// What has found no thread by the time that this is dropped never finds one: those descriptors
/// stay open until the process ends, and what was taken for them is not given back.
pub struct Closing<K>(Arc<Shared<K>>);

struct Shared<K> {
    state: Mutex<State<K>>,
    /// Each failure to start a thread may be of a sender's doing.
    limit: LogLimit,
}

struct State<K> {
    counts: HashMap<K, usize>,
    /// Those that no thread has taken yet. Each has a thread that is starting, unless the last
    /// attempt to start one has failed. The next attempt is that of the next call of
    /// [`Closing::close`] or [`Closing::of`].
    waiting: VecDeque<Batch<K>>,
    /// Threads that have not looked for a batch yet.
    starting: usize,
    /// What is to be freed, and whether a thread is at it.
    to_free: VecDeque<Batch<K>>,
    is_freeing: bool,
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
    /// Of whose descriptors it counts as how many.
    counted: Option<(K, usize)>,
    descriptors: Vec<OwnedFd>,
    taken: Box<dyn Send>,
}

/// What a thread is to do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Closes, and counts as starting.
    Starting,
    Closing,
    Freeing,
}

/// A thread to be, which has its role until it is dropped.
struct Closer<K> {
    shared: Arc<Shared<K>>,
    role: Role,
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
                starting: 0,
                to_free: VecDeque::new(),
                is_freeing: false,
            }),
            limit: LogLimit::new(),
        }))
    }
}

impl<K> Shared<K> {
    fn state(&self) -> MutexGuard<'_, State<K>> {
        lock(&self.state)
    }
}

impl<K: Hash + Eq + Clone + Send + 'static> Closing<K> {
    /// How many of a sender's are. Those that have found no thread look for one again.
    #[must_use]
    pub fn of(&self, sender: &K) -> usize {
        self.start();
        self.0
            .state()
            .counts
            .get(sender)
            .copied()
            .unwrap_or_default()
    }

    /// Closes `descriptors`. Afterwards what was taken for them is dropped, too.
    pub fn close(&self, sender: K, descriptors: Vec<OwnedFd>, taken: impl Send + 'static) {
        // Without any there is nothing to wait for.
        if !descriptors.is_empty() {
            self.enqueue(sender, descriptors, taken);
            self.start();
        }
    }

    /// Drops what takes long to free, and waits for nobody.
    pub fn free(&self, taken: impl Send + 'static) {
        self.enqueue_to_free(taken);
        self.start();
    }

    fn enqueue(&self, sender: K, descriptors: Vec<OwnedFd>, taken: impl Send + 'static) {
        let mut state = self.0.state();
        *state.counts.entry(sender.clone()).or_default() += descriptors.len();
        state.waiting.push_back(Batch {
            counted: Some((sender, descriptors.len())),
            descriptors,
            taken: Box::new(taken),
        });
    }

    fn enqueue_to_free(&self, taken: impl Send + 'static) {
        self.0.state().to_free.push_back(Batch {
            counted: None,
            descriptors: Vec::new(),
            taken: Box::new(taken),
        });
    }

    /// Starts the threads that are needed, as far as that is possible now.
    fn start(&self) {
        while let Some(closer) = self.next_closer() {
            let thread = std::thread::Builder::new()
                .name("close".to_owned())
                .stack_size(STACK);
            if let Err(e) = thread.spawn(|| closer.run()) {
                warn_limited!(
                    self.0.limit,
                    "Cannot close descriptors that were sent yet: {e}"
                );
                return;
            }
        }
    }

    /// The next thread that is needed, if one is: for each batch that waits and has none, and for
    /// all that is to be freed.
    fn next_closer(&self) -> Option<Closer<K>> {
        let mut state = self.0.state();
        let role = if state.waiting.len() > state.starting {
            state.starting += 1;
            Role::Starting
        } else if !state.to_free.is_empty() && !state.is_freeing {
            state.is_freeing = true;
            Role::Freeing
        } else {
            return None;
        };
        Some(Closer {
            shared: Arc::clone(&self.0),
            role,
        })
    }
}

impl<K: Hash + Eq> Closer<K> {
    /// Closes, or frees, what waits, until nothing does.
    fn run(mut self) {
        while let Some(batch) = self.take() {
            self.end(batch);
        }
    }

    fn take(&mut self) -> Option<Batch<K>> {
        let mut state = self.shared.state();
        if self.role == Role::Freeing {
            let batch = state.to_free.pop_front();
            if batch.is_none() {
                // Whoever brings more starts another one.
                state.is_freeing = false;
                self.role = Role::Closing;
            }
            return batch;
        }
        state.starting -= usize::from(self.role == Role::Starting);
        self.role = Role::Closing;
        state.waiting.pop_front()
    }

    fn end(&self, batch: Batch<K>) {
        drop(batch.descriptors);
        drop(batch.taken);
        let Some((sender, count)) = batch.counted else {
            return;
        };
        let mut state = self.shared.state();
        if let Some(open) = state.counts.get_mut(&sender) {
            *open -= count;
            if *open == 0 {
                state.counts.remove(&sender);
            }
        }
    }
}

impl<K> Drop for Closer<K> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        match self.role {
            Role::Starting => state.starting -= 1,
            Role::Freeing => state.is_freeing = false,
            Role::Closing => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    /// What waits to be closed, and the end that tells whether it was.
    fn descriptor() -> (Vec<OwnedFd>, UnixStream) {
        let (theirs, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (vec![theirs.into()], ours)
    }

    fn is_closed(mut ours: &UnixStream) -> bool {
        ours.read(&mut [0]).is_ok_and(|bytes| bytes == 0)
    }

    #[test]
    fn a_burst_starts_a_thread_for_each_batch_and_none_besides() {
        let closing = Closing::default();
        let mut closers = Vec::new();
        let mut ends = Vec::new();
        for _ in 0..3 {
            let (descriptors, ours) = descriptor();
            ends.push(ours);
            closing.enqueue("sender", descriptors, ());
            closers.extend(closing.next_closer());
            assert!(closing.next_closer().is_none());
        }
        assert_eq!((closers.len(), closing.of(&"sender")), (3, 3));
        // The first closes all; the others find nothing, and count no longer.
        for closer in closers {
            closer.run();
            assert!(ends.iter().all(is_closed) && closing.next_closer().is_none());
        }
        closing.enqueue("sender", descriptor().0, ());
        assert!(closing.next_closer().is_some());
    }

    #[test]
    fn what_takes_long_to_free_is_freed_by_one_other_thread() {
        use std::sync::mpsc;
        struct Freed(mpsc::Sender<std::thread::ThreadId>, mpsc::Receiver<()>);
        impl Drop for Freed {
            fn drop(&mut self) {
                self.0.send(std::thread::current().id()).unwrap();
                let _ = self.1.recv();
            }
        }
        let (sender, freed) = mpsc::channel();
        let (goes_on, waits) = mpsc::channel();
        let (_, ends) = mpsc::channel();
        let closing = Closing::<&str>::default();
        closing.free(Freed(sender.clone(), waits));
        let thread = freed.recv().unwrap();
        assert_ne!(thread, std::thread::current().id());
        closing.free(Freed(sender, ends));
        assert!(closing.next_closer().is_none());
        assert_eq!(closing.of(&"sender"), 0);
        drop(goes_on);
        assert_eq!(freed.recv(), Ok(thread));
    }

    #[test]
    fn what_was_to_be_freed_where_no_thread_could_be_started_is_freed_by_the_next() {
        let closing = Closing::default();
        let (sender, freed) = std::sync::mpsc::channel::<()>();
        closing.enqueue_to_free(sender);
        drop(closing.next_closer());
        assert_eq!(closing.of(&"sender"), 0);
        assert!(freed.recv().is_err());
    }

    #[test]
    fn a_batch_does_not_wait_for_a_thread_that_is_busy() {
        let closing = Closing::default();
        let [(first, _), (second, _)] = [descriptor(), descriptor()];
        closing.enqueue("sender", first, ());
        let mut busy = closing.next_closer().unwrap();
        let batch = busy.take().unwrap();
        closing.enqueue("sender", second, ());
        closing.next_closer().unwrap().run();
        assert_eq!(closing.of(&"sender"), 1);
        busy.end(batch);
        assert_eq!(closing.of(&"sender"), 0);
    }

    #[test]
    fn a_thread_that_cannot_start_is_tried_again() {
        let closing = Closing::default();
        let (descriptors, ours) = descriptor();
        closing.enqueue("sender", descriptors, ());
        // As `spawn` does that fails.
        drop(closing.next_closer().unwrap());
        assert!(!is_closed(&ours));
        closing.next_closer().unwrap().run();
        assert!(is_closed(&ours));
    }

    #[test]
    fn what_has_found_no_thread_in_the_end_stays_open_and_keeps_what_was_taken_for_it() {
        let closing = Closing::default();
        let (descriptors, ours) = descriptor();
        let taken = Arc::new(());
        closing.enqueue("sender", descriptors, Arc::clone(&taken));
        drop(closing.next_closer().unwrap());
        drop(closing);
        assert!(!is_closed(&ours));
        assert_eq!(Arc::strong_count(&taken), 2);
    }
}
