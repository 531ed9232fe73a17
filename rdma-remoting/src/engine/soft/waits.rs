//! A requester that waits: for a peer that answers, or for a peer's receive request.
//!
//! It says so, then looks once more, and has no turn until it is scheduled. Whoever changes what it
//! may wait for looks whether it waits, after the change ([`wake::wait_for_other`]).

use crate::engine::Schedule;
use farlane_sys::sync::lock;
use farlane_worker::wake;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};

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
    /// It is in the list of a shared receive queue, or on its way from there to being told.
    listed: AtomicBool,
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

    /// Whether it has to go into the list of a shared receive queue: it is there once.
    pub fn enlist(&self) -> bool {
        !self.listed.swap(true, Ordering::AcqRel)
    }

    /// It was taken from there.
    pub fn unlist(&self) {
        self.listed.store(false, Ordering::Release);
    }

    /// Whether it may be in such a list.
    pub fn is_listed(&self) -> bool {
        self.listed.load(Ordering::Acquire)
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

/// A shared receive queue has requests.
impl Schedule for Receiver {
    fn schedule(&self) {
        // Who waits after this is in the list again; who did before is told now.
        self.listed.swap(false, Ordering::AcqRel);
        self.pass_on();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    fn counting() -> (Arc<AtomicUsize>, Requesting) {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let schedule = move || {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        (count, Requesting::new(Arc::new(schedule)))
    }

    #[test]
    fn who_waits_for_an_answer_is_told_once() {
        let (told, requesting) = counting();
        requesting.peer_changed();
        assert_eq!(told.load(Ordering::SeqCst), 0);
        requesting.wait();
        requesting.peer_changed();
        requesting.peer_changed();
        assert_eq!(told.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn who_waits_for_a_receive_request_is_told_once() {
        let receiver = Receiver::default();
        let (told, requesting) = counting();
        receiver.pass_on();
        receiver.wait(&requesting);
        assert!(receiver.is_awaited());
        receiver.pass_on();
        receiver.changed();
        assert_eq!(told.load(Ordering::SeqCst), 1);
        // A requester that is no more is not told.
        receiver.wait(&requesting);
        drop(requesting);
        receiver.pass_on();
        assert_eq!(told.load(Ordering::SeqCst), 1);
    }
}
