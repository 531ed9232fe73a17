//! Which queue pair has which number.

use super::target::Target;
use super::waits::Answers;
use crate::engine::QpNumber;
use crate::nodes::TransferObserver;
use farlane_sys::sync::{read, write};
use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, RwLock};

/// Numbers below are special in InfiniBand (QP0, QP1) or look like mistakes.
const FIRST_NUMBER: u32 = 16;

#[derive(Debug, Default)]
struct Numbers {
    qps: HashMap<QpNumber, Arc<Target>>,
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
    /// Comes next.
    #[cfg(test)]
    again: Option<QpNumber>,
}

impl Draws {
    fn next(&mut self) -> QpNumber {
        #[cfg(test)]
        if let Some(number) = self.again.take() {
            return number;
        }
        self.drawn += 1;
        let [a, b, c, ..] = self.keys.hash_one(self.drawn).to_ne_bytes();
        QpNumber::of(u32::from_ne_bytes([a, b, c, 0]))
    }
}

/// All queue pairs of an engine, by number.
#[derive(Default)]
pub struct Fabric {
    numbers: RwLock<Numbers>,
    /// Who waits for an answer.
    pub answers: Arc<Answers>,
    /// Told of what is moved.
    pub transfers: Option<Arc<dyn TransferObserver>>,
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fabric")
            .field("numbers", &self.numbers)
            .finish_non_exhaustive()
    }
}

impl Fabric {
    /// A fabric without queue pairs that tells `transfers` what is moved.
    pub fn observed_by(transfers: Arc<dyn TransferObserver>) -> Self {
        Self {
            transfers: Some(transfers),
            ..Self::default()
        }
    }

    /// Adds the queue pair that `make` makes of its number. `None` when there are `limit`.
    pub fn add(&self, limit: u32, make: impl FnOnce(QpNumber) -> Target) -> Option<Arc<Target>> {
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

    /// Has the next queue pair have this number, whose own is gone.
    #[cfg(test)]
    pub fn give_again(&self, number: QpNumber) {
        let mut numbers = write(&self.numbers);
        assert!(!numbers.qps.contains_key(&number));
        numbers.draws.again = Some(number);
    }

    /// The queue pair of a number.
    pub fn find(&self, number: QpNumber) -> Option<Arc<Target>> {
        let numbers = read(&self.numbers);
        numbers.qps.get(&number).cloned()
    }

    /// Takes a queue pair out.
    pub fn remove(&self, number: QpNumber) {
        let mut numbers = write(&self.numbers);
        numbers.qps.remove(&number);
    }
}
