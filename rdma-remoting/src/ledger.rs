//! What the VMs and processes of a backend share, and none may take alone: mappings of the
//! backend's process (`vm.max_map_count`), queue pairs of its engine, memory for keys, descriptors.
//!
//! A tenant never has more than what is left for all others: alone it comes to one half, and the
//! next one to one half of the rest
//!  (a dynamic threshold, Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory
//!  packet switches",
//! 1998). Nobody has to know how many tenants there will be, and what nobody else wants is not kept
//! back for good.

use farlane_abi::width::to_u64;
use farlane_sys::sync::lock;
use farlane_zero_copy::fault;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Mappings that a process may have where the system does not say
/// (`Documentation/admin-guide/sysctl/vm.rst`).
const DEFAULT_MAP_COUNT: u64 = 65530;
/// Descriptors that a process may have where there is no limit (`fs.nr_open`).
const DEFAULT_DESCRIPTORS: u64 = 1 << 20;
/// Memory regions of all tenants: some 300 bytes each.
const MEMORY_REGIONS: u64 = 1 << 20;

/// A resource that tenants share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Mappings of the backend's process.
    Mappings,
    /// Queue pairs of the engine.
    QueuePairs,
    /// Memory regions, which are memory of the backend.
    MemoryRegions,
    /// Descriptors of the backend's process.
    Descriptors,
}

/// How many resources there are.
const RESOURCES: usize = 4;

impl Resource {
    const ALL: [Self; RESOURCES] = [
        Self::Mappings,
        Self::QueuePairs,
        Self::MemoryRegions,
        Self::Descriptors,
    ];

    fn index(self) -> usize {
        self as usize
    }
}

/// How much there is of each resource, and how much is taken.
#[derive(Debug)]
pub struct Ledger {
    budgets: [Budget; RESOURCES],
}

#[derive(Debug)]
struct Budget {
    total: u64,
    taken: Mutex<u64>,
}

impl Budget {
    fn taken(&self) -> MutexGuard<'_, u64> {
        lock(&self.taken)
    }
}

impl Ledger {
    /// As much of each resource for all tenants together as `total` says.
    #[must_use]
    pub fn new(total: impl Fn(Resource) -> u64) -> Arc<Self> {
        let budget = |of| Budget {
            total: total(of),
            taken: Mutex::new(0),
        };
        Arc::new(Self {
            budgets: Resource::ALL.map(budget),
        })
    }

    /// Three quarters of the mappings that this process may have, and can
    /// [guard](farlane_zero_copy::fault), and of the descriptors that it may have now: the rest is
    /// the process's own. So many queue pairs, and the memory regions that there are.
    #[must_use]
    pub fn of_this_process(queue_pairs: u64) -> Arc<Self> {
        let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count");
        let limit = limit.ok().and_then(|text| text.trim().parse().ok());
        let guarded = to_u64(fault::PLACES);
        let mappings = limit.unwrap_or(DEFAULT_MAP_COUNT).min(guarded) / 4 * 3;
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let descriptors = files.current.unwrap_or(DEFAULT_DESCRIPTORS) / 4 * 3;
        Self::new(|of| match of {
            Resource::Mappings => mappings,
            Resource::QueuePairs => queue_pairs,
            Resource::MemoryRegions => MEMORY_REGIONS,
            Resource::Descriptors => descriptors,
        })
    }

    fn budget(&self, of: Resource) -> &Budget {
        &self.budgets[of.index()]
    }
}

/// What one tenant has.
#[derive(Debug)]
pub struct Account {
    ledger: Arc<Ledger>,
    own: [AtomicU64; RESOURCES],
}

impl Account {
    /// A tenant that has nothing.
    #[must_use]
    pub fn new(ledger: &Arc<Ledger>) -> Arc<Self> {
        Arc::new(Self {
            ledger: Arc::clone(ledger),
            own: Default::default(),
        })
    }

    fn own(&self, of: Resource) -> &AtomicU64 {
        &self.own[of.index()]
    }

    /// Takes so many, until the result is dropped; `None`: that is more than the tenant's share.
    #[must_use]
    pub fn take(self: &Arc<Self>, of: Resource, amount: u64) -> Option<Share> {
        let budget = self.ledger.budget(of);
        let mut taken = budget.taken();
        // Changed under the lock only.
        let own = self.own(of).load(Ordering::Relaxed);
        let left = budget.total.checked_sub(taken.checked_add(amount)?)?;
        own.checked_add(amount).filter(|sum| *sum <= left)?;
        *taken += amount;
        self.own(of).store(own + amount, Ordering::Relaxed);
        Some(Share {
            account: Arc::clone(self),
            of,
            amount,
        })
    }
}

/// What a tenant has taken. Given back when dropped.
#[derive(Debug)]
pub struct Share {
    account: Arc<Account>,
    of: Resource,
    amount: u64,
}

impl Share {
    /// A share of nothing, which can grow.
    #[must_use]
    pub fn of_nothing(account: &Arc<Account>, of: Resource) -> Self {
        Self {
            account: Arc::clone(account),
            of,
            amount: 0,
        }
    }

    /// How much it is.
    #[must_use]
    pub fn amount(&self) -> u64 {
        self.amount
    }

    /// Takes so many more; `None`, and nothing has changed: that is more than the tenant's share.
    #[must_use]
    pub fn grow(&mut self, by: u64) -> Option<()> {
        let mut more = self.account.take(self.of, by)?;
        self.amount += std::mem::take(&mut more.amount);
        Some(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.account.ledger.budget(self.of).taken();
        *taken = taken.saturating_sub(self.amount);
        self.account
            .own(self.of)
            .fetch_sub(self.amount, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn who_comes_first_leaves_one_half_and_gives_all_back() {
        let ledger = Ledger::new(|_| 100);
        let tenants = [(); 3].map(|()| Account::new(&ledger));
        let take_all = |tenant: &Arc<Account>| -> Vec<_> {
            std::iter::from_fn(|| tenant.take(Resource::QueuePairs, 1)).collect()
        };
        let first = take_all(&tenants[0]);
        let second = take_all(&tenants[1]);
        let third = take_all(&tenants[2]);
        assert_eq!([first.len(), second.len(), third.len()], [50, 25, 12]);
        // The other resource is another matter.
        assert!(tenants[0].take(Resource::Mappings, 50).is_some());
        assert!(tenants[0].take(Resource::Mappings, 51).is_none());
        drop(first);
        drop((second, third));
        assert_eq!(take_all(&tenants[2]).len(), 50);
    }

    proptest! {
        #[test]
        fn there_is_always_something_left_and_nothing_is_counted_twice(
            steps in prop::collection::vec((0..4_usize, 0..40_u64, any::<bool>()), 1..200),
        ) {
            let ledger = Ledger::new(|_| 64);
            let tenants = [(); 4].map(|()| Account::new(&ledger));
            let mut shares: Vec<Share> = Vec::new();
            for (tenant, amount, gives) in steps {
                if gives && !shares.is_empty() {
                    shares.swap_remove(tenant % shares.len());
                }
                shares.extend(tenants[tenant].take(Resource::Mappings, amount));
                let sum: u64 = shares.iter().map(|share| share.amount).sum();
                prop_assert_eq!(*ledger.budget(Resource::Mappings).taken(), sum);
                prop_assert!(sum < 64);
            }
        }
    }
}
