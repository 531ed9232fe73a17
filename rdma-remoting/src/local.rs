//! Queues of a program in the same process: the engine without any remoting.
//!
//! What a test of the engine uses, and the reference that the cost of remoting is measured
//! against.

use crate::completion_queue::{CompletionSink, Overrun};
use crate::request::RecvWqe;
use crate::work_queue::{QueueError, SharedSource, WorkSource};
use farlane_abi::queue::Completion;
use farlane_sys::sync::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// A queue of requests; clones are ends of the same queue.
#[derive(Debug)]
pub struct LocalQueue<T>(Arc<Mutex<VecDeque<T>>>);

impl<T> Clone for LocalQueue<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Default for LocalQueue<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> LocalQueue<T> {
    /// Appends a work queue element.
    pub fn post(&self, request: T) {
        lock(&self.0).push_back(request);
    }

    /// Requests that nobody has taken.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.0).len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T: Send> WorkSource<T> for LocalQueue<T> {
    fn take(&mut self, into: &mut T) -> Result<bool, QueueError> {
        Ok(lock(&self.0).pop_front().map(|r| *into = r).is_some())
    }

    fn retire(&mut self) {}

    fn queued(&self) -> u32 {
        u32::try_from(self.len()).unwrap_or(u32::MAX)
    }

    fn discard(&mut self) {
        lock(&self.0).clear();
    }
}

impl SharedSource for LocalQueue<RecvWqe> {
    /// Who posts knows whom to tell.
    fn want_rings(&self, _wanted: bool) {}
}

/// A completion queue of at most `entries` completions.
#[derive(Debug)]
pub struct LocalCompletionQueue {
    entries: u32,
    queue: Mutex<VecDeque<Completion>>,
}

impl LocalCompletionQueue {
    /// An empty completion queue.
    #[must_use]
    pub fn new(entries: u32) -> Arc<Self> {
        Arc::new(Self {
            entries,
            queue: Mutex::default(),
        })
    }

    /// Completions that nobody has taken.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.queue).len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the oldest completion.
    pub fn poll(&self) -> Option<Completion> {
        lock(&self.queue).pop_front()
    }
}

impl CompletionSink for LocalCompletionQueue {
    fn push(&self, completion: &Completion, _solicited: bool) -> Result<(), Overrun> {
        let mut queue = lock(&self.queue);
        if queue.len() as u64 >= u64::from(self.entries) {
            return Err(Overrun {
                entries: self.entries,
            });
        }
        queue.push_back(*completion);
        Ok(())
    }
}
