//! The queues of a controller, by identifier: 0 is the admin queue.

use crate::queue::{CompletionQueue, SubmissionQueue};
use std::ops::Range;

/// All queues that there can be, and those that there are.
#[derive(Debug)]
pub struct Queues {
    count: u16,
    submission: Vec<Option<SubmissionQueue>>,
    completion: Vec<Option<CompletionQueue>>,
}

impl Queues {
    /// No queue yet, of up to so many I/O queues.
    pub fn new(io_queues: u16) -> Self {
        let count = io_queues.saturating_add(1);
        Self {
            count,
            submission: (0..count).map(|_| None).collect(),
            completion: (0..count).map(|_| None).collect(),
        }
    }

    /// Identifiers that queues can have.
    pub fn ids(&self) -> Range<u16> {
        0..self.count
    }

    /// A submission queue.
    pub fn sq(&self, id: u16) -> Option<&SubmissionQueue> {
        self.submission.get(usize::from(id))?.as_ref()
    }

    /// The same, to be changed.
    pub fn sq_mut(&mut self, id: u16) -> Option<&mut SubmissionQueue> {
        self.submission.get_mut(usize::from(id))?.as_mut()
    }

    /// A completion queue.
    pub fn cq(&self, id: u16) -> Option<&CompletionQueue> {
        self.completion.get(usize::from(id))?.as_ref()
    }

    /// The same, to be changed.
    pub fn cq_mut(&mut self, id: u16) -> Option<&mut CompletionQueue> {
        self.completion.get_mut(usize::from(id))?.as_mut()
    }

    /// All completion queues.
    pub fn cqs(&self) -> impl Iterator<Item = &CompletionQueue> {
        self.completion.iter().flatten()
    }

    /// Adds a submission queue, of which its completion queue knows. False if there is none.
    pub fn create_sq(&mut self, id: u16, queue: SubmissionQueue) -> bool {
        let Some(cq) = self.cq_mut(queue.cq) else {
            return false;
        };
        cq.users += 1;
        if let Some(place) = self.submission.get_mut(usize::from(id)) {
            *place = Some(queue);
        }
        true
    }

    /// Adds a completion queue.
    pub fn create_cq(&mut self, id: u16, queue: CompletionQueue) {
        if let Some(place) = self.completion.get_mut(usize::from(id)) {
            *place = Some(queue);
        }
    }

    /// Takes a submission queue away.
    pub fn delete_sq(&mut self, id: u16) {
        let place = self.submission.get_mut(usize::from(id));
        if let Some(queue) = place.and_then(Option::take)
            && let Some(cq) = self.cq_mut(queue.cq)
        {
            debug_assert!(cq.users > 0, "a completion queue that nobody uses");
            cq.users -= 1;
        }
    }

    /// Takes a completion queue away.
    pub fn delete_cq(&mut self, id: u16) {
        if let Some(place) = self.completion.get_mut(usize::from(id)) {
            *place = None;
        }
    }

    /// Whether there is any I/O queue.
    pub fn has_io_queues(&self) -> bool {
        self.submission.iter().skip(1).any(Option::is_some)
            || self.completion.iter().skip(1).any(Option::is_some)
    }

    /// Takes all away.
    pub fn clear(&mut self) {
        self.submission.fill_with(|| None);
        self.completion.fill_with(|| None);
    }
}
