//! Whose queue pairs are.
//!
//! A peer that is told of a queue pair once more takes the connection that has it for one that is
//! stale, and ends it (IBTA 12.9.8.3.1). So a number is of one account alone, from when its queue
//! pair is there, or a connection is that names it, until neither is. A number that no queue pair
//! has may be named, as with Linux's `rdma_cm`: programs measure connections without queue pairs
//! so. Queue pairs are given numbers that nobody has named ([`Management::is_named`]).
//!
//! [`Management::is_named`]: crate::engine::Management::is_named

use super::PortConnections;
use crate::engine::QpNumber;
use crate::ledger::Account;
use farlane_abi::Errno;
use farlane_sys::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The queue pairs of a port: by their numbers and the accounts that pay for them, how many have
/// each. Two accounts have one number for as long as it takes to forget the first one.
#[derive(Debug, Default)]
pub(super) struct QueuePairs(Mutex<BTreeMap<(u32, usize), usize>>);

fn name(number: u32, account: &Arc<Account>) -> (u32, usize) {
    // Whoever has named a queue pair holds the account: no other one has its address.
    (number, Arc::as_ptr(account).addr())
}

impl QueuePairs {
    /// Whether this is the number of a queue pair, or of a connection.
    pub fn is_named(&self, number: QpNumber) -> bool {
        let number = number.get();
        let all = lock(&self.0);
        let mut its = all.range((number, 0)..=(number, usize::MAX));
        its.next().is_some()
    }

    /// Names a queue pair, or what is called as one, of a connection.
    ///
    /// # Errors
    /// `EINVAL` where others than those who share the account have this number.
    pub fn claim(
        self: &Arc<Self>,
        account: &Arc<Account>,
        number: u32,
    ) -> Result<NamedQueuePair, Errno> {
        let mut all = lock(&self.0);
        let name = name(number, account);
        let mut its = all.range((number, 0)..=(number, usize::MAX));
        if its.next().is_some() && !all.contains_key(&name) {
            return Err(Errno::EINVAL);
        }
        *all.entry(name).or_insert(0) += 1;
        drop(all);
        Ok(NamedQueuePair {
            all: Arc::clone(self),
            account: Arc::clone(account),
            number,
        })
    }
}

/// A queue pair of a port, until this is dropped.
#[derive(Debug)]
pub(crate) struct NamedQueuePair {
    all: Arc<QueuePairs>,
    account: Arc<Account>,
    number: u32,
}

impl NamedQueuePair {
    /// Names one that there is.
    pub fn new(port: &PortConnections, account: &Arc<Account>, number: QpNumber) -> Self {
        let number = number.get();
        let mut all = lock(&port.queue_pairs.0);
        *all.entry(name(number, account)).or_insert(0) += 1;
        drop(all);
        Self {
            all: Arc::clone(&port.queue_pairs),
            account: Arc::clone(account),
            number,
        }
    }
}

impl Drop for NamedQueuePair {
    fn drop(&mut self) {
        let name = name(self.number, &self.account);
        let mut all = lock(&self.all.0);
        if let Some(count) = all.get_mut(&name) {
            *count -= 1;
            if *count == 0 {
                all.remove(&name);
            }
        }
    }
}
