//! Descriptors that others have sent, or can have sent, and that are closed; and their memory,
//! which takes as long to free as there is of it.
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
    /// What it counts as.
    count: usize,
    descriptors: Vec<OwnedFd>,
    taken: Box<dyn Send>,
}

/// A thread to be that counts as starting, until it is dropped or has looked for a batch.
struct Closer<K> {
    shared: Arc<Shared<K>>,
    is_starting: bool,
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

    /// Drops what takes long to free. It counts as a descriptor.
    pub fn free(&self, sender: K, taken: impl Send + 'static) {
        self.enqueue(sender, Vec::new(), taken);
        self.start();
    }

    fn enqueue(&self, sender: K, descriptors: Vec<OwnedFd>, taken: impl Send + 'static) {
        let count = descriptors.len().max(1);
        let mut state = self.0.state();
        *state.counts.entry(sender.clone()).or_default() += count;
        state.waiting.push_back(Batch {
            sender,
            count,
            descriptors,
            taken: Box::new(taken),
        });
    }

    /// Starts a thread for each batch that waits and has none, as far as that is possible now.
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

    /// The next thread that is needed, if one is.
    fn next_closer(&self) -> Option<Closer<K>> {
        let mut state = self.0.state();
        (state.waiting.len() > state.starting).then(|| {
            state.starting += 1;
            Closer {
                shared: Arc::clone(&self.0),
                is_starting: true,
            }
        })
    }
}

impl<K: Hash + Eq> Closer<K> {
    /// Closes what waits, until nothing does.
    fn run(mut self) {
        while let Some(batch) = self.take() {
            self.end(batch);
        }
    }

    fn take(&mut self) -> Option<Batch<K>> {
        let mut state = self.shared.state();
        state.starting -= usize::from(std::mem::take(&mut self.is_starting));
        state.waiting.pop_front()
    }

    fn end(&self, batch: Batch<K>) {
        let count = batch.count;
        drop(batch.descriptors);
        drop(batch.taken);
        let mut state = self.shared.state();
        if let Some(open) = state.counts.get_mut(&batch.sender) {
            *open -= count;
            if *open == 0 {
                state.counts.remove(&batch.sender);
            }
        }
    }
}

impl<K> Drop for Closer<K> {
    fn drop(&mut self) {
        self.shared.state().starting -= usize::from(self.is_starting);
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
    fn what_takes_long_to_free_is_freed_by_another_thread_and_counts() {
        struct Freed(std::sync::mpsc::Sender<std::thread::ThreadId>);
        impl Drop for Freed {
            fn drop(&mut self) {
                self.0.send(std::thread::current().id()).unwrap();
            }
        }
        let (sender, freed) = std::sync::mpsc::channel();
        let closing = Closing::default();
        closing.enqueue("sender", Vec::new(), Freed(sender.clone()));
        assert_eq!(closing.of(&"sender"), 1);
        closing.free("sender", Freed(sender));
        for _ in 0..2 {
            assert_ne!(freed.recv().unwrap(), std::thread::current().id());
        }
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
