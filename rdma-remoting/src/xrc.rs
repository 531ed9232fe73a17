//! Domains of extended reliable connections: shared receive queues by number (IBTA annex A14).
//!
//! Each message to a queue pair of a domain names one of its shared receive queues. What it does,
//! with memory keys too, it does in that queue's protection domain, and it completes into that
//! queue's completion queue.

use crate::completion_queue::{CompletionSink, Overrun};
use crate::draws::Draws;
use crate::request::SrqNumber;
use crate::shared_receive_queue::SharedReceives;
use farlane_abi::queue::Completion;
use farlane_abi::width::halves;
use farlane_sys::sync::{lock, read, write};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, RwLock};

/// A shared receive queue of a domain, and where its requests complete.
pub struct XrcReceives {
    receives: Arc<SharedReceives>,
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
}

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
    /// Adds a shared receive queue whose requests complete into `sink`, and returns its number: not
    /// zero, and none that the domain has.
    pub fn add(&self, receives: &Arc<SharedReceives>, sink: Arc<dyn CompletionSink>) -> SrqNumber {
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

    /// Ends a shared receive queue. When this returns, nothing is taken from it and nothing
    /// completes into its completion queue.
    pub fn remove(&self, number: SrqNumber) {
        let removed = write(&self.queues).remove(&number);
        if let Some(queue) = removed {
            *write(&queue.sink) = None;
            queue.receives.close();
        }
    }
}
