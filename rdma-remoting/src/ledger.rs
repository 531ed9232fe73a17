//! What the VMs and processes of a backend share, and none may take alone: mappings of the
//! backend's process (`vm.max_map_count`), queue pairs of its engine, memory for keys, completion
//! queues, shared receive queues, address handles, memberships of multicast groups, ids of
//! connection management, and of these those that listen, extents, descriptors.
//!
//! A tenant never has more than what is left for all others: alone it comes to one half, and the
//! next one to one half of the rest
//!  (a dynamic threshold, Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory
//!  packet switches",
//! 1998). Nobody has to know how many tenants there will be, and what nobody else wants is not kept
//! back for good.
//!
//! Users of one tenant that do not trust each other share it the same way
//! ([`Account::of_user`]).
//!
//! Besides that an operator gives a tenant limits of its own, as the kernel's RDMA cgroup does
//! (`Documentation/admin-guide/cgroup-v1/rdma.rst`). They are looked at first.

use farlane_abi::PAGE_BYTES;
use farlane_abi::width::to_u64;
use farlane_sys::sync::lock;
use farlane_worker::counters::Sample;
use farlane_zero_copy::{WordLocks, fault};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Mappings that a process may have where the system does not say
/// (`Documentation/admin-guide/sysctl/vm.rst`).
const DEFAULT_MAP_COUNT: u64 = 65530;
/// Descriptors that a process may have where there is no limit (`fs.nr_open`).
const DEFAULT_DESCRIPTORS: u64 = 1 << 20;
/// Memory keys of all tenants: some 300 bytes each.
const MEMORY_KEYS: u64 = 1 << 20;
/// Completion queues of all tenants, which are memory of the backend.
const COMPLETION_QUEUES: u64 = 1 << 18;
/// Shared receive queues of all tenants, which are memory of the backend, too.
const SHARED_RECEIVE_QUEUES: u64 = 1 << 18;
/// Address handles of all tenants: some 200 bytes each.
const ADDRESS_HANDLES: u64 = 1 << 20;
/// Memberships of multicast groups of all tenants, as many as an engine has: some 100 bytes each.
const GROUP_MEMBERSHIPS: u64 = 1 << 16;
/// Ids of connection management of all tenants: some 1.5 KiB each.
pub(crate) const CONNECTION_IDS: u64 = 1 << 18;
/// Of these, ids that listen: some 300 bytes more each, and what waits there.
pub(crate) const LISTENING_IDS: u64 = 1 << 15;
/// Extents of all tenants: as often each page of the host's memory can be one, of 64 bytes.
const EXTENTS_OF_A_PAGE: u64 = 4;
/// Memory of the host where the system does not say.
const DEFAULT_MEMORY_BYTES: u64 = 4 << 30;
/// Of what nothing of the backend's is used up: only operators limit it.
const UNLIMITED: u64 = u64::MAX;

/// Defines [`Resource`]: of each its name in metrics and what is counted.
macro_rules! resources {
    ($($resource:ident, $name:literal, $what:literal;)*) => {
        /// A resource that tenants share, or that an operator limits.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Resource {
            $(#[doc = concat!($what, ".")] $resource,)*
        }

        /// How many resources there are.
        const RESOURCES: usize = [$($name),*].len();

        impl Resource {
            /// All of them.
            pub const ALL: [Self; RESOURCES] = [$(Self::$resource),*];

            /// How much a tenant has, and may have, as metrics show it.
            fn samples(self, has: u64, most: Option<u64>) -> impl Iterator<Item = Sample<'static>> {
                let (has, most) = match self {
                    $(Self::$resource => (
                        Sample::gauge($name, concat!($what, " that it has now."), has),
                        most.map(|most| {
                            let help = concat!($what, " that it may have.");
                            Sample::gauge(concat!($name, "_limit"), help, most)
                        }),
                    ),)*
                };
                std::iter::once(has).chain(most)
            }
        }
    };
}

resources! {
    Mappings, "mappings", "Mappings of the backend's process";
    QueuePairs, "queue_pairs", "Queue pairs of the engine";
    CompletionQueues, "completion_queues", "Completion queues";
    SharedReceiveQueues, "shared_receive_queues", "Shared receive queues";
    MemoryRegions, "memory_regions", "Memory regions";
    MemoryRegionBytes, "memory_region_bytes", "Bytes of memory regions";
    MemoryKeys, "memory_keys", "Room for memory keys";
    Extents, "extents", "Extents of pinned memory";
    Descriptors, "descriptors", "Descriptors of the backend's process";
    AddressHandles, "address_handles", "Address handles";
    GroupMemberships, "group_memberships", "Memberships of multicast groups";
    ConnectionIds, "connection_ids", "Ids of connection management";
    ListeningIds, "listening_ids", "Ids of connection management that listen";
    BufferPages, "buffer_pages", "Pages of host-allocated buffers of processes";
}

impl Resource {
    fn index(self) -> usize {
        self as usize
    }
}

/// How much an operator lets a tenant have of each resource; nothing is limited by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits([Option<u64>; RESOURCES]);

impl Limits {
    /// The same, but at most so much of this resource; `None` for no limit.
    #[must_use]
    pub fn with(mut self, of: Resource, most: Option<u64>) -> Self {
        self.0[of.index()] = most;
        self
    }

    /// The limit of this resource, if it has one.
    #[must_use]
    pub fn most(&self, of: Resource) -> Option<u64> {
        self.0[of.index()]
    }

    /// Whether a tenant may have so much of this resource.
    fn allow(&self, of: Resource, amount: u64) -> bool {
        self.most(of).is_none_or(|most| amount <= most)
    }

    /// The limit of this resource where it is less than `number`, else `number`.
    pub(crate) fn at_most<N>(&self, of: Resource, number: N) -> N
    where
        N: Copy + Into<u64> + TryFrom<u64>,
    {
        let most = self.most(of).unwrap_or(u64::MAX).min(number.into());
        // What is not more than it fits.
        N::try_from(most).unwrap_or(number)
    }
}

/// Memory of the host, as `proc_meminfo(5)` has it.
fn host_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
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
    /// the process's own. So many queue pairs, the completion queues and memory keys that there
    /// are, and extents that grow with the host's memory.
    #[must_use]
    pub fn of_this_process(queue_pairs: u64) -> Arc<Self> {
        let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count");
        let limit = limit.ok().and_then(|text| text.trim().parse().ok());
        let guarded = to_u64(fault::PLACES);
        let mappings = limit.unwrap_or(DEFAULT_MAP_COUNT).min(guarded) / 4 * 3;
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let descriptors = files.current.unwrap_or(DEFAULT_DESCRIPTORS) / 4 * 3;
        let memory_bytes = host_memory_bytes().unwrap_or(DEFAULT_MEMORY_BYTES);
        let extents = memory_bytes / PAGE_BYTES * EXTENTS_OF_A_PAGE;
        Self::new(|of| match of {
            Resource::Mappings => mappings,
            Resource::QueuePairs => queue_pairs,
            Resource::CompletionQueues => COMPLETION_QUEUES,
            Resource::SharedReceiveQueues => SHARED_RECEIVE_QUEUES,
            Resource::MemoryRegions | Resource::MemoryRegionBytes => UNLIMITED,
            Resource::MemoryKeys => MEMORY_KEYS,
            Resource::Extents => extents,
            Resource::Descriptors => descriptors,
            Resource::AddressHandles => ADDRESS_HANDLES,
            Resource::GroupMemberships => GROUP_MEMBERSHIPS,
            Resource::ConnectionIds => CONNECTION_IDS,
            Resource::ListeningIds => LISTENING_IDS,
            Resource::BufferPages => memory_bytes / PAGE_BYTES,
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
    /// The tenant's, also of its users. Held for a few instructions; under it no lock is taken.
    limits: Arc<Mutex<Limits>>,
    own: [AtomicU64; RESOURCES],
    /// Of the words of its memory.
    words: Arc<WordLocks>,
    /// Whose user it is, where it is a user's of a tenant.
    tenant: Option<Arc<Self>>,
}

impl Account {
    /// A tenant that has nothing, and never has more than `limits` say.
    #[must_use]
    pub fn new(ledger: &Arc<Ledger>, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            ledger: Arc::clone(ledger),
            limits: Arc::new(Mutex::new(limits)),
            own: Default::default(),
            words: Arc::default(),
            tenant: None,
        })
    }

    /// One of a tenant's users that do not trust each other. What it takes the tenant has, and it
    /// never has more than the tenant could still take: so alone it comes to one half of what the
    /// tenant could have.
    #[must_use]
    pub fn of_user(tenant: &Arc<Self>) -> Arc<Self> {
        Arc::new(Self {
            ledger: Arc::clone(&tenant.ledger),
            limits: Arc::clone(&tenant.limits),
            own: Default::default(),
            words: Arc::clone(&tenant.words),
            tenant: Some(Arc::clone(tenant)),
        })
    }

    /// The locks of words of its memory, which all its contexts share.
    #[must_use]
    pub fn word_locks(&self) -> &Arc<WordLocks> {
        &self.words
    }

    /// Its limits.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *lock(&self.limits)
    }

    /// It may have so much from now on. What it has more it keeps, and is given nothing.
    pub fn set_limits(&self, limits: Limits) {
        *lock(&self.limits) = limits;
    }

    /// How much it has of each resource, and its limits.
    #[must_use]
    pub fn samples(&self) -> Vec<Sample<'static>> {
        let limits = self.limits();
        let of = |of: Resource| {
            let has = self.own(of).load(Ordering::Relaxed);
            of.samples(has, limits.most(of))
        };
        Resource::ALL.into_iter().flat_map(of).collect()
    }

    fn own(&self, of: Resource) -> &AtomicU64 {
        &self.own[of.index()]
    }

    /// Takes so many, until the result is dropped; `None`: that is more than the tenant's limit or
    /// share.
    #[must_use]
    pub fn take(self: &Arc<Self>, of: Resource, amount: u64) -> Option<Share> {
        // Also where there is more than a limit that has come since.
        if amount == 0 {
            return Some(Share::of_nothing(self, of));
        }
        let budget = self.ledger.budget(of);
        let mut taken = budget.taken();
        // Changed under the lock only.
        let has = |account: &Self| account.own(of).load(Ordering::Relaxed);
        let tenant = self.tenant.as_ref().unwrap_or(self);
        let sum = has(tenant).checked_add(amount)?;
        let limits = self.limits();
        limits.allow(of, sum).then_some(())?;
        let left = budget.total.checked_sub(taken.checked_add(amount)?)?;
        (sum <= left).then_some(())?;
        let more = left.saturating_sub(sum) / 2;
        let own = has(self).checked_add(amount)?;
        if self.tenant.is_some() {
            let limit = limits.most(of).unwrap_or(u64::MAX);
            (own <= more.min(limit.saturating_sub(sum))).then_some(())?;
        }
        *taken += amount;
        tenant.own(of).store(sum, Ordering::Relaxed);
        self.own(of).store(own, Ordering::Relaxed);
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

    /// Takes so many more; `None`, and nothing has changed: that is more than the tenant's limit
    /// or share.
    #[must_use]
    pub fn grow(&mut self, by: u64) -> Option<()> {
        let mut more = self.account.take(self.of, by)?;
        self.amount += std::mem::take(&mut more.amount);
        Some(())
    }

    /// Gives back what it is more than `to`.
    pub fn shrink(&mut self, to: u64) {
        if let Some(amount) = self.amount.checked_sub(to) {
            self.amount = to;
            drop(Self {
                account: Arc::clone(&self.account),
                of: self.of,
                amount,
            });
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.account.ledger.budget(self.of).taken();
        *taken = taken.saturating_sub(self.amount);
        let tenant = self.account.tenant.iter();
        for account in tenant.chain([&self.account]) {
            account
                .own(self.of)
                .fetch_sub(self.amount, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn who_comes_first_leaves_one_half_and_gives_all_back() {
        let ledger = Ledger::new(|_| 100);
        let tenants = [(); 3].map(|()| Account::new(&ledger, Limits::default()));
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

    fn limited(ledger: &Arc<Ledger>, most: u64) -> Arc<Account> {
        Account::new(
            ledger,
            Limits::default().with(Resource::QueuePairs, Some(most)),
        )
    }

    #[test]
    fn a_limit_refuses_at_the_limit_and_not_before() {
        let ledger = Ledger::new(|_| 100);
        let tenant = limited(&ledger, 3);
        let take = |amount| tenant.take(Resource::QueuePairs, amount);
        assert!(take(4).is_none());
        let two = take(2).unwrap();
        assert!(take(2).is_none());
        let mut one = take(1).unwrap();
        assert!(one.grow(1).is_none() && take(1).is_none());
        // Nothing, and nothing of anything else, is refused.
        assert!(take(0).is_some());
        assert!(tenant.take(Resource::CompletionQueues, 50).is_some());
        drop(two);
        assert!(one.grow(2).is_some() && take(1).is_none());
        drop(one);
        assert!(take(3).is_some());
        // A limit is no promise: the share is what it was.
        assert!(
            limited(&ledger, 1000)
                .take(Resource::QueuePairs, 51)
                .is_none()
        );
        assert!(limited(&ledger, 0).take(Resource::QueuePairs, 1).is_none());
    }

    #[test]
    fn who_is_at_its_limit_takes_nothing_from_others() {
        let ledger = Ledger::new(|_| 100);
        let (small, other) = (
            limited(&ledger, 10),
            Account::new(&ledger, Limits::default()),
        );
        let all = small.take(Resource::QueuePairs, 10).unwrap();
        for _ in 0..1000 {
            assert!(small.take(Resource::QueuePairs, 1).is_none());
        }
        assert!(other.take(Resource::QueuePairs, 45).is_some());
        drop(all);
        assert!(other.take(Resource::QueuePairs, 50).is_some());
    }

    #[test]
    fn a_user_of_a_tenant_leaves_the_others_as_much_as_it_has() {
        let ledger = Ledger::new(|_| 128);
        let tenant = Account::new(&ledger, Limits::default());
        let users = [(); 2].map(|()| Account::of_user(&tenant));
        let take_all = |account: &Arc<Account>| -> Vec<_> {
            std::iter::from_fn(|| account.take(Resource::Descriptors, 1)).collect()
        };
        let has = || tenant.own(Resource::Descriptors).load(Ordering::Relaxed);
        let first = take_all(&users[0]);
        let second = take_all(&users[1]);
        assert_eq!([first.len(), second.len()], [32, 16]);
        assert_eq!(has(), 48);
        // The tenant's own have what is left, and another tenant its half.
        let own = take_all(&tenant);
        assert_eq!((own.len(), has()), (16, 64));
        assert!(users[0].take(Resource::Descriptors, 1).is_none());
        let other = Account::new(&ledger, Limits::default());
        assert_eq!(take_all(&other).len(), 32);
        drop((first, second, own));
        assert_eq!(has(), 0);
        assert_eq!(take_all(&users[1]).len(), 32);
    }

    #[test]
    fn a_user_has_one_half_of_a_limit() {
        let ledger = Ledger::new(|_| 1000);
        let tenant = limited(&ledger, 10);
        let user = Account::of_user(&tenant);
        let five = user.take(Resource::QueuePairs, 5).unwrap();
        assert!(user.take(Resource::QueuePairs, 1).is_none());
        assert!(tenant.take(Resource::QueuePairs, 6).is_none());
        assert!(tenant.take(Resource::QueuePairs, 5).is_some());
        drop(five);
        assert!(tenant.take(Resource::QueuePairs, 10).is_some());
        assert!(user.take(Resource::MemoryRegionBytes, 249).is_some());
    }

    #[test]
    fn threads_of_a_tenant_together_have_no_more_than_its_limit() {
        const LIMIT: u64 = 5;
        let ledger = Ledger::new(|_| 1000);
        let tenant = limited(&ledger, LIMIT);
        let has = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for step in 0..2000_u64 {
                        let amount = 1 + step % 3;
                        if let Some(share) = tenant.take(Resource::QueuePairs, amount) {
                            let before = has.fetch_add(amount, Ordering::SeqCst);
                            assert!(before + amount <= LIMIT);
                            has.fetch_sub(amount, Ordering::SeqCst);
                            drop(share);
                        }
                    }
                });
            }
        });
        assert!(tenant.take(Resource::QueuePairs, LIMIT).is_some());
    }

    #[test]
    fn metrics_show_what_a_tenant_has_and_may_have() {
        let tenant = limited(&Ledger::new(|_| 100), 7);
        let _share = tenant.take(Resource::QueuePairs, 3);
        let samples = tenant.samples();
        let value = |name| samples.iter().find(|s| s.name == name).map(|s| s.value);
        assert_eq!(value("queue_pairs"), Some(3));
        assert_eq!(value("queue_pairs_limit"), Some(7));
        assert_eq!(value("completion_queues"), Some(0));
        assert_eq!(value("completion_queues_limit"), None);
        assert_eq!(samples.len(), RESOURCES + 1);
    }

    #[test]
    fn a_vm_of_half_the_host_can_register_all_its_memory_page_by_page() {
        let ledger = Ledger::of_this_process(1);
        let memory = host_memory_bytes().unwrap();
        let vms = [(); 2].map(|()| Account::new(&ledger, Limits::default()));
        let all = vms
            .each_ref()
            .map(|vm| vm.take(Resource::Extents, memory / PAGE_BYTES / 2));
        assert!(all.iter().all(Option::is_some));
        let all = vms[0].take(Resource::Extents, memory / PAGE_BYTES * 4);
        assert!(all.is_none());
    }

    #[test]
    fn of_another_limit_nothing_is_taken_away_and_nothing_more_is_given() {
        let ledger = Ledger::new(|_| 100);
        let account = Account::new(&ledger, Limits::default());
        let user = Account::of_user(&account);
        let of = Resource::QueuePairs;
        let had = account.take(of, 8).unwrap();
        account.set_limits(Limits::default().with(of, Some(4)));
        assert!(account.take(of, 1).is_none() && user.take(of, 1).is_none());
        assert!(account.take(of, 0).is_some() && user.take(of, 0).is_some());
        assert_eq!(had.amount(), 8);
        drop(had);
        let had = account.take(of, 4).unwrap();
        assert!(account.take(of, 1).is_none());
        account.set_limits(Limits::default().with(of, Some(40)));
        assert!(account.take(of, 1).is_some() && user.take(of, 1).is_some());
        drop(had);
    }

    #[test]
    fn a_number_is_cut_to_the_limit() {
        let limits = Limits::default().with(Resource::QueuePairs, Some(1 << 40));
        assert_eq!(limits.at_most(Resource::QueuePairs, u32::MAX), u32::MAX);
        assert_eq!(limits.at_most(Resource::QueuePairs, u64::MAX), 1 << 40);
        assert_eq!(limits.at_most(Resource::Mappings, 5_u32), 5);
        let limits = limits.with(Resource::QueuePairs, Some(4));
        assert_eq!(limits.at_most(Resource::QueuePairs, 5_u32), 4);
        assert_eq!(limits.at_most(Resource::QueuePairs, 3_u32), 3);
    }

    proptest! {
        #[test]
        fn there_is_always_something_left_and_nothing_is_counted_twice(
            steps in prop::collection::vec((0..4_usize, 0..40_u64, any::<bool>()), 1..200),
        ) {
            let ledger = Ledger::new(|_| 64);
            let tenants = [(); 4].map(|()| Account::new(&ledger, Limits::default()));
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
