//! What was scheduled of a context: from any thread, for the worker that serves it.

use crate::schedule::Schedule;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, WorkerEvent, lock, wake::Sleep};
use std::sync::Arc;

/// What was scheduled of a context, and whom it is told.
#[derive(Default)]
pub(crate) struct Inbox {
    /// There is something.
    any: AtomicBool,
    posted: Mutex<Posted>,
}

#[derive(Default)]
struct Posted {
    slots: Vec<u32>,
    /// Wakes the worker that serves the context, where one does.
    worker: Option<Arc<Sleep<WorkerEvent>>>,
}

impl Inbox {
    /// Has the worker woken that serves the context from now on. It must look at the context once
    /// after this.
    pub fn tell(&self, worker: Option<Arc<Sleep<WorkerEvent>>>) {
        lock(&self.posted).worker = worker;
    }

    fn post(&self, slot: u32) {
        {
            let mut posted = lock(&self.posted);
            posted.slots.push(slot);
            self.any.store(true, Ordering::Release);
        }
        self.wake();
    }

    /// Has the worker, where one serves the context, look at it.
    pub fn wake(&self) {
        let worker = lock(&self.posted).worker.clone();
        if let Some(worker) = worker {
            worker.wake();
        }
    }

    /// What there is.
    #[cfg(test)]
    pub fn slots(&self) -> Vec<u32> {
        lock(&self.posted).slots.clone()
    }

    /// Takes what there is.
    pub fn take(&self) -> Vec<u32> {
        if !self.any.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut posted = lock(&self.posted);
        self.any.store(false, Ordering::Release);
        std::mem::take(&mut posted.slots)
    }
}

/// How a queue pair is scheduled: from any thread.
pub(crate) struct Scheduled {
    inbox: Arc<Inbox>,
    slot: u32,
    /// It is in the inbox, or on its way from there to its turn: it is there once.
    posted: AtomicBool,
}

impl Scheduled {
    pub fn new(inbox: &Arc<Inbox>, slot: u32) -> Arc<Self> {
        Arc::new(Self {
            inbox: Arc::clone(inbox),
            slot,
            posted: AtomicBool::new(false),
        })
    }

    /// Of the queue pair.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// It has left the inbox; the turn that follows sees all that it was scheduled for before.
    pub fn called(&self) {
        self.posted.swap(false, Ordering::AcqRel);
    }
}

impl Schedule for Scheduled {
    fn schedule(&self) {
        if !self.posted.swap(true, Ordering::AcqRel) {
            self.inbox.post(self.slot);
        }
    }
}
