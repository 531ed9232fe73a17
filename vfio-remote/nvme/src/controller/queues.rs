//! The queues of a controller, by identifier.

use crate::ids::{CqId, SqId};
use crate::queue::{CompletionQueue, SubmissionQueue};

/// All queues that there can be, and those that there are.
#[derive(Debug)]
pub struct Queues {
    /// Queue pairs, that of the admin queues among them.
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

    /// Identifiers that submission queues can have.
    pub fn sq_ids(&self) -> impl Iterator<Item = SqId> + use<> {
        (0..self.count).map(SqId::new)
    }

    /// The same, but from `first` on: those before it come last.
    pub fn sq_ids_from(&self, first: SqId) -> impl Iterator<Item = SqId> + use<> {
        let count = self.count;
        (0..count).map(move |step| SqId::new((first.get() + step) % count))
    }

    /// The identifier after this one; after the last it is the first.
    pub fn sq_id_after(&self, id: SqId) -> SqId {
        SqId::new((id.get() + 1) % self.count)
    }

    /// Identifiers that completion queues can have.
    pub fn cq_ids(&self) -> impl Iterator<Item = CqId> + use<> {
        (0..self.count).map(CqId::new)
    }

    /// Identifiers that submission queues can have which are not the admin queue.
    pub fn io_sq_ids(&self) -> impl Iterator<Item = SqId> + use<> {
        (1..self.count).map(SqId::new)
    }

    /// Identifiers that completion queues can have which are not the admin queue's.
    pub fn io_cq_ids(&self) -> impl Iterator<Item = CqId> + use<> {
        (1..self.count).map(CqId::new)
    }

    /// Whether an I/O submission queue can have this identifier.
    pub fn can_be_io_sq(&self, id: SqId) -> bool {
        (1..self.count).contains(&id.get())
    }

    /// Whether an I/O completion queue can have this identifier.
    pub fn can_be_io_cq(&self, id: CqId) -> bool {
        (1..self.count).contains(&id.get())
    }

    /// A submission queue.
    pub fn sq(&self, id: SqId) -> Option<&SubmissionQueue> {
        self.submission.get(id.index())?.as_ref()
    }

    /// The same, to be changed.
    pub fn sq_mut(&mut self, id: SqId) -> Option<&mut SubmissionQueue> {
        self.submission.get_mut(id.index())?.as_mut()
    }

    /// A completion queue.
    pub fn cq(&self, id: CqId) -> Option<&CompletionQueue> {
        self.completion.get(id.index())?.as_ref()
    }

    /// The same, to be changed.
    pub fn cq_mut(&mut self, id: CqId) -> Option<&mut CompletionQueue> {
        self.completion.get_mut(id.index())?.as_mut()
    }

    /// All completion queues.
    pub fn cqs(&self) -> impl Iterator<Item = &CompletionQueue> {
        self.completion.iter().flatten()
    }

    /// Adds a submission queue, of which its completion queue knows. False if there is none.
    pub fn create_sq(&mut self, id: SqId, queue: SubmissionQueue) -> bool {
        let Some(cq) = self.cq_mut(queue.cq) else {
            return false;
        };
        cq.users += 1;
        if let Some(place) = self.submission.get_mut(id.index()) {
            *place = Some(queue);
        }
        true
    }

    /// Adds a completion queue.
    pub fn create_cq(&mut self, id: CqId, queue: CompletionQueue) {
        if let Some(place) = self.completion.get_mut(id.index()) {
            *place = Some(queue);
        }
    }

    /// Takes a submission queue away.
    pub fn delete_sq(&mut self, id: SqId) {
        let place = self.submission.get_mut(id.index());
        if let Some(queue) = place.and_then(Option::take)
            && let Some(cq) = self.cq_mut(queue.cq)
        {
            debug_assert!(cq.users > 0, "a completion queue that nobody uses");
            cq.users -= 1;
        }
    }

    /// Takes a completion queue away.
    pub fn delete_cq(&mut self, id: CqId) {
        if let Some(place) = self.completion.get_mut(id.index()) {
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
