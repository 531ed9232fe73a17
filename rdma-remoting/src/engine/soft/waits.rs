//! Who waits for whom: requesters whose peers do not answer, and whose peers have no receive
//! request.

use super::fabric::QpName;
use crate::engine::Schedule;
use farlane_sys::sync::lock;
use farlane_worker::wake;
use std::collections::HashMap;
use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, Weak};

/// A requester that waits, as it is scheduled.
type Waiter = Weak<dyn Schedule>;

/// Requesters that wait for an answer, by the name of the queue pair that is to answer, as they
/// have it: whether there is one or not. Each waits for one at a time, and has one name itself.
#[derive(Default)]
pub struct Answers(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    /// Whom each requester waits for.
    of: HashMap<QpName, QpName>,
    /// Who waits for each.
    by: HashMap<QpName, HashMap<QpName, Waiter>>,
}

impl Waiting {
    fn forget(&mut self, who: QpName) {
        if let Some(peer) = self.of.remove(&who)
            && let Some(all) = self.by.get_mut(&peer)
        {
            all.remove(&who);
            if all.is_empty() {
                self.by.remove(&peer);
            }
        }
    }
}

impl Answers {
    /// Requester `who` waits for `peer`, and for nobody else. After this it looks once more.
    pub fn wait(&self, who: QpName, peer: QpName, waiter: Waiter) {
        let mut waiting = lock(&self.0);
        waiting.forget(who);
        waiting.of.insert(who, peer);
        waiting.by.entry(peer).or_default().insert(who, waiter);
    }

    /// Requester `who` waits for nobody.
    pub fn forget(&self, who: QpName) {
        lock(&self.0).forget(who);
    }

    /// A queue pair has changed: it may answer now, or no longer. Said of each name that it has.
    pub fn changed(&self, peer: QpName) {
        let all = {
            let mut waiting = lock(&self.0);
            let all = waiting.by.remove(&peer).unwrap_or_default();
            for who in all.keys() {
                waiting.of.remove(who);
            }
            all
        };
        for waiter in all.into_values() {
            schedule(&waiter);
        }
    }
}

/// The requester that waits for a receive request of a queue pair: it has one peer.
pub struct Receiver {
    awaited: AtomicU32,
    waiter: Mutex<Option<Waiter>>,
}

impl Default for Receiver {
    fn default() -> Self {
        Self {
            awaited: AtomicU32::new(0),
            waiter: Mutex::new(None),
        }
    }
}

impl Receiver {
    /// The peer's requester waits. After this it looks once more.
    pub fn wait(&self, waiter: Waiter) {
        *lock(&self.waiter) = Some(waiter);
        wake::wait_for_other(&self.awaited);
    }

    /// Whether the peer's requester waits.
    pub fn is_awaited(&self) -> bool {
        wake::is_awaited(&self.awaited)
    }

    /// Has the peer's requester look, where it waits.
    pub fn pass_on(&self) {
        if wake::must_pass_on(&self.awaited) {
            let waiter = lock(&self.waiter).take();
            waiter.iter().for_each(schedule);
        }
    }
}

fn schedule(waiter: &Waiter) {
    if let Some(waiter) = waiter.upgrade() {
        waiter.schedule();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Destination, QpNumber};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn counting() -> (Arc<AtomicUsize>, Arc<dyn Schedule>) {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let waiter = move || {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        (count, Arc::new(waiter))
    }

    fn number(of: u32) -> QpName {
        QpName {
            destination: Destination::Lid(1),
            number: QpNumber::of(of),
        }
    }

    #[test]
    fn a_requester_waits_for_one_peer_and_is_told_once() {
        let answers = Answers::default();
        let (told, waiter) = counting();
        let wait = |who, peer| answers.wait(number(who), number(peer), Arc::downgrade(&waiter));
        let told = || told.load(Ordering::SeqCst);
        wait(1, 7);
        wait(1, 8);
        answers.changed(number(7));
        assert_eq!(told(), 0, "it waits for another one");
        answers.changed(number(8));
        answers.changed(number(8));
        assert_eq!(told(), 1);
        wait(1, 7);
        wait(2, 7);
        answers.forget(number(1));
        answers.changed(number(7));
        assert_eq!(told(), 2);
        let waiting = lock(&answers.0);
        assert!(waiting.of.is_empty() && waiting.by.is_empty());
    }

    #[test]
    fn one_number_at_two_ports_is_two_names() {
        let answers = Answers::default();
        let at = |destination| QpName {
            destination,
            number: QpNumber::of(7),
        };
        let [here, there] = [1, 2].map(|gid| at(Destination::Gid([gid; 16])));
        let waiters = [counting(), counting()];
        let told = || [0, 1].map(|i: usize| waiters[i].0.load(Ordering::SeqCst));
        answers.wait(here, there, Arc::downgrade(&waiters[0].1));
        answers.wait(there, here, Arc::downgrade(&waiters[1].1));
        answers.changed(here);
        assert_eq!(told(), [0, 1]);
        answers.changed(at(Destination::Lid(2)));
        assert_eq!(told(), [0, 1]);
        answers.forget(there);
        answers.changed(there);
        assert_eq!(told(), [1, 1]);
    }

    #[test]
    fn who_waits_for_many_peers_in_turn_takes_one_place() {
        let answers = Answers::default();
        let (_, waiter) = counting();
        for peer in 0..1000 {
            answers.wait(number(1), number(peer), Arc::downgrade(&waiter));
        }
        let waiting = lock(&answers.0);
        assert_eq!((waiting.of.len(), waiting.by.len()), (1, 1));
    }

    #[test]
    fn who_waits_for_a_receive_request_is_told_once() {
        let receiver = Receiver::default();
        let (told, waiter) = counting();
        receiver.pass_on();
        receiver.wait(Arc::downgrade(&waiter));
        assert!(receiver.is_awaited());
        receiver.pass_on();
        receiver.pass_on();
        assert_eq!(told.load(Ordering::SeqCst), 1);
        // A requester that is no more is not told.
        receiver.wait(Arc::downgrade(&waiter));
        drop(waiter);
        receiver.pass_on();
        assert_eq!(told.load(Ordering::SeqCst), 1);
    }
}
