//! Whose queue pairs are.
//!
//! A peer that is told of a queue pair once more takes the connection that has it for one that is
//! stale, and ends it (IBTA 12.9.8.3.1). So nobody connects a queue pair of others. A number that
//! no queue pair has may be named, as with Linux's `rdma_cm`: programs measure connections without
//! queue pairs so. Numbers are drawn, so nobody can name those that others will be given.

use super::PortConnections;
use crate::engine::QpNumber;
use crate::ledger::Account;
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
    /// Whether this is the number of a queue pair, and of none of whom this account is of.
    pub fn are_others(&self, number: u32, account: &Arc<Account>) -> bool {
        let all = lock(&self.0);
        let mut its = all.range((number, 0)..=(number, usize::MAX));
        its.next().is_some() && !all.contains_key(&name(number, account))
    }
}

/// A queue pair of a port, until this is dropped.
pub(crate) struct NamedQueuePair {
    port: Arc<PortConnections>,
    account: Arc<Account>,
    number: QpNumber,
}

impl NamedQueuePair {
    pub fn new(port: &Arc<PortConnections>, account: &Arc<Account>, number: QpNumber) -> Self {
        let mut all = lock(&port.queue_pairs.0);
        *all.entry(name(number.get(), account)).or_insert(0) += 1;
        drop(all);
        Self {
            port: Arc::clone(port),
            account: Arc::clone(account),
            number,
        }
    }
}

impl Drop for NamedQueuePair {
    fn drop(&mut self) {
        let name = name(self.number.get(), &self.account);
        let mut all = lock(&self.port.queue_pairs.0);
        if let Some(count) = all.get_mut(&name) {
            *count -= 1;
            if *count == 0 {
                all.remove(&name);
            }
        }
    }
}
