//! Domains of extended reliable connections: shared receive queues by number (IBTA annex A14).
//!
//! Each message to a queue pair of a domain names one of its shared receive queues. What it does,
//! with memory keys too, it does in that queue's protection domain, and it completes into that
//! queue's completion queue: also where another context than the queue pair's has them.

use crate::completion_queue::{CompletionSink, Overrun};
use crate::draws::Draws;
use crate::memory::MemoryTable;
use crate::request::SrqNumber;
use crate::shared_receive_queue::SharedReceives;
use farlane_abi::queue::Completion;
use farlane_abi::width::halves;
use farlane_sys::sync::{lock, read, write};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard};

/// A shared receive queue of a domain, the keys of its context, and where its requests complete.
pub struct XrcReceives {
    receives: Arc<SharedReceives>,
    memory: Arc<MemoryTable>,
    /// It has ended. Read by a message that moves bytes, which comes before any lock of the queue.
    ended: RwLock<bool>,
    /// None from its end on.
    sink: RwLock<Option<Arc<dyn CompletionSink>>>,
}

impl fmt::Debug for XrcReceives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("XrcReceives").field(&self.receives).finish()
    }
}

impl XrcReceives {
    /// Its requests.
    #[must_use]
    pub fn receives(&self) -> &Arc<SharedReceives> {
        &self.receives
    }

    /// The memory that messages to it may name.
    #[must_use]
    pub fn memory(&self) -> &MemoryTable {
        &self.memory
    }

    /// Holds it while a message that names it moves bytes; none where it has ended.
    #[must_use]
    pub fn hold(&self) -> Option<Hold<'_>> {
        let ended = read(&self.ended);
        (!*ended).then(|| Hold(ended))
    }
}

/// Whoever ends the queue waits until this is dropped.
#[derive(Debug)]
pub struct Hold<'a>(#[allow(dead_code, reason = "it is held")] RwLockReadGuard<'a, bool>);

impl CompletionSink for XrcReceives {
    fn push(&self, completion: &Completion, solicited: bool) -> Result<(), Overrun> {
        match &*read(&self.sink) {
            Some(sink) => sink.push(completion, solicited),
            // Nobody asks for it any more.
            None => Ok(()),
        }
    }
}

/// A domain.
#[derive(Debug, Default)]
pub struct XrcDomain {
    queues: RwLock<HashMap<SrqNumber, Arc<XrcReceives>>>,
    draws: Mutex<Draws>,
}

impl XrcDomain {
    /// Adds a shared receive queue whose requests name keys of `memory` and complete into `sink`.
    /// Returns its number: not zero, and none that the domain has.
    pub fn add(
        &self,
        receives: &Arc<SharedReceives>,
        memory: &Arc<MemoryTable>,
        sink: Arc<dyn CompletionSink>,
    ) -> SrqNumber {
        let mut queues = write(&self.queues);
        let mut draws = lock(&self.draws);
        let number = loop {
            let [low, _] = halves(draws.next());
            let number = SrqNumber::of(low);
            if number.get() != 0 && !queues.contains_key(&number) {
                break number;
            }
        };
        let queue = XrcReceives {
            receives: Arc::clone(receives),
            memory: Arc::clone(memory),
            ended: RwLock::new(false),
            sink: RwLock::new(Some(sink)),
        };
        queues.insert(number, Arc::new(queue));
        number
    }

    /// The shared receive queue of this number.
    #[must_use]
    pub fn find(&self, number: SrqNumber) -> Option<Arc<XrcReceives>> {
        read(&self.queues).get(&number).cloned()
    }

    /// Ends a shared receive queue, after the turn of a message that moves bytes. When this
    /// returns, nothing is taken from it, nothing is moved for a message that names it, and nothing
    /// completes into its completion queue.
    pub fn remove(&self, number: SrqNumber) {
        let removed = write(&self.queues).remove(&number);
        if let Some(queue) = removed {
            *write(&queue.ended) = true;
            *write(&queue.sink) = None;
            queue.receives.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::{LocalCompletionQueue, LocalQueue};
    use crate::memory::PdHandle;
    use crate::request::RecvWqe;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    /// Whoever ends a queue goes on after the turn that it meets.
    #[test]
    fn a_queue_ends_when_nobody_holds_it_and_is_held_no_more() {
        for _ in 0..200 {
            let domain = XrcDomain::default();
            let source = Box::new(LocalQueue::<RecvWqe>::default());
            let receives = SharedReceives::new(source, PdHandle(1), Box::new(|_| ()));
            let number = domain.add(
                &receives,
                &Arc::new(MemoryTable::new(1)),
                LocalCompletionQueue::new(1),
            );
            let queue = domain.find(number).unwrap();
            let let_go = AtomicBool::new(false);
            let held = queue.hold().unwrap();
            thread::scope(|scope| {
                scope.spawn(|| {
                    domain.remove(number);
                    assert!(let_go.load(Ordering::SeqCst), "it has ended in between");
                });
                while domain.find(number).is_some() {
                    thread::yield_now();
                }
                thread::yield_now();
                let_go.store(true, Ordering::SeqCst);
                drop(held);
            });
            assert!(queue.hold().is_none());
        }
    }
}
