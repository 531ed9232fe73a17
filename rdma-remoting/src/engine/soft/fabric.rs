//! Which queue pair has which number.

use super::qp::SoftQp;
use crate::engine::{QpNumber, Waker};
use farlane_sys::sync::{read, write};
use farlane_worker::wake;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock, RwLock};

/// Numbers below are special in InfiniBand (QP0, QP1) or look like mistakes.
const FIRST_NUMBER: u32 = 16;

#[derive(Debug, Default)]
struct Numbers {
    qps: HashMap<QpNumber, Arc<SoftQp>>,
    draws: Draws,
}

/// Numbers that nobody can tell beforehand: who gives one back does not get it again by asking
/// often, nor does a peer that was connected to it, or to an earlier life of this backend, meet
/// another in its place.
#[derive(Debug, Default)]
struct Draws {
    /// Keys of a pseudorandom function.
    keys: RandomState,
    drawn: u64,
}

impl Draws {
    fn next(&mut self) -> QpNumber {
        self.drawn += 1;
        let [a, b, c, ..] = self.keys.hash_one(self.drawn).to_ne_bytes();
        QpNumber::of(u32::from_ne_bytes([a, b, c, 0]))
    }
}

/// All queue pairs of an engine, by number.
#[derive(Default)]
pub struct Fabric {
    numbers: RwLock<Numbers>,
    /// Not set where no thread gives turns by itself.
    waker: OnceLock<Waker>,
    /// A requester waits for a peer that answers it.
    awaited: AtomicU32,
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fabric")
            .field("numbers", &self.numbers)
            .finish_non_exhaustive()
    }
}

impl Fabric {
    /// See [`Engine::set_waker`](crate::engine::Engine::set_waker).
    pub fn set_waker(&self, waker: Waker) {
        self.waker.get_or_init(|| waker);
    }

    /// Has every thread look at its queue pairs.
    pub fn wake(&self) {
        if let Some(wake) = self.waker.get() {
            wake();
        }
    }

    /// A requester waits for a peer that answers it.
    pub fn wait_for_answer(&self) {
        wake::wait_for_other(&self.awaited);
    }

    /// A queue pair has changed: it may answer now, or no longer.
    pub fn changed(&self) {
        if wake::must_pass_on(&self.awaited) {
            self.wake();
        }
    }

    /// Adds the queue pair that `make` makes of its number. `None` when there are `limit`.
    pub fn add(&self, limit: u32, make: impl FnOnce(QpNumber) -> SoftQp) -> Option<Arc<SoftQp>> {
        let mut numbers = write(&self.numbers);
        if numbers.qps.len() >= usize::try_from(limit).ok()? {
            return None;
        }
        // Few are in use: the first one is nearly always free.
        let number = loop {
            let number = numbers.draws.next();
            if number.get() >= FIRST_NUMBER && !numbers.qps.contains_key(&number) {
                break number;
            }
        };
        let qp = Arc::new(make(number));
        numbers.qps.insert(number, Arc::clone(&qp));
        Some(qp)
    }

    /// Has a queue pair have another's number, which is gone.
    #[cfg(test)]
    pub fn succeed(&self, qp: SoftQp) -> Arc<SoftQp> {
        let mut numbers = write(&self.numbers);
        let qp = Arc::new(qp);
        assert!(numbers.qps.insert(qp.number, Arc::clone(&qp)).is_none());
        qp
    }

    /// The queue pair of a number.
    pub fn find(&self, number: QpNumber) -> Option<Arc<SoftQp>> {
        let numbers = read(&self.numbers);
        numbers.qps.get(&number).cloned()
    }

    /// Takes a queue pair out.
    pub fn remove(&self, number: QpNumber) {
        let mut numbers = write(&self.numbers);
        numbers.qps.remove(&number);
    }
}
