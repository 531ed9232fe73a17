//! A requester that waits: for a peer that answers, or for a peer's receive request.
//!
//! It says so, then looks once more, and has no turn until it is scheduled. Whoever changes what it
//! may wait for looks whether it waits, after the change ([`wake::wait_for_other`]).

use crate::engine::Schedule;
use crate::shared_receive_queue::SharedReceives;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use crate::sync::{Mutex, lock, wake};
use std::sync::{Arc, Weak};

/// How a queue pair is scheduled, and whether its requester waits for an answer: of the one queue
/// pair that it is connected to, which alone can come to answer.
pub struct Requesting {
    schedule: Arc<dyn Schedule>,
    awaits: AtomicU32,
}

impl Requesting {
    pub fn new(schedule: Arc<dyn Schedule>) -> Self {
        Self {
            schedule,
            awaits: AtomicU32::new(0),
        }
    }

    /// It has a turn.
    pub fn schedule(&self) {
        self.schedule.schedule();
    }

    /// Its requester waits for an answer. After this it looks once more.
    pub fn wait(&self) {
        wake::wait_for_other(&self.awaits);
    }

    /// Its peer has changed: it may answer now. To be called after a full fence.
    pub fn peer_changed(&self) {
        if wake::must_pass_on(&self.awaits) {
            self.schedule();
        }
    }
}

/// The requester that waits for a receive request of a queue pair: it has one peer.
#[derive(Default)]
pub struct Receiver {
    awaited: AtomicU32,
    waiter: Mutex<Option<Weak<dyn Schedule>>>,
}

impl Receiver {
    /// The peer's requester waits. After this it looks once more.
    pub fn wait(&self, peer: &Requesting) {
        *lock(&self.waiter) = Some(Arc::downgrade(&peer.schedule));
        wake::wait_for_other(&self.awaited);
    }

    /// Whether the peer's requester waits.
    pub fn is_awaited(&self) -> bool {
        wake::is_awaited(&self.awaited)
    }

    /// Has the peer's requester look, where it waits.
    pub fn pass_on(&self) {
        if wake::must_pass_on(&self.awaited)
            && let Some(waiter) = lock(&self.waiter).take()
            && let Some(waiter) = waiter.upgrade()
        {
            waiter.schedule();
        }
    }

    /// The queue pair has changed otherwise than by a receive request.
    pub fn changed(&self) {
        // Between the change and the look whether somebody waits.
        fence(Ordering::SeqCst);
        self.pass_on();
    }
}

/// The place of a queue pair in the list of one shared receive queue, where its peer's requester
/// waits for a request of that queue.
pub struct Place {
    queue: Weak<SharedReceives>,
    receiver: Arc<Receiver>,
    /// It is in the list, or on its way from there to being told: it is there once.
    listed: AtomicBool,
}

impl Place {
    /// One that is not in the list.
    pub fn new(queue: &Arc<SharedReceives>, receiver: &Arc<Receiver>) -> Arc<Self> {
        Arc::new(Self {
            queue: Arc::downgrade(queue),
            receiver: Arc::clone(receiver),
            listed: AtomicBool::new(false),
        })
    }

    /// Whether it is in the list of that queue.
    pub fn is_of(&self, queue: &Arc<SharedReceives>) -> bool {
        std::ptr::eq(self.queue.as_ptr(), Arc::as_ptr(queue))
    }

    /// Goes into the list of `queue`, which is its own.
    pub fn enlist(self: &Arc<Self>, queue: &SharedReceives) {
        if !self.listed.swap(true, Ordering::AcqRel) {
            queue.wait(Arc::<Self>::downgrade(self));
        }
    }

    /// Goes from the list, for ever.
    pub fn leave(self: Arc<Self>) {
        if self.listed.load(Ordering::Acquire)
            && let Some(queue) = self.queue.upgrade()
        {
            let me: Weak<dyn Schedule> = Arc::<Self>::downgrade(&self);
            queue.forget(&me);
        }
    }
}

/// The shared receive queue has requests.
impl Schedule for Place {
    fn schedule(&self) {
        // Who waits after this is in the list again; who did before is told now.
        self.listed.swap(false, Ordering::AcqRel);
        self.receiver.pass_on();
    }
}
